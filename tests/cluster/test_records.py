import random

import pytest
from support.callers import framed, hello

from pipedream_rt.cluster.identity import NONCE
from pipedream_rt.cluster.records import (
    FIELDS,
    HEAD,
    HELLO,
    LARGEST,
    LARGEST_AT_FIRST,
    is_name,
    length_of,
    packed,
    unpacked,
    welcome,
)
from pipedream_rt.errors import TransportError
from pipedream_rt.schema import problem_of


def read(data):
    """Read one record of bytes as either end of a connection does."""
    length = length_of(data[: HEAD.size], LARGEST, "somebody")
    return unpacked(data[HEAD.size : HEAD.size + length], "somebody")


LINK = {"job": "", "group": bytes(NONCE), "generation": 0, "sender": 1, "recipient": 0}

NESTED = b"\x91" * 1200 + b"\xc0"  # a list in a list in a list, 1200 times

READABLE = b"\x91" * 990 + b"\xc0"  # msgpack reads it, and a `repr` of it would end in an error


@pytest.mark.parametrize(
    ("junk", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a record of 1195725856 bytes, where at most 1048576 are"),
        (b"\0\0\0\1\xc1", "a record that is no msgpack"),
        (b"\0\0\0\0", "a record that is no msgpack"),
        (framed(b"\x81\xa4type\xa4stop\0"), "a record that is no msgpack"),
        (b"\0\0\0\1\1", "a int as a record, which is a map"),
        (b"\0\0\0\1\x80", "a record of the unknown type None"),
    ],
)
def test_who_sends_it_is_named(junk, words):
    with pytest.raises(TransportError, match=f"somebody sent {words}.*same version"):
        read(junk)


@pytest.mark.parametrize(
    "junk",
    [
        NESTED,
        b"\x82\xa4type\xa5hello\xa7version" + NESTED,
        READABLE,
        b"\x81\xa4type" + READABLE,
        b"\x82\xa4type\xa5hello\xa7version" + READABLE,
        b"\x82\xa4type\xa4beat\xa5doing" + READABLE,
        b"\x82\xa4type\xa5doors\xa7by_name" + b"\x81\xa1w" * 990 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        {"type": ["hello"]},
        {"type": "no\nsuch \x1b[2J" * 20},
        {"type": 7},
        {7: "type"},
        {b"type": "hello"},
        {"type": "exit", "failed": True, 7: 7},
        {},
        [],
        "hello",
        {"type": "admitted", "secret": "x" * 65},
        {"type": "link", **LINK, "job": "x" * 32},
        {"type": "doors", "by_name": {"a name": ["", 0, "", ""]}},
        {"type": "doors", "by_name": {"w": ["", 0, ""]}},
        {"type": "door", "at": ["\x1b", 1, "", ""]},
        {"type": "door", "at": ["h", 65536, "", ""]},
    ],
)
def test_what_is_no_record_is_an_error_that_can_be_printed(junk):
    with pytest.raises(TransportError) as e:
        read(framed(junk))
    assert str(e.value).isprintable()
    assert len(str(e.value)) < 300


VALUES = {
    "hello": [{"version": None}, {"version": 6, "name": [1], "more": {}}],
    "refused": [{"reason": "x" * 4096, "passing": False}],
    "admitted": [{"secret": None}, {"secret": "f" * 64}],
    "over": [{"code": 0}, {"code": 255}],
    "ready": [{"processor": "a kind", "obstacle": ""}],
    "welcome": [welcome(1, ["coordinator", "w"], "")],
    "door": [
        {"at": ["", 0, "", ""]},
        {"at": ["::1", 65535, "0" * 16, "/tmp/x"]},
        {"at": ["", 0, "0" * 16, "/tmp/caf\udce9/x"]},
    ],
    "doors": [{"by_name": {}}, {"by_name": {"w-1": ["127.0.0.1", 1, "", ""]}}],
    "link": [LINK],
    "joined": [{"nearby": [0, 1]}],
    "failed": [{"text": "x\ny"}],
    "unfit": [{"text": "x\ny"}],
    "shut": [{}],
    "story": [{"text": None}, {"text": "computing"}],
    "beat": [{"doing": "", "rss": 0}],
    "doing": [{"action": "F4"}],
    "clock": [{"ns": None}, {"ns": 2**63}],
    "examine": [{"folder": "/tmp", "token": "t"}],
    "measure": [{"rank": 0}],
    "findings": [{"text": ""}],
    "stop": [{}],
    "stopped": [{}],
    "exit": [{"failed": True}, {"failed": False}],
}
"""For each type of record, the fields of some that make sense."""


@pytest.mark.parametrize("kind", FIELDS)
def test_a_record_that_makes_sense_is_read_as_it_was_sent(kind):
    for fields in VALUES[kind]:
        record = {"type": kind, **fields}
        assert read(packed(record)) == record


WRONG = (None, "", "x\x1b[2J", b"", b"x" * 33, -1, 2**64 - 1, True, 1.5, float("inf"), [],
         [[1]], {}, {"a": 1}, ["x"], [-1])  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind in FIELDS for field in FIELDS[kind]]
)
def test_a_field_of_another_kind_is_named(kind, field):
    """The version of a hello may be anything: another version may write it in another way."""
    refused = 0
    for value in WRONG:
        record = {"type": kind, **VALUES[kind][0], field: value}
        if FIELDS[kind][field](value):
            assert read(packed(record))[field] == value
            continue
        with pytest.raises(TransportError) as e:
            read(packed(record))
        assert f"somebody sent a {kind!r} that makes no sense: its {field!r} is " in str(e.value)
        assert str(e.value).isprintable()
        assert len(str(e.value)) < 300
        refused += 1
    assert refused >= len(WRONG) - 4 or field == "version"


def test_what_a_member_and_a_coordinator_say_first_makes_sense():
    assert problem_of(hello(), HELLO) == ""
    assert len(packed(hello("w" * 100, host="h" * 200))) < LARGEST_AT_FIRST
    made = welcome(2, ("coordinator", "a", "b"), "::1", nonce=b"n" * NONCE, rpc="open")
    assert read(packed(made)) == made
    assert made["host"] == "::1"


def test_a_name():
    assert all(map(is_name, ("w", "node-0-1", "A_b-9", "x" * 100)))
    no_names = ("", "x" * 101, "a b", "a\n", "é", "a/b", "a.b", None, 7, b"w")
    assert not any(map(is_name, no_names))


def random_value(draw, depth=0):
    kind = draw.randrange(9 if depth < 6 else 7)
    if kind == 7:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 8:
        return {
            draw.choice(("type", "a", 3)): random_value(draw, depth + 1)
            for _ in range(draw.randrange(4))
        }
    return (
        None, draw.random() < 0.5, draw.randrange(-(2**63), 2**64), draw.random() * 1e300,
        draw.randbytes(draw.choice((0, 3, 32, 200))), "\x1b" * draw.randrange(300), "hello",
    )[kind]  # fmt: skip


@pytest.mark.parametrize("count", [4000, pytest.param(300_000, marks=pytest.mark.stress)])
def test_generated_records_of_every_type_with_fields_of_any_kind(count):
    """Whatever comes is a record that fits its table, or a `TransportError`."""
    draw = random.Random(7)
    taken, errors = 0, []
    for _ in range(count):
        kind = draw.choice(list(FIELDS))
        record = {"type": kind} | {name: random_value(draw) for name in FIELDS[kind]}
        try:
            got = read(packed(record))
            assert problem_of(got, FIELDS[kind]) == ""
            taken += 1
        except TransportError as error:
            errors.append(str(error))
    assert taken
    assert errors
    assert all(error.isprintable() for error in errors)


@pytest.mark.parametrize("count", [2000, pytest.param(200_000, marks=pytest.mark.stress)])
def test_bytes_that_were_changed_on_the_way(count):
    draw = random.Random(11)
    records = [packed({"type": kind, **each}) for kind in VALUES for each in VALUES[kind]]
    errors = []
    for _ in range(count):
        data = bytearray(draw.choice(records))
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(HEAD.size, len(data))] = draw.randrange(256)
        try:
            got = unpacked(bytes(data[HEAD.size :]), "somebody")
            assert problem_of(got, FIELDS[got["type"]]) == ""
        except TransportError as error:
            errors.append(str(error))
    assert errors
    assert all(error.isprintable() for error in errors)
