"""Records over sockets of an event loop; what comes behind the last of them is the transport's."""

import asyncio
import queue
import random
import socket

import pytest
import torch
from support.deadlines import LATEST_S
from support.encrypted import OTHER, SECRET, tcp_pair
from support.loops import run

from pipedream_rt.cluster.records import HEAD, LARGEST, LARGEST_AT_FIRST, packed
from pipedream_rt.cluster.stream import Stream
from pipedream_rt.errors import PeerLost, TransportError
from pipedream_rt.transport.link import Connection, Link
from pipedream_rt.transport.links import Links

BOTH = pytest.mark.parametrize("encrypts", [False, True], ids=["plain", "encrypted"])


async def streams(encrypts, ends=None):
    """The two ends of a connection: of who calls, and of who is called."""
    ends = ends or socket.socketpair()
    caller, called = Stream(ends[0], "the called"), Stream(ends[1], "the caller")
    if encrypts:
        await asyncio.gather(
            caller.encrypt(SECRET.tls(called=False), called=False),
            called.encrypt(SECRET.tls(called=True), called=True),
        )
    return caller, called


def story(size):
    return {"type": "story", "text": "x" * size}


@BOTH
def test_records_arrive_whole_and_in_order_both_ways(encrypts):
    async def main():
        ends = await streams(encrypts)
        for end in ends:
            end.admit("a member")
        sent = [story(size) for size in (0, 1, 5000, 70_000, 900_000, 3)]
        for one, other in (ends, ends[::-1]):
            for record in sent:
                one.send(record)
            assert [await other.read() for _ in sent] == sent
            await one.sent()
        for end in ends:
            end.close()
            end.close()

    run(main())


@BOTH
def test_bytes_that_come_one_by_one(encrypts):
    async def pass_on(source, target):
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, 1):
            await loop.sock_sendall(target, data)

    async def main():
        one, other = socket.socketpair(), socket.socketpair()
        for end in (one[1], other[0]):
            end.setblocking(False)
        relays = [
            asyncio.ensure_future(pass_on(*way)) for way in ((one[1], other[0]), (other[0], one[1]))
        ]
        caller, called = await streams(encrypts, (one[0], other[1]))
        caller.send(story(1000))
        assert await called.read() == story(1000)
        caller.close()
        called.close()
        await asyncio.gather(*relays)
        one[1].close()
        other[0].close()

    run(main())


@BOTH
def test_the_first_record_is_small_and_no_record_is_larger_than_its_limit(encrypts):
    async def main():
        caller, called = await streams(encrypts)
        caller.send(story(LARGEST_AT_FIRST))
        with pytest.raises(TransportError, match=f"at most {LARGEST_AT_FIRST} are allowed"):
            await called.read()
        caller.close()
        called.close()
        caller, called = await streams(encrypts)
        called.admit("worker 'w'")
        caller.send(story(LARGEST))
        with pytest.raises(TransportError, match=rf"worker 'w' sent .* at most {LARGEST} are"):
            await called.read()
        caller.close()
        called.close()

    run(main())


@BOTH
def test_what_the_socket_does_not_take_follows_by_itself(encrypts):
    async def main():
        caller, called = await streams(encrypts, tcp_pair(buffer=32_768))
        called.admit("a member")
        for _ in range(5):
            caller.send(story(900_000))
        sent = asyncio.ensure_future(caller.sent())
        await asyncio.sleep(0)
        assert not sent.done()
        for _ in range(5):
            assert await called.read() == story(900_000)
        await asyncio.wait_for(sent, LATEST_S)
        caller.close()
        called.close()

    run(main())


@BOTH
def test_an_end_that_is_gone_is_noticed(encrypts):
    async def main():
        caller, called = await streams(encrypts)
        caller.send({"type": "stop"})
        caller.close()
        assert await called.read() == {"type": "stop"}
        with pytest.raises(PeerLost, match="the caller closed the connection"):
            await called.read()
        called.send({"type": "stopped"})  # whoever reads has met it
        await called.sent()
        called.close()

    run(main())


@BOTH
@pytest.mark.parametrize("closes_here", [False, True])
def test_a_read_that_waits_ends_with_the_connection(encrypts, closes_here):
    async def main():
        caller, called = await streams(encrypts)
        reading = asyncio.ensure_future(called.read())
        await asyncio.sleep(0)
        (called if closes_here else caller).close()
        with pytest.raises(PeerLost):
            await asyncio.wait_for(reading, LATEST_S)
        caller.close()
        called.close()

    run(main())


def test_a_write_that_waits_ends_with_the_connection():
    async def main():
        caller, called = await streams(False)
        caller.send(story(900_000))
        sent = asyncio.ensure_future(caller.sent())
        await asyncio.sleep(0)
        assert not sent.done()
        caller.close()
        await asyncio.wait_for(sent, LATEST_S)
        called.close()

    run(main())


@pytest.mark.parametrize("stranger", ["caller", "called"])
def test_the_certificate_of_another_job(stranger):
    async def main():
        ends = socket.socketpair()
        caller, called = Stream(ends[0], "the called"), Stream(ends[1], "the caller")
        secrets = (OTHER, SECRET) if stranger == "caller" else (SECRET, OTHER)

        async def call():
            await caller.encrypt(secrets[0].tls(called=False), called=False)
            await caller.read()  # an end that calls learns here that it was refused

        errors = await asyncio.gather(
            call(), called.encrypt(secrets[1].tls(called=True), called=True), return_exceptions=True
        )
        for error in errors:
            assert isinstance(error, TransportError)
            assert "is PIPEDREAM_RT_SECRET the same for all processes of the job?" in str(error)
        caller.close()
        called.close()

    run(main())


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, b"\x16\x03\x01"])
@pytest.mark.parametrize("is_called", [True, False])
def test_an_end_that_does_not_encrypt(is_called, words):
    async def main():
        ends = socket.socketpair()
        stream = Stream(ends[0], "the other end")
        ends[1].sendall(words)
        ends[1].shutdown(socket.SHUT_WR)
        with pytest.raises(TransportError, match=r"closed the connection|does not speak TLS 1.3"):
            await stream.encrypt(SECRET.tls(called=is_called), called=is_called)
        stream.close()
        ends[1].close()

    run(main())


def test_what_was_changed_on_the_way_is_no_record():
    async def main():
        for place in range(5, 60, 3):
            caller, called = await streams(True)
            caller.engine.write(packed({"type": "stop"}))
            sealed = bytearray(caller.engine.sealed())
            sealed[place % len(sealed)] ^= 1
            caller.socket.sendall(sealed)
            caller.close()
            with pytest.raises(TransportError, match=r"has ended the encryption|closed the"):
                await called.read()
            called.close()

    run(main())


def test_junk_is_an_error_of_its_own():
    async def main():
        draw = random.Random(3)
        for number in range(1000):
            ends = socket.socketpair()
            stream = Stream(ends[0], "somebody")
            data = draw.randbytes(draw.randrange(60))
            ends[1].sendall(HEAD.pack(len(data)) + data if number % 2 else data)
            ends[1].close()
            with pytest.raises(TransportError, match="somebody"):
                await stream.read()
            stream.close()

    run(main())


def test_the_hosts_are_those_of_tcp_and_empty_within_the_machine():
    async def main():
        for encrypts, host in ((True, "127.0.0.1"), (False, "")):
            ends = await streams(encrypts, tcp_pair() if encrypts else None)
            for end in ends:
                assert (end.local_host, end.remote_host) == (host, host)
                end.close()

    run(main())


# -- what comes behind the last record -------------------------------------------------------------


async def spoken(encrypts, count, closes):
    """An end that has read a record, behind which frames came; its other end is a link."""
    caller, called = await streams(encrypts)
    called.send({"type": "stop"})
    link = Link(Connection(called.socket, called.engine))
    for number in range(count):
        assert link.send(number, b"early", [torch.full((number * 100,), number)])
    if closes:
        link.close()
    assert await caller.read() == {"type": "stop"}
    return Connection(caller.socket, caller.engine), link


@BOTH
@pytest.mark.threads
@pytest.mark.parametrize("closes", [False, True], ids=["stays", "closes"])
def test_frames_that_came_at_once_behind_a_record_are_delivered(encrypts, closes):
    """Nothing comes later; the sender may have closed the link, as one that says why it fails."""
    connection, link = run(spoken(encrypts, 5, closes))
    came, lost = queue.SimpleQueue(), queue.SimpleQueue()
    links = Links({1: connection}, lambda _, frame: came.put(frame), lambda *end: lost.put(end))
    try:
        if closes:
            lost.get(timeout=LATEST_S)
            assert came.qsize() == 5
        for number in range(5):
            frame = came.get(timeout=LATEST_S)
            assert (frame.kind, frame.data) == (number, b"early")
            assert torch.equal(frame.tensors[0], torch.full((number * 100,), number))
    finally:
        links.close()
        link.close()


@BOTH
def test_a_part_of_a_frame_that_came_behind_a_record_is_completed(encrypts):
    connection, link = run(spoken(encrypts, 0, closes=False))
    reader, came = Link(connection), []
    link.send(1, b"", [torch.arange(50_000.0)])
    link.send(2, b"", [])
    while len(came) < 2:
        link.flush()
        reader.receive(came.append)
    assert torch.equal(came[0].tensors[0], torch.arange(50_000.0))
    reader.close()
    link.close()
