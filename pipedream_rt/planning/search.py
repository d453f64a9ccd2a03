"""The best plan: which layers are a stage, and on how many workers, so that the pipe is fastest.

The search goes from the end of the model to its beginning. ``best[p, r, u][i]`` is the least period
of a pipe that has the layers behind cut i, begins with a stage of r replicas on the workers from p
on, and uses u workers in all. It follows from those that begin behind that stage::

    best[p, r, u][i] = min over cuts j of  max(period(i, j), transfer(j), best[p', r', u - r][j])

with p' >= p + r, where the stage fits into the memory of its workers; the memory depends on the
u - r workers behind the stage. So every plan with contiguous stages on contiguous workers is seen,
also those that leave workers idle. Steps: O(cuts^2 workers^3), and O(cuts^2 workers^2) where all
workers are alike, since it is then enough to leave idle the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pipedream_rt.errors import ConfigError
from pipedream_rt.observe.summary import bytes_text
from pipedream_rt.planning.costing import EVERY, Costing
from pipedream_rt.planning.cuts import Floats

_EQUAL = 1 + 1e-12
"""Periods of which one is larger by less are equal, so that rounding does not choose the plan."""


class Stage(NamedTuple):
    """A stage of a plan.

    Attributes:
        start: The cut before it; -1 for the beginning of the model.
        workers: Its workers, in order.
    """

    start: int
    end: int
    workers: tuple[int, ...]

    @property
    def span(self) -> tuple[int, int]:
        """Its row and column among the spans (`cuts.spans`)."""
        return self.start + 1, self.end


class _Begin(NamedTuple):
    """How a rest of the model begins.

    Attributes:
        first: The first worker of its first stage.
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
        """The workers on the stages behind the first one."""
        return self.used - self.replicas


@dataclass(frozen=True, slots=True)
class Limits:
    """What plans are looked at.

    Attributes:
        replicas: The most replicas of a stage; None for any number.
        workers: The number of workers that are used; None for as many as are best.
    """

    replicas: int | None = None
    workers: int | None = None


def best_stages(costing: Costing, limits: Limits | None = None) -> tuple[float, list[Stage]]:
    """Return the least period, and the stages of a plan that has it.

    Of several such plans it is one with the fewest workers, and of these the one for which the
    squares of the periods of all stages have the smallest sum: the most even one.
    """
    search = _Search(costing, limits or Limits())
    least = search.least()
    period = min(least.values())
    bound = period * _EQUAL
    fewest = min(used for used, value in least.items() if value <= bound)
    evenness = search.evenness(bound)
    return period, search.stages(evenness, search.sweep(evenness), fewest)


def stages_by_workers(costing: Costing, limits: Limits | None = None) -> dict[int, list[Stage]]:
    """Return, for each number of workers that some plan can use, the stages of a fastest one.

    Where several are as fast, it need not be the most even one.
    """
    search = _Search(costing, limits or Limits())
    return {used: search.stages(search.period(), search.periods, used) for used in search.least()}


@dataclass(frozen=True, slots=True)
class _Goal:
    """What is made small.

    Attributes:
        of_stage: Returns the value of the first stage of a beginning, for some spans by row and
            column; infinite where it cannot be.
        of_hop: Returns, by cut, the value of the hop from the first stage of a beginning to that of
            another one.
    """

    of_stage: Callable[[_Begin, Any], Floats]
    of_hop: Callable[[_Begin, _Begin], Floats]
    join: np.ufunc


class _Search:
    """A search for plans."""

    def __init__(self, costing: Costing, limits: Limits) -> None:
        self._costing, self._limits = costing, limits
        self._most = limits.replicas or len(costing.machines)
        self._known: dict[tuple[object, ...], Floats] = {}

    @cached_property
    def periods(self) -> dict[_Begin, Floats]:
        """What `sweep` returns for the shortest periods."""
        return self.sweep(self.period())

    def least(self) -> dict[int, float]:
        """Return the least period for each number of workers that is allowed, rising."""
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
        """Return the goal of a short period."""
        return _Goal(self._fitting, self._transfers, np.maximum)

    def evenness(self, bound: float) -> _Goal:
        """Return the goal of a small sum of squares of periods, none of which exceeds a bound."""

        def of_stage(begin: _Begin, where: Any) -> Floats:
            periods = self._fitting(begin, where)
            return np.where(periods <= bound, periods, math.inf) ** 2

        def of_hop(begin: _Begin, following: _Begin) -> Floats:
            return np.where(self._transfers(begin, following) <= bound, 0.0, math.inf)

        return _Goal(of_stage, of_hop, np.add)

    def memory(self) -> _Goal:
        """Return the goal of little memory on the worker that needs the most."""

        def of_stage(begin: _Begin, where: Any) -> Floats:
            memory = self._costing.memory(begin.replicas, begin.after, where)
            return np.where(np.isfinite(self._possible(begin, where)), memory, math.inf)

        return _Goal(of_stage, lambda begin, following: np.zeros(1), np.maximum)

    def _fitting(self, begin: _Begin, where: Any) -> Floats:
        """Return the periods of the first stage of a beginning, if the workers have the memory."""
        periods, room = self._possible(begin, where), self._costing.room(begin.workers)
        if math.isinf(room):
            return periods
        memory = self._costing.memory(begin.replicas, begin.after, where)
        return np.where(memory <= room, periods, math.inf)

    def _possible(self, begin: _Begin, where: Any) -> Floats:
        """Return the periods of the first stage of a beginning, infinite where it cannot be."""
        machines, workers = self._costing.machines, begin.workers
        speed = min(machines.workers[w].speed for w in workers)
        links = (machines.bandwidth_of(workers), machines.latency_of(workers))
        key = (begin.replicas, speed, *links)
        if key not in self._known:
            self._known[key] = self._costing.period(workers)
        periods: Floats = self._known[key][where]
        is_possible = self._costing.is_possible(begin.replicas, begin.after)
        return periods if is_possible else np.full_like(periods, math.inf)

    def _transfers(self, begin: _Begin, following: _Begin) -> Floats:
        """Return the times of messages between the first stages of two beginnings."""
        return self._costing.transfers(begin.workers, following.workers)

    # -- the sweep ------------------------------------------------------------------------------

    def _begins(self) -> Iterator[_Begin]:
        """Yield how a rest of the model can begin, those that begin farther behind first."""
        workers = len(self._costing.machines)
        for first in reversed(range(workers)):
            left = workers - first
            for replicas in range(1, min(self._most, left) + 1):
                fewest = left if self._costing.machines.are_alike else replicas
                for used in range(fewest, left + 1):
                    yield _Begin(first, replicas, used)

    def sweep(self, goal: _Goal) -> dict[_Begin, Floats]:
        """Return, for each beginning, the best value of a rest, by the cut before it plus one."""
        best: dict[_Begin, Floats] = {}
        for begin in self._begins():
            rest = self._rest(goal, begin, best)
            best[begin] = goal.join(goal.of_stage(begin, EVERY), rest).min(axis=1)
        return best

    def _rest(self, goal: _Goal, begin: _Begin, best: dict[_Begin, Floats]) -> Floats:
        """Return, by the cut behind the first stage, the best value of what follows."""
        found = np.full(len(self._costing.cuts), math.inf)
        if not begin.after:
            found[-1] = 0.0
        for following in _followers(begin, best):
            behind = goal.join(goal.of_hop(begin, following), best[following][1:])
            np.minimum(found, behind, out=found)
        return found

    def stages(self, goal: _Goal, best: dict[_Begin, Floats], used: int) -> list[Stage]:
        """Return the stages of the best plan that uses a number of workers."""
        row, found = 0, []
        values = {begin: float(b[0]) for begin, b in best.items() if begin.used == used}
        while values:
            begin = min(values, key=values.__getitem__)  # the first one of several
            choices = goal.join(goal.of_stage(begin, row), self._rest(goal, begin, best))
            end = int(np.argmin(choices))
            found.append(Stage(row - 1, end, begin.workers))
            row = end + 1
            values = {
                each: float(goal.join(_at(goal.of_hop(begin, each), end), best[each][row]))
                for each in _followers(begin, best)
            }
        return found


def _at(hops: Floats, cut: int) -> float:
    """Return the value of a hop at a cut; one value may stand for all cuts."""
    return float(hops[cut if len(hops) > 1 else 0])


def _followers(begin: _Begin, best: Mapping[_Begin, Floats]) -> list[_Begin]:
    """Return the beginnings of what can follow the first stage of a beginning."""
    free = begin.first + begin.replicas
    return [each for each in best if each.first >= free and each.used == begin.after]


def _nothing_fits(costing: Costing, search: _Search, allowed: Sequence[_Begin]) -> str:
    """Return the text of an error: what there is, and the smallest memory that would do."""
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
