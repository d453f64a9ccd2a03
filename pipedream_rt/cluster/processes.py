"""Stages on worker processes that are connected by sockets and torch RPC."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from typing import Any

from pipedream_rt import extras
from pipedream_rt.cluster.control_loop import ControlLoop
from pipedream_rt.cluster.elsewhere import Elsewhere
from pipedream_rt.cluster.environment import memory_is_shared, rpc_of_environment
from pipedream_rt.cluster.forked_workers import fork_server
from pipedream_rt.cluster.generation import COORDINATOR_NAME, Generation, status_of
from pipedream_rt.cluster.interface import ClusterSpec, Endpoint, Reference, memoized_error
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.local import Local
from pipedream_rt.cluster.subprocesses import end_processes
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, PipelineClosed, PipelineError, TransportError
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.schedules import COORDINATOR
from pipedream_rt.tracing.clock import Reading
from pipedream_rt.transport import fence
from pipedream_rt.transport.fence import NoEndpoint
from pipedream_rt.transport.interface import Transport
from pipedream_rt.transport.limits import ensure_descriptors, make_room_for_agent
from pipedream_rt.transport.sockets import SocketTransport

_STOP_TIMEOUT = timedelta(seconds=5)
"""For the stages to end the action at hand once they are to stop."""

_EXIT_TIMEOUT = timedelta(seconds=3)
"""For the processes to end after that, before they are killed."""


class ProcessCluster:
    """Worker processes, each with its stages; links join them, and torch RPC holds references."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        loop: ControlLoop,
        listener: Listener,
        own: Sequence[str],
        elsewhere: Elsewhere,
    ) -> None:
        wish = rpc_of_environment()
        ensure_descriptors(spec.assignment.most)
        obstacles = {COORDINATOR_NAME: fence.obstacle()}
        self.generation = spec.generation
        self._life = Lifecycle("the cluster")
        self._fail = spec.fail
        self._assignment = spec.assignment
        self._loop = loop
        self._listener = listener
        self._rpc: Endpoint = NoEndpoint()
        self._sockets: SocketTransport | None = None
        self._local = Local(spec.threads, fork_server())
        self._elsewhere = elsewhere
        workers = self._workers = Generation(spec, listener, self._local, elsewhere)
        try:
            wanted = fence.decided(wish, obstacles) != "off"
            if wanted and not self._takes_agent(wish, spec.timeout):
                obstacles[COORDINATOR_NAME] = "taken"
            deadline = Deadline(spec.start_timeout)
            self._local.start(own)
            loop.run(workers.gather(deadline))
            self._members = workers.members
            self.names = tuple(member.name for member in self._members for _ in member.slots)
            obstacles.update((member.name, member.obstacle) for member in self._members)
            mode = fence.decided(wish, obstacles)
            self.without_rpc = fence.why_left_out(wish, obstacles)
            fence.warn_once(wish, obstacles)
            self._form(spec, mode, deadline)
            host_ids = workers.host_ids() if memory_is_shared() else {}
            self.host_ids = tuple(
                host_ids.get(member.name, "") for member in self._members for _ in member.slots
            )
            loop.run(workers.watch())
        except Exception:
            self.kill()  # those elsewhere hear that a next generation may begin
            raise
        except BaseException:
            self.close()
            raise

    def _takes_agent(self, wish: fence.Wish, timeout: timedelta) -> bool:
        """Take the one agent that torch allows in a process; return whether it was free."""
        try:
            self._rpc = extras.RPCEndpoint(timeout)
        except ConfigError:  # another pipeline has it
            if wish == "on":
                raise
            return False
        make_room_for_agent()
        return True

    def _form(self, spec: ClusterSpec, mode: fence.AgentMode, deadline: Deadline) -> None:
        """Connect to all members, and join torch RPC with them; nothing listens afterwards."""
        loop, workers = self._loop, self._workers
        group = loop.run(workers.welcome(mode, deadline))
        transport = self._sockets = SocketTransport(group, shares_memory=memory_is_shared())
        self.transport: Transport = transport
        if mode == "off":
            self._rpc.close()  # so that another pipeline can have the agent
            self._rpc = NoEndpoint(self.without_rpc)
        self._rpc.carry(group, transport)
        transport.open(COORDINATOR, spec.receive, self._peer_lost)
        transport.connect(loop.run(workers.connect(group, deadline)))
        # To join torch RPC blocks until all members do the same, so it has a thread of its own: a
        # worker that dies meanwhile is noticed, and ends it.
        with ThreadPoolExecutor(1, thread_name_prefix="join") as thread:
            try:
                joining = thread.submit(self._rpc.join, mode, deadline)
                loop.run(workers.all_joined(joining, deadline))
            except BaseException as error:
                self._rpc.close()  # ends the calls to other members that are under way
                if isinstance(error, RuntimeError):
                    raise TransportError(f"joining the RPC group failed: {error}") from error
                raise
        if mode != "off":
            self._rpc.shut()
            loop.run(workers.broadcast({"type": "shut"}))

    def _peer_lost(self, error: PipelineError) -> None:
        """Report that a message of the coordinator could not be handed over."""
        # The thread of the links is here, which must not wait for a process to end: so the cause
        # is found by whoever asks for the error.
        if self._life.is_open:
            self._fail(memoized_error(lambda: self.name_loss(error)))

    def check_settings_unchanged(self) -> None: ...

    def waiting(self) -> AbstractContextManager[None]:
        """No context: worker processes compute whether the coordinator waits or not."""
        return nullcontext()

    def name_loss(self, error: PipelineError) -> PipelineError:
        peer = getattr(error, "peer", "")
        member = next((member for member in self._members if member.name == peer), None)
        return error if member is None else self._workers.loss_of(member, error)

    def stories(self) -> list[str]:
        return self._loop.run(self._workers.stories())

    def status(self) -> list[dict[str, Any]]:
        return status_of(self._members)

    def clocks(self) -> list[Reading]:
        readings = self._loop.run(self._workers.clocks())
        return [r for r, m in zip(readings, self._members, strict=True) for _ in m.slots]

    def newcomers(self) -> int:
        members = self._members
        free = self._assignment.most - len(members)
        # The generation would end for them, and lose members that do not come back.
        if not free or not self._assignment.stays_open or not all(m.returns for m in members):
            return 0
        return self._loop.run(self._workers.expected())

    def reference(self, stage: int, part: str) -> Reference:
        return self._rpc.reference(stage, part)

    def parameter_references(self, stage: int) -> list[Reference]:
        return list(self._rpc.parameter_references(stage))

    def kill(self) -> None:
        self._end(killed=True)

    def close(self) -> None:
        self._end(killed=False)

    def _end(self, *, killed: bool) -> None:
        """End the workers once; kill them also while another thread waits for them to end."""
        is_first = self._life.begin_closing()
        workers, processes = self._workers, self._local.processes.values()
        # Queued before any connection ends, so that the loop takes no end for a failure.
        self._loop.call_soon(workers.expect_ends)
        # On an ExitStack each step runs even if Ctrl-C interrupts the one before it. The last line
        # runs first: read upwards.
        with ExitStack() as steps:
            if is_first:
                steps.callback(self._life.close)
                steps.callback(lambda: end_processes(processes, Deadline(_EXIT_TIMEOUT)))
                steps.callback(self._in_loop, workers.leave(failed=killed))
                if self._sockets is not None:
                    steps.callback(self._sockets.close)
                steps.callback(self._rpc.close)
                steps.callback(self._in_loop, workers.stop(_STOP_TIMEOUT))
            if killed:
                # The loop adds none to the silent once it has given up.
                steps.callback(lambda: self._elsewhere.replace(workers.silent))
                steps.callback(self._in_loop, workers.give_up())
                for process in processes:
                    steps.callback(process.kill)

    def _in_loop(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a step of the end in the loop, unless that was closed: then all connections are."""
        with suppress(PipelineClosed):
            self._loop.run(coroutine)
