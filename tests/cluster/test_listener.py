"""How workers become members, with workers whose words the tests say."""

import asyncio
import contextlib
import gc
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.callers import (
    OTHER,
    SECRET,
    asked,
    calling,
    framed,
    hello,
    in_loop,
    ready,
    soon,
    until,
)
from support.deadlines import LATEST_S

from pipedream_rt.cluster import framing as framing_module
from pipedream_rt.cluster import reception as reception_module
from pipedream_rt.cluster.addresses import boot_id, listening
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.peer_listeners import listening_at
from pipedream_rt.cluster.records import LARGEST_AT_FIRST
from pipedream_rt.errors import PeerLost, TransportError
from pipedream_rt.software import software

pytestmark = pytest.mark.threads


@contextlib.contextmanager
def opened(loop, *listeners, most=2):
    """A listener to which workers may come."""
    listener = Listener(SECRET, *listeners)
    listener.roster.most = most
    in_loop(loop, listener.open)
    try:
        yield listener
    finally:
        loop.run(listener.close())


@pytest.fixture
def listener(loop):
    with listening("127.0.0.1", 0) as bound, opened(loop, bound) as listener:
        yield listener


@pytest.fixture
def calls(listener):
    """Makes encrypted connections to the listener."""
    with contextlib.ExitStack() as made:

        def call(secret=SECRET):
            control = calling(listener.listeners[0].getsockname(), secret)
            made.callback(control.close)
            return control

        yield call


@contextlib.contextmanager
def started_here(loop, listener, name="w"):
    """The worker's end of a connection that it has inherited."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        in_loop(loop, listener.take, ours, name)
        yield Control(theirs, "the coordinator")


def hang_up(worker):
    """Read until the connection ends; at most a refusal comes."""
    while True:
        refusal(worker.receive(soon()))


def only_member(loop, listener):
    until(loop, lambda: listener.roster.coming)
    (member,) = listener.roster.coming
    return member


def refusal(answer):
    assert answer["type"] == "refused"
    assert answer["reason"].isprintable()
    return answer["reason"]


def test_a_worker_from_elsewhere_becomes_a_member(loop, listener, calls):
    worker = calls()
    assert asked(worker, hello("w")) == {"type": "admitted", "secret": None}
    ready(worker, "a kind", "taken")
    until(loop, lambda: listener.roster.coming and listener.roster.coming[0].ready)
    member = only_member(loop, listener)
    assert (member.name, member.description) == ("w", "pid 7 on here")
    assert (member.processor, member.obstacle) == ("a kind", "taken")
    assert (member.is_local, member.nearby, member.returns) == (False, False, True)
    assert member.same_clock == (boot_id() != "")
    assert member.connection.peer == "worker 'w'"
    assert member.connection.local_host == member.connection.remote_host == "127.0.0.1"


def test_a_worker_that_was_started_here_gets_the_secret(loop):
    with opened(loop) as listener, started_here(loop, listener) as worker:
        assert listener.roster.unheard == ["w"]
        answer = asked(worker, hello("w", job="", boot="another", returns=False))
        assert answer == {"type": "admitted", "secret": SECRET.text}
        member = only_member(loop, listener)
        assert listener.roster.unheard == []
        assert (member.is_local, member.nearby, member.returns) == (True, True, True)
        assert not member.same_clock


def test_a_worker_of_this_machine_that_somebody_else_has_started(loop, tmp_path, monkeypatch):
    """The kernel says that it is of this user. It may be of another job of his."""
    with (
        contextlib.ExitStack() as made,
        listening_at(tmp_path / "socket") as at,
        opened(loop, at) as listener,
    ):

        def call():
            connection = made.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(at.getsockname())
            return Control(connection, "the coordinator")

        assert "another job" in refusal(asked(call(), hello("w", job=OTHER.job)))
        assert "another job" in refusal(asked(call(), hello("w", job="")))
        assert asked(call(), hello("w")) == {"type": "admitted", "secret": SECRET.text}
        member = only_member(loop, listener)
        assert (member.is_local, member.nearby) == (False, True)
        monkeypatch.setattr(reception_module, "is_same_user", lambda _: False)
        with pytest.raises(PeerLost):
            asked(call(), hello("v"))


def test_other_software_would_compute_other_bits(loop, listener, calls, caplog):
    worker = calls()
    answer = asked(worker, hello("w", software="torch 1.13.0"))
    text = f"it has torch 1.13.0, and the script {software()}; its stages might compute other bits"
    assert refusal(answer).startswith(text)
    assert not answer["passing"]
    with pytest.raises(PeerLost):
        worker.receive(soon())
    until(loop, lambda: listener.roster.refused == {"w": answer["reason"]})
    assert "refused worker 'w' (pid 7 on here): it has torch 1.13.0" in caplog.text


def test_who_does_not_know_the_secret_is_told_so(loop, listener, calls, caplog):
    """At this end too, where the log tells of him once a second at most."""
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        calls(OTHER)
    assert asked(calls(), hello("w"))["type"] == "admitted"
    text = "one end does not know the secret that the other has"
    until(loop, lambda: text in caplog.text)
    assert only_member(loop, listener).name == "w"


def nested(levels):
    value = 7
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(("said", "words"), [
    ({"type": "exit", "failed": False}, "which only a coordinator sends"),
    # msgpack reads 990 levels, of which a `repr` would end in an error of the interpreter.
    ({"type": "beat", "rss": 0, "doing": nested(990)}, "a record of more than 4 levels"),
], ids=["not its own", "nested deeply"])  # fmt: skip
def test_a_member_that_sends_what_it_may_not_send_is_gone(
    loop, listener, calls, caplog, said, words
):
    worker = calls()
    asked(worker, hello("w"))
    worker.send(said)
    until(loop, lambda: not listener.roster.coming)
    assert words in caplog.text
    with pytest.raises(PeerLost):
        worker.receive(soon())
    assert asked(calls(), hello("w"))["type"] == "admitted"


NESTED = b"\x81\xa4type" + b"\x91" * 1200 + b"\xc0"
HTTP = b"GET / HTTP/1.1\r\n\r\n"
FORGED = {"type": "hello", "version": "6\n[worker] ERROR \x1b[2J", "name": "\x1b[1m"}
LINK = {
    "type": "link", "job": SECRET.job, "group": bytes(32), "generation": 1, "sender": 1,
    "recipient": 0,
}  # fmt: skip


@pytest.mark.parametrize("encrypted", [False, True])
def test_what_a_stranger_sends_ends_the_stranger_alone(loop, listener, calls, caplog, encrypted):
    """Nested and large records, a member that was led here, text that would forge the log."""
    sent = [
        framed(each)
        for each in (NESTED, FORGED, b"\x80", b"\xc1", NESTED[:900] * 4, LINK, [], "hello",
                     {"type": "stop"}, {"type": "failed", "text": "x" * LARGEST_AT_FIRST})
    ]  # fmt: skip
    sent += [HTTP, bytes(8), bytes(range(256)) * 16, b"\xff" * 5]
    for junk in sent:
        if encrypted:
            stranger = calls()
            with stranger._lock:
                stranger._framing.engine.write(junk)
                stranger._write(stranger._framing.engine.sealed(), soon())
            with pytest.raises(TransportError):
                hang_up(stranger)
        else:
            with socket.create_connection(
                listener.listeners[0].getsockname(), LATEST_S
            ) as stranger:
                stranger.sendall(junk)
                stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(OSError):
                    while stranger.recv(1000):
                        pass
    asked(calls(), hello("right"))
    assert only_member(loop, listener).name == "right"
    assert "a connection that is no worker was dropped" in caplog.text
    assert ("refused worker" in caplog.text) == encrypted
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert "Task exception" not in record.getMessage()


def test_a_member_that_is_led_to_a_control_port_is_dropped(loop, calls, caplog):
    """It has the certificate of the job, and wants another member."""
    member = calls()
    member.send(LINK)
    with pytest.raises(PeerLost):
        member.receive(soon())
    until(loop, lambda: "is 'link', where 'hello' was expected" in caplog.text)


def test_while_it_rests_callers_wait_in_the_queue_of_the_kernel(loop, listener, calls):
    worker = calls()
    asked(worker, hello("w"))
    loop.run(listener.rest())
    loop.run(listener.rest())
    with socket.create_connection(listener.listeners[0].getsockname(), LATEST_S) as stranger:
        stranger.settimeout(0.1)
        stranger.sendall(HTTP)
        with pytest.raises(TimeoutError):
            stranger.recv(1)
        ready(worker)
        until(loop, lambda: listener.roster.coming[0].ready)  # members live on
        in_loop(loop, listener.open)
        assert asked(calls(), hello("v"))["type"] == "admitted"


def test_who_has_come_is_sent_away_in_the_end(loop, listener, calls):
    member, stranger = calls(), calls()
    asked(member, hello("w"))
    loop.run(listener.close())
    loop.run(listener.close())
    assert member.receive(soon()) == {"type": "exit", "failed": False}
    for each in (member, stranger):
        with pytest.raises(PeerLost):
            each.receive(soon())
    assert listener.roster.is_shut
    assert listener.roster.coming == []
    in_loop(loop, listener.open)  # it stays closed
    with socket.create_connection(listener.listeners[0].getsockname(), LATEST_S) as late:
        late.settimeout(0.1)
        late.sendall(HTTP)
        with pytest.raises(TimeoutError):
            late.recv(1)


@pytest.mark.parametrize("turns", range(8))
def test_a_connection_that_comes_in_the_last_moment_is_closed(loop, listener, turns):
    """Whatever its coroutine has done until then."""

    async def close_soon():
        with socket.create_connection(listener.listeners[0].getsockname(), LATEST_S) as stranger:
            for _ in range(turns):
                await asyncio.sleep(0)
            await listener.rest()
            for _ in range(8):
                await asyncio.sleep(0)
            return stranger

    loop.run(close_soon())
    gc.collect()  # a socket that was not closed warns


@pytest.mark.parametrize("turns", range(8))
def test_who_says_hello_in_the_last_moment_does_not_keep_it_from_resting(loop, tmp_path, turns):
    with listening_at(tmp_path / "socket") as at, opened(loop, at) as listener:

        async def rest_soon():
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(at.getsockname())
                for _ in range(3):
                    await asyncio.sleep(0)
                connection.sendall(framed(hello("w")))
                for _ in range(turns):
                    await asyncio.sleep(0)
                resting = asyncio.ensure_future(listener.rest())
                await asyncio.wait([resting], timeout=LATEST_S)
                return resting.done()

        assert loop.run(rest_soon())


def test_an_address_of_either_family():
    for host, expected in (("127.0.0.1", "127.0.0.1:"), ("::1", "[::1]:")):
        with listening(host, 0) as listener:
            assert Listener(SECRET, listener).address.startswith(expected)


# -- questions ------------------------------------------------------------------------------------

CLOCK = {"type": "clock", "ns": None}


@contextlib.contextmanager
def admitted(loop):
    """A listener, a member of it, and the worker's end of its connection."""
    with opened(loop) as listener, started_here(loop, listener) as worker:
        assert asked(worker, hello("w"))["type"] == "admitted"
        yield listener, only_member(loop, listener), worker


def test_an_answer_comes_with_its_time(loop):
    with admitted(loop) as (listener, member, worker), ThreadPoolExecutor(1) as thread:
        asking = thread.submit(loop.run, listener.ask(member, CLOCK, "clock", LATEST_S))
        assert worker.receive(soon()) == CLOCK
        before = time.monotonic_ns()
        worker.send({"type": "beat", "doing": "", "rss": 1})  # something else is no answer
        worker.send({"type": "clock", "ns": 5})
        record, received = asking.result(LATEST_S)
        assert record == {"type": "clock", "ns": 5}
        assert received >= before


def test_who_does_not_answer_is_not_awaited_for_ever(loop):
    """In time, or because it goes when it was asked, or has gone before."""
    with admitted(loop) as (listener, member, worker), ThreadPoolExecutor(1) as thread:
        assert loop.run(listener.ask(member, CLOCK, "clock", 0.01)) is None
        worker.receive(soon())
        asking = thread.submit(loop.run, listener.ask(member, CLOCK, "clock", LATEST_S))
        worker.receive(soon())
        worker.close()
        assert asking.result(LATEST_S / 2) is None
        assert loop.run(listener.ask(member, CLOCK, "clock", LATEST_S)) is None


def test_an_answer_that_came_too_late_is_not_that_to_the_next_question(loop):
    """A clock that was read before the question would seem to be years fast or slow."""
    with admitted(loop) as (listener, member, worker), ThreadPoolExecutor(1) as thread:
        assert loop.run(listener.ask(member, CLOCK, "clock", 0.0)) is None
        worker.send({"type": "clock", "ns": 1})
        worker.send({"type": "doing", "action": "F1"})
        until(loop, lambda: member.doing == "F1")
        worker.receive(soon())
        asking = thread.submit(loop.run, listener.ask(member, CLOCK, "clock", LATEST_S))
        worker.receive(soon())
        worker.send({"type": "clock", "ns": 2})
        assert asking.result(LATEST_S)[0]["ns"] == 2


def test_whatever_a_decoder_raises_ends_the_connection(loop, monkeypatch):
    def recurses(data, peer):
        raise RecursionError("maximum recursion depth exceeded")

    with admitted(loop) as (_, member, worker):
        monkeypatch.setattr(framing_module, "unpacked", recurses)
        worker.send({"type": "doing", "action": "B1"})
        until(loop, lambda: member.ended is not None)
        assert str(member.ended).startswith("what worker 'w' sent cannot be read: RecursionError(")
        assert worker.has_come()
