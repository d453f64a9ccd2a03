"""What a pipeline needs of its workers, and what they are told."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

from pipedream_rt.errors import PipelineError
from pipedream_rt.observe.clock import Reading
from pipedream_rt.schedules import Plan
from pipedream_rt.schedules.seats import Crew
from pipedream_rt.transport.base import Receive, Transport

Failure: TypeAlias = BaseException | Callable[[], BaseException]
"""Why a cluster cannot go on: an error, or a function that finds it out, which may wait a while."""

Fail: TypeAlias = Callable[[Failure], object]
"""Called when the cluster cannot go on; from any thread, perhaps several times. Never waits."""


def once(find_out: Callable[[], BaseException]) -> Callable[[], BaseException]:
    """Return a function that finds an error out when it is first called, and then keeps it."""
    return functools.lru_cache(maxsize=1)(find_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """What every kind of cluster is told.

    Attributes:
        threads: Number of threads for torch's own parallel loops in each worker started here.
        recovers: Whether the pipeline has had workers before.
    """

    plan: Plan
    crew: Crew
    receive: Receive
    fail: Fail
    generation: int
    timeout: timedelta
    start_timeout: timedelta
    heartbeat: timedelta
    threads: int
    recovers: bool = False
    around: Callable[[], AbstractContextManager[None]] = nullcontext


class Reference(Protocol):
    """The part of an RRef that a pipeline offers; of stages in this process another class."""

    def to_here(self) -> Any:
        """Return a copy of the value."""

    def local_value(self) -> Any:
        """Return the value itself, on its owner."""

    def owner_name(self) -> str:
        """Return the name of the worker that holds the value."""


class Cluster(Protocol):
    """The workers of one pipeline.

    Attributes:
        places: By worker of the plan, a text that is the same for those which share memory with
            each other; empty for one that shares none.
        without_rpc: Why references lead to no modules, parameters and optimizers; empty if they do.
        endpoints: What `Pipeline.explain` says of torch RPC; empty for stages in this process.
    """

    names: tuple[str, ...]
    places: tuple[str, ...]
    transport: Transport
    without_rpc: str
    endpoints: str

    def may_wait(self) -> None:
        """Refuse to be waited for where the script has changed what workers here compute with.

        The coordinator asks before it feeds anything for which it will wait, so nothing is lost.
        """

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context that the coordinator enters around every wait for its workers."""

    def name_loss(self, error: PipelineError) -> PipelineError:
        """Turn an error about a lost peer into one that names the worker and how it ended."""

    def stories(self) -> list[str]:
        """Describe what every worker waits for and what it did last, for a stall report."""

    def status(self) -> list[dict[str, Any]]:
        """Describe every worker process, for `pipedream-rt status`; empty for threads."""

    def clocks(self) -> list[Reading]:
        """Read the clock of each worker of the plan against ``time.monotonic_ns`` of this process.

        Workers that share a process have the same one.
        """

    def newcomers(self) -> int:
        """Return how many workers wait to join, for which a next generation would have work."""

    def reference(self, stage: int, part: str) -> Reference:
        """Return a reference to a part of a stage."""

    def parameter_references(self, stage: int) -> list[Reference]:
        """Return references to the trainable parameters of a stage, in the order of its module."""

    def close(self) -> None:
        """End every thread and process that was started. Idempotent."""

    def kill(self) -> None:
        """End the workers at once, without letting them finish their actions; then `close`."""
