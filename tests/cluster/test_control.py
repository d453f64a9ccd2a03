"""Both ends of a control connection: the worker's, and the coordinator's in its event loop."""

import asyncio
import contextlib
import select
import socket
import threading
from datetime import timedelta

import pytest
from support.callers import OTHER, SECRET, framed, in_loop, soon
from support.deadlines import LATEST_S

from pipedream_rt.cluster import control as control_module
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.records import LARGEST, LARGEST_AT_FIRST
from pipedream_rt.cluster.stream import Stream
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout, PeerLost, TransportError

BEAT = {"type": "beat", "doing": "", "rss": 1}


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield Control(left, "right"), Control(right, "left")


async def accepted(connection, secret=SECRET):
    """Be the coordinator's end of a connection, which is encrypted."""
    stream = Stream(connection, "the worker")
    try:
        await stream.encrypt(secret.tls(called=True), called=True)
    except TransportError:
        stream.close()
        raise
    stream.admit("the worker")
    return stream


@contextlib.contextmanager
def ends(loop, encrypted):
    """The worker's end of a connection and the coordinator's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Control(theirs, "the coordinator")
        if encrypted:
            answer = asyncio.run_coroutine_threadsafe(accepted(ours), loop._loop)
            worker.encrypt(SECRET.tls(called=False), soon())
            stream = answer.result(LATEST_S)
        else:
            stream = in_loop(loop, Stream, ours, "the worker")
            stream.admit("the worker")
        try:
            yield worker, stream
        finally:
            in_loop(loop, stream.close)
            worker.close()


both = pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])


def test_records_arrive_whole_and_in_order(pair):
    left, right = pair
    records = [{"type": "refused", "passing": True, "reason": "x" * i * 900} for i in range(5)]
    for record in records:
        left.send(record)
    assert [right.receive(soon()) for _ in records] == records


def test_what_arrived_before_the_end_is_read(pair):
    left, right = pair
    for i in range(3):
        left.send({"type": "hello", "version": i})
    left.close()
    assert right.has_come()
    assert [right.receive(soon())["version"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(PeerLost, match="left closed the connection"):
        right.receive(soon())


def test_nothing_in_time(pair):
    assert not pair[0].has_come()
    with pytest.raises(MessageTimeout, match="nothing came from right"):
        pair[0].receive(Deadline(timedelta(seconds=0)))


def test_half_a_record_that_came_in_time_is_not_lost(pair):
    left, right = pair
    data = framed({"type": "exit", "failed": True})
    for part in (data[:2], data[2:9]):
        left._socket.sendall(part)
        with pytest.raises(MessageTimeout):
            right.receive(Deadline(timedelta(seconds=0)))
    left._socket.sendall(data[9:])
    assert right.receive(soon()) == {"type": "exit", "failed": True}


def test_a_deadline_of_years_is_no_error(pair):
    here, there = pair
    there.send(BEAT)
    assert here.receive(Deadline(timedelta(days=4000))) == BEAT
    assert here._wait(select.POLLOUT, Deadline(timedelta(days=4000)))


def test_the_other_end_is_gone(pair):
    left, right = pair
    right.close()
    with pytest.raises(PeerLost, match="right closed the connection") as e:
        left.receive(soon())
    assert e.value.peer == "right"
    with pytest.raises(PeerLost, match="right is gone"):
        left.send(BEAT)
    left.close()
    left.close()
    with pytest.raises(PeerLost):
        left.send(BEAT)


def test_an_end_that_reads_nothing_counts_as_gone(pair, monkeypatch):
    monkeypatch.setattr(control_module, "_SEND_TIMEOUT", timedelta(seconds=0))
    pair[0]._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST // 4)
    with pytest.raises(PeerLost, match="right is gone: it read nothing for 0 s"):
        pair[0].send({"type": "failed", "text": "x" * (LARGEST - 100)})


@pytest.mark.threads
@both
def test_what_both_ends_say_arrives_whole_and_in_order(loop, encrypted):
    """Some records are larger than what a socket takes at once."""
    records = [{"type": "failed", "text": "x" * size} for size in (0, 1 << 19, 10, 1 << 19, 1)]

    async def read():
        return [await stream.read() for _ in records]

    async def write():
        for record in records:
            stream.send(record)
        await stream.sent()

    with ends(loop, encrypted) as (worker, stream):
        for coroutine, other in (
            (read, lambda: [worker.send(record) for record in records]),
            (write, lambda: [worker.receive(soon()) for _ in records]),
        ):
            future = asyncio.run_coroutine_threadsafe(coroutine(), loop._loop)
            got = other()
            assert records in (got, future.result(LATEST_S))


@pytest.mark.threads
@both
def test_threads_that_send_at_once_do_not_mix_their_records(loop, encrypted):
    async def read():
        return [(await stream.read())["action"] for _ in range(400)]

    def send(letter):
        for i in range(100):
            worker.send({"type": "doing", "action": letter * (1 + 37 * i)})

    with ends(loop, encrypted) as (worker, stream):
        threads = [threading.Thread(target=send, args=(letter,)) for letter in "abcd"]
        for each in threads:
            each.start()
        came = loop.run(read())
        for each in threads:
            each.join(LATEST_S)
    assert all(len({*action}) == 1 for action in came)
    assert sorted(came) == sorted(each * (1 + 37 * i) for i in range(100) for each in "abcd")


@pytest.mark.threads
@both
def test_who_reads_does_not_wait_for_a_sender_that_waits(loop, encrypted):
    """The other end may wait for this one to read; the engine alone is of one thread at a time."""
    with ends(loop, encrypted) as (worker, stream):
        if not encrypted:
            in_loop(loop, stream.send, BEAT)
            with worker._lock:  # as a sender has
                assert worker.receive(soon()) == BEAT
        in_loop(loop, stream.close)
        with worker._lock, pytest.raises(PeerLost, match="the coordinator closed the connection"):
            worker.receive(soon())


@pytest.mark.threads
@both
def test_records_that_come_at_once_are_read_one_by_one(loop, encrypted):
    async def write():
        for i in range(3):
            stream.send({"type": "hello", "version": i})
        await stream.sent()

    with ends(loop, encrypted) as (worker, stream):
        loop.run(write())
        assert [worker.receive(soon())["version"] for _ in range(3)] == [0, 1, 2]
        assert not worker.has_come()


@pytest.mark.threads
@both
def test_only_members_may_send_large_records(loop, encrypted):
    with ends(loop, encrypted) as (worker, stream):
        stream._framing.largest = LARGEST_AT_FIRST
        worker.send({"type": "failed", "text": "x" * LARGEST_AT_FIRST})
        with pytest.raises(TransportError, match=r"the worker sent a record of .* at most 4096"):
            loop.run(stream.read())


@pytest.mark.threads
@both
def test_the_end_of_a_connection_is_noticed_by_who_reads(loop, encrypted):
    with ends(loop, encrypted) as (worker, stream):
        worker.close()
        with pytest.raises(PeerLost, match="the worker closed the connection"):
            loop.run(stream.read())
        in_loop(loop, stream.send, BEAT)  # who writes notices nothing
        loop.run(stream.sent())
    with ends(loop, encrypted) as (worker, stream):
        in_loop(loop, stream.close)
        in_loop(loop, stream.close)
        with pytest.raises(PeerLost, match="the coordinator"):
            worker.receive(soon())


@pytest.mark.threads
def test_who_waits_hears_that_the_connection_was_closed_here(loop):
    async def read_and_write():
        reading = asyncio.ensure_future(stream.read())
        while stream._writing is None:
            stream.send({"type": "failed", "text": "x" * (LARGEST // 2)})
        writing = asyncio.ensure_future(stream.sent())
        await asyncio.sleep(0)
        stream.close()
        await asyncio.wait_for(writing, LATEST_S)
        with pytest.raises(PeerLost, match="the worker is gone"):
            await asyncio.wait_for(reading, LATEST_S)

    with ends(loop, False) as (_, stream):
        loop.run(read_and_write())


@pytest.mark.threads
def test_both_ends_say_that_they_know_another_secret(loop):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Control(theirs, "the coordinator")
        answer = asyncio.run_coroutine_threadsafe(accepted(ours, OTHER), loop._loop)
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            worker.encrypt(SECRET.tls(called=False), soon())
        with pytest.raises(TransportError, match="one end does not know the secret"):
            answer.result(LATEST_S)


@pytest.mark.threads
def test_a_worker_that_trusts_everybody_reads_why_it_was_refused(loop):
    """In TLS 1.3 the end that calls hears of it with what it reads first."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker, trusting = Control(theirs, "the coordinator"), OTHER.tls(called=False)
        trusting.verify_mode = 0
        try:
            answer = asyncio.run_coroutine_threadsafe(accepted(ours), loop._loop)
            worker.encrypt(trusting, soon())
        finally:
            trusting.verify_mode = 2
        with pytest.raises(TransportError, match="one end does not know the secret"):
            answer.result(LATEST_S)
        with pytest.raises(TransportError, match=r"has ended the encryption: one end does not"):
            worker.receive(soon())


def test_whoever_takes_the_connection_and_says_nothing_is_not_awaited_for_ever(pair):
    with pytest.raises(MessageTimeout, match=r"right has taken the connection.* for 0\.1 s"):
        pair[0].encrypt(SECRET.tls(called=False), soon(0.1))


def test_whoever_hangs_up_during_the_handshake_is_gone(pair):
    pair[1]._socket.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerLost, match="right closed the connection"):
        pair[0].encrypt(SECRET.tls(called=False), soon())


@pytest.mark.threads
def test_bytes_from_outside_end_an_encrypted_connection(loop):
    junk = b"\x17\x03\x03\x00\x20" + b"j" * 32
    with ends(loop, True) as (worker, stream):
        worker._socket.sendall(junk)
        with pytest.raises(TransportError, match="the worker has ended the encryption"):
            loop.run(stream.read())
        stream.socket.sendall(junk)
        with pytest.raises(TransportError, match="the coordinator has ended the encryption"):
            worker.receive(soon())


@pytest.mark.threads
def test_who_sends_over_a_broken_encryption_hears_at_most_that_the_other_end_is_gone(loop):
    junk = b"\x17\x03\x03\x00\x20" + b"j" * 32
    with ends(loop, True) as (worker, stream):
        worker._socket.sendall(junk)
        with pytest.raises(TransportError):
            loop.run(stream.read())
        in_loop(loop, stream.send, BEAT)
        stream.socket.sendall(junk)
        with pytest.raises(TransportError):
            worker.receive(soon())
        with contextlib.suppress(PeerLost):
            worker.send(BEAT)


@pytest.mark.threads
@both
def test_where_a_connection_leaves_the_machine_its_ends_have_addresses(loop, encrypted):
    """Only then the kernel is told to give up an end that confirms nothing."""
    with ends(loop, encrypted) as (worker, stream):
        assert bool(stream.engine) == encrypted
        if not encrypted:
            assert stream.local_host == stream.remote_host == worker.local_host == ""
            worker.notice_within(1)
