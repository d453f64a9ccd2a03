import random
import select
import socket
from datetime import timedelta

import msgpack
import pytest

from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.control_records import FIELDS
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout, PeerLost, TransportError
from pipedream_rt.schema import problem_of


def soon():
    return Deadline(timedelta(seconds=10))


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield Control(left, "right"), Control(right, "left")


def test_records_arrive_whole_and_in_order(pair):
    left, right = pair
    records = [{"type": "refused", "passing": True, "reason": "x" * i * 900} for i in range(5)]
    for record in records:
        left.send(record)
    assert [right.receive(soon()) for _ in records] == records


def test_what_arrived_behind_a_record_is_not_left_in_the_buffer(pair):
    left, right = pair
    for i in range(3):
        left.send({"type": "hello", "version": i})
    left.close()
    assert [r["version"] for r in right.receive_all()] == [0, 1, 2]


def test_nothing_in_time(pair):
    with pytest.raises(MessageTimeout, match="nothing came from right"):
        pair[0].receive(Deadline(timedelta(seconds=0)))


def test_a_deadline_of_years_is_no_error(pair):
    here, there = pair
    there.send({"type": "beat", "doing": "", "rss": 1})
    assert here.receive(Deadline(timedelta(days=4000)))["type"] == "beat"
    assert here._wait(select.POLLOUT, Deadline(timedelta(days=4000)))


def test_the_other_end_is_gone(pair):
    left, right = pair
    right.close()
    with pytest.raises(PeerLost, match="right closed the connection") as e:
        left.receive(soon())
    assert e.value.peer == "right"
    with pytest.raises(PeerLost):
        left.send({"type": "x" * (1 << 20)})


@pytest.mark.parametrize(
    ("junk", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a record of 1195725856 bytes, where at most 4096"),
        (b"\0\0\0\1\xc1", "a record that is no msgpack"),
        (b"\0\0\0\1\1", "a int as a record, which is a map"),
        (b"\0\0\0\1\x80", "a record of the unknown type None"),
    ],
)
def test_strangers_are_noticed(pair, junk, words):
    pair[0]._socket.sendall(junk)
    with pytest.raises(TransportError, match=f"left sent {words}.*same version"):
        pair[1].receive(soon())


NESTED = b"\x91" * 1200 + b"\xc0"  # a list in a list in a list, 1200 times


def packed(record):
    data = record if isinstance(record, bytes) else msgpack.packb(record)
    return len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    "junk",
    [
        NESTED,
        b"\x81\xa4type" + NESTED,
        b"\x82\xa4type\xa5hello\xa7version" + NESTED,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        {"type": ["hello"]},
        {"type": "hello", "version": {}},
        {"type": "hello", "version": 6, "name": [1]},
        {"type": "no such"},
        {"type": "no\nsuch \x1b[2J" * 20},
        {"type": 7},
        {"type": None},
        {7: "type"},
        {b"type": "hello"},
        {},
        [],
        "hello",
        {"type": "call"},
        {"type": "call", "nonce": b"short"},
        {"type": "call", "nonce": "x" * 32},
        {"type": "call", "nonce": b"x" * 32, "salt": b"x" * 32, "key": 3},
        {"type": "refused", "reason": 3, "passing": True},
        {"type": "refused", "reason": "x"},
        {"type": "welcome"},
        {"type": "exit", "failed": 1},
        {"type": "beat", "rss": -1, "doing": "x"},
    ],
)
def test_a_record_that_is_none_ends_the_connection_with_an_error_that_can_be_printed(pair, junk):
    pair[0]._socket.sendall(packed(junk))
    with pytest.raises(TransportError) as e:
        pair[1].receive(soon())
    assert str(e.value).isprintable()
    assert len(str(e.value)) < 300


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


@pytest.mark.parametrize("count", [400, pytest.param(30_000, marks=pytest.mark.stress)])
@pytest.mark.parametrize("signed", [False, True])
def test_generated_records_of_every_type_with_fields_of_any_kind(count, signed):
    """Whatever comes is a record that fits its table, or a `TransportError`."""
    draw = random.Random(7)
    taken, errors = 0, []
    for _ in range(count):
        kind = draw.choice(list(FIELDS))
        record = {"type": kind} | {name: random_value(draw) for name in FIELDS[kind]}
        ends = socket.socketpair()
        left, right = (Control(end, "somebody") for end in ends)
        if signed:
            left.secure(b"k" * 32, b"left", b"right")
            right.secure(b"k" * 32, b"right", b"left")
        left.send(record)
        try:
            got = right.receive(soon())
            assert problem_of(got, FIELDS[kind]) == ""
            taken += 1
        except TransportError as error:
            errors.append(str(error))
        left.close()
        right.close()
    assert taken
    assert errors
    assert all(error.isprintable() for error in errors)
