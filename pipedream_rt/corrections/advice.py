"""Which corrections to use: a table of what was measured, and what follows from it.

With momentum, the next updates resemble the last ones: the weights can be extrapolated, and the
error of a stale update can be taken back. Such corrections helped every optimizer with momentum but
NAdam, which looks ahead by itself. Without momentum an update tells little of the next one, and
extrapolation made every such optimizer learn more slowly. So these have no rows.

The figures are printed by ``python benchmarks/first_touch.py table corrections stale``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipedream_rt.corrections.correction import Correction
from pipedream_rt.corrections.gradients import ErrorFeedback
from pipedream_rt.corrections.prediction import Extrapolation
from pipedream_rt.corrections.rates import StalenessDamping


def _both() -> list[Correction]:
    return [ErrorFeedback(), Extrapolation()]


def _three() -> list[Correction]:
    return [ErrorFeedback(limit=2.0), Extrapolation(), StalenessDamping()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What was measured of an optimizer with stale gradients, on 4 stages.

    Attributes:
        optimizer: The name of its class. It must have a momentum.
        most: The largest staleness, in updates, that the row is for.
        make: Makes the corrections that gave the lowest loss.
        slowdown: Updates to the same held-out loss with the corrections, as a multiple of those of
            plain training; the worse of two tasks.
        plain: The same without corrections.
    """

    optimizer: str
    most: int
    make: Callable[[], list[Correction]]
    slowdown: float
    plain: float


TABLE: tuple[Advice, ...] = (
    Advice(optimizer="Adam", most=1, make=_both, slowdown=1.07, plain=1.30),
    Advice(optimizer="Adam", most=3, make=_three, slowdown=1.32, plain=2.66),
    Advice(optimizer="AdamW", most=1, make=_both, slowdown=1.06, plain=1.19),
    Advice(optimizer="AdamW", most=3, make=_three, slowdown=1.27, plain=2.41),
    Advice(optimizer="SGD", most=1, make=_both, slowdown=1.10, plain=1.42),
    Advice(optimizer="SGD", most=3, make=_three, slowdown=1.78, plain=4.41),
    Advice(optimizer="Muon", most=1, make=_both, slowdown=0.99, plain=1.12),
    Advice(optimizer="Muon", most=3, make=_three, slowdown=1.10, plain=2.02),
    Advice(optimizer="RotatedAdamW", most=1, make=_both, slowdown=0.99, plain=1.19),
    Advice(optimizer="RotatedAdamW", most=3, make=_three, slowdown=1.23, plain=1.93),
)
"""By optimizer; the rows of one optimizer stand in the order of their staleness."""

SAMPLES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "async-1f1b": {
        "Adam": (1.17, 1.12),  # on 8 stages as AdamW
        "AdamW": (1.16, 1.12),
        "SGD": (1.30, 1.14),
        "Muon": (1.10, 1.00),
        "NAdam": (1.08, 1.06),
    },
    "2bw": {"AdamW": (1.42, 1.43), "Muon": (1.31, 1.32)},
}
"""By schedule and optimizer: samples to the same loss, as a multiple of those of plain training,
with one micro-batch for each stage, and with four; the worst of several programs
(``python benchmarks/first_touch.py table choice choice-adam 2bw``)."""

_OF = ("torch.optim", "pipedream_rt.optimizers")
"""Packages of the optimizers in the tables. An optimizer of another package may have the same name.
"""


def advised(
    optimizer: type | None, groups: Sequence[Mapping[str, Any]], staleness: int
) -> list[Correction]:
    """Return the measured best corrections for an optimizer; none where none were shown to help."""
    rows = _rows(optimizer)
    if not staleness or not rows or not all(_has_momentum(rows[0].optimizer, g) for g in groups):
        return []
    # Beyond the largest staleness that was measured, its row is the best guess.
    return next((row for row in rows if row.most >= staleness), rows[-1]).make()


def samples_taken(schedule: str, optimizer: type | None, per_stage: float) -> float | None:
    """Return the multiple in `SAMPLES` for some micro-batches per stage; None if not measured."""
    rows = SAMPLES.get(schedule, {})
    name = _measured(optimizer, rows)
    # Nothing was measured with fewer micro-batches than stages.
    return None if name is None or per_stage < 1 else rows[name][per_stage >= 4]


def _has_momentum(optimizer: str, group: Mapping[str, Any]) -> bool:
    """Whether the options of a parameter group give an optimizer of the table a momentum."""
    if optimizer == "SGD":
        return bool(group.get("momentum", 0.0))
    # An option that was left out has the default of its class, which is above 0 for betas.
    betas = group.get("betas")
    return betas is None or bool(betas[0])


def _rows(optimizer: type | None) -> list[Advice]:
    """Return the rows of an optimizer's class, or of the base that `_measured` finds."""
    name = _measured(optimizer, {row.optimizer for row in TABLE})
    return [row for row in TABLE if row.optimizer == name]


def _measured(optimizer: type | None, names: Container[str]) -> str | None:
    """Return the name of the nearest known base of an optimizer's class; None if not in names."""
    for cls in () if optimizer is None else optimizer.__mro__:
        if cls.__module__.startswith(_OF):
            # Only the nearest class counts: what is not in a table may derive from what is.
            return cls.__name__ if cls.__name__ in names else None
    return None
