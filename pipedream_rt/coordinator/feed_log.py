"""What was fed into the pipe since the points that a run can go back to.

The coordinator numbers all that it feeds. A stage that starts from an origin and is fed what came
after it, in the same order, computes the same bits as before; so what follows an origin is kept
until there is a newer one, and recovery is: new workers, the state at an origin, the feed since.

What is kept says for which role it is, not for which stage, so that a later generation may have
another plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from pipedream_rt.messages.message import Command, MicroBatch, Target


class Role(Enum):
    """For which stages something is."""

    ENTRY = "entry"
    """Those that take the model's input."""
    TARGET = "target"
    """Those that compute the loss."""
    EVERY = "every"
    """All; each gets the same."""
    OWN = "own"
    """All; each gets the entries of a dictionary whose keys are names in its own layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A point that a run can go back to.

    Attributes:
        position: The first of the feed after it.
        folder: The checkpoint made there; None for the start of the run.
        floor: Oldest weight version to be read from there on; None for what the checkpoint says.
        optimizer: Pickled `OptimizerSpec` of that time; empty if none was set.
        training: Mode that all modules were set to; None if never.
    """

    position: int = 0
    folder: Path | None = None
    floor: int | None = None
    optimizer: bytes = b""
    training: bool | None = None


class Entry(NamedTuple):
    """One thing that the coordinator fed.

    Attributes:
        role: For which stages.
        position: Its number.
        payload: What it says; its turn is set anew whenever it is sent.
        tensors: What it carries.
    """

    role: Role
    position: int
    payload: MicroBatch | Command | Target
    tensors: tuple[Tensor, ...]


class FeedLog:
    """The feed since the oldest of the origins.

    Two origins are kept, so that a run whose last checkpoint is damaged can go back further.

    Attributes:
        origins: Oldest first.
        on: Whether anything is kept at all.
    """

    def __init__(self, on: bool) -> None:
        """Begin at the start of a run."""
        self.on = on
        self.origins: deque[Origin] = deque([Origin()], maxlen=2)
        self._entries: deque[Entry] = deque()

    def append(self, entry: Entry) -> None:
        """Keep what is being sent."""
        if self.on:
            self._entries.append(entry)

    def begin(self, origin: Origin) -> None:
        """Add the newest origin; forget what no origin needs any more."""
        self.origins.append(origin)
        first = self.origins[0].position
        while self._entries and self._entries[0].position < first:
            self._entries.popleft()

    def stop(self) -> None:
        """Keep nothing any more."""
        self.on = False
        self._entries.clear()

    def since(self, origin: Origin) -> Iterator[Entry]:
        """Return what was fed after an origin, in order."""
        return (entry for entry in self._entries if entry.position >= origin.position)
