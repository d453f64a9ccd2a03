"""The life of a generation, with workers whose words the tests say: no process computes."""

import asyncio
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from support.callers import (
    SECRET,
    asked,
    calling,
    control_plane,
    hello,
    in_loop,
    open_files,
    ready,
    soon,
    until,
    until_main_thread_waits,
)
from support.clusters import spec
from support.deadlines import LATEST_S

from pipedream_rt.cluster import generation as generation_module
from pipedream_rt.cluster import listener as listener_module
from pipedream_rt.cluster.addresses import listening, parse_address
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.elsewhere import AtAddress
from pipedream_rt.cluster.forked_workers import ForkServer
from pipedream_rt.cluster.generation import Generation, status_of
from pipedream_rt.cluster.generations import Generations
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.local import Local
from pipedream_rt.cluster.peer_links import PeerLinks
from pipedream_rt.cluster.peer_listeners import PeerAddress, listening_for_peers
from pipedream_rt.cluster.roster import Member, Phase
from pipedream_rt.errors import (
    MessageTimeout,
    PeerLost,
    PipelineClosed,
    RendezvousTimeout,
    WorkerLost,
)
from pipedream_rt.job.process_assignment import ProcessAssignment
from pipedream_rt.transport.group import Group

pytestmark = pytest.mark.threads


class Ended:
    """A process that has ended with exit code 7."""

    def wait(self, timeout):
        return 7


class Job:
    """A coordinator, which waits in another thread while the test plays its workers.

    Attributes:
        here: The workers' ends of inherited connections, by name.
        failures: What was reported since the generation is watched.
    """

    def __init__(self, stack, loop, count, here=(), listener=None, **more):
        self.loop, self._stack = loop, stack
        self.failures = []
        self._thread = stack.enter_context(ThreadPoolExecutor()).submit
        self.here, self.local = {}, Local(1, ForkServer())
        for name in here:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            self.local.connections[name] = ours
            self.here[name] = Control(theirs, "the coordinator")
        if listener is None:
            listeners = [] if here else [stack.enter_context(listening("127.0.0.1", 0))]
            listener = Listener(SECRET, *listeners)
            stack.callback(lambda: loop.run(listener.close()))
        self.listener = listener
        asked = spec(count, fail=self.failures.append, **more)
        self.generation = Generation(asked, listener, self.local, AtAddress("127.0.0.1:1"))
        stack.callback(self.end)

    @property
    def members(self):
        return self.generation.members

    @property
    def address(self):
        return self.listener.listeners[0].getsockname()

    def end(self):
        self.loop.run(self.generation.stop(timedelta(0)))
        self.loop.run(self.generation.leave(failed=False))

    def start(self, coroutine):
        """Run a coroutine of the coordinator beside the test; return its future."""
        return self._thread(self.loop.run, coroutine)

    def gather(self, seconds=LATEST_S):
        return self.start(self.generation.gather(soon(seconds)))

    def ask(self, name, **changes):
        """Have a worker say hello; return its connection, and the answer."""
        if name in self.here:
            control = self.here[name]
        else:
            control = calling(self.address)
            self._stack.callback(control.close)
        return control, asked(control, hello(name, **changes))

    def come(self, name, is_ready=True, **changes):
        """Have a worker become a member."""
        control, answer = self.ask(name, **changes)
        assert answer["type"] == "admitted", answer
        if is_ready:
            ready(control)
        return control

    def gathered(self, *names):
        """Gather workers of these names; return their ends of the connections."""
        gathering = self.gather()
        workers = [self.come(name) for name in names]
        gathering.result(LATEST_S)
        return workers

    def form(self, seconds=LATEST_S):
        """Let the members form a group; the future has the coordinator's connections."""

        async def form():
            deadline, generation = soon(seconds), self.generation
            group = await generation.welcome("off", deadline)
            met = await generation.connect(group, deadline)
            for connection in met.values():
                self._stack.callback(connection.socket.close)
            nothing = Future()  # there is no torch RPC to join
            nothing.set_result(None)
            await generation.all_joined(nothing, deadline)
            return met

        return self.start(form())

    def join(self, worker):
        """Have a worker meet the others beside the test, as `worker/process.py` does."""
        return self._thread(self._join, worker)

    def _join(self, worker):
        welcome = worker.receive(soon())
        group = Group(
            generation=welcome["generation"],
            rank=welcome["rank"],
            names=tuple(welcome["names"]),
            hosts=tuple(welcome["hosts"]),
            key=SECRET.group_key(welcome["nonce"]),
        )

        async def meet():
            return await PeerLinks(group, SECRET, listeners, addresses, soon()).meet()

        with listening_for_peers(welcome["host"]) as listeners:
            worker.send({"type": "door", "at": listeners.address})
            by_name = worker.receive(soon())["by_name"]
            addresses = {rank: PeerAddress(*by_name[name]) for rank, name in enumerate(group.names)}
            met = asyncio.run(meet())
        for connection in met.values():
            self._stack.callback(connection.socket.close)
        nearby = [rank for rank, each in met.items() if each.carries_descriptors]
        worker.send({"type": "joined", "nearby": nearby})
        return group

    def watch(self):
        self.loop.run(self.generation.watch())

    def failure(self):
        """Wait until something is reported, and return the error."""
        until(self.loop, lambda: self.failures)
        return self.failures[0]()


@pytest.fixture
def job(loop):
    """Makes jobs, which end with the test."""
    with contextlib.ExitStack() as stack:
        yield functools.partial(Job, stack, loop)


# -- workers are gathered -------------------------------------------------------------------------


def test_workers_that_do_not_come_in_time_are_named(job):
    """One has come anew under its name, as after a restart, and imports torch."""
    one = job(2)
    gathering = one.gather()
    first = one.come("w0")
    assert "'w0' is taken by pid 7 on here" in one.ask("w0")[1]["reason"]
    first.close()
    roster = one.listener.roster
    until(one.loop, lambda: not roster.coming)
    one.come("w0", is_ready=False)
    one.come("w1")
    until(one.loop, lambda: [m.ready for m in roster.coming] == [False, True])
    roster._asked = roster._asked._replace(until=0.0)  # the time is over
    in_loop(one.loop, one.listener.changed.set)
    text = (
        rf"^1 of 2 workers did not join within {LATEST_S:g} s: w0; joined: w1; "
        r"still importing torch: w0; start them with `pipedream-rt worker .*`, or give Pipeline "
        r"recovery=Recovery\(start=.*"
    )
    with pytest.raises(RendezvousTimeout, match=text) as e:
        gathering.result(LATEST_S)
    assert e.value.missing == 1
    assert [member.name for member in one.members] == ["w0", "w1"]  # they hear the end


@pytest.mark.parametrize(("comes", "words", "error"), [
    (False, b"", r"^worker 'w1' ended before it joined \(exit code 7\); its output says why"),
    (True, b"", r"^worker 'w1' \(no stage yet, pid 7 on here\) is gone: exit code 7$"),
    (False, b"GET / HTTP/1.1\r\n\r\n", r"^worker 'w1' cannot join: .* a record of 1195725856"),
], ids=["before its hello", "before it is ready", "speaks otherwise"])  # fmt: skip
def test_a_worker_started_here_that_ends_before_it_is_ready_is_named_at_once(
    job, comes, words, error
):
    one = job(2, here=("w0", "w1"))
    one.local.processes["w1"] = Ended()
    gathering = one.gather()
    if comes:
        one.come("w1", is_ready=False)
    if words:
        one.here["w1"]._socket.sendall(words)
    else:
        one.here["w1"].close()
    with pytest.raises(WorkerLost, match=error) as e:
        gathering.result(LATEST_S)
    assert (e.value.worker, e.value.stage) == ("w1", None)
    assert e.value.__cause__ is not None
    if words:
        with pytest.raises(PeerLost):
            one.here["w1"].receive(soon())


def test_a_worker_started_here_that_is_stopped_is_noticed_by_the_heartbeat(job):
    one = job(1, here=("w0",), heartbeat=0.3)
    handle, events = one.listener.roster.handle, []
    one.listener.roster.handle = lambda event, now: events.append(event) or handle(event, now)
    words = r"^worker 'w0' has been silent since it was started, for longer than the heartbeat of"
    with pytest.raises(WorkerLost, match=words):
        one.gather().result(LATEST_S)
    assert len(events) < 20  # meanwhile it waits, and burns no processor time


def test_who_comes_while_a_generation_runs_is_in_the_next_one(job):
    elastic = ProcessAssignment(fewest=1, most=2, wait=timedelta(hours=1), stays_open=True)
    first = job(2, assignment=elastic)
    first.listener.roster.expected = 1
    (runs,) = first.gathered("runs")
    early = first.come("early")
    first.end()
    assert runs.receive(soon()) == {"type": "exit", "failed": False}
    second = job(2, listener=first.listener, assignment=elastic)
    gathering = second.gather()
    # Before that, whoever comes is told to come again.
    until(second.loop, lambda: second.listener.roster.phase is Phase.GATHERING)
    second.come("late")
    gathering.result(LATEST_S)
    assert [member.name for member in second.members] == ["early", "late"]
    assert not early.has_come()


def test_where_no_newcomers_are_wanted_nobody_joins_while_a_generation_runs(job):
    one = job(1)
    one.gathered("w0")
    with socket.create_connection(one.address, timeout=0.2) as late:
        late.sendall(b"GET / HTTP/1.1\r\n\r\n")  # which ends a connection that is accepted
        with pytest.raises(TimeoutError):
            late.recv(1)


def test_strangers_who_keep_coming_do_not_put_off_the_deadline(job, crowd):
    one = job(1)
    with crowd(one.address), pytest.raises(RendezvousTimeout):
        one.gather(0.5).result(LATEST_S)


IDLE = """
import resource, socket, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
idle = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10) for _ in range(200)]
print("they stay", flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_a_worker_joins_where_idle_strangers_are_more_than_descriptors(job, few_descriptors):
    """The strangers have a process, since they need descriptors too."""
    one = job(1)
    few_descriptors(64)
    gathering = one.gather()
    command = [sys.executable, "-S", "-c", IDLE, str(one.address[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as strangers:
        assert strangers.stdout.readline() == b"they stay\n"
        one.come("w0")
        gathering.result(LATEST_S)


# -- the wait is ended ----------------------------------------------------------------------------


def test_closing_from_another_thread_ends_the_wait(job):
    one = job(2)
    gathering = one.gather()
    worker = one.come("w0")
    one.loop.run(one.listener.close())
    with pytest.raises(PipelineClosed, match="closed while it waited for workers"):
        gathering.result(LATEST_S)
    assert worker.receive(soon()) == {"type": "exit", "failed": False}
    with pytest.raises(PipelineClosed):
        one.gather().result(LATEST_S)


@pytest.mark.parametrize("turns", range(5))
def test_a_wait_that_is_ended_while_something_changes_is_over(job, turns):
    """As by Ctrl-C when a worker comes. The wait may be anywhere between the two."""
    one = job(2)

    async def end():
        gathering = asyncio.ensure_future(one.generation.gather(soon()))
        for _ in range(5):
            await asyncio.sleep(0)
        one.listener.changed.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        gathering.cancel()
        await asyncio.wait([gathering], timeout=LATEST_S)
        return gathering

    assert one.loop.run(end()).cancelled()
    assert one.listener.roster.phase is Phase.ENDING  # whoever has come hears it


class ByTest(AtAddress):
    """Workers that the test plays, which join at a port of loopback."""

    def __init__(self):
        super().__init__("127.0.0.1:0")
        self.joins = threading.Event()

    def secret(self):
        return SECRET

    def start(self, count, address, secret, deadline):
        self.address = parse_address(address)
        self.joins.set()


@contextlib.contextmanager
def signalled(handle, number):
    """Generations, and a worker that has the main thread get a signal when it has joined."""
    by_test, came = ByTest(), []
    generations = Generations(by_test)

    def come():
        assert by_test.joins.wait(LATEST_S)
        came.append(calling(by_test.address))
        assert asked(came[0], hello("w0"))["type"] == "admitted"
        until_main_thread_waits()
        signal.pthread_kill(threading.main_thread().ident, number)

    signal.signal(number, lambda *_: handle(generations))
    worker = threading.Thread(target=come)
    worker.start()
    try:
        yield generations, came
    finally:
        worker.join(LATEST_S)
        generations.close()
        came[0].close()
    with listening(*by_test.address):
        pass  # the port is free again


def read_to_the_end(worker):
    """Read until the connection ends; at most the coordinator sends the worker away."""
    while True:
        assert worker.receive(soon()) == {"type": "exit", "failed": False}


def interrupt(_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("handle", "error"), [(Generations.close, PipelineClosed), (interrupt, KeyboardInterrupt)]
)
def test_a_signal_that_comes_while_workers_are_awaited_leaves_nothing(handle, error):
    """A handler closes the pipeline, or Ctrl-C is pressed."""
    files = open_files()
    for number in (signal.SIGUSR1, signal.SIGINT):
        with signalled(handle, number) as (generations, came):
            with pytest.raises(error):
                generations.start(spec(2))
            generations.close()
            with pytest.raises(PeerLost):
                read_to_the_end(came[0])
            with pytest.raises(PipelineClosed):
                generations.start(spec(2))
    assert open_files() == files


# -- a group forms --------------------------------------------------------------------------------


@pytest.mark.parametrize("here", [("w0", "w1"), ()], ids=["started here", "from elsewhere"])
def test_a_group_forms_and_nothing_is_left_of_it(here):
    files = open_files()
    with contextlib.ExitStack() as stack, control_plane() as loop:
        one = Job(stack, loop, 2, here=here)
        workers = one.gathered("w0", "w1")
        forming = one.form()
        groups = [each.result(LATEST_S) for each in [one.join(worker) for worker in workers]]
        met = forming.result(LATEST_S)
        assert met.keys() == {1, 2}
        assert [group.rank for group in groups] == [1, 2]
        assert groups[0].names == ("coordinator", "w0", "w1")
        assert groups[0].hosts == (0, 1)
        host_ids = one.generation.host_ids()
        assert host_ids["w0"] == host_ids["w1"] != ""
        one.watch()
        stack.close()
    assert open_files() == files


@pytest.mark.parametrize(("met", "hosts"), [
    (({0, 2}, {0, 1, 3}, {0, 2}), ["", "", ""]),
    (({0, 2}, {0, 1}, {0}), ["1", "1", "3"]),
    (({2}, {1}, None), ["1", "1", "3"]),
])  # fmt: skip
def test_who_has_not_met_all_of_its_host_at_unix_sockets_shares_no_memory(job, met, hosts):
    generation = job(3).generation
    generation.members = [Member(n, "", None, met=m) for n, m in zip("abc", met, strict=True)]
    assert generation.host_ids() == dict(zip("abc", hosts, strict=True))


def test_a_worker_is_told_all_that_it_needs(job):
    one = job(1, here=("w0",), heartbeat=8)
    (worker,) = one.gathered("w0")
    group = one.loop.run(one.generation.welcome("fenced", soon(60)))
    told = worker.receive(soon())
    assert told["names"] == ["coordinator", "w0"]
    assert (told["rank"], told["generation"], told["beat_s"]) == (1, 1, 2.0)
    assert told["seats"] == [[0, "stage 0", [0]]]
    assert (told["hosts"], told["host"], told["rpc"]) == ([0], None, "fenced")
    assert 0 < told["start_timeout_s"] <= 60
    assert SECRET.group_key(told["nonce"]) == group.key


@pytest.mark.parametrize("said", ["", "nothing", "its address", "that it has joined"])
def test_a_member_that_dies_while_the_group_forms_is_named_at_once(job, said):
    one = job(2, here=("w0", "w1"))
    one.local.processes["w1"] = Ended()
    workers = one.gathered("w0", "w1")
    if not said:  # it is gone before its welcome
        workers[1].close()
        until(one.loop, lambda: one.members[1].ended)
    forming = one.form()
    if said == "nothing":
        workers[1].receive(soon())
    elif said == "its address":
        with listening_for_peers(None) as listeners:
            workers[1].receive(soon())
            for worker in workers:
                worker.send({"type": "door", "at": listeners.address})
            assert workers[1].receive(soon())["type"] == "doors"
    elif said == "that it has joined":
        workers[1].send({"type": "joined", "nearby": []})
    workers[1].close()
    words = r"^worker 'w1' \(stage 1, pid 7 on here\) is gone: exit code 7$"
    with pytest.raises(WorkerLost, match=words) as e:
        forming.result(LATEST_S)
    assert (e.value.worker, e.value.stage) == ("w1", 1)
    assert isinstance(e.value.__cause__, PeerLost)
    # Else the next socket with the number of one that was closed would never be heard.
    assert watched(one.loop) <= {int(fd) for fd in os.listdir("/proc/self/fd")}


def watched(loop):
    """The descriptors that an event loop looks at."""
    return {key.fd for key in loop._loop._selector.get_map().values()}


@pytest.mark.parametrize(("said", "words"), [
    ({"type": "failed", "text": "no device"}, "^worker 'w0' could not join: no device$"),
    ({"type": "exit", "failed": True}, "^worker 'w0' .*is gone.*which only a coordinator sends"),
])  # fmt: skip
def test_what_a_member_says_while_the_group_forms_may_end_it(job, said, words):
    one = job(1)
    (worker,) = one.gathered("w0")
    forming = one.form()
    worker.send(said)
    with pytest.raises(WorkerLost, match=words) as e:
        forming.result(LATEST_S)
    assert e.value.stage == 0


def test_a_group_that_does_not_form_in_time(job):
    one = job(1, here=("w0",))
    one.gathered("w0")
    words = "^all 1 workers came, but the group did not form in time; can they reach each other"
    with pytest.raises(RendezvousTimeout, match=words):
        one.form(0.3).result(LATEST_S)


def test_what_blocks_while_all_join_is_awaited_with_an_eye_on_the_members(job):
    one = job(1, here=("w0",))
    one.local.processes["w0"] = Ended()
    (worker,) = one.gathered("w0")
    begun, free = threading.Event(), threading.Event()

    def block():
        begun.set()
        assert free.wait(LATEST_S)

    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as last:
        last.callback(free.set)
        joining = one.start(one.generation.all_joined(thread.submit(block), soon()))
        assert begun.wait(LATEST_S)
        worker.send({"type": "joined", "nearby": []})
        until(one.loop, lambda: one.members[0].met is not None)
        for _ in range(9):
            in_loop(one.loop, lambda: None)
        assert one.listener.roster.phase is Phase.WELCOMED  # they have not all joined
        worker.close()
        with pytest.raises(WorkerLost, match="exit code 7"):
            joining.result(LATEST_S)


# -- the members are watched ----------------------------------------------------------------------


def test_a_member_that_is_lost_is_reported_at_once(job):
    one = job(2, here=("w0", "w1"))
    one.local.processes["w1"] = Ended()
    workers = one.gathered("w0", "w1")
    one.watch()
    workers[1].send({"type": "doing", "action": "F4"})
    workers[1].close()
    error = one.failure()
    assert str(error) == "worker 'w1' (stage 1, pid 7 on here) is gone: exit code 7"
    assert (error.worker, error.stage, error.doing) == ("w1", 1, "F4")
    assert one.failures[0]() is error


def test_a_fork_server_that_ends_is_replaced_before_a_worker_needs_it(job, monkeypatch):
    one, replaced = job(1), threading.Event()
    one.gathered("w0")
    watched, of_server = os.pipe()
    monkeypatch.setattr(one.local, "open_end_of_forks", lambda: watched)
    monkeypatch.setattr(one.local, "replace_forks", replaced.set)
    one.watch()
    assert not replaced.is_set()
    os.close(of_server)
    assert replaced.wait(LATEST_S)


def test_what_a_member_may_not_say_is_told_with_its_loss(job):
    one = job(1)
    (worker,) = one.gathered("w0")
    one.watch()
    worker.send({"type": "stop"})
    assert str(one.failure()).startswith(
        "worker 'w0' (stage 0, pid 7 on here) is gone: it was started elsewhere: with --persist"
    )
    assert "(worker 'w0' sent a 'stop', which only a coordinator sends" in str(one.failure())


def test_in_the_end_no_loss_is_reported(job):
    one = job(1)
    (worker,) = one.gathered("w0")
    one.watch()
    one.loop.call_soon(one.generation.expect_ends)
    worker.close()
    until(one.loop, lambda: one.members[0].ended)
    assert one.failures == []


@contextlib.contextmanager
def beating(*workers):
    """Workers that say again and again that they are alive."""
    over = threading.Event()

    def beat():
        while not over.wait(0.02):
            for worker in workers:
                worker.send({"type": "beat", "doing": "computing", "rss": 5})

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LATEST_S)


def test_a_member_that_is_silent_is_reported_after_the_heartbeat(job):
    """And none while the event loop itself stands still, as where the coordinator is stopped."""
    one = job(2, heartbeat=0.8)
    workers = one.gathered("w0", "w1")
    with beating(workers[1]):
        with beating(workers[0]):
            one.watch()
            in_loop(one.loop, threading.Event().wait, 1.0)
            one.loop.run(asyncio.sleep(0.3))  # it has looked again
            assert one.failures == []
        start = time.monotonic()
        error = one.failure()
    assert time.monotonic() - start > 0.6
    assert error.worker == "w0"
    assert " (it has been silent for " in str(error)
    assert one.generation.silent == {"w0"}


def test_members_tell_what_they_wait_for(job):
    """One whose encryption is broken does not keep the others from it."""
    one = job(3)
    workers = one.gathered("w0", "w1", "w2")
    workers[2]._socket.sendall(b"\x17\x03\x03\x00\x20" + b"j" * 32)
    until(one.loop, lambda: one.members[2].ended)
    telling = one.start(one.generation.stories())
    for worker in workers[:2]:
        assert worker.receive(soon()) == {"type": "story", "text": None}
    workers[0].send({"type": "story", "text": "computing"})
    workers[1].close()
    assert telling.result(LATEST_S) == [
        "stage 0 (worker 'w0'): computing",
        "stage 1 (worker 'w1'): its worker does not answer",
        "stage 2 (worker 'w2'): its worker does not answer",
    ]


def test_the_clocks_of_members_are_read(job):
    """Of another kernel, of this one, and of this one in a time namespace of its own."""
    one = job(3)
    gathering = one.gather()
    far, *near = [one.come("w0", boot="another"), one.come("w1"), one.come("w2")]
    gathering.result(LATEST_S)

    def answer(worker, ahead):
        with contextlib.suppress(PeerLost):
            while worker.receive(soon())["type"] == "clock":
                worker.send({"type": "clock", "ns": time.monotonic_ns() + ahead})

    with ThreadPoolExecutor() as threads:
        for worker, ahead in ((far, 0), (near[0], 0), (near[1], 10**11)):
            threads.submit(answer, worker, ahead)
        try:
            readings = one.start(one.generation.clocks()).result(LATEST_S)
        finally:
            for worker in (far, *near):
                worker._socket.shutdown(socket.SHUT_RD)
    assert [abs(r.offset - true) <= r.error for r, true in zip(readings, (0, 0, 10**11))] == [
        True
    ] * 3
    assert [reading.error > 0 for reading in readings] == [True, False, True]


def test_a_clock_that_is_not_told_is_not_awaited_for_ever(job, monkeypatch):
    monkeypatch.setattr(generation_module, "_CLOCK_S", 0.1)
    one = job(1)
    one.gathered("w0")
    words = r"^worker 'w0' did not say within 0\.1 s what its clock shows; is it stopped"
    with pytest.raises(MessageTimeout, match=words):
        one.start(one.generation.clocks()).result(LATEST_S)


def test_the_status_of_every_member():
    beat = {"type": "beat", "doing": "computing", "rss": 5}
    begun = time.monotonic()
    member = Member("w0", "pid 7 on here", None, heard=begun - 3, beat=beat)
    (status,) = status_of([member])
    assert 3 <= status.pop("silent_s") <= 3 + time.monotonic() - begun
    assert status == {
        "name": "w0", "stages": "no stage yet", "process": "pid 7 on here", "rss": 5,
        "doing": "computing",
    }  # fmt: skip


# -- the end --------------------------------------------------------------------------------------


def test_the_stages_of_all_members_stop_and_the_members_leave(job):
    one = job(2)
    workers = one.gathered("w0", "w1")
    one.watch()
    stopping = one.start(one.generation.stop(timedelta(seconds=LATEST_S)))
    for worker in workers:
        assert worker.receive(soon()) == {"type": "stop"}
        assert not stopping.done()
        worker.send({"type": "stopped"})
    stopping.result(LATEST_S)
    one.loop.run(one.generation.leave(failed=True))
    for worker in workers:
        assert worker.receive(soon()) == {"type": "exit", "failed": True}
        with pytest.raises(PeerLost):
            worker.receive(soon())
    assert one.failures == []


@pytest.mark.parametrize("why", ["late", "given up"])
def test_who_does_not_stop_is_not_awaited_for_ever(job, why):
    one = job(2)
    workers = one.gathered("w0", "w1")
    one.watch()
    stopping = one.start(one.generation.stop(timedelta(seconds=0.2 if why == "late" else 1000)))
    for worker in workers:
        assert worker.receive(soon()) == {"type": "stop"}
    workers[0].send({"type": "stopped"})
    if why == "given up":
        one.loop.run(one.generation.give_up())
    stopping.result(LATEST_S)
    assert one.failures == []


def test_before_workers_are_gathered_there_is_nothing_to_wait_for(job):
    """As where the start fails: a process cannot be forked, or torch RPC has another pipeline."""
    one = job(1)
    one.loop.run(one.generation.stop(timedelta(hours=1)))


def test_a_member_that_reads_nothing_does_not_keep_the_others_from_leaving(job, monkeypatch):
    monkeypatch.setattr(listener_module, "_LEAVE_S", 0.2)
    one = job(2)
    workers = one.gathered("w0", "w1")

    def fill():
        while one.members[0].connection._writing is None:
            one.members[0].connection.send({"type": "failed", "text": "x" * (1 << 19)})

    in_loop(one.loop, fill)
    one.loop.run(one.generation.leave(failed=False))
    assert one.members[0].connection.socket.fileno() == -1  # it had its time
    assert workers[1].receive(soon()) == {"type": "exit", "failed": False}


def test_a_record_reaches_the_others_where_a_member_is_gone(job):
    one = job(2)
    workers = one.gathered("w0", "w1")
    workers[0].close()
    one.loop.run(one.generation.broadcast({"type": "shut"}))
    assert workers[1].receive(soon()) == {"type": "shut"}
