"""Which corrections to use: a table of what was measured, and what follows from it.

The figures are printed by ``python benchmarks/learning.py table``, and the page of results says how
they were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipedream_rt.corrections.base import Correction
from pipedream_rt.corrections.gradients import ErrorFeedback
from pipedream_rt.corrections.prediction import Extrapolation
from pipedream_rt.corrections.rates import StalenessDamping


def _none() -> list[Correction]:
    return []


def _both() -> list[Correction]:
    return [ErrorFeedback(), Extrapolation()]


def _three() -> list[Correction]:
    return [ErrorFeedback(limit=2.0), Extrapolation(), StalenessDamping()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What was measured of an optimizer with stale gradients.

    Attributes:
        optimizer: The name of its class.
        most: The largest staleness that this is about.
        make: Makes the corrections that gave the lowest loss.
        slowdown: How many times the samples of the best synchronous training it took with them to
            the same loss, in runs of 1,200 updates.
        plain: The same without corrections.
    """

    optimizer: str
    most: int
    make: Callable[[], list[Correction]]
    slowdown: float
    plain: float


TABLE: tuple[Advice, ...] = (
    Advice(optimizer="AdamW", most=1, make=_both, slowdown=1.90, plain=3.0),
    Advice(optimizer="AdamW", most=7, make=_three, slowdown=3.9, plain=6.6),
    Advice(optimizer="NAdam", most=7, make=_none, slowdown=3.3, plain=3.3),
    Advice(optimizer="Muon", most=1, make=_both, slowdown=1.03, plain=1.33),
    Advice(optimizer="Muon", most=7, make=_three, slowdown=1.47, plain=2.7),
    Advice(optimizer="RotatedAdamW", most=1, make=_both, slowdown=0.98, plain=1.39),
)
"""By optimizer and rising staleness."""

BEARABLE = 1.5
"""The slowdown that a pipe without a bubble makes good, where the bubble of others is large."""

_OF = ("torch.optim", "pipedream_rt.optimizers")
"""Where the optimizers of the table come from; others may have the same names."""

_told: set[tuple[str, int]] = set()


def advised(optimizer: type | None, staleness: int) -> list[Correction]:
    """Return the corrections that are best for an optimizer; none where nothing was measured.

    Beyond the staleness that was measured, those of the largest measured one are taken.

    Args:
        optimizer: The class of the optimizer.
        staleness: The largest staleness of a stage.
    """
    rows = _rows(optimizer)
    return _nearest(rows, staleness).make() if staleness and rows else []


def doubt(optimizer: type, staleness: int, corrections: Sequence[Correction]) -> str:
    """Return a warning if gradients are staler than an optimizer was shown to bear, else nothing.

    Each warning is returned once in a process; none is about optimizers that were not measured.

    Args:
        optimizer: The class of the optimizer.
        staleness: The largest staleness of a stage.
        corrections: The corrections that are used.
    """
    rows = _rows(optimizer)
    borne = max(
        (row.most for row in rows if (row.slowdown if corrections else row.plain) <= BEARABLE),
        default=0,
    )
    name = optimizer.__name__
    if not rows or staleness <= borne or (name, staleness) in _told:
        return ""
    _told.add((name, staleness))
    nearest = _nearest(rows, staleness)
    factor = nearest.slowdown if corrections else nearest.plain
    better = sorted({row.optimizer for row in TABLE if row.slowdown <= BEARABLE and row.most == 1})
    return (
        f"gradients are up to {staleness} updates stale; with {name} and a staleness of "
        f"{nearest.most} it took {factor:g} times the samples of the best synchronous training to "
        "the same loss, in runs of 1,200 updates; over 10,000 it weighed much less. What bore "
        f"staleness best: at least as many micro-batches as stages, with {' or '.join(better)} and "
        'corrections="auto". A schedule that flushes has none'
    )


def _nearest(rows: Sequence[Advice], staleness: int) -> Advice:
    """Return what was measured with at least a staleness, or else with the largest one."""
    return next((row for row in rows if row.most >= staleness), rows[-1])


def _rows(optimizer: type | None) -> list[Advice]:
    """Return what was measured of an optimizer, or of the class that it is a kind of."""
    measured = {row.optimizer for row in TABLE}
    for cls in () if optimizer is None else optimizer.__mro__:
        if cls.__name__ in measured and cls.__module__.startswith(_OF):
            return [row for row in TABLE if row.optimizer == cls.__name__]
    return []
