"""Which corrections to use: a table of what was measured, and what follows from it.

An optimizer with a momentum goes on for a while in the direction in which it went, so where its
weights will be can be told, and what a stale update got wrong can be taken back. Corrections of
that kind helped every such optimizer but NAdam, which looks ahead by itself. An optimizer without
momentum steps along each gradient anew; its updates tell little of the next one, and to extrapolate
them made every one of them learn more slowly. So these have no rows.

The figures are printed by ``python benchmarks/first_touch.py table corrections stale``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipedream_rt.corrections.base import Correction
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
        slowdown: How many times the updates of plain training it took with them to the same
            held-out loss, on that of two tasks where it took more.
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
"""By optimizer and rising staleness."""

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
"""By schedule and optimizer, how many times the samples of plain training it took to the same loss,
with one micro-batch for each stage, and with four; on that of several programs where it took most
(``python benchmarks/first_touch.py table choice choice-adam 2bw``)."""

_OF = ("torch.optim", "pipedream_rt.optimizers")
"""Where the optimizers of the table come from; others may have the same names."""


def advised(
    optimizer: type | None, groups: Sequence[Mapping[str, Any]], staleness: int
) -> list[Correction]:
    """Return the corrections that are best for an optimizer; none where none were shown to help.

    Beyond the staleness that was measured, those of the largest measured one are taken.
    """
    rows = _rows(optimizer)
    if not staleness or not rows or not all(_has_momentum(rows[0].optimizer, g) for g in groups):
        return []
    return next((row for row in rows if row.most >= staleness), rows[-1]).make()


def samples_taken(schedule: str, optimizer: type | None, per_stage: float) -> float | None:
    """Return what `SAMPLES` has of an optimizer, or of the class that it is a kind of."""
    rows = SAMPLES.get(schedule, {})
    name = _measured(optimizer, rows)
    return None if name is None or per_stage < 1 else rows[name][per_stage >= 4]


def _has_momentum(optimizer: str, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer of the table has a momentum with the options of a group."""
    if optimizer == "SGD":
        return bool(group.get("momentum", 0.0))
    betas = group.get("betas")
    return betas is None or bool(betas[0])


def _rows(optimizer: type | None) -> list[Advice]:
    """Return what was measured of an optimizer, or of the class that it is a kind of."""
    name = _measured(optimizer, {row.optimizer for row in TABLE})
    return [row for row in TABLE if row.optimizer == name]


def _measured(optimizer: type | None, names: Container[str]) -> str | None:
    """Return the name of an optimizer, or of the class that it is a kind of, if it is of some."""
    for cls in () if optimizer is None else optimizer.__mro__:
        if cls.__module__.startswith(_OF):
            # NAdam and the like are kinds of Optimizer alone, and AdamW is a kind of Adam.
            return cls.__name__ if cls.__name__ in names else None
    return None
