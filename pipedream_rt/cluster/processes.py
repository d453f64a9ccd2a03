"""Stages on worker processes: their start, the watch over them, their end."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import queue
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from pipedream_rt.cluster.base import Fail, Reference
from pipedream_rt.cluster.addresses import boot_id, interface_of
from pipedream_rt.cluster.control import VERSION, Control, Record
from pipedream_rt.cluster.fork_server import ForkedWorker, ForkServer
from pipedream_rt.cluster.keys import (
    COORDINATOR_END,
    NONCE,
    WORKER_END,
    group_key,
    prove,
    session_key,
)
from pipedream_rt.cluster.subprocesses import end_processes
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import (
    MessageTimeout,
    PeerLost,
    PipelineError,
    RendezvousTimeout,
    TransportError,
    WorkerLost,
)
from pipedream_rt.messages.message import COORDINATOR
from pipedream_rt.observe.clock import Reading, best
from pipedream_rt.schedules import Shape
from pipedream_rt.transport.base import Receive, Transport
from pipedream_rt.transport.rpc import Directory, RpcGroup, RpcTransport, refuse_second

_log = logging.getLogger(__name__)

_STORY_TIMEOUT = timedelta(seconds=2)
"""For the workers to say what they wait for, when something stalls."""

_STOP_TIMEOUT = timedelta(seconds=5)
"""For the stages to end the action at hand when told to."""

_CLOCK_TIMEOUT = timedelta(seconds=5)
"""For a worker to answer all questions for its clock."""

_CLOCK_ROUNDS = 16
"""Questions of which the quickest answer counts."""

_MOST_STRANGERS = 512
"""Connections that have not said who they are, of which the oldest then go."""

_EXIT_TIMEOUT = timedelta(seconds=3)
"""For the processes to end after that; what is left then is killed."""


@dataclass(slots=True)
class _Member:
    """A worker that has said hello."""

    name: str
    description: str
    control: Control
    story: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    clock: queue.SimpleQueue[tuple[int, int]] = field(default_factory=queue.SimpleQueue)
    same_clock: bool = False
    stages: tuple[int, ...] = ()
    ready: bool = False
    stopped: bool = False
    heard: float = field(default_factory=time.monotonic)
    doing: str = ""
    beat: Record = field(default_factory=dict)

    @property
    def hosts(self) -> str:
        """Which stages it hosts, in words."""
        numbers = ", ".join(map(str, self.stages))
        return f"stage {numbers}" if len(self.stages) == 1 else f"stages {numbers}"


class WorkerProcesses:
    """Processes that this one started, each with a control connection that it inherits."""

    def __init__(self, threads: int, forks: ForkServer) -> None:
        """Start none yet.

        Args:
            threads: For torch's own parallel loops in each.
            forks: Starts them.
        """
        self._threads = threads
        self._forks = forks
        self.processes: dict[str, ForkedWorker] = {}
        self.controls: dict[str, Control] = {}

    def start(self, names: list[str]) -> None:
        """Start a process for each name; after an error, ``processes`` has those that were started.

        Args:
            names: Of the workers.
        """
        for name in names:
            ours, theirs = socket.socketpair()
            with theirs:
                self.controls[name] = Control(ours, f"worker {name!r}")
                self.processes[name] = self._forks.fork(name, self._threads, theirs)

    def ending(self, name: str) -> str:
        """How a process ended, in words; empty while it runs or if it is not ours."""
        process = self.processes.get(name)
        if process is None:
            return ""
        try:
            code = process.wait(timeout=1)  # its connection is closed already, so it is ending
        except subprocess.TimeoutExpired:
            return "still running"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class ProcessCluster:
    """Worker processes, each hosting its stages, connected by torch RPC.

    Args:
        shape: How many workers are needed, and which stages each hosts.
        receive: Takes messages for the coordinator.
        fail: Told of a failure; also when a worker dies.
        generation: Number of this group in the process.
        timeout: For messages that are sure to come.
        start_timeout: For all workers to join.
        threads: For torch's own parallel loops in workers that are started here.
        listener: Where workers that are started elsewhere join; None to start local ones.
        own: With a listener, how many workers to start here all the same.
        heartbeat: For how long a worker may be silent.
        forks: Starts workers here.
        secret: Of the job: who joins by the listener proves that it knows it.
        replace: Has somebody else kill the workers that he started and start others.
    """

    def __init__(
        self,
        shape: Shape,
        receive: Receive,
        fail: Fail,
        *,
        generation: int,
        timeout: timedelta,
        start_timeout: timedelta,
        threads: int,
        heartbeat: timedelta,
        secret: bytes,
        forks: ForkServer,
        listener: socket.socket | None = None,
        own: int = 0,
        replace: Callable[[], None] | None = None,
    ) -> None:
        """Start or await the workers and join them into a group.

        Raises:
            RendezvousTimeout: Not all came in time.
            WorkerLost: One died on the way.
        """
        refuse_second()
        self._shape = shape
        self.generation = generation
        self._fail = fail
        self._closed = self._closing = False
        self._timeout = timeout
        self._heartbeat = heartbeat
        self._secret = secret
        self._replace = replace
        self._rpc: RpcTransport | None = None
        self._members: list[_Member] = []
        self._monitor: threading.Thread | None = None
        self._all_stopped = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._asked: dict[Control, bytes] = {}
        self._local = WorkerProcesses(threads, forks)
        try:
            deadline = Deadline(start_timeout)
            count = shape.workers if listener is None else own
            self._local.start([f"worker-{i}" for i in range(count)])
            self._gather(listener, deadline)
            self._form_group(receive, deadline)
        except BaseException:
            self.close()
            raise

    # -- start ----------------------------------------------------------------------------------

    def _gather(self, listener: socket.socket | None, deadline: Deadline) -> None:
        """Collect as many members as there are workers, in the order of their names."""
        needed = self._shape.workers
        with selectors.DefaultSelector() as selector:
            for control in self._local.controls.values():
                self._call(control, secret=self._secret)
                selector.register(control, selectors.EVENT_READ)
            if listener is not None:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            unheard = list(self._local.controls.values())
            own = len(unheard)
            try:
                while len(self._members) < needed:
                    ready = selector.select(deadline.remaining_s())
                    if not ready:
                        raise self._missing(deadline)
                    for key, _ in ready:
                        if key.fileobj is listener:
                            newcomer = self._accept(listener)
                            if newcomer is not None:
                                selector.register(newcomer, selectors.EVENT_READ)
                                unheard.append(newcomer)
                        elif len(self._members) < needed:
                            control = key.fileobj  # type: ignore[assignment]
                            if self._hear(control):
                                selector.unregister(control)
                                unheard.remove(control)
                                del self._asked[control]
                    while len(unheard) > own + _MOST_STRANGERS:
                        # The oldest stranger has had his time.
                        selector.unregister(unheard[own])
                        unheard[own].close()
                        del self._asked[unheard.pop(own)]
            finally:
                for control in unheard:
                    control.close()
                self._asked.clear()
        self._members.sort(key=lambda m: _natural(m.name))
        for worker, member in enumerate(self._members):
            member.stages = tuple(self._shape.stages_of(worker))
            self._expect_ready(member, deadline)
        self.names = tuple(member.name for member in self._members)

    def _expect_ready(self, member: _Member, deadline: Deadline) -> None:
        """Wait until a member has imported torch: what follows should take no time."""
        try:
            record = member.control.receive(deadline)
        except MessageTimeout:
            raise self._missing(deadline) from None
        except PeerLost as error:
            raise self._lost(member, error) from error
        member.ready = record["type"] == "ready"

    def _accept(self, listener: socket.socket) -> Control | None:
        """Take a connection and ask who it is; None if it is gone again."""
        try:
            connection, address = listener.accept()
        except OSError:
            return None
        control = Control(connection, f"the worker at {address[0]}:{address[1]}")
        try:
            self._call(control)
        except PeerLost:
            control.close()
            return None
        return control

    def _call(self, control: Control, **more: bytes) -> None:
        """Ask who is there."""
        self._asked[control] = nonce = secrets.token_bytes(NONCE)
        control.send({"type": "call", "nonce": nonce, **more})

    def _hear(self, control: Control) -> bool:
        """Read the hello of a worker, if all of it is there; make it a member or refuse it.

        Returns:
            Whether it is dealt with.
        """
        started = next((n for n, c in self._local.controls.items() if c is control), None)
        try:
            hello = control.poll()
        except TransportError as error:
            control.close()
            if started is not None:
                raise WorkerLost(
                    f"worker {started!r} ended before it joined "
                    f"({self._local.ending(started)}); its output says why",
                    worker=started,
                    stage=None,
                ) from error
            _log.warning("a connection that is no worker was dropped: %s", error)
            return True
        if hello is None:
            return False
        name = str(hello.get("name"))
        description = f"pid {hello.get('pid')} on {hello.get('host')}"
        reason = self._reason_to_refuse(name, hello, self._asked[control])
        if reason:
            _log.warning("refused worker %r (%r): %s", name, description, reason)
            with suppress(PeerLost):
                control.send({"type": "refused", "reason": reason})
            control.close()
            return True
        control.peer = f"worker {name!r}"
        key = session_key(self._secret, self._asked[control], hello["nonce"])
        control.secure(key, COORDINATOR_END, WORKER_END)
        same_clock = hello.get("boot") == boot_id() != ""
        self._members.append(_Member(name, description, control, same_clock=same_clock))
        return True

    def _reason_to_refuse(self, name: str, hello: Record, asked: bytes) -> str:
        """Why a worker cannot be a member; empty if it can."""
        if hello.get("version") != VERSION:
            return f"it speaks protocol {hello.get('version')}, the coordinator {VERSION}"
        answer, shown = hello.get("nonce"), hello.get("proof")
        if not isinstance(answer, bytes) or not isinstance(shown, bytes):
            return "it shows no proof of the job's secret"
        if not hmac.compare_digest(prove(self._secret, asked, answer, hello), shown):
            return "it does not know the job's secret; give it the same PIPEDREAM_RT_SECRET"
        twin = next((m for m in self._members if m.name == name), None)
        if twin is not None:
            return f"the name {name!r} is taken by {twin.description}; give each worker its own"
        return ""

    def _missing(self, deadline: Deadline) -> RendezvousTimeout:
        """Say who did not come."""
        needed = self._shape.workers
        came = {m.name for m in self._members}
        if len(came) == needed:  # then some of them have not become ready
            came -= {m.name for m in self._members if not m.ready}
        joined = sorted(came, key=_natural)
        expected = {*self._local.controls, *(m.name for m in self._members)}
        absent = sorted(expected - came, key=_natural)
        missing = needed - len(joined)
        seconds = deadline.timeout.total_seconds() if deadline.timeout else 0.0
        return RendezvousTimeout(
            f"{missing} of {needed} workers did not join within {seconds:g} s"
            + (f": {', '.join(absent)}" if absent else "")
            + f"; joined: {', '.join(joined) or 'none'}; start them with "
            "`pipedream-rt worker HOST:PORT --name NAME`, or raise start_timeout",
            missing=missing,
        )

    def _form_group(self, receive: Receive, deadline: Deadline) -> None:
        """Tell the members, join the RPC group with them."""
        host = self._meeting_host()
        names = ("coordinator", *self.names)
        nonce = secrets.token_bytes(NONCE)
        for worker, member in enumerate(self._members):
            member.control.send(
                {
                    "type": "welcome",
                    "nonce": nonce,
                    "beat_s": self._heartbeat.total_seconds() / 4,
                    "rank": worker + 1,
                    "stages": list(member.stages),
                    "names": list(names),
                    "host": host,
                    "generation": self.generation,
                    "timeout_s": self._timeout.total_seconds(),
                    "start_timeout_s": deadline.remaining_s(),
                    "path": sys.path,
                }
            )
        self._rpc = RpcTransport(
            RpcGroup(
                generation=self.generation,
                rank=0,
                names=names,
                interface=interface_of(host),
                timeout=self._timeout,
                key=group_key(self._secret, nonce),
            )
        )
        self.transport: Transport = self._rpc
        self._rpc.open(COORDINATOR, receive, self._peer_lost)
        self._join(self._rpc, deadline)
        self._rpc.shield()
        self._tell({"type": "shield"})
        self._monitor = threading.Thread(target=self._watch, name="control", daemon=True)
        self._monitor.start()

    def _meeting_host(self) -> str:
        """Address of this machine that every member reaches: not loopback if one is elsewhere."""
        hosts = [member.control.local_host for member in self._members]
        return next((h for h in hosts if not ipaddress.ip_address(h).is_loopback), hosts[0])

    def _join(self, transport: RpcTransport, deadline: Deadline) -> None:
        """Join the RPC group, which waits for the members, while watching them.

        Joining runs in a thread of its own, so that a worker that dies meanwhile ends it.
        """
        ours, theirs = socket.socketpair()
        addresses: Future[dict[str, str]] = Future()
        found: dict[str, str] = {}

        def publish(address: str) -> None:
            found["coordinator"] = address
            theirs.send(b"x")

        def join() -> None:
            with theirs:
                directory = Directory(("coordinator", *self.names), publish, addresses.result)
                transport.join(directory, deadline)

        with ours, ThreadPoolExecutor(1, thread_name_prefix="join") as thread:
            joining = thread.submit(join)
            try:
                self._exchange(ours, found, addresses, deadline)
            except BaseException as error:
                if not addresses.done():
                    addresses.set_exception(error)
                transport.close()  # ends calls to peers
                raise
            try:
                joining.result()
            except RuntimeError as error:
                raise TransportError(f"joining the RPC group failed: {error}") from error

    def _exchange(
        self,
        joining: socket.socket,
        found: dict[str, str],
        addresses: Future[dict[str, str]],
        deadline: Deadline,
    ) -> None:
        """Gather the addresses of all, hand them out, wait until all have joined.

        Args:
            joining: Readable when this process has published its address; closed when it is done.
            found: Where it publishes.
            addresses: To be filled in.
            deadline: For all of it.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(joining, selectors.EVENT_READ)
            for member in self._members:
                selector.register(member.control, selectors.EVENT_READ, member)
            waiting = 1 + len(self._members)
            while waiting:
                ready = selector.select(deadline.remaining_s())
                if not ready:
                    raise RendezvousTimeout(
                        f"all {len(self._members)} workers came, but the RPC group did not form "
                        "in time; can they reach each other and the coordinator on any port?"
                    )
                for key, _ in ready:
                    done = (
                        self._hear_joining(key.data, found)
                        if key.data is not None
                        else not joining.recv(1)
                    )
                    if done:
                        selector.unregister(key.fileobj)
                        waiting -= 1
                if len(found) == 1 + len(self._members) and not addresses.done():
                    addresses.set_result(found)
                    self._tell({"type": "addresses", "by_name": found})

    def _hear_joining(self, member: _Member, found: dict[str, str]) -> bool:
        """Read a member's address, or its word that it is in the group.

        Returns:
            Whether it is.
        """
        try:
            records = member.control.receive_all()
        except PeerLost as error:
            raise self._lost(member) from error
        for record in records:
            if record["type"] == "joined":
                return True  # what may have come behind it is a sign of life
            if record["type"] == "address":
                found[member.name] = str(record["address"])
            else:
                raise WorkerLost(
                    f"worker {member.name!r} could not join: {record.get('text', record['type'])}",
                    worker=member.name,
                    stage=member.stages[0],
                )
        return False

    # -- while it runs --------------------------------------------------------------------------

    def _watch(self) -> None:
        """Read the control connections until closed, on a thread of its own.

        A daemon, though `close` joins it: the interpreter joins others before it runs what would
        close a pipeline that its user forgot.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for member in self._members:
                selector.register(member.control, selectors.EVENT_READ, member)
            beat_s = self._heartbeat.total_seconds() / 4
            looked = time.monotonic()
            for member in self._members:
                member.heard = looked
            while True:
                for key, _ in selector.select(beat_s):
                    if key.data is None:
                        return
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                # Where this process itself was stopped, silence is no news.
                now, before = time.monotonic(), looked
                looked = now
                if now - before < 2 * beat_s:
                    self._notice_silence(now)

    def _notice_silence(self, now: float) -> None:
        """Give a worker up that has said nothing for as long as the heartbeat."""
        limit_s = self._heartbeat.total_seconds()
        for member in self._members:
            if now - member.heard > limit_s and not member.stopped and not self._closing:
                silent = f" (it has been silent for {now - member.heard:.1f} s)"
                self._fail(self._lost(member, note=silent))

    def _read(self, member: _Member) -> bool:
        """Read the records of a member.

        Returns:
            Whether there may be more.
        """
        try:
            records = member.control.receive_all()
        except TransportError:
            if not self._closing:
                self._fail(self._lost(member))
            self._note_stopped(member)
            return False
        member.heard = time.monotonic()
        for record in records:
            if record["type"] == "stopped":
                self._note_stopped(member)
            elif record["type"] == "story":
                member.story.put(str(record["text"]))
            elif record["type"] == "clock":
                member.clock.put((int(record["ns"]), time.monotonic_ns()))
            elif record["type"] == "doing":
                member.doing = str(record["action"])
            elif record["type"] == "beat":
                member.beat = record
        return True

    def _note_stopped(self, member: _Member) -> None:
        """Count a member that computes no more, or is gone."""
        member.stopped = True
        if all(m.stopped for m in self._members):
            self._all_stopped.set()

    def _lost(
        self, member: _Member, problem: PipelineError | None = None, note: str = ""
    ) -> WorkerLost:
        """Say which worker is gone, and how if it is ours.

        Args:
            member: The worker.
            problem: What was noticed, if not the end of its connection.
            note: To be added.
        """
        ending = self._local.ending(member.name)
        what = "does not answer" if "still" in ending else "is gone"
        error = WorkerLost(
            f"worker {member.name!r} ({member.hosts}, {member.description}) {what}"
            + (f": {ending}" if ending else "")
            + note,
            worker=member.name,
            stage=member.stages[0],
            doing=member.doing,
        )
        error.__cause__ = problem
        return error

    def _peer_lost(self, error: PipelineError) -> None:
        """A message of the coordinator could not be handed over."""
        if not self._closing:
            self._fail(self.name_loss(error))

    def waiting(self) -> AbstractContextManager[None]:
        """See `Cluster.waiting`."""
        return nullcontext()

    def name_loss(self, error: PipelineError) -> PipelineError:
        """See `Cluster.name_loss`."""
        member = next((m for m in self._members if m.name == getattr(error, "peer", "")), None)
        return error if member is None else self._lost(member, error)

    def stories(self) -> list[str]:
        """See `Cluster.stories`; a worker that does not answer soon is said not to."""
        self._tell({"type": "story"})
        deadline = Deadline(_STORY_TIMEOUT)
        told = []
        for member in self._members:
            try:
                text = member.story.get(timeout=deadline.remaining_s())
            except queue.Empty:
                text = "its worker does not answer"
            told.append(f"{member.hosts} (worker {member.name!r}): {text}")
        return told

    def status(self) -> list[dict[str, Any]]:
        """See `Cluster.status`."""
        now = time.monotonic()
        return [
            {
                "name": member.name,
                "stages": member.hosts,
                "process": member.description,
                "silent_s": now - member.heard,
                "rss": int(member.beat.get("rss", 0)),
                "doing": str(member.beat.get("doing", "")),
            }
            for member in self._members
        ]

    def clocks(self) -> list[Reading]:
        """See `Cluster.clocks`."""
        return [self._clock_of(member) for member in self._members]

    def _clock_of(self, member: _Member) -> Reading:
        """Ask a worker for its clock several times and keep the answer that came soonest."""
        deadline = Deadline(_CLOCK_TIMEOUT)
        readings = []
        for _ in range(_CLOCK_ROUNDS):
            sent = time.monotonic_ns()
            member.control.send({"type": "clock"})
            try:
                answered, received = member.clock.get(timeout=deadline.remaining_s())
            except queue.Empty:
                raise MessageTimeout(
                    f"worker {member.name!r} does not answer when asked for its clock"
                ) from None
            readings.append(Reading(sent, answered, received))
        found = best(readings)
        # On one machine the clock is one; containers with a time namespace of their own differ.
        if member.same_clock and abs(found.offset) <= found.error:
            return Reading(found.answered, found.answered, found.answered)
        return found

    def reference(self, stage: int, part: str) -> Reference:
        """See `Cluster.reference`."""
        assert self._rpc is not None
        return self._rpc.reference(stage, part)

    def parameter_references(self, stage: int) -> list[Reference]:
        """See `Cluster.parameter_references`."""
        assert self._rpc is not None
        return list(self._rpc.parameter_references(stage))

    # -- end ------------------------------------------------------------------------------------

    def kill(self) -> None:
        """See `Cluster.kill`."""
        self._closing = True
        for process in self._local.processes.values():
            process.kill()
        self._all_stopped.set()  # nobody is waited for
        if self._replace is not None:
            self._replace()
        self.close()

    def close(self) -> None:
        """See `Cluster.close`."""
        if self._closed:
            return
        self._closed = self._closing = True
        # Every step happens, in the order of the calls below read upwards, also when Ctrl-C
        # interrupts one before it.
        with ExitStack() as steps:
            steps.callback(self._woken.close)
            steps.callback(self._wake.close)
            processes = self._local.processes.values()
            steps.callback(lambda: end_processes(processes, Deadline(_EXIT_TIMEOUT)))
            for control in (*(m.control for m in self._members), *self._local.controls.values()):
                steps.callback(control.close)
            steps.callback(self._tell, {"type": "exit"})
            if self._rpc is not None:
                steps.callback(self._rpc.close)
            if self._monitor is not None:
                steps.callback(self._monitor.join)
                steps.callback(self._wake.send, b"x")
                steps.callback(lambda: self._all_stopped.wait(_STOP_TIMEOUT.total_seconds()))
            steps.callback(self._tell, {"type": "stop"})

    def _tell(self, record: dict[str, Any]) -> None:
        """Send a record to every member that is still there."""
        for member in self._members:
            try:
                member.control.send(record)
            except PeerLost:
                pass  # it is gone, which is all that is wanted of it


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key: ``w2`` before ``w10``."""
    return [(int(d), "") if d else (-1, t) for d, t in re.findall(r"(\d+)|(\D+)", name)]
