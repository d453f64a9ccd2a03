"""A worker that has said hello, as the coordinator knows it."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.control_records import Record
from pipedream_rt.errors import PeerLost, PipelineError, WorkerLost
from pipedream_rt.schedules.edges import Address
from pipedream_rt.transport.rpc.fence import Obstacle

_CRASHES = [f"killed by SIG{name}" for name in ("SEGV", "ABRT", "FPE", "BUS", "ILL")]
"""Endings that come from what a worker computes; SIGKILL and the like come from outside."""


class WorkerSlot(NamedTuple):
    """A worker of the plan, by its number there, whose work a worker process does."""

    worker: int
    title: str
    stages: tuple[Address, ...]

    @property
    def hosts(self) -> str:
        """The stages of this seat, in words."""
        several = len(self.stages) > 1
        return f"stages {', '.join(map(str, self.stages))}" if several else self.title


@dataclass(slots=True)
class Member:
    """A worker process that has said hello.

    The thread that gathers the workers fills it in; from then on the thread of `Watch` owns
    ``stopped``, ``heard``, ``doing`` and ``beat``, which other threads only read.

    Attributes:
        name: Unique in the group.
        same_clock: Whether it runs on the coordinator's kernel.
        returns: Whether it joins again by itself when a generation ends.
        seats: The workers of the plan whose work it does; empty until all have said hello.
        stage: The first stage that it hosts.
        ready: Whether it has imported torch.
        processor: Its kind of processor; empty until it is ready.
        obstacle: What keeps torch RPC from being fenced off there; empty for nothing.
        stopped: Whether its stages compute no more, or its connection has ended.
        heard: When it last sent anything, in seconds of the monotonic clock.
        doing: Text form of the action that it announced last; empty where a job asks for none.
        beat: Its last heartbeat.
        story: Its answers to what it waits for.
        clock: Its clock and when that came, in nanoseconds.
    """

    name: str
    description: str
    control: Control
    same_clock: bool = False
    returns: bool = True
    seats: list[WorkerSlot] = field(default_factory=list)
    stage: int | None = None
    ready: bool = False
    processor: str = ""
    obstacle: Obstacle = ""
    stopped: bool = False
    heard: float = field(default_factory=time.monotonic)
    doing: str = ""
    beat: Record = field(default_factory=dict)
    story: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    clock: queue.SimpleQueue[tuple[int, int]] = field(default_factory=queue.SimpleQueue)

    @property
    def stages(self) -> tuple[Address, ...]:
        """Addresses of the stages that it hosts; empty until all workers have said hello."""
        return tuple(address for seat in self.seats for address in seat.stages)

    @property
    def hosts(self) -> str:
        """The stages that the worker hosts, in words."""
        return " and ".join(seat.hosts for seat in self.seats) or "no stage yet"

    def lost(self, ending: str, problem: PipelineError | None = None, note: str = "") -> WorkerLost:
        """Make the error that says that the worker is gone, and how it ended."""
        what = "does not answer" if "still" in ending else "is gone"
        if problem is not None and not isinstance(problem, PeerLost):
            note += f" ({problem})"  # its connection was given up for what came over it
        error = WorkerLost(
            f"worker {self.name!r} ({self.hosts}, {self.description}) {what}"
            + (f": {ending}" if ending else "")
            + note,
            worker=self.name,
            stage=self.stage,
            doing=self.doing,
            crashed=ending in _CRASHES,
        )
        error.__cause__ = problem
        return error


def tell(members: Iterable[Member], record: Record) -> None:
    """Send a record to every member whose connection still stands."""
    for member in members:
        try:
            member.control.send(record)
        except PeerLost:
            pass


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key of a worker's name by which ``w2`` comes before ``w10``."""
    return [(int(d), "") if d else (-1, t) for d, t in re.findall(r"(\d+)|(\D+)", name)]
