"""What the times of the stages of a pipeline suggest."""

from __future__ import annotations

from collections.abc import Sequence

from pipedream_rt.schedules import Plan
from pipedream_rt.schedules.edges import name_of

_LOST = 0.2
"""The share of the throughput from which on unequal stages are told of."""


def about_balance(plan: Plan, busy_s: Sequence[float]) -> list[str]:
    """Return what is said of stages of which some compute much longer than others.

    Args:
        plan: The plan.
        busy_s: By stage, the seconds that it has computed, or one of its replicas.
    """
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
