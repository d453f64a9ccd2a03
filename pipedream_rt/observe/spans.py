"""Where spans are written while they happen: a ring of fixed size, allocated once.

One record is 64 bytes, written by one call; no object is made for it. The simulator writes the
same records, so that everything after can read either.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

SPAN = np.dtype(
    [
        ("kind", "<u2"),
        ("kept", "<u2"),
        ("stage", "<i4"),
        ("index", "<i4"),
        ("version", "<i4"),
        ("in_flight", "<u4"),
        ("waited_for", "<i4"),
        ("ready", "<i8"),
        ("arrived", "<i8"),
        ("start", "<i8"),
        ("end", "<i8"),
        ("bytes", "<i8"),
    ]
)
"""One span: what a worker did from one instant to another.

kind: letter of the action (F, B, I, W, S), E for a pass without training, C for a command, N for an
injection by the coordinator, L for a loss that came to it. stage: which; -1 the coordinator. index:
micro-batch, update, or position in the feed. version: weight version read, or made by a step. kept,
in_flight: versions and micro-batches held after it. waited_for: stage whose message was needed, -1
the coordinator, -2 nobody. ready: when the worker had ended what it did before. arrived: when the
message was there. start, end: of the work itself. bytes: of the tensors sent. Times are nanoseconds
on one clock, the coordinator's.
"""

NOBODY = -2
"""What an action waits for that needs no message."""

Spans = npt.NDArray[Any]
"""An array of `SPAN`."""

_RECORD = struct.Struct("<HHiiiIiqqqqq")


class Recorder:
    """A ring of spans; the oldest are overwritten.

    Args:
        capacity: Spans that it holds.
    """

    def __init__(self, capacity: int) -> None:
        """Allocate everything."""
        self._capacity = capacity
        self._data = bytearray(capacity * SPAN.itemsize)
        self.count = 0

    def record(
        self,
        kind: int,
        stage: int,
        index: int,
        version: int,
        kept: int,
        in_flight: int,
        waited_for: int,
        ready: int,
        arrived: int,
        start: int,
        end: int,
        size: int,
    ) -> None:
        """Write one span; see `SPAN` for the values."""
        _RECORD.pack_into(
            self._data, self.count % self._capacity * _RECORD.size,
            kind, kept, stage, index, version, in_flight, waited_for,
            ready, arrived, start, end, size,
        )  # fmt: skip
        self.count += 1

    @property
    def dropped(self) -> int:
        """Spans that were overwritten."""
        return max(0, self.count - self._capacity)

    def spans(self) -> Spans:
        """Return what is there, oldest first. A view where nothing was overwritten."""
        everything = np.frombuffer(self._data, dtype=SPAN)
        if self.count <= self._capacity:
            return everything[: self.count]
        return np.roll(everything, -(self.count % self._capacity))
