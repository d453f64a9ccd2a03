"""A link: whole frames arrive in order, and what makes no sense or was changed ends it."""

import random
import re
import select
import socket
import ssl
import struct

import msgpack
import pytest
import torch
from support.deadlines import LATEST_S
from support.encrypted import encrypted_pair, sealed_frames, shaken, tcp_pair

from pipedream_rt.errors import TransportError
from pipedream_rt.transport import link as module
from pipedream_rt.transport.link import Connection, Link


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_frames_arrive_in_order_however_the_kernel_cuts_them(linked, is_encrypted):
    draw = random.Random(1)
    left, right = linked(*encrypted_pair()) if is_encrypted else linked()
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


def fed(data, engine=None):
    """What a link that receives these bytes makes of them; an engine decrypts them."""
    ends = socket.socketpair()
    link = Link(Connection(ends[1], engine))
    try:
        with ends[0]:
            ends[0].sendall(data)
        frames = []
        while True:
            link.receive(frames.append)
    except (TransportError, OSError) as error:
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


def test_a_frame_that_would_be_too_large_is_not_sent(linked, monkeypatch):
    monkeypatch.setattr(module, "_LARGEST_META", 1000)
    left, right = linked()
    with pytest.raises(TransportError, match="and may have 1000; send large values as tensors"):
        left.send(0, bytes(1000), [])
    assert left.send(0, b"small", [])
    came = []
    right.receive(came.append)
    assert [frame.data for frame in came] == [b"small"]


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


# -- encrypted -----------------------------------------------------------------------------------
def test_nothing_of_an_encrypted_frame_that_was_changed_is_delivered():
    length = len(sealed_frames(1)[0][0])
    for place in range(length):
        (sent,), engine = sealed_frames(1)
        assert len(sent) == length
        changed = bytearray(sent)
        changed[place] ^= 1 << place % 8
        frames, error = fed(changed, engine)
        assert frames == [], place
        assert isinstance(error, ssl.SSLError | ConnectionError)


def test_nothing_of_an_encrypted_frame_that_was_cut_is_delivered():
    length = len(sealed_frames(1)[0][0])
    for cut in range(length):
        (sent,), engine = sealed_frames(1)
        frames, error = fed(sent[:cut], engine)
        assert frames == [], cut
        assert isinstance(error, ConnectionError)


@pytest.mark.parametrize(
    ("order", "delivered"),
    [
        ([0, 1, 2], [0, 1, 2]),
        ([0, 0, 1], [0]),
        ([0, 2, 1], [0]),
        ([1, 0], []),
        ([0, 1, 0], [0, 1]),
        ([2], []),
    ],
    ids=str,
)
def test_what_is_repeated_left_out_or_out_of_turn_ends_the_link(order, delivered):
    sent, engine = sealed_frames(3)
    frames, error = fed(b"".join(sent[number] for number in order), engine)
    assert [frame.kind for frame in frames] == delivered
    assert isinstance(error, ConnectionError if order == delivered else ssl.SSLError)


@pytest.mark.parametrize(
    "junk",
    [
        b"\x15\x03\x03\x00\x02\x02\x28",  # an alert, as of before the encryption
        b"\x14\x03\x03\x00\x01\x01",
        b"\x17\x03\x03\xff\xff" + bytes(70_000),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 100,
    ],
    ids=["alert", "change of ciphers", "long", "HTTP", "zeros"],
)
def test_what_a_stranger_puts_between_ends_the_link(junk):
    sent, engine = sealed_frames(2)
    frames, error = fed(sent[0] + junk + sent[1], engine)
    assert [frame.kind for frame in frames] == [0]
    assert isinstance(error, ssl.SSLError)


@pytest.mark.parametrize("size", [0, 1, 16_383, 16_384, 16_385, 65_536, 200_000])
def test_nothing_that_is_decrypted_stays_behind(linked, size):
    """One read of the socket brings several frames; nothing comes later that would wake a thread.

    The size is that of the tensor in each, around those of a record of TLS and of the buffer.
    """
    caller, called = shaken()
    here, there = socket.socketpair()
    sealed, end = linked(Connection(there, caller), Connection(here, called))
    sent = [torch.arange(size, dtype=torch.uint8) for _ in range(3)]
    came = []
    for number, tensor in enumerate(sent):
        is_out = sealed.send(number, b"", [tensor])
        while not is_out:
            end.receive(came.append)
            is_out = sealed.flush()
    end.receive(came.append)
    poll = select.poll()
    poll.register(here, select.POLLIN)
    while len(came) < len(sent):
        assert poll.poll(0), "nothing is in the socket, and something is not delivered"
        end.receive(came.append)
    assert [frame.kind for frame in came] == [0, 1, 2]
    assert all(torch.equal(frame.tensors[0], sent[0]) for frame in came)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_connection_that_is_reset_ends_the_link(linked, is_encrypted):
    ours, theirs = tcp_pair()
    ends = encrypted_pair((ours, theirs)) if is_encrypted else map(Connection, (ours, theirs))
    link, _ = linked(*ends)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    with pytest.raises(ConnectionResetError):
        link.receive(lambda frame: None)


def test_what_the_socket_does_not_take_is_left_over_and_flushed(linked):
    left, right = linked(*encrypted_pair(tcp_pair(buffer=32_768)))
    large, came = torch.arange(2_000_000.0), []
    assert not left.send(1, b"", [large])
    assert not left.send(2, b"behind", [])
    assert not left.flush()
    poll = select.poll()
    poll.register(right, select.POLLIN)
    poll.register(left, select.POLLOUT)
    while len(came) < 2:
        assert poll.poll(1000 * LATEST_S)
        left.flush()
        right.receive(came.append)
    assert left.flush()
    assert [frame.kind for frame in came] == [1, 2]
    assert torch.equal(came[0].tensors[0], large)
    assert left.send(3, b"", [])


def test_small_parts_share_a_record_of_tls(linked):
    """As the heads of many small frames do; a large part is encrypted where it lies."""
    link, _ = linked(*encrypted_pair())
    large = memoryview(bytes(100_000))
    parts = [memoryview(bytes([n]) * 10) for n in range(5)]
    link._queue.extend([*parts, large, *parts])
    pieces = list(link._pieces(module._ENCRYPTED_AT_ONCE))
    assert [len(piece) for piece in pieces] == [50, 100_000, 50]
    assert pieces[1].obj is large.obj
    assert not link._queue
    link._queue.append(large)
    assert [len(piece) for piece in link._pieces(60_000)] == [60_000]
    assert [len(piece) for piece in link._pieces(60_000)] == [40_000]
