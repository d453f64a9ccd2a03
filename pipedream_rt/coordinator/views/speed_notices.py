"""Two warnings that a run gives at most once: unequal stages, and a model too small to split."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipedream_rt.coordinator.results import StepResult
from pipedream_rt.schedules import Plan
from pipedream_rt.tracing.balance import about_balance, about_size

_FROM, _UPDATES, _BUSY_S = 3, 10, 1.0
"""The first update that is measured; the fewest updates, and seconds, of a measurement."""


class BalanceNotice:
    """Warns once if the compute times of the stages are too unequal."""

    def __init__(self, plan: Plan, say: Callable[[str], object]) -> None:
        self._plan = plan
        self._say: Callable[[str], object] | None = say
        self._first: StepResult | None = None

    def __call__(self, result: StepResult) -> None:
        """Look at the next result; results come in order."""
        if self._say is None:
            return
        if self._first is None:
            # The first mini-batches pay for memory and code that is not there yet. Replicas take
            # turns, so two results may be of two: all that each has computed so far counts.
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


_WAITED = 0.5
"""The pipe sets the pace if the script waits for results for more than this share of the time."""

_ALONE = 0.9
"""The share of their computing time for which stages have a core, where nobody else uses it."""


class SizeNotice:
    """Warns once if the pipe sets the pace and one process would be as fast.

    Where other programs use the cores too, the clock says nothing of a model. It is then judged by
    the processor time of the processes. The workers have so many ``cores`` together, and
    ``threads`` each.
    """

    def __init__(
        self,
        plan: Plan,
        say: Callable[[str], object],
        *,
        cores: int,
        threads: int = 1,
    ) -> None:
        self._plan = plan
        self._cores, self._threads = cores, threads
        self._say: Callable[[str], object] | None = say
        self._first: tuple[StepResult, float, float, float] | None = None

    def __call__(self, result: StepResult, waited: float) -> None:
        """Look at the next result; the script has ``waited`` so many seconds for all so far."""
        if self._say is None or result.step < _FROM:
            return
        now, own = time.monotonic(), time.process_time()
        if self._first is None:
            self._first = (result, now, own, waited)
            return
        first, then, own_before, before = self._first
        count, seconds = result.step - first.step, now - then
        if count < _UPDATES or seconds < _BUSY_S:
            return
        say, self._say = self._say, None
        if waited - before > _WAITED * seconds:  # else the loader or the script's loop sets it
            busy = [b - a for a, b in zip(first.processor_s, result.processor_s)]
            clock = [b - a for a, b in zip(first.busy_s, result.busy_s)]
            if sum(busy) < _ALONE * sum(clock):
                seconds = max(self._of_workers(first, result), own - own_before)
            for text in about_size(self._plan, busy, seconds, count * self._plan.per_update):
                say(text)

    def _of_workers(self, first: StepResult, last: StepResult) -> float:
        """Return the seconds that the workers need at least, by themselves and on their cores."""
        each = [0.0] * self._plan.workers
        for stage, (a, b) in enumerate(zip(first.process_s, last.process_s)):
            worker = self._plan.worker_of(stage)
            each[worker] = max(each[worker], b - a)
        return max(max(each) / self._threads, sum(each) / self._cores)
