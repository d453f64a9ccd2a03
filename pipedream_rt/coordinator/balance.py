"""What a pipeline says once, when it has seen how long its stages take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipedream_rt.coordinator.results import StepResult
from pipedream_rt.schedules import Plan
from pipedream_rt.schedules.edges import name_of

_LOST = 0.2
"""The share of the throughput from which on unequal stages are told of."""

_FROM, _UPDATES, _BUSY_S = 3, 10, 1.0
"""The update from which on stages are measured; and for how many updates and seconds at least."""


class Balance:
    """Says once, from what stages have computed so far, that they take too unequal times.

    Args:
        plan: The plan.
        say: Called with the sentence.
    """

    def __init__(self, plan: Plan, say: Callable[[str], object]) -> None:
        """Measure nothing yet."""
        self._plan = plan
        self._say: Callable[[str], object] | None = say
        self._first: StepResult | None = None

    def __call__(self, result: StepResult) -> None:
        """Look at the result of a mini-batch, which come in order."""
        if self._say is None:
            return
        if self._first is None:
            # The first mini-batches pay for memory and code that is not there yet. Replicas take
            # turns, so that of each the whole is looked at.
            self._first = result if result.step >= _FROM or self._plan.replicated else None
            return
        since = result.step - self._first.step
        before = (0.0,) * len(result.busy_s) if self._plan.replicated else self._first.busy_s
        busy = [now - then for now, then in zip(result.busy_s, before, strict=True)]
        if since < _UPDATES or max(busy) < _BUSY_S:
            return
        say, self._say = self._say, None
        for text in about_balance(self._plan, busy):
            say(text)


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
