"""Which corrections to use: a table of what was measured, and what follows from it.

One update stale, what costs samples is momentum that goes on where a stale gradient has sent it. A
shorter one, in Nesterov's form, makes up for that with AdamW, Adam and SGD. Where the form of the
momentum is the optimizer's own, or more updates are stale, the next updates still resemble the last
ones: the weights can be extrapolated, and the error of a stale update can be taken back. NAdam has
Nesterov's form by itself. Without momentum an update tells little of the next one, and
extrapolation made every such optimizer learn more slowly. So these have no rows.

The figures are printed by ``python benchmarks/first_touch.py table`` with the sets ``nesterov``,
``nesterov-sgd``, ``nesterov-adam``, ``corrections`` and ``stale``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipedream_rt.corrections.gradients import ErrorFeedback
from pipedream_rt.corrections.nesterov import StalenessNesterov
from pipedream_rt.corrections.prediction import Extrapolation
from pipedream_rt.corrections.rates import StalenessDamping
from pipedream_rt.job.samples import has_momentum, known_base
from pipedream_rt.stage.correction import Correction


def _nesterov() -> list[Correction]:
    return [StalenessNesterov()]


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
            plain training; the worst of the programs that were tried.
        plain: The same without corrections.
    """

    optimizer: str
    most: int
    make: Callable[[], list[Correction]]
    slowdown: float
    plain: float


TABLE: tuple[Advice, ...] = (
    Advice(optimizer="Adam", most=1, make=_nesterov, slowdown=1.03, plain=1.30),
    Advice(optimizer="Adam", most=3, make=_three, slowdown=1.32, plain=2.66),
    Advice(optimizer="AdamW", most=1, make=_nesterov, slowdown=1.06, plain=1.54),
    Advice(optimizer="AdamW", most=3, make=_three, slowdown=1.27, plain=2.41),
    Advice(optimizer="SGD", most=1, make=_nesterov, slowdown=1.07, plain=1.42),
    Advice(optimizer="SGD", most=3, make=_three, slowdown=1.78, plain=4.41),
    Advice(optimizer="Muon", most=1, make=_both, slowdown=0.99, plain=1.12),
    Advice(optimizer="Muon", most=3, make=_three, slowdown=1.10, plain=2.02),
    Advice(optimizer="RotatedAdamW", most=1, make=_both, slowdown=0.99, plain=1.19),
    Advice(optimizer="RotatedAdamW", most=3, make=_three, slowdown=1.23, plain=1.93),
)
"""By optimizer; the rows of one optimizer stand in the order of their staleness."""


def advised(
    optimizer: type | None, groups: Sequence[Mapping[str, Any]], staleness: int
) -> list[Correction]:
    """Return the measured best corrections for an optimizer; none where none were shown to help."""
    rows = _rows(optimizer)
    if not staleness or not rows or not has_momentum(rows[0].optimizer, groups):
        return []
    # Beyond the largest staleness that was measured, its row is the best guess.
    return next((row for row in rows if row.most >= staleness), rows[-1]).make()


def _rows(optimizer: type | None) -> list[Advice]:
    """Return the rows of an optimizer's class, or of the base that `known_base` finds."""
    name = known_base(optimizer, {row.optimizer for row in TABLE})
    return [row for row in TABLE if row.optimizer == name]
