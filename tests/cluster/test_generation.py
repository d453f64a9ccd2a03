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
from pipedream_rt.cluster.elsewhere import AtAddress, Elsewhere
from pipedream_rt.cluster.forked_workers import ForkServer
from pipedream_rt.cluster.generation import Generation, status_of
from pipedream_rt.cluster.generations import Generations
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.local import Local
from pipedream_rt.cluster.peer_links import PeerLinks
from pipedream_rt.cluster.peer_listeners import PeerAddress, listening_for_peers
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


def starters(connections):
    """Return who starts workers on this machine, with their connections, and who does elsewhere."""
    local = Local(1, ForkServer())
    local.connections.update(connections)
    return local, AtAddress("127.0.0.1:1")


def loop_turns(loop, seconds):
    """Let the event loop run for some seconds."""
    loop.run(asyncio.sleep(seconds))


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
        self.here, ours = {}, {}
        for name in here:
            ends = socket.socketpair()
            for end in ends:
                stack.enter_context(end)
            ours[name], self.here[name] = ends[0], Control(ends[1], "the coordinator")
        if listener is None:
            listeners = [] if here else [stack.enter_context(listening("127.0.0.1", 0))]
            listener = Listener(SECRET, *listeners)
            stack.callback(lambda: loop.run(listener.close()))
        self.listener = listener
        self.local, keeper = starters(ours)
        self.spec = spec(count, fail=self.failures.append, **more)
        self.generation = Generation(self.spec, listener, self.local, keeper)
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
        self.deadline = soon(seconds)
        return self.start(self.generation.gather(self.deadline))

    def expire(self):
        """Let the deadline be over for workers to come."""
        self.deadline._at = time.monotonic()
        roster = self.listener.roster
        roster._asked = roster._asked._replace(until=0.0)
        in_loop(self.loop, self.listener.changed.set)

    def ask(self, name, **changes):
        """Have a worker say hello; return its connection, and the answer."""
        if name in self.here:
            control = self.here[name]
        else:
            control = calling(self.address)
            self._stack.callback(control.close)
        return control, asked(control, hello(name, **changes))

    def come(self, name, is_ready=True, processor="a kind", **changes):
        """Have a worker become a member."""
        control, answer = self.ask(name, **changes)
        assert answer["type"] == "admitted", answer
        if is_ready:
            ready(control, processor)
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


def test_members_are_ranked_by_the_natural_order_of_their_names(job):
    one = job(2, here=("w10", "w9"), per_worker=2)
    one.gathered("w10", "w9")
    assert [member.name for member in one.members] == ["w9", "w10"]
    assert [member.stages for member in one.members] == [(0, 2), (1, 3)]
    assert [member.stage for member in one.members] == [0, 1]
    assert all(member.ready for member in one.members)


def test_a_worker_that_leaves_before_all_have_come_makes_room_for_another_of_its_name(job, caplog):
    """As after a restart. A second one of a name, and one too many, may try again later."""
    one = job(2)
    gathering = one.gather()
    first = one.come("w0")
    assert "'w0' is taken by pid 7 on here" in one.ask("w0")[1]["reason"]
    first.close()
    until(one.loop, lambda: not one.listener.roster.coming)
    one.come("w0", is_ready=False)  # so that it does not end yet
    one.come("w1")
    _, answer = one.ask("w2")
    assert answer["passing"]
    assert answer["reason"] == "the job has its 2 workers"
    until(one.loop, lambda: [m.ready for m in one.listener.roster.coming] == [False, True])
    one.expire()
    text = (
        rf"^1 of 2 workers did not join within {LATEST_S:g} s: w0; joined: w1; "
        r"still importing torch: w0; start them with `pipedream-rt worker .*`, or give Pipeline "
        r"recovery=Recovery\(start=.*"
    )
    with pytest.raises(RendezvousTimeout, match=text) as e:
        gathering.result(LATEST_S)
    assert e.value.missing == 1
    assert "left before all had come" in caplog.text


def test_a_worker_with_another_torch_is_refused_and_named_in_the_end(job):
    one = job(2)
    gathering = one.gather()
    _, answer = one.ask("w0", software="torch 1.13.0")
    assert not answer["passing"]
    assert "install the same on all machines" in answer["reason"]
    one.come("w1")
    until(one.loop, lambda: one.listener.roster.coming)
    one.expire()
    words = r"^1 of 2 .*; joined: w1; 'w0' was refused: it has torch 1\.13\.0, and the"
    with pytest.raises(RendezvousTimeout, match=words):
        gathering.result(LATEST_S)


def test_workers_that_do_not_answer_are_named(job):
    one = job(2, here=("w10", "w9"))
    words = r"^2 of 2 workers did not join within 0 s: w9, w10; joined: none; start them"
    with pytest.raises(RendezvousTimeout, match=words) as e:
        one.gather(0).result(LATEST_S)
    assert e.value.missing == 2


@pytest.mark.parametrize("other", ["a kind", "another"])
def test_several_kinds_of_processor_are_told_of(job, other, caplog):
    one = job(2)
    gathering = one.gather()
    one.come("w0")
    one.come("w1", processor=other)
    gathering.result(LATEST_S)
    told = [r.message for r in caplog.records if "several kinds of processor" in r.message]
    assert bool(told) == (other != "a kind")
    assert all("a kind (w0); another (w1)" in text for text in told)


@pytest.mark.parametrize("comes", [False, True], ids=["before its hello", "before it is ready"])
def test_a_worker_started_here_that_ends_before_it_is_ready_is_named_at_once(job, comes):
    one = job(2, here=("w0", "w1"))
    one.local.processes["w1"] = Ended()
    gathering = one.gather()
    if comes:
        one.come("w1", is_ready=False)
    one.here["w1"].close()
    with pytest.raises(WorkerLost, match=r"^worker 'w1' .*exit code 7") as e:
        gathering.result(LATEST_S)
    assert (e.value.worker, e.value.stage) == ("w1", None)
    assert comes or "ended before it joined (exit code 7); its output says why" in str(e.value)


def test_a_worker_started_here_that_speaks_otherwise_is_named_at_once(job):
    one = job(1, here=("w0",))
    gathering = one.gather()
    one.here["w0"]._socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(WorkerLost, match=r"^worker 'w0' cannot join: .* a record of 1195725856"):
        gathering.result(LATEST_S)


def test_a_worker_from_elsewhere_that_ends_before_it_is_ready_is_waited_for(job, caplog):
    one = job(1)
    gathering = one.gather()
    one.come("w0", is_ready=False).close()
    until(one.loop, lambda: "worker 'w0' (pid 7 on here) left before all" in caplog.text)
    one.come("w1")
    gathering.result(LATEST_S)
    assert [member.name for member in one.members] == ["w1"]


@pytest.mark.parametrize("comes", [False, True], ids=["before its hello", "behind its hello"])
def test_a_worker_started_here_that_is_stopped_is_noticed_by_the_heartbeat(job, comes):
    one = job(1, here=("w0",), heartbeat=0.3)
    gathering = one.gather()
    if comes:
        one.come("w0", is_ready=False)
    words = r"^worker 'w0' has been silent since it was started, for longer than the heartbeat of"
    with pytest.raises(WorkerLost, match=words):
        gathering.result(LATEST_S)


def test_a_worker_from_elsewhere_may_take_long_to_import_torch(job):
    one = job(1, heartbeat=0.1)
    gathering = one.gather()
    one.come("w0", is_ready=False)
    loop_turns(one.loop, 0.3)
    one.expire()
    with pytest.raises(RendezvousTimeout, match="still importing torch: w0"):
        gathering.result(LATEST_S)


def test_an_elastic_group_begins_without_those_that_are_late(job, caplog):
    """It waits for the next one each time that one has come, and not for ever."""
    one = job(5, assignment=ProcessAssignment(fewest=2, most=5, wait=timedelta(seconds=0.3)))
    gathering = one.gather()
    workers = [one.come(name, is_ready=False) for name in "abc"]
    for worker in workers:  # only now, so that it does not begin before all have come
        ready(worker)
    gathering.result(LATEST_S)
    assert [(m.name, m.hosts) for m in one.members] == [
        ("a", "stage 0 and stage 1"), ("b", "stage 2 and stage 3"), ("c", "stage 4"),
    ]  # fmt: skip
    assert "worker processes: 3, for the work of 5" in caplog.text


def test_an_elastic_group_does_not_wait_where_all_have_come_that_can(job):
    """The most that there may be, or as many as the last generation has expected."""
    elastic = ProcessAssignment(fewest=1, most=3, wait=timedelta(hours=1))
    one = job(3, assignment=elastic)
    one.gathered("a", "b", "c")
    other = job(3, assignment=elastic)
    other.listener.roster.expected = 2
    other.gathered("a", "b")
    assert other.listener.roster.expected == 0


def test_too_few_for_an_elastic_group(job):
    one = job(3, assignment=ProcessAssignment(fewest=2, most=3, wait=timedelta(seconds=0.1)))
    gathering = one.gather()
    one.come("a")
    until(one.loop, lambda: one.listener.roster.coming)
    loop_turns(one.loop, 0.2)
    one.expire()
    with pytest.raises(RendezvousTimeout, match=r"^1 of 2 workers .* s; joined: a; start them"):
        gathering.result(LATEST_S)


def test_who_comes_while_a_generation_runs_is_in_the_next_one(job):
    elastic = ProcessAssignment(fewest=1, most=2, wait=timedelta(hours=1), stays_open=True)
    first = job(2, assignment=elastic)
    first.listener.roster.expected = 1
    (runs,) = first.gathered("runs")
    assert "the name 'runs' is taken" in first.ask("runs")[1]["reason"]
    early = first.come("early")
    assert first.ask("more")[1]["reason"] == "the job has its 2 workers"
    first.end()
    assert runs.receive(soon()) == {"type": "exit", "failed": False}
    second = job(2, listener=first.listener, assignment=elastic)
    gathering = second.gather()
    second.come("late")
    gathering.result(LATEST_S)
    assert [member.name for member in second.members] == ["early", "late"]
    assert not early.has_come()


def test_where_no_newcomers_are_wanted_nobody_joins_while_a_generation_runs(job):
    one = job(1)
    one.gathered("w0")
    with socket.create_connection(one.address, timeout=0.2) as late:
        late.sendall(b"x")
        with pytest.raises(TimeoutError):
            late.recv(1)


def test_what_was_left_of_one_generation_does_not_end_the_next_one(job):
    """A worker of the first has not said anything when another one is lost."""
    first = job(2, here=("w0", "w1"))
    gathering = first.gather()
    first.here["w0"].close()
    with pytest.raises(WorkerLost, match="worker 'w0'"):
        gathering.result(LATEST_S)
    first.end()
    second = job(2, here=("w0", "w1"), listener=first.listener)
    second.gathered("w0", "w1")
    assert [member.name for member in second.members] == ["w0", "w1"]


def test_strangers_who_keep_coming_do_not_put_off_the_deadline(job):
    one, over = job(1), threading.Event()

    def come():
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(one.address, timeout=1):
                pass

    stranger = threading.Thread(target=come)
    stranger.start()
    try:
        with pytest.raises(RendezvousTimeout):
            one.gather(1).result(LATEST_S)
    finally:
        over.set()
        stranger.join()


FULL = """
import resource, time
from datetime import timedelta
from test_generation import *
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with contextlib.ExitStack() as stack:
    job = Job(stack, stack.enter_context(control_plane()), 1)
    print(job.address[1], flush=True)
    print(SECRET.text, flush=True)
    start, used = time.monotonic(), time.process_time()
    try:
        job.gather(3).result()
    except RendezvousTimeout:
        print(time.monotonic() - start, time.process_time() - used, flush=True)
"""


@contextlib.contextmanager
def program(text, *arguments, **more):
    """Run a program that uses this file, with pipes to and from it."""
    here = os.path.dirname(__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((here, os.path.dirname(here)))}
    with subprocess.Popen(
        [sys.executable, "-c", text, *map(str, arguments)], text=True, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, **more,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.processes
def test_more_idle_strangers_than_there_are_descriptors():
    """The oldest go; the deadline is kept, and no processor time is burnt."""
    with program(FULL) as process, contextlib.ExitStack() as strangers:
        port, _ = int(process.stdout.readline()), process.stdout.readline()
        for _ in range(200):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        passed, used = process.communicate(timeout=LATEST_S)[0].split()
    assert float(passed) < LATEST_S
    assert float(used) < 1


@pytest.mark.processes
def test_a_worker_joins_where_idle_strangers_are_more_than_descriptors():
    with program(FULL) as process, contextlib.ExitStack() as opened:
        address = ("127.0.0.1", int(process.stdout.readline()))
        secret = Secret(process.stdout.readline().strip())
        for _ in range(100):
            opened.enter_context(socket.create_connection(address, timeout=10))
        worker = opened.enter_context(contextlib.closing(calling(address, secret)))
        assert asked(worker, hello("w0", job=secret.job))["type"] == "admitted"
        ready(worker)
        assert process.stdout.read() == ""


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


class ByTest(Elsewhere):
    """Workers that the test plays, which join at a port of loopback."""

    stays_open = False

    def __init__(self):
        self.joins = threading.Event()
        self.address = ()

    def secret(self):
        return SECRET

    def listening(self):
        return listening("127.0.0.1", 0)

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

    before = signal.signal(number, lambda *_: handle(generations))
    worker = threading.Thread(target=come)
    worker.start()
    try:
        yield generations, came
    finally:
        worker.join(LATEST_S)
        generations.close()
        signal.signal(number, before)
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
def test_a_group_forms(job, here):
    one = job(2, here=here)
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


def test_who_has_not_met_all_of_its_host_at_unix_sockets_shares_no_memory(job):
    one = job(3, here=("a", "b", "c"))
    one.gathered("a", "b", "c")
    for member, met in zip(one.members, ({0, 2}, {0, 1, 3}, {0, 2}), strict=True):
        member.met = met
    assert one.generation.host_ids() == {"a": "", "b": "", "c": ""}
    for member, met in zip(one.members, ({0, 2}, {0, 1}, {0}), strict=True):
        member.met = met
    host_ids = one.generation.host_ids()
    assert host_ids["a"] == host_ids["b"] != host_ids["c"]


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


@pytest.mark.parametrize("said", ["nothing", "its address", "that it has joined"])
def test_a_member_that_dies_while_the_group_forms_is_named_at_once(job, said):
    one = job(2, here=("w0", "w1"))
    one.local.processes["w1"] = Ended()
    workers = one.gathered("w0", "w1")
    forming = one.form()
    if said == "nothing":
        workers[1].receive(soon())
    elif said == "its address":
        with listening_for_peers(None) as listeners:
            workers[1].receive(soon())
            for worker in workers:
                worker.send({"type": "door", "at": listeners.address})
            assert workers[1].receive(soon())["type"] == "doors"
    else:
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


@pytest.mark.parametrize("here", [("w0", "w1"), ()], ids=["started here", "from elsewhere"])
def test_a_member_that_dies_before_its_welcome_is_named_at_once(job, here):
    one = job(2, here=here)
    workers = one.gathered("w0", "w1")
    workers[1].close()
    until(one.loop, lambda: one.members[1].ended)
    with pytest.raises(WorkerLost, match=r"^worker 'w1' \(stage 1, pid 7 on here\) is gone"):
        one.form().result(LATEST_S)


def test_a_member_that_could_not_join_says_why(job):
    one = job(2)
    workers = one.gathered("w0", "w1")
    forming = one.form()
    workers[0].receive(soon())
    workers[0].send({"type": "failed", "text": "its device is gone"})
    words = "^worker 'w0' could not join: its device is gone$"
    with pytest.raises(WorkerLost, match=words) as e:
        forming.result(LATEST_S)
    assert e.value.stage == 0


def test_a_member_that_sends_something_else_while_the_group_forms_is_named(job):
    one = job(1, here=("w0",))
    (worker,) = one.gathered("w0")
    forming = one.form()
    worker.send({"type": "exit", "failed": True})
    words = r"^worker 'w0' .*is gone.*which only a coordinator sends"
    with pytest.raises(WorkerLost, match=words):
        forming.result(LATEST_S)


def test_a_member_that_does_not_answer_its_welcome_is_noticed_by_the_heartbeat(job):
    one = job(2, here=("w0", "w1"), heartbeat=0.3)
    one.local.processes["w0"] = Ended()
    workers = one.gathered("w0", "w1")
    forming = one.form()
    workers[1].send({"type": "door", "at": ["", 0, "", "/nowhere"]})
    words = r"^worker 'w0' .*\(it has not answered its welcome within the heartbeat\)$"
    with pytest.raises(WorkerLost, match=words):
        forming.result(LATEST_S)


def test_a_group_that_does_not_form_in_time(job):
    one = job(1, here=("w0",))
    one.gathered("w0")
    words = "^all 1 workers came, but the group did not form in time; can they reach each other"
    with pytest.raises(RendezvousTimeout, match=words):
        one.form(0.3).result(LATEST_S)


def test_closing_while_a_group_forms(job):
    one = job(1, here=("w0",))
    (worker,) = one.gathered("w0")
    forming = one.form()
    worker.receive(soon())
    one.loop.run(one.generation.give_up())
    with pytest.raises(PipelineClosed, match="closed while its workers joined"):
        forming.result(LATEST_S)


def test_members_that_cannot_be_reached_from_other_machines_are_named(job):
    one = job(2)
    workers = one.gathered("w0", "w1")
    forming = one.form()
    for worker, host in zip(workers, ("127.0.0.1", "10.1.2.3"), strict=True):
        worker.send({"type": "door", "at": [host, 9, "", ""]})
    words = r"^'coordinator', 'w0' of the group cannot be reached .*w0 127\.0\.0\.1:9, w1 10\.1\.2"
    with pytest.raises(RendezvousTimeout, match=words) as e:
        forming.result(LATEST_S)
    assert e.value.missing == 2


@pytest.mark.parametrize("ends", [True, False])
def test_what_blocks_while_all_join_is_awaited_with_an_eye_on_the_members(job, ends):
    one = job(1, here=("w0",))
    one.local.processes["w0"] = Ended()
    (worker,) = one.gathered("w0")
    begun, free = threading.Event(), threading.Event()

    def block():
        begun.set()
        assert free.wait(LATEST_S)

    with ThreadPoolExecutor(1) as thread:
        joining = one.start(one.generation.all_joined(thread.submit(block), soon()))
        assert begun.wait(LATEST_S)
        try:
            if ends:
                worker.send({"type": "joined", "nearby": []})
                free.set()
                joining.result(LATEST_S)
            else:
                worker.close()
                with pytest.raises(WorkerLost, match="exit code 7"):
                    joining.result(LATEST_S)
        finally:
            free.set()


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


def test_a_member_that_was_lost_before_it_is_watched_is_reported(job):
    one = job(1)
    (worker,) = one.gathered("w0")
    worker.close()
    until(one.loop, lambda: one.members[0].ended)
    one.watch()
    assert str(one.failure()).startswith(
        "worker 'w0' (stage 0, pid 7 on here) is gone: it was started elsewhere: with --persist"
    )


def test_what_a_member_may_not_say_is_told_with_its_loss(job):
    one = job(1)
    (worker,) = one.gathered("w0")
    one.watch()
    worker.send({"type": "stop"})
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
    one = job(2, heartbeat=0.8)
    workers = one.gathered("w0", "w1")
    with beating(workers[1]):
        one.watch()
        start = time.monotonic()
        error = one.failure()
    assert time.monotonic() - start > 0.7
    assert error.worker == "w0"
    assert " (it has been silent for " in str(error)
    assert one.generation.silent == {"w0"}


def test_a_member_whose_stages_have_stopped_may_be_silent(job):
    one = job(2, heartbeat=0.4)
    workers = one.gathered("w0", "w1")
    workers[0].send({"type": "stopped"})
    one.watch()
    assert one.failure().worker == "w1"
    assert one.generation.silent == {"w1"}


def test_while_the_event_loop_itself_stands_still_nobody_counts_as_silent(job):
    one = job(1, heartbeat=0.8)
    workers = one.gathered("w0")
    with beating(*workers):
        one.watch()
        in_loop(one.loop, threading.Event().wait, 1.8)
        loop_turns(one.loop, 0.5)
        assert one.failures == []
    assert one.failure().worker == "w0"


COORDINATOR = """
import sys
from test_generation import *
with contextlib.ExitStack() as stack:
    job = Job(stack, stack.enter_context(control_plane()), 1, heartbeat=0.8)
    ours = socket.socket(fileno=int(sys.argv[1]))
    job.local.connections["w0"] = stack.enter_context(ours)
    job.gather().result()
    job.watch()
    print("watches", flush=True)
    for line in sys.stdin:
        loop_turns(job.loop, 0.5)
        print([str(each()) for each in job.failures], flush=True)
"""


@pytest.mark.processes
def test_while_the_coordinator_is_stopped_nobody_counts_as_silent():
    ours, theirs = socket.socketpair()
    with ours, theirs, program(COORDINATOR, ours.fileno(), pass_fds=[ours.fileno()]) as process:
        worker = Control(theirs, "the coordinator")
        assert asked(worker, hello("w0"))["type"] == "admitted"
        ready(worker)
        assert process.stdout.readline() == "watches\n"
        with beating(worker):
            process.send_signal(signal.SIGSTOP)
            threading.Event().wait(2)  # more than twice the heartbeat
            process.send_signal(signal.SIGCONT)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "[]\n"


WORKER = """
import sys
from test_generation import *
secret = Secret(sys.stdin.readline().strip())
worker = calling(("127.0.0.1", int(sys.argv[1])), secret)
assert asked(worker, hello("w0", job=secret.job))["type"] == "admitted"
ready(worker)
with beating(worker):
    sys.stdin.read()
"""


@pytest.mark.processes
def test_a_worker_that_is_stopped_is_reported_after_the_heartbeat(job):
    """Its process is there, and its connection stands."""
    one = job(1, heartbeat=0.8)
    gathering = one.gather()
    with program(WORKER, one.address[1]) as process:
        process.stdin.write(f"{SECRET.text}\n")
        process.stdin.flush()
        gathering.result(LATEST_S)
        one.watch()
        loop_turns(one.loop, 1.5)
        assert one.failures == []
        process.send_signal(signal.SIGSTOP)
        assert " (it has been silent for " in str(one.failure())
        process.send_signal(signal.SIGCONT)


def test_members_tell_what_they_wait_for(job, monkeypatch):
    monkeypatch.setattr(generation_module, "_STORY_S", 1.0)
    one = job(3)
    workers = one.gathered("w0", "w1", "w2")
    workers[2].close()
    until(one.loop, lambda: one.members[2].ended)
    telling = one.start(one.generation.stories())
    for worker in workers[:2]:
        assert worker.receive(soon()) == {"type": "story", "text": None}
    workers[0].send({"type": "story", "text": "computing"})
    assert telling.result(LATEST_S) == [
        "stage 0 (worker 'w0'): computing",
        "stage 1 (worker 'w1'): its worker does not answer",
        "stage 2 (worker 'w2'): its worker does not answer",
    ]


def test_a_member_whose_encryption_is_broken_does_not_keep_the_others_from_telling(job):
    one = job(2)
    workers = one.gathered("w0", "w1")
    workers[0]._socket.sendall(b"\x17\x03\x03\x00\x20" + b"j" * 32)
    until(one.loop, lambda: one.members[0].ended)
    telling = one.start(one.generation.stories())
    until(one.loop, lambda: telling.done() or workers[1].has_come())
    workers[1].send({"type": "story", "text": "computing"})
    assert telling.result(LATEST_S)[1] == "stage 1 (worker 'w1'): computing"


@contextlib.contextmanager
def clocks(shift, *workers):
    """Workers that say what their clocks show, which differ by so many seconds each."""

    def answer(worker, ahead):
        with contextlib.suppress(PeerLost):
            while worker.receive(soon())["type"] == "clock":
                worker.send({"type": "clock", "ns": time.monotonic_ns() + ahead})

    threads = [
        threading.Thread(target=answer, args=(worker, round(1e9 * shift * number)))
        for number, worker in enumerate(workers, 1)
    ]
    for each in threads:
        each.start()
    yield
    for worker in workers:
        worker._socket.shutdown(socket.SHUT_RD)
    for each in threads:
        each.join(LATEST_S)


def test_the_clocks_of_members_are_read(job):
    """Those of another kernel, and those of this one in a time namespace of their own."""
    one = job(2)
    workers = one.gathered("w0", "w1")
    with clocks(100, *workers):
        readings = one.start(one.generation.clocks()).result(LATEST_S)
    for number, reading in enumerate(readings, 1):
        assert abs(reading.offset - 1e11 * number) <= reading.error


def test_processes_of_one_kernel_have_one_clock(job):
    one = job(1)
    workers = one.gathered("w0")
    assert one.members[0].same_clock
    with clocks(0, *workers):
        (reading,) = one.start(one.generation.clocks()).result(LATEST_S)
    assert (reading.offset, reading.error) == (0, 0)


def test_a_clock_that_is_not_told_is_not_awaited_for_ever(job, monkeypatch):
    monkeypatch.setattr(generation_module, "_CLOCK_S", 0.1)
    one = job(1)
    one.gathered("w0")
    words = r"^worker 'w0' did not say within 0\.1 s what its clock shows; is it stopped"
    with pytest.raises(MessageTimeout, match=words):
        one.start(one.generation.clocks()).result(LATEST_S)


def test_the_status_of_every_member(job):
    one = job(1)
    (worker,) = one.gathered("w0")
    worker.send({"type": "beat", "doing": "computing", "rss": 5})
    until(one.loop, lambda: one.members[0].beat)
    (status,) = status_of(one.members)
    assert 0 <= status.pop("silent_s") < LATEST_S
    assert status == {
        "name": "w0", "stages": "stage 0", "process": "pid 7 on here", "rss": 5,
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


@pytest.mark.parametrize("why", ["gone", "late", "given up"])
def test_who_does_not_stop_is_not_awaited_for_ever(job, why):
    one = job(2)
    workers = one.gathered("w0", "w1")
    one.watch()
    stopping = one.start(one.generation.stop(timedelta(seconds=0.2 if why == "late" else 1000)))
    for worker in workers:
        assert worker.receive(soon()) == {"type": "stop"}
    workers[0].send({"type": "stopped"})
    if why == "gone":
        workers[1].close()
    elif why == "given up":
        one.loop.run(one.generation.give_up())
    stopping.result(LATEST_S)
    assert one.failures == []


def test_before_workers_are_gathered_there_is_nothing_to_wait_for(job):
    """As where the start fails: a process cannot be forked, or torch RPC has another pipeline."""
    one = job(1)
    one.loop.run(one.generation.stop(timedelta(hours=1)))


def test_before_stages_run_there_is_nothing_to_stop(job):
    one = job(1)
    (worker,) = one.gathered("w0")
    one.loop.run(one.generation.stop(timedelta(seconds=LATEST_S)))
    assert not worker.has_come()


def test_a_member_that_reads_nothing_does_not_keep_the_others_from_leaving(job, monkeypatch):
    monkeypatch.setattr(listener_module, "_LEAVE_S", 0.2)
    one = job(2)
    workers = one.gathered("w0", "w1")

    def fill():
        while one.members[0].connection._writing is None:
            one.members[0].connection.send({"type": "failed", "text": "x" * (1 << 19)})

    in_loop(one.loop, fill)
    one.loop.run(one.generation.leave(failed=False))
    assert workers[1].receive(soon()) == {"type": "exit", "failed": False}


def test_a_record_reaches_the_others_where_a_member_is_gone(job):
    one = job(2)
    workers = one.gathered("w0", "w1")
    workers[0].close()
    one.loop.run(one.generation.broadcast({"type": "shut"}))
    assert workers[1].receive(soon()) == {"type": "shut"}


def test_nothing_is_left_of_a_generation():
    files = open_files()
    with contextlib.ExitStack() as stack, control_plane() as loop:
        one = Job(stack, loop, 2)
        workers = one.gathered("w0", "w1")
        forming = one.form()
        for each in [one.join(worker) for worker in workers]:
            each.result(LATEST_S)
        forming.result(LATEST_S)
        one.watch()
        stack.close()
    assert open_files() == files
