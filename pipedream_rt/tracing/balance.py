"""Advice from how long the stages of a pipeline compute.

``busy_s`` is, by stage, the seconds that it has computed: of all its replicas for the size of a
run, of one for the balance.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipedream_rt.schedules import Plan
from pipedream_rt.schedules.edges import name_of
from pipedream_rt.tracing.summary import seconds_text

_AS_FAST = 1.05
"""The speed, in times of one process, below which a run is said to be too small."""

_LOST = 0.2
"""The share of the throughput from which on the loss by unequal stages is reported."""


def speed_of(busy_s: Sequence[float], seconds: float) -> float:
    """Return how many times as fast the stages were as one process that does all by itself."""
    return sum(busy_s) / seconds if seconds > 0 else 0.0


def about_size(
    plan: Plan, busy_s: Sequence[float], seconds: float, micro_batches: int
) -> list[str]:
    """Return the advice for a run that one process would do as fast; none for others.

    ``seconds`` is what the run takes, or what it must take by its processor time.
    """
    speed = speed_of(busy_s, seconds)
    if plan.workers == 1 or not 0 < speed < _AS_FAST:
        return []
    each = seconds_text(sum(busy_s) / max(1, micro_batches))
    # At least: here cutting and sending count as computing, and one process does neither.
    factor = f"at least {1 / speed:.1f} times as fast" if speed < 0.95 else "as fast"
    return [
        f"too small for {plan.workers} workers: all stages together compute {each} for a "
        f"micro-batch, and the rest of the time goes into messages and waiting. One process would "
        f"be {factor}. Larger mini-batches, fewer micro_batches, fewer stages or a larger model "
        'change that; until then, workers="serial" computes the same bits in one process'
    ]


def about_balance(plan: Plan, busy_s: Sequence[float]) -> list[str]:
    """Return the advice for stages of which some compute much longer than others."""
    of_worker = [0.0] * plan.workers
    for stage, seconds in enumerate(busy_s):
        for worker in {plan.worker_of(a) for a in plan.addresses if plan.stage_of(a) == stage}:
            of_worker[worker] += seconds
    mean, most = sum(of_worker) / len(of_worker), max(of_worker)
    if mean >= (1 - _LOST) * most:
        return []
    slowest, fastest = (pick(range(len(busy_s)), key=busy_s.__getitem__) for pick in (max, min))
    alone = ""
    if plan.layers and len(layers := plan.layers[slowest]) == 1:
        alone = f"its one layer, {layers[0]}, takes several workers by Layout(replicas=...); or "
    return [
        f"{name_of(slowest)} has computed {busy_s[slowest]:.2g} s, and {name_of(fastest)} "
        f"{busy_s[fastest]:.2g} s: if all workers computed equally long, the pipe would be "
        f"{most / mean:.1f} times as fast. To move layers, {alone}measure "
        "them: `pipedream-rt profile -o model.profile SCRIPT`, then `pipedream-rt plan "
        f"model.profile --workers {plan.workers}` says where to cut; or let the pipeline do both: "
        'stages="auto" with example='
    ]
