"""How many samples an asynchronous schedule takes to the loss of plain training, as measured."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping, Sequence
from typing import Any

SAMPLES: Mapping[str, Mapping[str, Mapping[int, float]]] = {
    "async-1f1b": {
        "Adam": {1: 1.06, 2: 0.95},
        "AdamW": {1: 1.06, 2: 0.95},
        "SGD": {1: 1.26, 2: 1.05},
        "Muon": {1: 1.10, 4: 1.00},
        "NAdam": {1: 1.08, 4: 1.06},
    },
    "2bw": {"AdamW": {1: 1.42}, "Muon": {1: 1.31}},
}
"""By schedule, optimizer and micro-batches for each stage: samples to the same loss, as a multiple
of those of plain training; the worst of several programs without BatchNorm
(``python benchmarks/first_touch.py table defaults nesterov nesterov-sgd nesterov-sgd-2n
nesterov-adam choice 2bw``)."""

CORRECTED = ("Adam", "AdamW", "SGD", "Muon")
"""The optimizers whose figures are those with the corrections of ``corrections="auto"``."""

_OF = ("torch.optim", "pipedream_rt.optimizers")
"""Packages of the optimizers in the tables. An optimizer of another package may have the same name.
"""


def samples_taken(
    schedule: str, optimizer: type | None, per_stage: float, corrected: bool
) -> float | None:
    """Return the multiple in `SAMPLES` for some micro-batches per stage; None if not measured.

    ``corrected``: see `measured`.
    """
    rows = measured(schedule, optimizer, corrected)
    # Nothing was measured with fewer micro-batches than stages.
    return rows[max(n for n in rows if n <= per_stage)] if rows and per_stage >= 1 else None


def measured(schedule: str, optimizer: type | None, corrected: bool) -> Mapping[int, float]:
    """Return the row of `SAMPLES` for an optimizer; an empty one if there is none.

    ``corrected``: whether staleness is corrected as it is by default.
    """
    rows = SAMPLES.get(schedule, {})
    name = known_base(optimizer, rows)
    return {} if name is None or (name in CORRECTED and not corrected) else rows[name]


def has_momentum(name: str, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all parameter groups of a known optimizer have the momentum that was measured."""
    # An option that was left out has the default of its class, which is above 0 for betas.
    momenta = (group.get("momentum", _MOMENTA.get(name, 1.0)) for group in groups)
    betas = (group.get("betas") or (1.0,) for group in groups)
    # With nesterov=True SGD has another form of it, of which nothing was measured.
    form = any(group.get("nesterov") for group in groups) and name == "SGD"
    return all(momenta) and all(first for first, *_ in betas) and not form


_MOMENTA = {"SGD": 0.0, "Muon": 0.95}
"""The default of the option ``momentum``, by optimizer."""


def known_base(optimizer: type | None, names: Container[str]) -> str | None:
    """Return the name of the nearest known base of an optimizer's class; None if not in names."""
    for cls in () if optimizer is None else optimizer.__mro__:
        if cls.__module__.startswith(_OF):
            # Only the nearest class counts: what is not in a table may derive from what is.
            steps: list[Any] = [getattr(each, "step", None) for each in (optimizer, cls)]
            same = len({*map(inspect.unwrap, steps)}) == 1  # torch wraps them, to profile
            return cls.__name__ if cls.__name__ in names and same else None
    return None
