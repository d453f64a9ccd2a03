"""Records over sockets of an event loop; what comes behind the last of them is the transport's."""

import asyncio
import queue
import socket
from contextlib import asynccontextmanager, closing

import pytest
import torch
from support.deadlines import LATEST_S
from support.encrypted import SECRET, tcp_pair
from support.loops import in_event_loop, run

from pipedream_rt.cluster.records import LARGEST, LARGEST_AT_FIRST
from pipedream_rt.cluster.stream import Stream
from pipedream_rt.errors import PeerLost, TransportError
from pipedream_rt.transport.link import Connection, Link
from pipedream_rt.transport.links import Links

BOTH = pytest.mark.parametrize("encrypts", [False, True], ids=["plain", "encrypted"])


async def shake_hands(caller, called):
    await asyncio.gather(
        caller.encrypt(SECRET.tls(called=False), called=False),
        called.encrypt(SECRET.tls(called=True), called=True),
    )


@asynccontextmanager
async def streams(encrypts, ends=None):
    """The two ends of a connection: of who calls, and of who is called."""
    ends = ends or socket.socketpair()
    with (
        closing(Stream(ends[0], "the called")) as caller,
        closing(Stream(ends[1], "the caller")) as called,
    ):
        if encrypts:
            await shake_hands(caller, called)
        yield caller, called


def story(size):
    return {"type": "story", "text": "x" * size}


@BOTH
@in_event_loop
async def test_records_arrive_whole_and_in_order_both_ways(encrypts):
    async with streams(encrypts) as ends:
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


@BOTH
@in_event_loop
async def test_bytes_that_come_one_by_one(encrypts):
    async def pass_on(source, target):
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, 1):
            await loop.sock_sendall(target, data)

    one, other = socket.socketpair(), socket.socketpair()
    with one[1], other[0]:
        for end in (one[1], other[0]):
            end.setblocking(False)
        relays = asyncio.gather(pass_on(one[1], other[0]), pass_on(other[0], one[1]))
        async with streams(encrypts, (one[0], other[1])) as (caller, called):
            caller.send(story(1000))
            assert await called.read() == story(1000)
        await relays


@in_event_loop
async def test_the_first_record_is_small_and_no_record_is_larger_than_its_limit():
    async with streams(False) as (caller, called):
        caller.send(story(LARGEST_AT_FIRST))
        with pytest.raises(TransportError, match=f"at most {LARGEST_AT_FIRST} are allowed"):
            await called.read()
        called.admit("worker 'w'")
        assert await called.read() == story(LARGEST_AT_FIRST)
        caller.send(story(LARGEST))
        with pytest.raises(TransportError, match=rf"worker 'w' sent .* at most {LARGEST} are"):
            await called.read()


@BOTH
@in_event_loop
async def test_what_the_socket_does_not_take_follows_by_itself(encrypts):
    async with streams(encrypts, tcp_pair(buffer=32_768)) as (caller, called):
        called.admit("a member")
        for _ in range(5):
            caller.send(story(900_000))
        sent = asyncio.ensure_future(caller.sent())
        await asyncio.sleep(0)
        assert not sent.done()
        for _ in range(5):
            assert await called.read() == story(900_000)
        await asyncio.wait_for(sent, LATEST_S)


@BOTH
@in_event_loop
async def test_an_end_that_is_gone_is_noticed(encrypts):
    async with streams(encrypts) as (caller, called):
        caller.send({"type": "stop"})
        caller.close()
        assert await called.read() == {"type": "stop"}
        with pytest.raises(PeerLost, match="the caller closed the connection"):
            await called.read()
        called.send({"type": "stopped"})  # whoever reads has met it
        await called.sent()


@BOTH
@pytest.mark.parametrize("closes_here", [False, True])
@in_event_loop
async def test_who_waits_hears_that_the_connection_ends(encrypts, closes_here):
    async with streams(encrypts) as (caller, called):
        called.send(story(900_000))
        waiting = [asyncio.ensure_future(each) for each in (called.read(), called.sent())]
        await asyncio.sleep(0)
        assert not any(each.done() for each in waiting)
        (called if closes_here else caller).close()
        gone = "is gone: " if closes_here else "is gone: |closed the connection"
        with pytest.raises(PeerLost, match=f"the caller ({gone})"):
            await asyncio.wait_for(waiting[0], LATEST_S)
        await asyncio.wait_for(waiting[1], LATEST_S)


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, b"\x16\x03\x01"])
@pytest.mark.parametrize("is_called", [True, False])
@in_event_loop
async def test_an_end_that_does_not_encrypt(is_called, words):
    ends = socket.socketpair()
    with closing(Stream(ends[0], "the other end")) as stream, ends[1]:
        ends[1].sendall(words)
        ends[1].shutdown(socket.SHUT_WR)
        with pytest.raises(TransportError, match=r"closed the connection|does not speak TLS 1.3"):
            await stream.encrypt(SECRET.tls(called=is_called), called=is_called)


@in_event_loop
async def test_the_hosts_are_those_of_tcp_and_empty_within_the_machine():
    for ends, host in ((tcp_pair(), "127.0.0.1"), (socket.socketpair(), "")):
        async with streams(bool(host), ends) as both:
            assert {(end.local_host, end.remote_host) for end in both} == {(host, host)}


# -- what comes behind the last record -------------------------------------------------------------


async def spoken(encrypts, count, closes):
    """An end that has read a record, behind which frames came; its other end is a link."""
    caller, called = (Stream(end, "the other") for end in socket.socketpair())
    if encrypts:
        await shake_hands(caller, called)
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
    with closing(Link(connection)) as reader, closing(link):
        came = []
        link.send(1, b"", [torch.arange(50_000.0)])
        link.send(2, b"", [])
        while len(came) < 2:
            link.flush()
            reader.receive(came.append)
    assert torch.equal(came[0].tensors[0], torch.arange(50_000.0))
