"""What a pipeline needs of its workers, and the specification by which they are started."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PipelineError
from pipedream_rt.job.process_assignment import ProcessAssignment
from pipedream_rt.schedules import Plan
from pipedream_rt.tracing.clock import Reading
from pipedream_rt.transport.fence import AgentMode
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.interface import Receive, StreamTransport, Transport

Failure: TypeAlias = BaseException | Callable[[], BaseException]
"""Why a cluster cannot go on: an error, or a function that determines it and may block."""

Fail: TypeAlias = Callable[[Failure], object]
"""Called when the cluster cannot go on; from any thread, perhaps several times. Never blocks."""


def memoized_error(find_out: Callable[[], BaseException]) -> Callable[[], BaseException]:
    """Return a function that determines an error once, and returns that same error each time."""
    return functools.lru_cache(maxsize=1)(find_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The specification of a generation of workers, for every kind of cluster.

    Attributes:
        assignment: How many worker processes do the work of the plan's workers.
        generation: Number of this group of workers, counted over all pipelines of the process.
        timeout: How long to wait for a message that is sure to come.
        start_timeout: How long to wait until all workers have joined.
        heartbeat: How long a worker process may be silent.
        threads: Number of threads for torch's own parallel loops in each worker started here.
    """

    plan: Plan
    assignment: ProcessAssignment
    receive: Receive
    fail: Fail
    generation: int
    timeout: timedelta
    start_timeout: timedelta
    heartbeat: timedelta
    threads: int


class Reference(Protocol):
    """What a pipeline offers of an RRef, also for stages that are in this process."""

    def to_here(self) -> Any:
        """Return a copy of the value."""

    def local_value(self) -> Any:
        """Return the value itself, on its owner."""

    def owner_name(self) -> str:
        """Return the name of the worker that holds the value."""


class Endpoint(Protocol):
    """The endpoint of a process that serves references to what its stages hold."""

    def expose(self, address: int, part: Callable[[str], Any]) -> None:
        """Let the coordinator make references to parts of a stage: ``part(name)`` returns one."""

    def carry(self, group: Group, transport: StreamTransport) -> None:
        """Let a transport carry its connections, before that one connects to anybody."""

    def join(self, mode: AgentMode, deadline: Deadline) -> None:
        """Join the group; that of the coordinator returns when every worker has answered it."""

    def shut(self) -> None:
        """Listen no more; connections stay."""

    def reference(self, address: int, part: str) -> Reference:
        """Return a reference to a part of a stage."""

    def parameter_references(self, address: int) -> Sequence[Reference]:
        """Return references to the trainable parameters of a stage, in the order of its module."""

    def close(self) -> None:
        """Leave the group. Idempotent, from any thread."""


class Cluster(Protocol):
    """The workers of one pipeline.

    Attributes:
        names: By worker of the plan, the name of the worker process that does its work.
        host_ids: By worker of the plan, the id of its host: workers with equal ids share memory.
            Empty for one that shares none.
        without_rpc: Why references lead to no modules, parameters and optimizers; empty if they do.
    """

    names: tuple[str, ...]
    host_ids: tuple[str, ...]
    transport: Transport
    without_rpc: str

    def check_settings_unchanged(self) -> None:
        """Refuse settings of the script that would change what stages in this process compute.

        The coordinator calls this before it feeds anything, so a refusal loses no micro-batch.
        """

    def waiting(self) -> AbstractContextManager[None]:
        """The context in which the coordinator waits for its workers."""

    def name_loss(self, error: PipelineError) -> PipelineError:
        """Turn the error of a lost peer into that of a lost worker, with how it ended."""

    def stories(self) -> list[str]:
        """Describe what every worker waits for and what it did last, for a stall report."""

    def status(self) -> list[dict[str, Any]]:
        """Describe every worker process, for `pipedream-rt status`; empty if none."""

    def clocks(self) -> list[Reading]:
        """The clock of each worker of the plan against ``time.monotonic_ns`` of this process."""

    def newcomers(self) -> int:
        """Number of workers that wait to join and would have work in the next generation."""

    def reference(self, stage: int, part: str) -> Reference:
        """Return a reference to a part of a stage."""

    def parameter_references(self, stage: int) -> list[Reference]:
        """Return references to the trainable parameters of a stage, in the order of its module."""

    def close(self) -> None:
        """End every thread and process that was started. Idempotent."""

    def kill(self) -> None:
        """End the workers at once, without letting them finish their actions; then `close`."""
