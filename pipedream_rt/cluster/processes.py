"""Stages on worker processes that are connected by sockets and torch RPC."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any

from pipedream_rt.cluster.engines.interface import Keeper
from pipedream_rt.cluster.environment import memory_is_shared, rpc_of_environment
from pipedream_rt.cluster.forked_workers import fork_server
from pipedream_rt.cluster.formation import COORDINATOR_NAME, Formation
from pipedream_rt.cluster.interface import ClusterSpec, Reference, memoized_error
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.liveness import Watch
from pipedream_rt.cluster.local_workers import LocalWorkers
from pipedream_rt.cluster.members import tell
from pipedream_rt.cluster.rendezvous import Rendezvous
from pipedream_rt.cluster.subprocesses import end_processes
from pipedream_rt.cluster.supervision import BY_HAND
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PipelineError
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.tracing.clock import Reading
from pipedream_rt.transport.interface import Transport
from pipedream_rt.transport.limits import ensure_descriptors, make_room_for_agent
from pipedream_rt.transport.rpc import fence
from pipedream_rt.transport.rpc.endpoint import Endpoint, NoEndpoint, is_open, refuse_second
from pipedream_rt.transport.sockets import SocketTransport

_STOP_TIMEOUT = timedelta(seconds=5)
"""For the stages to end the action at hand when told to stop."""

_SENT_TIMEOUT = timedelta(seconds=2)
"""For the last records to the workers to be sent, where they are encrypted."""

_EXIT_TIMEOUT = timedelta(seconds=3)
"""For the processes to end after that, before they are killed."""


class ProcessCluster:
    """Worker processes, each with its stages; links join them, and torch RPC holds references."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        door: Listener,
        own: Sequence[str] = (),
        keeper: Keeper = BY_HAND,
    ) -> None:
        wish = rpc_of_environment()
        ensure_descriptors(spec.assignment.most)
        obstacles = {COORDINATOR_NAME: fence.obstacle()}
        if fence.decided(wish, obstacles) != "off":
            if spec.recovers and wish == "auto" and is_open():
                # A run must not end because it would have no references after a recovery.
                obstacles[COORDINATOR_NAME] = "taken"
            else:
                refuse_second()
                make_room_for_agent()
        self.generation = spec.generation
        self._life = Lifecycle("the cluster")
        self._fail = spec.fail
        self._crew = spec.assignment
        self._door = door
        self._killed = False
        self._rpc: Endpoint | NoEndpoint = NoEndpoint()
        self._sockets: SocketTransport | None = None
        self._local = LocalWorkers(spec.threads, fork_server())
        self._keeper = keeper
        rendezvous = Rendezvous(
            spec.plan,
            self._local,
            door,
            spec.heartbeat,
            keeper,
            spec.assignment,
        )
        self._members = rendezvous.members
        self._watch = Watch(self._members, self._local, spec.fail, spec.heartbeat, keeper)
        try:
            deadline = Deadline(spec.start_timeout)
            every = [f"worker-{i}" for i in range(spec.assignment.most)]
            self._local.start(every if door.listener is None else own)
            rendezvous.gather(deadline)
            self.names = tuple(member.name for member in self._members for _ in member.seats)
            obstacles.update((member.name, member.obstacle) for member in self._members)
            mode = fence.decided(wish, obstacles)
            self.without_rpc = fence.why_left_out(wish, obstacles)
            self.endpoints = fence.in_words(wish, obstacles)
            fence.tell(wish, obstacles)
            formation = Formation(
                spec.plan, self._members, self._local, deadline, spec.heartbeat, door.tls
            )
            group = formation.welcome(
                generation=spec.generation, timeout=spec.timeout, key=door.key.key,
                rpc=mode,
            )  # fmt: skip
            self._sockets = SocketTransport(group, gives=memory_is_shared())
            self.transport: Transport = self._sockets
            self._rpc = (
                NoEndpoint(self.without_rpc)
                if mode == "off"
                else Endpoint(group, self._sockets.tunnel, spec.timeout, mode)
            )
            self._sockets.open(COORDINATOR, spec.receive, self._peer_lost)
            formation.join(group, self._sockets, self._rpc)
            places = formation.places()
            self.places = tuple(
                places[member.name] for member in self._members for _ in member.seats
            )
            self._watch.start()
        except BaseException:
            self.close()
            raise

    def _peer_lost(self, error: PipelineError) -> None:
        """Report that a message of the coordinator could not be handed over."""
        # The thread of the links is here, which must not wait for a process to end: so the cause
        # is found by whoever asks for the error.
        if not self._watch.ending:
            self._fail(memoized_error(lambda: self.name_loss(error)))

    def check_settings_unchanged(self) -> None: ...

    def waiting(self) -> AbstractContextManager[None]:
        """No context: worker processes compute whether the coordinator waits or not."""
        return nullcontext()

    def name_loss(self, error: PipelineError) -> PipelineError:
        return self._watch.name_loss(error)

    def stories(self) -> list[str]:
        return self._watch.stories()

    def status(self) -> list[dict[str, Any]]:
        return self._watch.status()

    def clocks(self) -> list[Reading]:
        readings = self._watch.clocks()
        return [r for r, m in zip(readings, self._members, strict=True) for _ in m.seats]

    def newcomers(self) -> int:
        members, door = self._members, self._door
        free = self._crew.most - len(members)
        # The generation would end for them, and lose members that do not come back.
        if not free or not self._crew.stays_open or not all(m.returns for m in members):
            return 0
        for gone in door.attend(0, free, members):
            door.note(gone)
        ready = sum(member.ready for member in door.members)
        door.expected = len(members) + ready
        return ready

    def reference(self, stage: int, part: str) -> Reference:
        return self._rpc.reference(stage, part)

    def parameter_references(self, stage: int) -> list[Reference]:
        return list(self._rpc.parameter_references(stage))

    def kill(self) -> None:
        self._watch.ending = self._killed = True
        for process in self._local.processes.values():
            process.kill()
        self._watch.stop_waiting()
        self._keeper.replace(self._watch.silent)
        self.close()

    def close(self) -> None:
        if not self._life.begin_closing():
            return
        self._watch.ending = True
        # On an ExitStack each step runs even if Ctrl-C interrupts the one before it. The last line
        # runs first: read upwards.
        with ExitStack() as steps:
            steps.callback(self._life.close)
            steps.callback(self._watch.close)
            processes = self._local.processes.values()
            steps.callback(lambda: end_processes(processes, Deadline(_EXIT_TIMEOUT)))
            if (tls := self._door.tls) is not None:
                steps.callback(lambda: tls.finish(Deadline(_SENT_TIMEOUT)))
            for control in (*(m.control for m in self._members), *self._local.controls.values()):
                steps.callback(control.close)
            steps.callback(tell, self._members, {"type": "exit", "failed": self._killed})
            if self._sockets is not None:
                steps.callback(self._sockets.close)
            steps.callback(self._rpc.close)
            steps.callback(self._watch.end)
            steps.callback(self._watch.wait_until_stopped, _STOP_TIMEOUT)
            steps.callback(tell, self._members, {"type": "stop"})
