"""Spans, and the ring of fixed size that they are written to while a run goes on.

A span is a record of 64 bytes. One call writes it, without making an object for it. The simulator
writes the same records, so what reads a measured trace reads a simulated one too.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipedream_rt.schema import read_file

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
"""One span. Times are in nanoseconds, in a trace on the coordinator's clock.

- kind: The letter of an action (F, B, I, W, S, R, T, A; D for the end of a flush, N for an
  injection by the coordinator); E for a pass of evaluation or inference; C for a command; L for the
  arrival of a loss at the coordinator.
- stage: The stage that acted; -1 for the coordinator.
- index: The micro-batch, the update, or the position in the feed.
- version: The weight version that was read, or that a step made.
- kept, in_flight: The number of versions kept, and of micro-batches in flight, after it.
- waited_for: The stage whose message arrived last; -1 for the coordinator, -2 if none was needed.
- ready: The time when the worker had ended what it did before.
- arrived: The time when the message of ``waited_for`` arrived; 0 if none was needed.
- start, end: The times when the work itself began and ended.
- bytes: The size of the tensors that were sent.
"""

NOBODY = -2
"""The value of ``waited_for`` for an action that needs no message."""

Spans = npt.NDArray[Any]
"""An array of records of the dtype `SPAN`."""

_RECORD = struct.Struct("<HHiiiIiqqqqq")


_SHOWN = 1 << 11
"""The number of newest spans of a recorder that other processes can read."""


class SpanFolder(NamedTuple):
    """Where recorders write their newest spans for other processes of the machine to read.

    Attributes:
        folder: It gets a file for each recorder.
        host: The only machine that writes there: on others the clock is another one.
    """

    folder: str
    host: str

    @staticmethod
    def in_folder(run: str | os.PathLike[str]) -> SpanFolder:
        """Return the place in the folder of a run, seen from this machine."""
        return SpanFolder(str(Path(run).absolute() / "spans"), os.uname().nodename)

    def open(self, name: str) -> int | None:
        """Return the descriptor of a new file; None if there can be none."""
        if self.host != os.uname().nodename:
            return None
        path = Path(self.folder, name)
        with contextlib.suppress(OSError):
            # An earlier worker may have left one. A link must not be followed, so O_EXCL.
            path.unlink(missing_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return None


def newest_spans(file: Path) -> Spans:
    """Return the newest spans that a recorder shows, oldest first; it may be writing meanwhile."""
    data = read_file(file, _SHOWN * SPAN.itemsize)
    spans = np.frombuffer(data, SPAN, len(data) // SPAN.itemsize)
    # A place may be empty yet, or half written.
    spans = spans[(spans["start"] > 0) & (spans["end"] >= spans["start"])]
    ordered: Spans = spans[np.argsort(spans["end"], kind="stable")]
    return ordered


class Recorder:
    """A ring of spans, in which new spans overwrite the oldest.

    Attributes:
        capacity: The number of spans that it holds.
        count: The number of spans that were written.
    """

    def __init__(self, capacity: int, shown: int | None = None) -> None:
        self.capacity = capacity
        self._shown = shown
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
        """Write one span; `SPAN` has the meaning of the values, and ``size`` is its ``bytes``."""
        at = self.count % self.capacity * _RECORD.size
        _RECORD.pack_into(
            self._data, at,
            kind, kept, stage, index, version, in_flight, waited_for,
            ready, arrived, start, end, size,
        )  # fmt: skip
        if self._shown is not None:
            self._show(at)
        self.count += 1

    def _show(self, at: int) -> None:
        """Write the span at an offset of the ring into the file; after an error never again."""
        span = memoryview(self._data)[at : at + _RECORD.size]
        assert self._shown is not None
        try:
            os.pwrite(self._shown, span, self.count % _SHOWN * _RECORD.size)
        except OSError:  # the disk is full, for example
            self._close()

    def _close(self) -> None:
        if self._shown is not None:
            os.close(self._shown)
            self._shown = None

    def __del__(self) -> None:
        self._close()

    @property
    def dropped(self) -> int:
        """The number of spans that were overwritten."""
        return max(0, self.count - self.capacity)

    def spans(self) -> Spans:
        """Return the spans in the ring, oldest first; a view of it if none was overwritten."""
        everything = np.frombuffer(self._data, dtype=SPAN)
        if self.count <= self.capacity:
            return everything[: self.count]
        return np.roll(everything, -(self.count % self.capacity))
