"""When a device did what a worker has launched: events around each action, read at the end."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch


class Done(NamedTuple):
    """An action that was launched between two events.

    Attributes:
        begin: The event before it.
        end: The event after it.
        kind: As in `SPAN`.
        stage: The address of the stage.
        index: As in `SPAN`.
        version: As in `SPAN`.
    """

    begin: torch.Event
    end: torch.Event
    kind: int
    stage: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    version: int


class DeviceEvents:
    """The last actions in one stream; older ones are dropped."""

    def __init__(self, stream: torch.Stream, capacity: int) -> None:
        self._stream = stream
        self._done: deque[Done] = deque(maxlen=capacity)

    @property
    def count(self) -> int:
        """The number of actions that are kept."""
        return len(self._done)

    def mark(self) -> torch.Event:
        """Return an event that says when the stream gets here."""
        event = torch.Event(self._stream.device, enable_timing=True)
        event.record(self._stream)
        return event

    def note(self, begin: torch.Event, kind: int, stage: int, index: int, version: int) -> None:
        """Keep an action that began at a mark and ends here."""
        self._done.append(Done(begin, self.mark(), kind, stage, index, version))

    def times(self) -> list[tuple[Done, int, int]]:
        """Wait for the stream; return each action with its begin and end, as ``monotonic_ns()``."""
        # elapsed_time() is a float32 in ms, exact enough only between neighbours. So the times are
        # summed up backwards from a last mark: the host waits for it, and so knows its time.
        later = self.mark()
        later.synchronize()
        at, found = float(time.monotonic_ns()), []
        for done in reversed(self._done):
            end = at - 1e6 * done.end.elapsed_time(later)
            at, later = end - 1e6 * done.begin.elapsed_time(done.end), done.begin
            found.append((done, round(at), round(end)))
        return found[::-1]
