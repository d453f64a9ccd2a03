"""The best plan: which layers are a stage, and on how many workers, so that the pipe is fastest.

The search goes from the end of the model to its beginning. ``best[p, r, u][i]`` is the least period
of a pipe that has the layers behind cut i, begins with a stage of r replicas on workers p to
p + r - 1, and uses u workers in all. It follows from the pipes that begin behind that stage::

    best[p, r, u][i] = min over cuts j of  max(period(i, j), transfer(j), best[p', r', u - r][j])

with p' >= p + r, where the stage fits into the memory of its workers; the memory depends on the
u - r workers behind the stage. So the search sees every plan with contiguous stages on contiguous
workers, also those that leave workers idle. It takes O(cuts^2 workers^3) steps, or O(cuts^2
workers^2) where all workers are alike: then only the first workers need ever be idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.costing import EVERY, Costing
from pipedream_rt.planning.cuts import Floats
from pipedream_rt.tracing.summary import bytes_text

_EQUAL = 1 + 1e-12
"""Periods within this factor count as equal, so that rounding does not choose the plan."""


class StageChoice(NamedTuple):
    """A stage of a plan.

    Attributes:
        start: The cut before it; -1 for the beginning of the model.
        end: The cut behind it.
        workers: Its workers, as indices of `Machines.workers`.
    """

    start: int
    end: int
    workers: tuple[int, ...]

    @property
    def span(self) -> tuple[int, int]:
        """Its row and column, as in `cuts.spans`."""
        return self.start + 1, self.end


class _Head(NamedTuple):
    """The first stage of the part behind a cut, and the number of workers of that part.

    Attributes:
        first: The first worker of its first stage.
        replicas: The replicas of that stage, on consecutive workers.
        used: The workers of that stage and all behind it.
    """

    first: int
    replicas: int
    used: int

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers of the first stage."""
        return tuple(range(self.first, self.first + self.replicas))

    @property
    def after(self) -> int:
        """How many workers the stages behind the first one use."""
        return self.used - self.replicas


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of the search.

    Attributes:
        replicas: The most replicas of a stage; None for any number.
        workers: The number of workers of a plan; None for the best number.
    """

    replicas: int | None = None
    workers: int | None = None


def best_stages(costing: Costing, limits: Limits | None = None) -> tuple[float, list[StageChoice]]:
    """Return the least period in seconds, and the stages of a plan that has it.

    Of several such plans it is one with the fewest workers, and of these the most even one: the sum
    of the squares of the periods of its stages is the smallest.
    """
    search = _Search(costing, limits or Limits())
    least = search.least()
    period = min(least.values())
    bound = period * _EQUAL
    fewest = min(used for used, value in least.items() if value <= bound)
    evenness = search.evenness(bound)
    return period, search.stages(evenness, search.sweep(evenness), fewest)


def stages_by_workers(
    costing: Costing, limits: Limits | None = None
) -> dict[int, list[StageChoice]]:
    """Return, for each number of workers that a plan can use, the stages of one of the fastest."""
    search = _Search(costing, limits or Limits())
    return {used: search.stages(search.period(), search.periods, used) for used in search.least()}


@dataclass(frozen=True, slots=True)
class _Goal:
    """The value that the sweep minimises.

    Attributes:
        of_stage: The value of a first stage, for some spans by row and column; infinite where the
            span cannot be one.
        of_hop: By cut, the value of the hop from one first stage to the next; one value may stand
            for all cuts.
        join: Combines the values of two parts that follow each other.
    """

    of_stage: Callable[[_Head, Any], Floats]
    of_hop: Callable[[_Head, _Head], Floats]
    join: np.ufunc


class _Search:
    """A search for plans; periods of stages are computed once for workers that are alike."""

    def __init__(self, costing: Costing, limits: Limits) -> None:
        self._costing, self._limits = costing, limits
        self._most = limits.replicas or len(costing.machines)
        self._known: dict[tuple[object, ...], Floats] = {}

    @cached_property
    def periods(self) -> dict[_Head, Floats]:
        """The best periods of every beginning, as `sweep` returns them."""
        return self.sweep(self.period())

    def least(self) -> dict[int, float]:
        """Return the least period by number of workers, of those that are allowed, rising."""
        allowed = [each for each in self.periods if self._limits.workers in (None, each.used)]
        found: dict[int, float] = {}
        for begin in sorted(allowed, key=lambda each: each.used):
            period = float(self.periods[begin][0])
            if math.isfinite(period):
                found[begin.used] = min(period, found.get(begin.used, math.inf))
        if not found:
            raise ConfigError(_nothing_fits(self._costing, self, allowed))
        return found

    # -- goals ----------------------------------------------------------------------------------

    def period(self) -> _Goal:
        """Minimise the period."""
        return _Goal(self._fitting, self._transfers, np.maximum)

    def evenness(self, bound: float) -> _Goal:
        """Minimise the sum of the squares of the periods, none of which exceeds a bound."""

        def of_stage(begin: _Head, where: Any) -> Floats:
            periods = self._fitting(begin, where)
            return np.where(periods <= bound, periods, math.inf) ** 2

        def of_hop(begin: _Head, following: _Head) -> Floats:
            return np.where(self._transfers(begin, following) <= bound, 0.0, math.inf)

        return _Goal(of_stage, of_hop, np.add)

    def memory(self) -> _Goal:
        """Minimise the memory of the worker that needs the most."""

        def of_stage(begin: _Head, where: Any) -> Floats:
            memory = self._costing.memory(begin.replicas, begin.after, where)
            return np.where(np.isfinite(self._possible(begin, where)), memory, math.inf)

        return _Goal(of_stage, lambda begin, following: np.zeros(1), np.maximum)

    def _fitting(self, begin: _Head, where: Any) -> Floats:
        """Return the periods of the first stage, infinite where its workers lack the memory."""
        periods, room = self._possible(begin, where), self._costing.room(begin.workers)
        if math.isinf(room):
            return periods
        memory = self._costing.memory(begin.replicas, begin.after, where)
        return np.where(memory <= room, periods, math.inf)

    def _possible(self, begin: _Head, where: Any) -> Floats:
        """Return the periods of the first stage, infinite where the schedule forbids it."""
        machines, workers = self._costing.machines, begin.workers
        speed = min(machines.workers[w].speed for w in workers)
        links = (machines.bandwidth_of(workers), machines.latency_of(workers))
        key = (begin.replicas, speed, *links)
        if key not in self._known:
            self._known[key] = self._costing.period(workers)
        periods: Floats = self._known[key][where]
        is_possible = self._costing.is_possible(begin.replicas, begin.after)
        return periods if is_possible else np.full_like(periods, math.inf)

    def _transfers(self, begin: _Head, following: _Head) -> Floats:
        """Return, by cut, the seconds of messages between the first stages of two beginnings."""
        return self._costing.transfers(begin.workers, following.workers)

    # -- the sweep ------------------------------------------------------------------------------

    def _begins(self) -> Iterator[_Head]:
        """Yield all beginnings, each after those that can follow it."""
        workers = len(self._costing.machines)
        for first in reversed(range(workers)):
            left = workers - first
            for replicas in range(1, min(self._most, left) + 1):
                # If workers are alike, let only the first ones of all be idle: none behind `first`.
                fewest = left if self._costing.machines.are_alike else replicas
                for used in range(fewest, left + 1):
                    yield _Head(first, replicas, used)

    def sweep(self, goal: _Goal) -> dict[_Head, Floats]:
        """Return, for each beginning, the best value of the rest, by the cut before it plus one."""
        best: dict[_Head, Floats] = {}
        for begin in self._begins():
            rest = self._rest(goal, begin, best)
            best[begin] = goal.join(goal.of_stage(begin, EVERY), rest).min(axis=1)
        return best

    def _rest(self, goal: _Goal, begin: _Head, best: dict[_Head, Floats]) -> Floats:
        """Return, by the cut behind the first stage, the best value of what follows it."""
        found = np.full(len(self._costing.cuts), math.inf)
        if not begin.after:
            found[-1] = 0.0  # behind the last cut nothing need follow
        for following in _followers(begin, best):
            behind = goal.join(goal.of_hop(begin, following), best[following][1:])
            np.minimum(found, behind, out=found)
        return found

    def stages(self, goal: _Goal, best: dict[_Head, Floats], used: int) -> list[StageChoice]:
        """Return the stages of the best plan that uses a number of workers."""
        row, found = 0, []
        values = {begin: float(b[0]) for begin, b in best.items() if begin.used == used}
        while values:
            begin = min(values, key=values.__getitem__)  # the first one of several
            choices = goal.join(goal.of_stage(begin, row), self._rest(goal, begin, best))
            end = int(np.argmin(choices))
            found.append(StageChoice(row - 1, end, begin.workers))
            row = end + 1
            values = {
                each: float(goal.join(_at(goal.of_hop(begin, each), end), best[each][row]))
                for each in _followers(begin, best)
            }
        return found


def _at(hops: Floats, cut: int) -> float:
    """Return the value of a hop at a cut; one value may stand for all cuts."""
    return float(hops[cut if len(hops) > 1 else 0])


def _followers(begin: _Head, best: Mapping[_Head, Floats]) -> list[_Head]:
    """Return the beginnings that can follow the first stage of another."""
    free = begin.first + begin.replicas
    return [each for each in best if each.first >= free and each.used == begin.after]


def _nothing_fits(costing: Costing, search: _Search, allowed: Sequence[_Head]) -> str:
    """Return the text of an error: why there is no plan, or the least memory that would do."""
    if not allowed:
        return f"a plan cannot use more than the {len(costing.machines)} workers that there are"
    needed = search.sweep(search.memory())
    least = min(float(needed[begin][0]) for begin in allowed)
    if math.isinf(least):
        used = min(begin.used for begin in allowed)
        more = ""
        if costing.schedule == "2bw":
            more = f", or more micro-batches per update than {costing.per_update}"
        return (
            f"there is no plan for {used} workers and a model that can be cut at "
            f"{len(costing.cuts)} places; allow replicas, or use fewer workers{more}"
        )
    most = max(worker.memory for worker in costing.machines.workers)
    return (
        f"no plan fits: the best one needs {bytes_text(least)} ({math.ceil(least):,} bytes) on a "
        f"worker, and the largest worker has {bytes_text(most)} ({most:,.0f} bytes); use more "
        "workers, smaller micro-batches, or recomputation"
    )
