import socket
from datetime import timedelta

import pytest

from pipedream_rt.cluster.control import Control
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout, PeerLost, TransportError


def soon():
    return Deadline(timedelta(seconds=10))


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield Control(left, "right"), Control(right, "left")


def test_records_arrive_whole_and_in_order(pair):
    left, right = pair
    records = [{"type": "hello", "n": i, "text": "x" * i * 1000} for i in range(5)]
    for record in records:
        left.send(record)
    assert [right.receive(soon()) for _ in records] == records


def test_what_arrived_behind_a_record_is_not_left_in_the_buffer(pair):
    left, right = pair
    for i in range(3):
        left.send({"type": "x", "n": i})
    left.close()
    assert [r["n"] for r in right.receive_all()] == [0, 1, 2]


def test_nothing_in_time(pair):
    with pytest.raises(MessageTimeout, match="nothing came from right"):
        pair[0].receive(Deadline(timedelta(seconds=0)))


def test_the_other_end_is_gone(pair):
    left, right = pair
    right.close()
    with pytest.raises(PeerLost, match="right closed the connection") as e:
        left.receive(soon())
    assert e.value.peer == "right"
    with pytest.raises(PeerLost):
        left.send({"type": "x" * (1 << 20)})


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\xc1", b"\0\0\0\1\1", b"\0\0\0\1\x80"]
)
def test_strangers_are_noticed(pair, junk):
    pair[0]._socket.sendall(junk)
    with pytest.raises(TransportError, match="speaks another protocol"):
        pair[1].receive(soon())
