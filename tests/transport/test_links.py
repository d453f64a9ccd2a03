"""Links: whole frames arrive in order, and what makes no sense ends the link."""

import os
import random
import re
import socket
import struct
import threading

import msgpack
import pytest
import torch
from support.encrypted import encrypted_pair
from support.linked import Member

from pipedream_rt.errors import TransportError
from pipedream_rt.transport import link as module
from pipedream_rt.transport.link import Connection, Link
from pipedream_rt.transport.links import text_of


def pair():
    ends = socket.socketpair()
    return Link(Connection(ends[0])), Link(Connection(ends[1]))


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_frames_arrive_in_order_however_the_kernel_cuts_them(is_encrypted):
    draw = random.Random(1)
    left, right = map(Link, encrypted_pair()) if is_encrypted else pair()
    sent, came = [], []
    for number in range(60):
        size = draw.choice((0, 1, 3, 1000, 70_000))
        sent.append(
            (number % 3, draw.randbytes(draw.choice((0, 5, 5000, 150_000))), torch.rand(size))
        )
        left.send(sent[-1][0], sent[-1][1], [sent[-1][2], torch.tensor(number)])
        if draw.random() < 0.5:
            right.receive(came.append)
    while len(came) < len(sent):
        all_out = left.flush()
        right.receive(came.append)
    assert all_out
    for (kind, data, tensor), frame in zip(sent, came, strict=True):
        assert (frame.kind, frame.data) == (kind, data)
        assert torch.equal(frame.tensors[0], tensor)
    left.close()
    right.close()


def recorded(*sends):
    """The bytes of frames."""
    ends = socket.socketpair()
    link = Link(Connection(ends[0]))
    for kind, data, tensors in sends:
        link.send(kind, data, tensors)
    link.close()
    with ends[1] as end:
        found = b""
        while part := end.recv(1 << 16):
            found += part
    return found


def fed(data):
    """What a link that receives these bytes makes of them."""
    ends = socket.socketpair()
    link = Link(Connection(ends[1]))
    try:
        with ends[0]:
            ends[0].sendall(data)
        frames = []
        while True:
            link.receive(frames.append)
    except (TransportError, ConnectionError) as error:
        return frames, error
    finally:
        link.close()


def test_nothing_that_was_cut_is_delivered():
    good = recorded((0, b"hello", [torch.ones(2)]))
    assert len(fed(good)[0]) == 1
    for length in range(len(good)):
        frames, error = fed(good[:length])
        assert frames == []
        assert isinstance(error, ConnectionError)


@pytest.mark.parametrize(
    "length", [module._LARGEST_META + 1, 1 << 29, (1 << 32) - 1], ids=["one more", "more", "most"]
)
def test_a_head_that_announces_too_much_ends_the_link(length):
    """At once, so that nothing of what is behind it is kept in memory."""
    frames, error = fed(struct.pack("!BIQ", 7, length, 0) + bytes(1000))
    assert not frames
    assert isinstance(error, TransportError)
    assert f"a frame of kind 7 announces {length} bytes besides its tensors" in str(error)


def test_a_frame_that_would_be_too_large_is_not_sent(monkeypatch):
    monkeypatch.setattr(module, "_LARGEST_META", 1000)
    left, right = pair()
    with pytest.raises(TransportError, match="and may have 1000; send large values as tensors"):
        left.send(0, bytes(1000), [])
    assert left.send(0, b"small", [])
    came = []
    right.receive(came.append)
    assert [frame.data for frame in came] == [b"small"]
    left.close()
    right.close()


@pytest.mark.parametrize(
    "junk", [b"\0" * 100, b"\xff" * 500, b"GET / HTTP/1.1\r\n\r\n" * 10, b"\x16\x03\x01\x02" * 50]
)
def test_junk_ends_a_link_with_an_error_of_its_own(junk):
    frames, error = fed(junk)
    assert frames == []
    assert isinstance(error, TransportError | ConnectionError)


def test_shared_memory_on_a_link_that_carries_none_ends_it():
    in_slot = msgpack.packb([b"", [["float32", [2], [1], 0, 4096]]])
    for kind, meta in ((254, b""), (0, in_slot)):
        frames, error = fed(struct.pack("!BIQ", kind, len(meta), 0) + meta)
        assert frames == []
        assert "shared memory on a link that carries no descriptors" in str(error)


def test_fuzz_of_frames():
    draw = random.Random(2)
    good = recorded(*((number, b"x" * number, [torch.ones(number)]) for number in range(20)))
    for _ in range(3_000):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            match draw.randrange(5):
                case 0:
                    del data[draw.randrange(len(data)) :]
                case 1:
                    data[draw.randrange(len(data)) :] = draw.randbytes(draw.randrange(200))
                case 2:
                    place = draw.randrange(len(data))
                    data[place:place] = draw.randbytes(5)
                case 3:
                    place = draw.randrange(len(data))
                    data[place : place + draw.randrange(100)] = b""
                case 4:
                    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            if not data:
                break
        _, error = fed(bytes(data))
        assert isinstance(error, TransportError | ConnectionError)


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"\xc1",
        msgpack.packb(3),
        msgpack.packb([b"", 3]),
        msgpack.packb([b"", [3]]),
        msgpack.packb([b"", [["float32", [2], [1, 1]]]]),
        msgpack.packb([b"", [["float32", [-2], [1]]]]),
        msgpack.packb([b"", [["no dtype", [2], [1]]]]),
        msgpack.packb([b"", [["float32", [1 << 40], [1]]]]),
        msgpack.packb([b"", [["float32", ["x"], [1]]]]),
        msgpack.packb([b"", [["float32", [2], [1]]]]),
    ],
)
def test_what_a_member_sends_but_makes_no_sense_ends_the_link(meta):
    """An error of one version of this package that talks to another; never a raw one."""
    frames, error = fed(struct.pack("!BIQ", 0, len(meta), 0) + meta)
    assert frames == []
    assert isinstance(error, TransportError)


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (OSError(12, "no room"), "other end's shared memory, for which this process has no room"),
        (RecursionError("deep"), r"malformed meta: RecursionError\('deep'\)"),
        (RuntimeError("can't allocate memory"), "torch cannot make a tensor .* allocate memory"),
    ],
    ids=repr,
)
def test_what_a_tensor_lacks_is_told(monkeypatch, raised, words):
    def refused(description):
        raise raised

    monkeypatch.setattr("pipedream_rt.transport.link.place_for", refused)
    meta = msgpack.packb([b"", [["float32", [2], [1]]]])
    frames, error = fed(struct.pack("!BIQ", 0, len(meta), 8) + meta)
    assert frames == []
    assert isinstance(error, TransportError)
    assert re.search(words, str(error))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), "connection reset by peer"),
        (ConnectionError("it closed the connection"), "it closed the connection"),
        (TransportError("set PIPEDREAM_RT_SECRET"), "set PIPEDREAM_RT_SECRET"),
    ],
)
def test_only_the_words_of_the_system_begin_in_lower_case(error, text):
    assert text_of(error) == text


def test_the_end_of_a_link_is_told_once_and_the_others_go_on():
    ends, other = socket.socketpair(), socket.socketpair()
    middle = Member({1: Connection(ends[0]), 2: Connection(other[0])})
    end = Member({0: Connection(ends[1])})
    third = Member({0: Connection(other[1])})
    assert end.links.send(0, 7, b"x") is None
    assert middle.came.get(timeout=20)[1].data == b"x"
    end.links.close()
    assert middle.lost.get(timeout=20) == (1, "it closed the connection")
    assert middle.links.send(1, 7, b"x") == "it closed the connection"
    assert middle.links.send(5, 7, b"x") == "there is no link to it"
    assert third.links.send(0, 7, b"y") is None
    assert middle.came.get(timeout=20)[1].data == b"y"
    third.links.close()
    middle.links.close()
    middle.links.close()
    assert middle.lost.qsize() <= 1


def two_members():
    ends = socket.socketpair()
    return Member({1: Connection(ends[0])}), Member({0: Connection(ends[1])})


@pytest.mark.parametrize("seed", range(4))
def test_what_a_waiter_and_the_thread_read_comes_once_and_in_order(seed):
    """Frames larger than a socket holds, small ones in heaps, and a waiter that comes and goes."""
    draw = random.Random(seed)
    sender, receiver = two_members()
    sizes = [draw.choice((0, 10, 1000, 70_000, 1_500_000)) for _ in range(150)]
    numbers, done = [], threading.Event()
    wanted = 0

    def receive(rank, frame):
        number, size = frame.tensors[0].item(), frame.tensors[1].numel()
        assert size == sizes[number]
        assert frame.tensors[1].eq(number % 100).all()
        numbers.append(number)
        if len(numbers) >= wanted:
            receiver.links.wake()
        if len(numbers) == len(sizes):
            done.set()

    receiver.links._receive = receive
    for number, size in enumerate(sizes):
        tensors = [torch.tensor(number), torch.full((size,), number % 100, dtype=torch.uint8)]
        assert sender.links.send(1, 7, b"", tensors) is None
    while len(numbers) < len(sizes):
        wanted = min(len(sizes), len(numbers) + draw.choice((1, 3, 40)))
        while len(numbers) < wanted:
            receiver.links.wait(20)
        if draw.random() < 0.5:
            os.sched_yield()  # the thread has to go on with what the waiter has left
    assert done.wait(20)
    assert numbers == list(range(len(sizes)))
    sender.links.close()
    receiver.links.close()


def test_what_a_waiter_leaves_in_the_socket_is_read_by_the_thread():
    """As much as a socket holds, of which nothing comes later that would wake the thread."""
    sender, receiver = two_members()
    receiver.links._receive = lambda rank, frame: (
        receiver.came.put((rank, frame)),
        receiver.links.wake(),
    )
    for _ in range(3):
        sender.links.send(1, 7, b"", [torch.zeros(150_000, dtype=torch.uint8)])
    receiver.links.wait(20)
    for _ in range(3):
        receiver.came.get(timeout=20)
    sender.links.close()
    receiver.links.close()


def test_a_waiter_is_woken_by_another_thread_before_and_while_it_waits():
    sender, receiver = two_members()
    receiver.links.wake()
    receiver.links.wait(None)
    waker = threading.Timer(0.05, receiver.links.wake)
    waker.start()
    receiver.links.wait(None)
    waker.join()
    receiver.links.wait(0.01)  # nobody calls
    sender.links.close()
    receiver.links.close()
    receiver.links.wake()  # too late, and no error


def test_a_waiter_that_reads_a_flood_is_woken_by_another_thread():
    sender, receiver = two_members()
    reads = iter(range(10**9))

    def flooded(rank):
        if next(reads) == 1000:
            waker = threading.Thread(target=receiver.links.wake)
            waker.start()
            waker.join()
        return False

    receiver.links._read = flooded
    # While the waiter waits; should it come later, the thread of the links reads the flood.
    sends = threading.Timer(0.05, sender.links.send, (1, 7, b"x"))
    sends.start()
    receiver.links.wait(20)
    sends.join()
    assert next(reads) >= 1000  # it has come back, and left the rest to the thread
    del receiver.links._read
    sender.links.close()
    receiver.links.close()


def test_a_wait_of_years_is_possible():
    sender, receiver = two_members()
    receiver.links.wake()
    receiver.links.wait(1e10)
    sender.links.close()
    receiver.links.close()


def test_a_waiter_finds_out_that_a_member_is_gone():
    sender, receiver = two_members()
    receiver.links._lost = lambda *lost: (receiver.lost.put(lost), receiver.links.wake())
    sender.links.send(1, 7, b"last")
    sender.links.close()
    while receiver.lost.empty():
        receiver.links.wait(20)
    assert receiver.came.get(timeout=20)[1].data == b"last"
    assert receiver.lost.get() == (0, "it closed the connection")
    receiver.links.wait(0.05)  # the end of the link is not told again, and wakes nobody
    assert receiver.lost.empty()
    receiver.links.close()
