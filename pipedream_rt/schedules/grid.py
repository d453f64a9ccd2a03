"""The drawing of an execution, in which the checker marks an action that breaks a rule."""

from __future__ import annotations

from collections.abc import Sequence


class Grid:
    """A drawing of an execution: a row for each worker, a column for each unit of time.

    With three stages and async-1f1b::

        stage 0  F0 F1 F2 .. .. B0 F3 ..
        stage 1  .. F0 F1 .. B0 F2 ..
        stage 2  .. .. F0 B0 F1 B1 ..
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._rows: list[dict[int, str]] = [{} for _ in names]

    def place(self, worker: int, time: int, text: str) -> None:
        """Write a text into the row of a worker and the column of a time."""
        self._rows[worker][time] = text

    def render(self, last: int | None = None) -> str:
        """Return the drawing, or its ``last`` columns alone."""
        end = max((max(row, default=-1) for row in self._rows), default=-1) + 1
        begin = 0 if last is None else max(0, end - last)
        cells = [[row.get(t, ".") for t in range(begin, end)] for row in self._rows]
        width = max((len(cell) for row in cells for cell in row), default=1)
        lead = "... " if begin else ""
        return "\n".join(
            f"{self._names[w]}  {lead}" + " ".join(cell.ljust(width) for cell in row).rstrip()
            for w, row in enumerate(cells)
        )
