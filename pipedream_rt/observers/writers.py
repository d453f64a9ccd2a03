"""Observers that write files for other programs: CSV, and JSON lines."""

from __future__ import annotations

import csv
import json
import os
from typing import TextIO

from pipedream_rt.errors import ConfigError
from pipedream_rt.paths import given_path
from pipedream_rt.schema import open_to_append
from pipedream_rt.tracing.events import Ended, Event, Stepped, packed


class _Lines:
    """A file to which lines are added; it is open only while a run goes on."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = given_path(path, "the file to write lines to")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot write to {path}: {reason}") from error
        # Opened only to refuse early what cannot be written; the first line opens it again.
        self.close()

    def _open(self) -> TextIO:
        """Open the file; each line is written at once."""
        return open(self._path, "a", buffering=1, newline="", opener=open_to_append)

    def write(self, text: str) -> None:
        if self._file.closed:
            self._file = self._open()
        self._file.write(text)

    @property
    def is_new(self) -> bool:
        """Whether the file is missing or empty."""
        return not self._path.exists() or not self._path.stat().st_size

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        self._file.close()


class JSONLines:
    """Writes every event as a line of JSON. An `Observer`.

    Args:
        path: The file; what is in it stays, and lines are added.

    Raises:
        ConfigError: It cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lines = _Lines(path)

    def __call__(self, event: Event) -> None:
        """Write an event."""
        self._lines.write(json.dumps(packed(event)) + "\n")
        if isinstance(event, Ended):
            self._lines.close()


class CSV:
    """Writes a row for each mini-batch: time, step, loss, learning rate, staleness and samples.

    An `Observer`. The learning rate is that of the first parameter group.

    Args:
        path: The file; what is in it stays, and rows are added.

    Raises:
        ConfigError: It cannot be written.
    """

    COLUMNS = ("time", "step", "loss", "rate", "staleness", "samples", "micro_batches")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lines = _Lines(path)
        self._rows = csv.writer(self._lines, lineterminator="\n")
        self._has_looked = False  # whether the file has column names was checked

    def __call__(self, event: Event) -> None:
        """Write the row of a mini-batch; before the first row of a file, the column names."""
        if isinstance(event, Stepped):
            if not self._has_looked and self._lines.is_new:
                self._rows.writerow(self.COLUMNS)
            self._has_looked = True
            rate = event.rates[0] if event.rates else ""
            self._rows.writerow(
                (event.time, event.step, event.loss, rate, event.staleness, event.samples,
                 event.micro_batches)
            )  # fmt: skip
        if isinstance(event, Ended):
            self._lines.close()
