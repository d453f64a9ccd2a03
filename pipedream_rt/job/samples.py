"""How many samples an asynchronous schedule takes to the loss of plain training, as measured."""

from __future__ import annotations

from collections.abc import Container, Mapping

SAMPLES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "async-1f1b": {
        "Adam": (1.05, 1.05),
        "AdamW": (1.05, 1.05),
        "SGD": (1.05, 1.05),
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


def samples_taken(schedule: str, optimizer: type | None, per_stage: float) -> float | None:
    """Return the multiple in `SAMPLES` for some micro-batches per stage; None if not measured."""
    rows = SAMPLES.get(schedule, {})
    name = known_base(optimizer, rows)
    # Nothing was measured with fewer micro-batches than stages.
    return None if name is None or per_stage < 1 else rows[name][per_stage >= 4]


def known_base(optimizer: type | None, names: Container[str]) -> str | None:
    """Return the name of the nearest known base of an optimizer's class; None if not in names."""
    for cls in () if optimizer is None else optimizer.__mro__:
        if cls.__module__.startswith(_OF):
            # Only the nearest class counts: what is not in a table may derive from what is.
            return cls.__name__ if cls.__name__ in names else None
    return None
