"""A worker that has sent its hello, as the coordinator knows it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pipedream_rt.cluster.control import EXIT_COORDINATOR_LOST, LIFE_AGAIN
from pipedream_rt.cluster.control_loop import within
from pipedream_rt.cluster.peer_listeners import PeerAddress
from pipedream_rt.cluster.records import Record
from pipedream_rt.cluster.stream import Stream
from pipedream_rt.errors import ConfigError, PeerLost, PipelineError, TransportError, WorkerLost
from pipedream_rt.schedules.edges import Address
from pipedream_rt.transport.fence import Obstacle

_CRASHES = {f"killed by SIG{name}" for name in ("SEGV", "ABRT", "FPE", "BUS", "ILL")}
_OURS = {f"exit code {code}" for code in (EXIT_COORDINATOR_LOST, LIFE_AGAIN)}


def is_of_its_own(ending: str) -> bool:
    """Whether a worker has ended by what it computes: not by SIGKILL, nor for want of a peer."""
    return ending in _CRASHES or (ending.startswith("exit code") and ending not in _OURS)


class WorkerSlot(NamedTuple):
    """A worker of the plan, by its number there, as a part of the work of a process."""

    worker: int
    title: str
    stages: tuple[Address, ...]

    @property
    def hosts(self) -> str:
        """Its stages, for messages."""
        several = len(self.stages) > 1
        return f"stages {', '.join(map(str, self.stages))}" if several else self.title


@dataclass(slots=True, eq=False)
class Member:
    """A worker process that has sent its hello.

    The event loop of the control plane owns it; other threads only read ``heard``, ``doing`` and
    ``beat``.

    Attributes:
        name: Unique in the group.
        is_local: Whether this process has started it.
        nearby: Whether its control connection does not leave the machine.
        same_clock: Whether it runs on the coordinator's kernel.
        returns: Whether it joins again by itself when a generation ends.
        changed: Called when a record has come, and when its connection has ended.
        slots: The workers of the plan whose work it does; empty until all have joined.
        stage: The first stage that it hosts.
        ready: Whether it has imported torch.
        processor: Its kind of processor; empty until it is ready.
        obstacle: What keeps torch RPC from being fenced off there; empty for nothing.
        peer_address: Where it listens for the other members while the group forms; None if not
            known.
        met: Once it has joined, the ranks that it has met at Unix sockets.
        stopped: Whether its stages compute no more, or its connection has ended.
        ended: Why its connection has ended; None while it stands.
        heard: When it last sent anything, in seconds of the monotonic clock.
        doing: Text form of the action that it announced last; empty where a job asks for none.
        beat: Its last heartbeat.
        answers: What it answers to questions, by type of record, with the time (monotonic, ns);
            None once its connection has ended.
    """

    name: str
    description: str
    stream: Stream
    is_local: bool = False
    nearby: bool = False
    same_clock: bool = False
    returns: bool = True
    changed: Callable[[], object] = lambda: None
    slots: list[WorkerSlot] = field(default_factory=list)
    stage: int | None = None
    ready: bool = False
    processor: str = ""
    obstacle: Obstacle = ""
    peer_address: PeerAddress | None = None
    met: set[int] | None = None
    stopped: bool = False
    ended: TransportError | None = None
    heard: float = field(default_factory=time.monotonic)
    doing: str = ""
    beat: Record = field(default_factory=dict)
    answers: dict[str, asyncio.Queue[tuple[Record, int] | None]] = field(default_factory=dict)

    @property
    def stages(self) -> tuple[Address, ...]:
        """Addresses of the stages that it hosts; empty until all workers have joined."""
        return tuple(address for slot in self.slots for address in slot.stages)

    @property
    def hosts(self) -> str:
        """The stages that the worker hosts, for messages."""
        return " and ".join(slot.hosts for slot in self.slots) or "no stage yet"

    async def live(self) -> None:
        """Read the records of the worker, until its connection ends."""
        try:
            while True:
                record = await self.stream.read()
                self.heard = time.monotonic()
                self._take(record)
                self.changed()
        except Exception as error:  # of any kind: it ends this connection and no other
            self.ended, self.stopped = self.stream.lost_by(error), True
        finally:
            self.stream.close()
            for queue in self.answers.values():
                queue.put_nowait(None)
            self.changed()

    def _take(self, record: Record) -> None:
        match record["type"]:
            case "doing":
                self.doing = str(record["action"])
            case "beat":
                self.beat = record
            case "ready":
                self.ready, self.processor = True, record["processor"]
                self.obstacle = record["obstacle"]
            case "door":
                self.peer_address = PeerAddress(*record["at"])
            case "joined":
                self.met = set(record["nearby"])
            case "failed":
                raise JoiningFailed(str(record["text"]))
            case "unfit":  # it would say so again, however often it is started
                raise JoiningFailed(str(record["text"])) from ConfigError(str(record["text"]))
            case "stopped":
                self.stopped = True
            case "story" | "clock" | "findings" as kind:
                self.answers.setdefault(kind, asyncio.Queue()).put_nowait(
                    (record, time.monotonic_ns())
                )
            case kind:
                raise TransportError(
                    f"worker {self.name!r} sent a {kind!r}, which only a coordinator sends; is it "
                    "pipedream-rt of the same version?"
                )

    async def ask(self, record: Record, kind: str, seconds: float) -> tuple[Record, int] | None:
        """Send a question; return the answer and its arrival (monotonic, ns), None for none."""
        if self.ended is not None:
            return None
        queue = self.answers.setdefault(kind, asyncio.Queue())
        while not queue.empty():  # an answer to an earlier question, which came too late
            queue.get_nowait()
        self.stream.send(record)
        try:
            return await within(queue.get(), seconds)
        except asyncio.TimeoutError:
            return None

    def lost(self, ending: str, problem: PipelineError | None = None, note: str = "") -> WorkerLost:
        """Make the error of a lost worker: its stages, its process, and how it ended."""
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
            crashed=is_of_its_own(ending),
        )
        error.__cause__ = problem
        return error


class JoiningFailed(TransportError):
    """A worker could not join the group, for the reason that it has sent."""


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key of a worker's name by which ``w2`` comes before ``w10``."""
    return [(int(d), "") if d else (-1, t) for d, t in re.findall(r"(\d+)|(\D+)", name)]
