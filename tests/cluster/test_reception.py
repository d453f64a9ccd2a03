"""Who connects to a port or a path of a job, and is no member, is dropped and disturbs nobody."""

import asyncio
import logging
import os
import random
import socket
import ssl
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import msgpack
import pytest
from support.deadlines import LATEST_S
from support.encrypted import OTHER, SECRET
from support.loops import run
from support.rights import exit_code, forked_as_another_user

from pipedream_rt.cluster import reception as module
from pipedream_rt.cluster.peer_listeners import listening_at
from pipedream_rt.cluster.reception import Reception, most_strangers
from pipedream_rt.cluster.records import HEAD, packed
from pipedream_rt.cluster.stream import Stream
from pipedream_rt.errors import TransportError
from pipedream_rt.transport.tls import TlsEngine

HELLO = {"type": "hello", "version": 14}
LINK = {
    "type": "link", "job": SECRET.job, "group": bytes(32), "generation": 1, "sender": 1,
    "recipient": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


class Listening:
    """A reception with a port and a path, in the running loop; what it hands over is in `came`."""

    def __init__(self, stack, folder):
        self.tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
        self.unix = stack.enter_context(listening_at(folder / "socket"))
        self.came = asyncio.Queue()
        self.listeners = (self.unix, self.tcp)
        self.reception = Reception(SECRET, self.listeners, self._receive, logging.WARNING)

    async def _receive(self, stream, first):
        self.came.put_nowait(first)
        stream.close()

    def dialled(self, stack, by_tcp=True):
        """A connection of somebody."""
        bound = self.tcp if by_tcp else self.unix
        connection = stack.enter_context(socket.socket(bound.family))
        connection.setblocking(True)
        connection.connect(bound.getsockname())
        connection.setblocking(False)
        return connection

    async def is_open(self, by_tcp=True):
        """Fail unless a member comes in."""
        with ExitStack() as stack:
            await self.comes_in(self.dialled(stack, by_tcp))

    async def comes_in(self, connection):
        """Be a member that has connected."""
        member = Stream(connection, "the listener")
        if connection.family == socket.AF_INET:
            await member.encrypt(SECRET.tls(called=False), called=False)
        member.send(LINK)
        assert await asyncio.wait_for(self.came.get(), LATEST_S) == LINK
        member.close()


@pytest.fixture
def at_listener(caplog):
    """Run a coroutine function with a listener and a stack; afterwards a member still comes in."""
    caplog.set_level(logging.WARNING)

    def run_at(main, is_open=True):
        async def whole():
            with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
                listener = Listening(stack, Path(folder))
                try:
                    await main(listener, stack)
                    if is_open:
                        for by_tcp in (True, False):
                            await listener.is_open(by_tcp)
                        assert listener.came.empty()
                finally:
                    await listener.reception.close()
                    await listener.reception.close()

        run(whole())

    return run_at


async def ended(connection):
    """Wait until the other end has closed a connection."""
    loop = asyncio.get_running_loop()
    with suppress(ConnectionError):
        while await asyncio.wait_for(loop.sock_recv(connection, 4096), LATEST_S):
            pass


async def say(connection, data):
    """Send bytes to somebody who may have had enough already."""
    with suppress(ConnectionError):
        await asyncio.get_running_loop().sock_sendall(connection, data)


def first_words():
    """What a member says first by TCP, as TLS has it."""
    engine = TlsEngine(SECRET.tls(called=False), False)
    engine.shake_hands()
    return engine.sealed()


JUNK = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": b"\0" * 1000,
    "no map": HEAD.pack(1) + b"\x03",
    "no msgpack": HEAD.pack(1) + b"\xc1",
    "nothing": HEAD.pack(0),
    "too long": HEAD.pack(1 << 20),
    "most": HEAD.pack((1 << 32) - 1),
    "deep": HEAD.pack(4000) + b"\x91" * 4000,
    "unknown type": packed({"type": "something"}),
    "no type": packed({"version": 14}),
    "a list as its type": packed({"type": ["hello"]}),
    "a number as a key": HEAD.pack(3) + msgpack.packb({1: 2}),
    "no fields": packed({"type": "link"}),
    "a text as its rank": packed({**LINK, "sender": "1"}),
    "a truth as its rank": packed({**LINK, "recipient": True}),
    "a rank below": packed({**LINK, "sender": -1}),
}


@pytest.mark.parametrize("by_tcp", [True, False], ids=["tcp", "unix"])
def test_junk_is_dropped(at_listener, by_tcp):
    async def main(listener, stack):
        for words in JUNK.values():
            stranger = listener.dialled(stack, by_tcp)
            await say(stranger, words + bytes(70_000 if by_tcp else 0))
            await ended(stranger)
            await listener.is_open(by_tcp)

    at_listener(main)


def test_half_words_are_dropped(at_listener):
    """The other end has sent a part of what is expected, and has closed."""

    async def main(listener, stack):
        for by_tcp, word in ((True, first_words()), (False, packed(LINK))):
            for cut in range(0, len(word), 7):
                stranger = listener.dialled(stack, by_tcp)
                await say(stranger, word[:cut])
                stranger.shutdown(socket.SHUT_WR)
                await ended(stranger)

    at_listener(main)


def test_random_bytes_are_dropped(at_listener):
    draw = random.Random(4)
    hello = first_words()

    async def main(listener, stack):
        for number in range(300):
            changed = bytearray(hello)
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            words = changed if number % 2 else draw.randbytes(draw.randrange(1, 400))
            with ExitStack() as opened:
                stranger = listener.dialled(opened, by_tcp=bool(number % 3))
                await say(stranger, words)
                stranger.shutdown(socket.SHUT_WR)
                await ended(stranger)

    at_listener(main)


@pytest.mark.parametrize("shows", ["another job's", "none", "none, of TLS 1.2"])
def test_who_has_not_the_certificate_of_the_job(at_listener, caplog, shows):
    context = OTHER.tls(called=False)
    if shows.startswith("none"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if shows == "none, of TLS 1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def main(listener, stack):
        stranger = Stream(listener.dialled(stack), "the listener")
        with pytest.raises(TransportError):  # noqa: PT012
            await stranger.encrypt(context, called=False)
            stranger.send(LINK)
            await stranger.read()
        stranger.close()

    at_listener(main)
    assert (
        "a connection that is no worker was dropped: the TLS handshake with the process at 127"
        in (caplog.text)
    )


def test_a_trusting_caller_learns_nothing_from_a_door(at_listener):
    """What a member says after its handshake is encrypted for who has the job's key alone."""

    async def main(listener, stack):
        stranger = Stream(listener.dialled(stack), "the listener")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        await stranger.encrypt(context, called=False)
        with pytest.raises(TransportError, match="one end does not know the secret"):
            await stranger.read()
        stranger.close()

    at_listener(main)


def test_who_says_nothing_is_dropped_in_time(at_listener, monkeypatch, caplog):
    """Also who sends a byte now and then: the time is that of all of it."""
    monkeypatch.setattr(module, "_FIRST_RECORD_S", 0.3)

    async def drip(stranger, data):
        for byte in data * 1000:
            await say(stranger, bytes([byte]))
            await asyncio.sleep(0.02)

    async def main(listener, stack):
        silent = [listener.dialled(stack, by_tcp) for by_tcp in (True, False, True)]
        shaken = Stream(silent[-1], "the listener")
        await shaken.encrypt(SECRET.tls(called=False), called=False)
        slow = [listener.dialled(stack, by_tcp) for by_tcp in (True, False)]
        words = first_words(), packed(LINK)
        drips = [asyncio.ensure_future(drip(*each)) for each in zip(slow, words)]
        await asyncio.gather(*map(ended, (*silent, *slow)))
        for each in drips:
            each.cancel()

    at_listener(main, is_open=False)
    assert "was dropped: it said nothing in time" in caplog.text


def test_slow_callers_hold_nobody_up(at_listener):
    """Their words come byte by byte, and a member comes in meanwhile."""
    words = first_words()

    async def main(listener, stack):
        strangers = [listener.dialled(stack) for _ in range(20)]
        for number, byte in enumerate(words):
            for stranger in strangers:
                await say(stranger, bytes([byte]))
            if number % 100 == 0:
                await listener.is_open()

    at_listener(main)


@pytest.mark.parametrize("by_tcp", [True, False], ids=["tcp", "unix"])
def test_the_oldest_of_too_many_are_dropped(at_listener, monkeypatch, by_tcp):
    monkeypatch.setattr(module, "_MOST", 5)

    async def main(listener, stack):
        by_age = [listener.dialled(stack, by_tcp) for _ in range(12)]
        await asyncio.gather(*map(ended, by_age[:7]))
        for stranger in by_age[7:]:
            with pytest.raises(BlockingIOError):
                stranger.recv(1)

    at_listener(main)


@pytest.mark.parametrize("free", [64, 6])
def test_many_idle_connections_where_descriptors_are_few(at_listener, few_descriptors, free):
    """The oldest make room: where the limit is reached, or already where there is none at all."""

    async def main(listener, stack):
        strangers = [listener.dialled(stack) for _ in range(200)]
        members = [listener.dialled(stack, by_tcp) for by_tcp in (True, False)]
        few_descriptors(free)
        if free == 64:
            listener.reception._most = most_strangers()
            assert 25 < listener.reception._most <= 32
        await asyncio.gather(*map(listener.comes_in, members))
        await ended(strangers[0])
        few_descriptors(None)

    at_listener(main)


def test_where_there_is_no_descriptor_at_all_it_tries_again(at_listener, few_descriptors, caplog):
    async def main(listener, stack):
        waiting = listener.dialled(stack)
        few_descriptors(0)
        gone = asyncio.ensure_future(say_and_end(waiting))
        while "nobody can be accepted" not in caplog.text:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert [left_out for _, left_out in listener.reception._logged.values()] == [0]  # it waits
        few_descriptors(None)
        await gone

    async def say_and_end(stranger):
        await say(stranger, b"GET / HTTP/1.1\r\n\r\n")
        await ended(stranger)

    at_listener(main)
    words = "nobody can be accepted: too many open files; allow more open files, as by `ulimit"
    assert words in caplog.text


def test_the_limit_is_half_of_what_is_free(monkeypatch):
    used = len(os.listdir("/proc/self/fd"))
    for free, most in ((0, 4), (7, 4), (60, 30), (256, 128), (100_000, 128)):
        limits = (used + free, used + free)
        monkeypatch.setattr(module.resource, "getrlimit", lambda _, limits=limits: limits)
        assert abs(most_strangers() - most) <= 1


def test_each_text_is_logged_once_a_second(at_listener, caplog):
    async def main(listener, stack):
        for _ in range(50):
            with ExitStack() as opened:
                stranger = listener.dialled(opened, by_tcp=False)
                await say(stranger, JUNK["no map"])
                await ended(stranger)
        said, _ = listener.reception._logged["a connection that is no worker was dropped: %s"]
        listener.reception._logged["a connection that is no worker was dropped: %s"] = (said - 1, 7)
        listener.reception.note("a connection that is no worker was dropped: %s", "it was another")

    at_listener(main)
    assert "it was another (and 7 others)" in caplog.text
    assert caplog.text.count("no worker was dropped") < 10


@pytest.mark.rights
def test_a_process_of_another_user_is_dropped(at_listener, caplog):
    """Where a folder should be open to others, against all care."""

    def call(path):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))
            caller.settimeout(LATEST_S)
            try:
                caller.sendall(packed(LINK))
                return 0 if caller.recv(1) == b"" else 1
            except ConnectionError:  # what it says is not read
                return 0

    async def main(listener, stack):
        path = Path(listener.unix.getsockname())
        path.parent.chmod(0o755)
        path.chmod(0o777)
        child = forked_as_another_user(lambda: call(path))
        assert await asyncio.to_thread(exit_code, child) == 0

    at_listener(main)
    assert "a process of this machine is of another user" in caplog.text


# -- the end of a reception ------------------------------------------------------------------------


def test_at_the_end_whoever_waits_is_dropped_and_the_listeners_stay(at_listener):
    async def main(listener, stack):
        waiting = [listener.dialled(stack, by_tcp) for by_tcp in (True, False) * 3]
        while len(listener.reception._strangers) < len(waiting):
            await asyncio.sleep(0)
        for _ in range(5):  # each has begun to read
            await asyncio.sleep(0)
        await listener.reception.close()
        await asyncio.gather(*map(ended, waiting))
        for bound in listener.listeners:
            assert bound.fileno() >= 0
        listener.dialled(stack)  # it stays in the kernel's queue

    at_listener(main, is_open=False)


def test_who_is_accepted_at_the_very_end_is_dropped_too(at_listener):
    """Its task has not begun yet; nothing is left to the collector of garbage."""

    async def main(listener, stack):
        stranger = listener.dialled(stack, by_tcp=False)
        listener.reception._accept(listener.unix)
        await listener.reception.close()
        await ended(stranger)

    at_listener(main, is_open=False)


def test_the_end_does_not_wait_for_who_was_received_meanwhile(at_listener):
    """A worker that becomes a member stays for as long as its control connection."""

    async def main(listener, stack):
        reception, over, ends = listener.reception, asyncio.Event(), []
        first = reception._first

        async def receive(stream, first):
            await over.wait()
            stream.close()

        async def first_and_then_the_end(stream):
            record = await first(stream)
            ends.append(asyncio.ensure_future(reception.close()))
            return record

        reception._receive, reception._first = receive, first_and_then_the_end
        await say(listener.dialled(stack, by_tcp=False), packed(LINK))
        while not ends:
            await asyncio.sleep(0)
        is_over, _ = await asyncio.wait(ends, timeout=LATEST_S)
        over.set()
        assert is_over, "the reception waits for the end of who was received"

    at_listener(main, is_open=False)
