"""The log of the feed since the restore points, from which a recovery replays it.

The coordinator gives everything that it feeds a position. Stages that start from the state of a
restore point, and are fed what came after it in the same order, compute the same bits as before.
So the coordinator keeps what it has fed since the oldest restore point, and a recovery is: new
workers, the state of a restore point, the feed since.

A command is for a role of stages, not for numbers of stages. So a later generation may have another
plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeAlias

from torch import Tensor

from pipedream_rt.batches.micro_batches import MicroBatch
from pipedream_rt.messages.head import Head, LossTask
from pipedream_rt.messages.message import Command, Gradient


class Role(Enum):
    """The stages that a command is for."""

    EVERY = "every"
    """All stages; each gets the same."""
    OWN = "own"
    """All stages; each gets those entries of a dictionary whose keys are names in its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePoint:
    """A point of the feed that a run can go back to.

    Attributes:
        position: The first position after this point.
        folder: The checkpoint that was made at this point; None for the start of the run.
        run: Identity of the run that made the checkpoint; empty if not known.
        floor: The oldest weight version that a stage reads after this point; None for the one that
            the checkpoint names.
        with_optimizer: Whether the checkpoint's optimizer state belongs to this point; not if the
            script has gone on with another optimizer.
        optimizer: The pickled `OptimizerSpec` that the stages had at this point; empty if none.
        training: The mode that all modules had been set to (`Module.train`); None if never.
        apart: The mode that stages had been set to by themselves after that, by stage.
    """

    position: int = 0
    folder: Path | None = None
    run: str = ""
    floor: int | None = None
    with_optimizer: bool = True
    optimizer: bytes = b""
    training: bool | None = None
    apart: tuple[tuple[int, bool], ...] = ()


class FedMicroBatch(NamedTuple):
    """A micro-batch in the feed."""

    head: Head
    micro_batch: MicroBatch
    task: LossTask

    @property
    def position(self) -> int:
        return self.head.position


class FedCommand(NamedTuple):
    """A command in the feed."""

    command: Command
    tensors: tuple[Tensor, ...]
    role: Role

    @property
    def position(self) -> int:
        return self.command.position


Entry: TypeAlias = FedMicroBatch | FedCommand
"""An item of the feed."""


class FeedLog:
    """The feed since the oldest restore point.

    Attributes:
        on: Whether entries are kept; not if the run recovers from no failure.
        restore_points: The restore points, oldest first.
        gradients: By position of a micro-batch, the script's gradient of its output:
            a recovery asks the script for nothing twice.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        # Two, so that a run whose newest checkpoint is damaged can go back further.
        self.restore_points: deque[RestorePoint] = deque([RestorePoint()], maxlen=2)
        self._entries: deque[Entry] = deque()
        self.gradients: dict[int, tuple[Gradient, tuple[Tensor, ...]]] = {}
        self._holds = 0
        self._next: RestorePoint | None = None

    def hold(self) -> None:
        """Add no newer restore point until `release` was called as often."""
        self._holds += 1

    def release(self) -> None:
        """Undo one `hold`; after the last, add the newest restore point that came meanwhile."""
        self._holds -= 1
        if not self._holds and self._next is not None:
            restore_point, self._next = self._next, None
            self.begin(restore_point)

    def append(self, entry: Entry) -> None:
        """Keep an entry that is being sent; only while the log is on."""
        self._entries.append(entry)

    def begin(self, restore_point: RestorePoint) -> None:
        """Add a newer restore point, and forget the entries that none needs any more."""
        if self._holds:
            # No checkpoint has what is held, such as a kept version: a recovery must go back to
            # before it was made, and make it again from the feed.
            self._next = restore_point
            return
        self.restore_points.append(restore_point)
        first = self.restore_points[0].position
        while self._entries and self._entries[0].position < first:
            self.gradients.pop(self._entries.popleft().position, None)

    def forget(self, position: int) -> None:
        """Forget the entry at a position: it left no trace, and its result was taken."""
        later = []
        while self._entries and self._entries[-1].position >= position:
            entry = self._entries.pop()
            if entry.position > position:
                later.append(entry)
        self._entries.extend(reversed(later))

    def stop(self) -> None:
        """Forget all entries, and keep none from now on."""
        self.on = False
        self._entries.clear()
        self.gradients.clear()

    def since(self, restore_point: RestorePoint) -> Iterator[Entry]:
        """Return the entries that were fed after a restore point, in order."""
        return (entry for entry in self._entries if entry.position >= restore_point.position)
