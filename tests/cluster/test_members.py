import asyncio
import contextlib
import socket

import pytest
from support.callers import ready
from support.deadlines import LATEST_S

from pipedream_rt.cluster import framing as framing_module
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.members import JoiningFailed, Member, WorkerSlot, natural
from pipedream_rt.cluster.peer_listeners import PeerAddress
from pipedream_rt.cluster.stream import Stream
from pipedream_rt.errors import PeerLost, TransportError


def member(name="w1", **more):
    """Return a member of which nobody reads the connection."""
    return Member(name, "pid 7 on here", None, **more)


def living(test):
    """Run a coroutine with a member whose connection is read, and with the worker's end of it."""

    def run():
        async def whole():
            ours, theirs = socket.socketpair()
            with ours, theirs:
                here = Member("w1", "pid 7 on here", Stream(ours, "worker 'w1'"))
                life = asyncio.create_task(here.live())
                await asyncio.wait_for(test(here, Control(theirs, "the coordinator")), LATEST_S)
                here.stream.close()
                await asyncio.wait_for(life, LATEST_S)

        asyncio.run(whole())

    return run


async def changed(member, condition):
    """Wait until a condition holds, which a record or the end of the connection makes true."""
    event = asyncio.Event()
    member.changed = event.set
    while not condition():
        await event.wait()
        event.clear()


def test_numbers_in_names_sort_as_numbers():
    names = ["w10", "w2", "a-2-b", "a-10-a", "w", "10", "9"]
    expected = ["a-2-b", "a-10-a", "w", "w2", "w10", "9", "10"]
    assert sorted(names, key=natural) == expected


def test_names_that_differ_have_different_keys():
    assert natural("a1") != natural("a2")
    assert natural("w") < natural("w0")


def test_a_lost_member_is_named_with_its_stages_its_process_and_its_end():
    here = member(slots=[WorkerSlot(1, "worker 1", (1, 3))], stage=1, doing="F4")
    problem = PeerLost("it closed the connection", peer="w1")
    error = here.lost("killed by SIGKILL", problem, " (note)")
    assert str(error) == (
        "worker 'w1' (stages 1, 3, pid 7 on here) is gone: killed by SIGKILL (note)"
    )
    assert (error.worker, error.stage, error.doing, error.crashed) == ("w1", 1, "F4", False)
    assert here.lost("killed by SIGSEGV").crashed
    assert error.__cause__ is problem
    assert str(here.lost("", TransportError("odd"))).endswith("is gone (odd)")


def test_a_member_whose_process_still_runs_does_not_answer():
    here = member(slots=[WorkerSlot(2, "stage 2", (2,))], stage=2)
    text = "worker 'w1' (stage 2, pid 7 on here) does not answer: still running"
    assert str(here.lost("still running")) == text
    assert str(here.lost("")) == "worker 'w1' (stage 2, pid 7 on here) is gone"


def test_a_member_that_has_no_seat_yet():
    here = member()
    assert (here.hosts, here.stages) == ("no stage yet", ())
    assert str(here.lost("")) == "worker 'w1' (no stage yet, pid 7 on here) is gone"


def test_a_member_with_several_seats():
    slots = [WorkerSlot(0, "stage 0", (0,)), WorkerSlot(1, "worker 1", (1, 3))]
    here = member(slots=slots)
    assert (here.hosts, here.stages) == ("stage 0 and stages 1, 3", (0, 1, 3))


@living
async def test_what_a_member_says_is_noted(here, worker):
    heard = here.heard
    ready(worker, "a kind", "taken")
    worker.send({"type": "door", "at": ["127.0.0.1", 7, "", ""]})
    worker.send({"type": "joined", "nearby": [0, 2]})
    worker.send({"type": "doing", "action": "F4"})
    worker.send({"type": "beat", "doing": "computing", "rss": 9})
    worker.send({"type": "stopped"})
    await changed(here, lambda: here.stopped)
    assert (here.ready, here.processor, here.obstacle) == (True, "a kind", "taken")
    assert here.peer_address == PeerAddress("127.0.0.1", 7)
    assert here.met == {0, 2}
    assert (here.doing, here.beat["rss"]) == ("F4", 9)
    assert here.heard > heard
    assert here.ended is None


@living
async def test_the_end_of_the_connection_is_noted(here, worker):
    worker.send({"type": "doing", "action": "B1"})
    worker.close()
    await changed(here, lambda: here.ended is not None)
    assert isinstance(here.ended, PeerLost)
    assert (here.doing, here.stopped) == ("B1", True)


@living
async def test_why_a_member_could_not_join_is_noted(here, worker):
    worker.send({"type": "failed", "text": "no such device"})
    await changed(here, lambda: here.ended is not None)
    assert isinstance(here.ended, JoiningFailed)
    assert str(here.ended) == "no such device"


def test_whatever_a_decoder_raises_ends_the_connection(monkeypatch):
    def recurses(data, peer):
        raise RecursionError("maximum recursion depth exceeded")

    @living
    async def run(here, worker):
        monkeypatch.setattr(framing_module, "unpacked", recurses)
        worker.send({"type": "doing", "action": "B1"})
        await changed(here, lambda: here.ended is not None)
        assert str(here.ended).startswith("what worker 'w1' sent cannot be read: RecursionError(")
        assert here.stopped
        assert worker.has_come()

    run()


@pytest.mark.parametrize("said", [{"type": "stop"}, {"type": "exit", "failed": True},
                                  {"type": "hello", "version": 1}, {"type": "shut"}])  # fmt: skip
def test_a_member_that_says_what_it_may_not_say_loses_its_connection(said):
    @living
    async def run(here, worker):
        worker.send(said)
        await changed(here, lambda: here.ended is not None)
        assert not isinstance(here.ended, PeerLost)
        text = f"worker 'w1' sent a {said['type']!r}, which only a coordinator sends"
        assert str(here.ended).startswith(text)
        assert worker.has_come()

    run()


@living
async def test_an_answer_comes_with_its_time(here, worker):
    question = {"type": "clock", "ns": None}
    asking = asyncio.ensure_future(here.ask(question, "clock", LATEST_S))
    while not worker.has_come():
        await asyncio.sleep(0)
    before = here.heard
    worker.send({"type": "beat", "doing": "", "rss": 1})  # something else is no answer
    worker.send({"type": "clock", "ns": 5})
    record, received = await asking
    assert record == {"type": "clock", "ns": 5}
    assert received >= 1e9 * before


@living
async def test_who_does_not_answer_is_not_awaited_for_ever(here, worker):
    assert await here.ask({"type": "story", "text": None}, "story", 0.01) is None
    worker.close()
    await changed(here, lambda: here.ended is not None)
    assert await here.ask({"type": "story", "text": None}, "story", 0.01) is None


@living
async def test_an_answer_that_came_too_late_is_not_that_to_the_next_question(here, worker):
    """A clock that was read before the question would seem to be years fast or slow."""
    question = {"type": "clock", "ns": None}
    assert await here.ask(question, "clock", 0.0) is None
    worker.send({"type": "clock", "ns": 1})
    worker.send({"type": "doing", "action": "F1"})
    await changed(here, lambda: here.doing == "F1")
    asking = asyncio.ensure_future(here.ask(question, "clock", LATEST_S))
    await asyncio.sleep(0)
    worker.send({"type": "clock", "ns": 2})
    record, _ = await asking
    assert record["ns"] == 2


@living
async def test_whoever_sends_to_a_member_that_is_gone_notices_nothing(here, worker):
    worker.close()
    for _ in range(3):
        here.stream.send({"type": "stop"})
    await changed(here, lambda: here.ended is not None)
    here.stream.send({"type": "stop"})
    with contextlib.closing(here.stream):
        await here.stream.sent()
