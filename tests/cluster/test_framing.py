"""Records become bytes and bytes records, without a socket."""

import pytest
from support.callers import framed
from support.encrypted import shaken

from pipedream_rt.cluster.framing import CHUNK, Framing
from pipedream_rt.cluster.records import HEAD, LARGEST, LARGEST_AT_FIRST
from pipedream_rt.errors import PeerLost, TransportError

both = pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])


def story(size):
    return {"type": "story", "text": "x" * size}


def ends(encrypted, largest=LARGEST):
    """Both ends of a connection: what one seals, the other takes."""
    one, other = Framing("the one", largest), Framing("the other", largest)
    if encrypted:
        one.engine, other.engine = shaken()
    return one, other


def record_of(framing):
    """Open what was taken as far as a record goes; return it, or the number of bytes it lacks."""
    while lacking := framing.lacking:
        if not framing.open(lacking):
            return lacking
    return framing.record()


@both
def test_records_come_whole_and_in_order_both_ways(encrypted):
    for one, other in (ends(encrypted), ends(encrypted)[::-1]):
        sent = [story(size) for size in (0, 1, 5000, 70_000, 900_000, 3)]
        for record in sent:
            other.take(one.sealed(record))
        assert [record_of(other) for _ in sent] == sent
        assert record_of(other) == HEAD.size
        assert not other.has_begun


@both
def test_bytes_may_come_one_by_one(encrypted):
    one, other = ends(encrypted)
    sealed = one.sealed(story(9))
    for number in range(len(sealed) - 1):
        other.take(sealed[number : number + 1])
        assert isinstance(record_of(other), int)
    other.take(sealed[-1:])
    assert record_of(other) == story(9)


def test_a_plain_connection_says_what_its_head_and_then_its_record_lack():
    framing, data = Framing("the other", LARGEST), framed({"type": "stop"})
    found = []
    for number in range(len(data)):
        found.append((framing.lacking, framing.has_begun))
        framing.take(data[number : number + 1])
    left = len(data) - HEAD.size
    heads = [(HEAD.size - n, n > 0) for n in range(HEAD.size)]
    assert found == heads + [(left - n, True) for n in range(left)]
    assert framing.lacking == 0
    assert framing.record() == {"type": "stop"}


def test_no_more_is_opened_than_the_record_lacks():
    """What is behind it may be for the transport, which goes on with the engine."""
    one, other = ends(encrypted=True)
    other.take(one.sealed({"type": "stop"}))
    one.engine.write(b"a frame")
    other.take(one.engine.sealed())
    assert record_of(other) == {"type": "stop"}
    room = memoryview(bytearray(100))
    assert bytes(room[: other.engine.read_into(room)]) == b"a frame"


def test_all_that_has_come_can_be_opened_ahead():
    one, other = ends(encrypted=True)
    other.take(one.sealed(story(5)) + one.sealed({"type": "stop"})[:-1])
    while other.open(CHUNK):
        pass
    assert record_of(other) == story(5)
    assert not other.has_begun
    assert not other.open(CHUNK)


@both
def test_a_record_that_is_too_large_is_refused_by_its_head(encrypted):
    """A limit that is raised holds from then on."""
    one, other = ends(encrypted, LARGEST_AT_FIRST)
    data = HEAD.pack(LARGEST_AT_FIRST + 1)
    if encrypted:
        one.engine.write(data)
        data = one.engine.sealed()
    other.take(data)
    words = f"a record of {LARGEST_AT_FIRST + 1} bytes, where at most {LARGEST_AT_FIRST} are"
    with pytest.raises(TransportError, match=f"^the other sent {words} allowed"):
        record_of(other)
    other.largest += 1
    assert record_of(other) == other.largest


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xc1", b"junk"])
def test_what_is_no_record_is_an_error_of_its_peer_and_is_dropped(data):
    framing = Framing("somebody", LARGEST)
    framing.take(framed(data) + framed({"type": "stop"}))
    with pytest.raises(TransportError, match=r"^somebody sent a record"):
        record_of(framing)
    assert record_of(framing) == {"type": "stop"}


@both
def test_the_end_of_a_connection_and_its_failure_name_the_peer(encrypted):
    _, other = ends(encrypted)
    with pytest.raises(PeerLost, match=r"^the other closed the connection$") as closed:
        other.take(b"")
    gone = other.gone(OSError("it broke"))
    assert str(gone) == "the other is gone: it broke"
    assert closed.value.peer == gone.peer == "the other"


def test_junk_ends_the_encryption():
    _, other = ends(encrypted=True)
    other.take(b"\x17\x03\x03\x00\x20" + b"j" * 32)
    with pytest.raises(TransportError, match=r"^the other has ended the encryption: "):
        record_of(other)
