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
from pipedream_rt.cluster.records import LARGEST
from pipedream_rt.cluster.stream import Stream
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout, PeerLost, TransportError

BEAT = {"type": "beat", "doing": "", "rss": 1}
JUNK = b"\x17\x03\x03\x00\x20" + b"j" * 32

both = pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])


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
def joined(loop, encrypted):
    """The worker's end of a connection and the coordinator's, which its event loop has."""
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


def test_an_end_by_reset_is_the_end_of_the_peer(ends):
    """As of a process that was killed with records unread."""
    ours, theirs = ends
    ours.send(BEAT)
    theirs.close()
    with pytest.raises(PeerLost, match="w is gone"):
        ours.receive(soon())


@pytest.mark.threads
@both
def test_what_came_before_the_end_is_read_one_by_one(loop, encrypted):
    async def write():
        for i in range(3):
            stream.send({"type": "hello", "version": i})
        await stream.sent()

    with joined(loop, encrypted) as (worker, stream):
        assert not worker.has_come()
        loop.run(write())
        assert worker.has_come()
        assert [worker.receive(soon())["version"] for _ in range(3)] == [0, 1, 2]
        assert not worker.has_come()
        in_loop(loop, stream.close)
        in_loop(loop, stream.close)
        assert worker.has_come()
        with pytest.raises(PeerLost, match="the coordinator closed the connection"):
            worker.receive(soon())


def test_half_a_record_that_came_in_time_is_not_lost_and_years_are_no_error(ends):
    coordinator, worker = ends
    data = framed({"type": "exit", "failed": True})
    for part in (b"", data[:2], data[2:9]):
        coordinator._socket.sendall(part)
        with pytest.raises(MessageTimeout, match="nothing came from the coordinator"):
            worker.receive(Deadline(timedelta(seconds=0)))
    assert worker.has_come()
    coordinator._socket.sendall(data[9:])
    years = Deadline(timedelta(days=4000))  # more milliseconds than `poll` can take
    assert worker._wait(select.POLLOUT, years)
    assert worker.receive(years) == {"type": "exit", "failed": True}


def test_the_other_end_is_gone(ends):
    coordinator, worker = ends
    coordinator.close()
    with pytest.raises(PeerLost, match="the coordinator closed the connection") as e:
        worker.receive(soon())
    assert e.value.peer == "the coordinator"
    with pytest.raises(PeerLost, match="the coordinator is gone"):
        worker.send(BEAT)
    worker.close()
    worker.close()
    for use in (lambda: worker.send(BEAT), lambda: worker.receive(soon())):
        with pytest.raises(PeerLost, match="the coordinator is gone"):
            use()


def test_an_end_that_reads_nothing_counts_as_gone(ends, monkeypatch):
    monkeypatch.setattr(control_module, "_SEND_TIMEOUT", timedelta(seconds=0))
    ends[0]._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST // 4)
    with pytest.raises(PeerLost, match="w is gone: it read nothing for 0 s"):
        ends[0].send({"type": "failed", "text": "x" * (LARGEST - 100)})


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

    with joined(loop, encrypted) as (worker, stream):
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

    with joined(loop, encrypted) as (worker, stream):
        threads = [threading.Thread(target=send, args=(letter,)) for letter in "abcd"]
        for each in threads:
            each.start()
        came = loop.run(read())
        for each in threads:
            each.join(LATEST_S)
    assert sorted(came) == sorted(each * (1 + 37 * i) for i in range(100) for each in "abcd")


@pytest.mark.threads
@both
def test_who_reads_does_not_wait_for_a_sender_that_waits(loop, encrypted):
    """The other end may wait for this one to read; the engine alone is of one thread at a time."""
    with joined(loop, encrypted) as (worker, stream):
        if not encrypted:
            in_loop(loop, stream.send, BEAT)
            with worker._lock:  # as a sender has
                assert worker.receive(soon()) == BEAT
        in_loop(loop, stream.close)
        with worker._lock, pytest.raises(PeerLost, match="the coordinator closed the connection"):
            worker.receive(soon())


@pytest.mark.threads
@pytest.mark.parametrize("trusts_everybody", [False, True])
def test_both_ends_hear_that_they_know_another_secret(loop, trusts_everybody):
    """In TLS 1.3 the end that calls may hear of it with what it reads first."""
    ours, theirs = socket.socketpair()
    context = OTHER.tls(called=False)
    with ours, theirs:
        worker = Control(theirs, "the coordinator")
        answer = asyncio.run_coroutine_threadsafe(accepted(ours), loop._loop)
        if trusts_everybody:
            context.verify_mode = 0
            try:
                worker.encrypt(context, soon())
            finally:
                context.verify_mode = 2
            with pytest.raises(TransportError, match="has ended the encryption: one end does not"):
                worker.receive(soon())
        else:
            with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
                worker.encrypt(context, soon())
        with pytest.raises(TransportError, match="one end does not know the secret"):
            answer.result(LATEST_S)


def test_whoever_takes_the_connection_and_does_not_shake_hands_is_not_awaited_for_ever(ends):
    coordinator, worker = ends
    with pytest.raises(MessageTimeout, match=r"coordinator has taken the connection.* for 0\.1 s"):
        worker.encrypt(SECRET.tls(called=False), soon(0.1))
    coordinator._socket.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerLost, match="the coordinator closed the connection"):
        worker.encrypt(SECRET.tls(called=False), soon())


@pytest.mark.threads
def test_bytes_from_outside_end_an_encrypted_connection(loop):
    """Who sends over it afterwards hears at most that the other end is gone."""
    with joined(loop, True) as (worker, stream):
        worker._socket.sendall(JUNK)
        with pytest.raises(TransportError, match="the worker has ended the encryption"):
            loop.run(stream.read())
        in_loop(loop, stream.send, BEAT)
        stream.socket.sendall(JUNK)
        with pytest.raises(TransportError, match="the coordinator has ended the encryption"):
            worker.receive(soon())
        with contextlib.suppress(PeerLost):
            worker.send(BEAT)


@pytest.mark.threads
@both
def test_the_kernel_gives_up_an_end_that_confirms_nothing_where_the_machine_is_left(
    loop, encrypted, monkeypatch
):
    """A Unix socket knows no such limit, and would refuse it."""
    told = []
    monkeypatch.setattr(control_module, "set_timeout", lambda _, seconds: told.append(seconds))
    with joined(loop, encrypted) as (worker, _):
        worker.notice_within(1)
    assert told == [1] * encrypted
