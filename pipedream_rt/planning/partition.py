"""A partition: the answer of the planner, with what is predicted of it.

A partition says which layers are a stage, and on which workers its replicas are. What it predicts:

- the throughput is that of the simulator, and never above that of the slowest stage or link;
- the staleness of a stage follows the formulas of `costing`; the slowdown of a run is read, at the
  mean staleness of its stages, from a curve that ``benchmarks/learning.py`` has measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from pipedream_rt.planning.costing import Costing
from pipedream_rt.planning.search import StageChoice
from pipedream_rt.schedules import Plan, plan_for
from pipedream_rt.simulation import Costs, simulate
from pipedream_rt.tracing.summary import summarize
from pipedream_rt.tracing.trace import Trace

C = TypeVar("C")

Slowdown = Sequence[tuple[float, float]]
"""Points of a curve: the mean staleness, and how many times as many samples are needed."""

SLOWDOWNS: dict[str, Slowdown] = {
    "corrected": ((0.0, 1.0), (0.44, 1.01), (1.0, 1.03), (3.5, 1.47)),
    "plain": ((0.0, 1.0), (1.0, 3.0), (3.5, 6.6)),
    "none": ((0.0, 1.0), (1.0, 1.0)),
}
"""Measured slowdowns (docs/results.md): Muon with corrections; AdamW, plain; or none assumed."""

DATA_PARALLEL = "data-parallel"
"""The choice of one stage that all workers replicate."""

_UNSEEN = 0.02
"""The share of the throughput that a latency may cost: only above it is slack added."""

_MOST_SLACK = 256
"""Extra warm-up forwards of a hop, at most."""

_MOST_SIMULATED = 4096
"""Micro-batches per update above which formulas take the place of the simulator."""

_SHORTEST = 1e-12
"""Seconds in place of 0, so that nothing is divided by zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A stage of a partition. Times are in seconds for each micro-batch of the pipe.

    Attributes:
        layers: The names of its layers.
        workers: The workers that host its replicas.
        period: The time that it needs for each micro-batch.
        transfer: The time that the link behind it is busy; 0 behind the last stage.
        latency: The time that a message to the next stage takes; 0 behind the last one.
        slack: The extra warm-up forwards before the next stage.
        memory: The bytes on each of its workers.
        in_flight: The most micro-batches in flight on each of its workers.
        versions: The weight versions that each of its workers keeps.
        staleness: The most updates between the version read and the one updated.
        coded: Whether a codec pays on the link behind it.
    """

    layers: tuple[str, ...]
    workers: tuple[int, ...]
    period: float
    transfer: float
    latency: float
    slack: int
    memory: float
    in_flight: int
    versions: int
    staleness: int
    coded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages, workers and a schedule, with what is predicted of them.

    Attributes:
        schedule: The name of the schedule.
        per_update: The number of micro-batches per update.
        stages: The stages, in the order of the model.
        throughput: The micro-batches per second.
        slowdown: How many times as many samples are needed because of staleness.
        costs: The costs of its stages, for simulations.
    """

    schedule: str
    per_update: int
    stages: tuple[PlannedStage, ...]
    throughput: float
    slowdown: float
    costs: Costs = field(repr=False)

    @property
    def shape(self) -> str:
        """The replicas of each stage, as ``15-1``."""
        return "-".join(str(len(stage.workers)) for stage in self.stages)

    @property
    def workers(self) -> int:
        """The number of workers that it uses."""
        return sum(len(stage.workers) for stage in self.stages)

    @property
    def worth(self) -> float:
        """The throughput, counted in micro-batches of a run without staleness."""
        return self.throughput / self.slowdown

    @property
    def memory(self) -> float:
        """The bytes on the worker that needs the most."""
        return max(stage.memory for stage in self.stages)

    @property
    def staleness(self) -> float:
        """The mean staleness of the stages."""
        return sum(stage.staleness for stage in self.stages) / len(self.stages)

    @property
    def bottleneck(self) -> str:
        """What limits the throughput, in words."""
        slowest = max(range(len(self.stages)), key=lambda s: self.stages[s].period)
        hop = max(range(len(self.stages)), key=lambda s: self.stages[s].transfer)
        if self.stages[hop].transfer > self.stages[slowest].period:
            return f"the link from stage {hop} to stage {hop + 1}"
        return f"stage {slowest}"

    def codecs(self, codec: C) -> dict[tuple[int, int], C]:
        """Return the ``codecs`` of `Layout`: a codec for each edge on which one pays.

        Args:
            codec: The codec whose costs `Machines` had.
        """
        return {(s, s + 1): codec for s, stage in enumerate(self.stages) if stage.coded}

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        derived = ("shape", "workers", "worth", "memory", "staleness", "bottleneck")
        plain = {**asdict(self), **{name: getattr(self, name) for name in derived}}
        del plain["costs"]
        return plain

    def trace(self, updates: int = 6) -> Trace:
        """Return a simulated run, which `tracing.timeline` draws.

        Args:
            updates: The number of updates.
        """
        slacks = [stage.slack for stage in self.stages[:-1]]
        replicas = [len(stage.workers) for stage in self.stages]
        plan = _plan_of(self.schedule, self.per_update, replicas, slacks)
        return simulate(plan, self.costs, updates * self.per_update)


def partition_of(
    costing: Costing, stages: Sequence[StageChoice], slowdown: Slowdown, *, rough: bool = False
) -> Partition:
    """Return a partition with all that is predicted of it; ``rough`` by formulas alone."""
    periods = [float(costing.period(s.workers, s.span)) for s in stages]
    hops = list(pairwise(stages))
    transfers = [float(costing.transfers(a.workers, b.workers)[a.end]) for a, b in hops]
    latencies = [costing.latency(a.workers, b.workers, a.end) for a, b in hops]
    coded = [costing.is_coded(a.workers, b.workers, a.end) for a, b in hops]
    period = max(*periods, *transfers, _SHORTEST)
    slacks = _slacks(costing, stages, period, latencies)
    rough = rough or not max(periods) or costing.per_update > _MOST_SIMULATED
    if not rough and not costing.flushes and any(len(stage.workers) > 1 for stage in stages):
        slacks = _deepened(costing, stages, period, slacks)
    planned = []
    for number, stage in enumerate(stages):
        replicas, after = len(stage.workers), _after(stages, number, slacks)
        planned.append(
            PlannedStage(
                layers=tuple(
                    costing.cuts.profile.layers[i].name
                    for i in costing.cuts.layers_between(stage.start, stage.end)
                ),
                workers=stage.workers,
                period=periods[number],
                transfer=(*transfers, 0.0)[number],
                latency=(*latencies, 0.0)[number],
                slack=(*slacks, 0)[number],
                memory=float(costing.memory(replicas, after, stage.span)),
                in_flight=costing.in_flight(replicas, after),
                versions=costing.versions(replicas, after),
                staleness=costing.staleness(replicas, after),
                coded=(*coded, False)[number],
            )
        )
    if rough:
        throughput = _estimated(costing, stages, period, latencies, slacks)
    else:
        # In `_costs_of` a link carries any number of messages at once, so it never limits.
        throughput = min(simulated(costing, stages, slacks), 1 / period)
    stale = sum(stage.staleness for stage in planned) / len(planned)
    return Partition(
        schedule=costing.schedule,
        per_update=costing.per_update,
        stages=tuple(planned),
        throughput=throughput,
        slowdown=_interpolated(slowdown, stale),
        costs=_costs_of(costing, stages),
    )


def _after(stages: Sequence[StageChoice], number: int, slacks: Sequence[int]) -> int:
    """Return the workers on the stages behind one, plus the slack of the hops up to there."""
    return sum(len(each.workers) for each in stages[number + 1 :]) + sum(slacks[number:])


def _slacks(
    costing: Costing, stages: Sequence[StageChoice], period: float, latencies: Sequence[float]
) -> list[int]:
    """Return, by hop, the least slack that hides its latency, or as much as fits the memory."""
    # Neighbours of r and r' workers, with slack e, have r + r' + e micro-batches between them. Each
    # takes the time of both stages and two hops, so the period is at least that over r + r' + e.
    # `_UNSEEN` of the throughput is given up for less slack, since slack is staleness.
    slacks = [0] * len(latencies)
    for hop in reversed(range(len(latencies))):
        between = len(stages[hop].workers) + len(stages[hop + 1].workers)
        needed = (between + 2 * latencies[hop] / period) * (1 - _UNSEEN) - between
        # Less a little, so that rounding does not add a unit.
        wanted = math.ceil(min(max(0.0, needed - 1e-9), _MOST_SLACK))
        for slack in range(wanted, 0, -1):
            tried = [*slacks[:hop], slack, *slacks[hop + 1 :]]
            # Slack deepens the stages before its hop, not those behind it.
            if all(_fits(costing, stages, number, tried) for number in range(hop + 1)):
                slacks = tried
                break
    return slacks


def _deepened(
    costing: Costing, stages: Sequence[StageChoice], period: float, slacks: list[int]
) -> list[int]:
    """Return more slack for stages with replicas, where that raises the throughput."""
    # A micro-batch stays on a stage with r replicas for r periods, so the pipe must be deeper than
    # the number of workers. One unit after another goes to the hop where it gains the most.
    best = simulated(costing, stages, slacks)
    tried = list(slacks)
    for _ in range(2 * sum(len(stage.workers) for stage in stages)):
        if best >= (1 - _UNSEEN) / period:
            break
        options = [[s + (i == hop) for i, s in enumerate(tried)] for hop in range(len(tried))]
        possible = [
            option
            for option in options
            if all(_fits(costing, stages, number, option) for number in range(len(stages)))
        ]
        if not possible:
            break
        rates = [simulated(costing, stages, option) for option in possible]
        rate = max(rates)
        tried = possible[rates.index(rate)]
        # Slack is staleness: it is kept only where it gains. A later unit may gain for two.
        if rate > best * (1 + _UNSEEN / 4):
            best, slacks = rate, tried
    return slacks


def _fits(
    costing: Costing, stages: Sequence[StageChoice], number: int, slacks: Sequence[int]
) -> bool:
    """Whether the schedule, and the memory of its workers, allow a stage with some slack."""
    stage, after = stages[number], _after(stages, number, slacks)
    if not costing.is_possible(len(stage.workers), after):
        return False
    memory = costing.memory(len(stage.workers), after, stage.span)
    return bool(memory <= costing.room(stage.workers))


def _estimated(
    costing: Costing,
    stages: Sequence[StageChoice],
    period: float,
    latencies: Sequence[float],
    slacks: Sequence[int],
) -> float:
    """Return the micro-batches per second of the pipe by formulas."""
    alone = [sum(costing.alone(stage.workers, stage.start, stage.end)) for stage in stages]
    sizes, k = [len(stage.workers) for stage in stages], costing.per_update
    if costing.flushes:
        # A mini-batch takes at most as long as one micro-batch needs to pass all stages and come
        # back, plus the time in which the slowest stage does all the others.
        others = max((-(-k // size) - 1) * time for size, time in zip(sizes, alone, strict=True))
        update = max(
            costing.update(stage.workers, stage.start, stage.end)
            + costing.exchange(stage.workers, stage.start, stage.end)
            for stage in stages
        )
        return k / max(sum(alone) + 2 * sum(latencies) + others + update, _SHORTEST)
    for hop, (latency, slack) in enumerate(zip(latencies, slacks, strict=True)):
        between = sizes[hop] + sizes[hop + 1] + slack
        period = max(period, (alone[hop] + alone[hop + 1] + 2 * latency) / between)
    return 1 / period


def simulated(costing: Costing, stages: Sequence[StageChoice], slacks: Sequence[int]) -> float:
    """Return the micro-batches per second of a pipe, as the simulator says."""
    k, costs = costing.per_update, _costs_of(costing, stages)
    replicas = [len(stage.workers) for stage in stages]
    plan = _plan_of(costing.schedule, k, replicas, slacks)
    if costing.flushes:
        return k / max(summarize(simulate(plan, costs, k)).makespan, _SHORTEST)
    in_flight = plan.in_flight(0) * plan.replicas[0]
    updates = max(8, -(-24 * (in_flight + 1) // k))  # so many that the steady phase decides
    return summarize(simulate(plan, costs, updates * k)).throughput


def _costs_of(costing: Costing, stages: Sequence[StageChoice]) -> Costs:
    """Return the costs of stages for the simulator."""
    both = [costing.alone(stage.workers, stage.start, stage.end) for stage in stages]
    hops = pairwise(stages)
    return Costs(
        forward=tuple((forward,) for forward, _ in both),
        backward=tuple((backward,) for _, backward in both),
        step=tuple((costing.update(s.workers, s.start, s.end),) for s in stages),
        hop_latency=tuple(costing.latency(a.workers, b.workers, a.end) for a, b in hops) or (0.0,),
        peer_latency=tuple(costing.exchange(s.workers, s.start, s.end) for s in stages),
    )


def _plan_of(schedule: str, per_update: int, replicas: list[int], slacks: Sequence[int]) -> Plan:
    """Return the plan of a schedule, or of data parallelism: a flush with one stage."""
    return plan_for(
        "1f1b" if schedule == DATA_PARALLEL else schedule,
        num_stages=len(replicas),
        per_update=per_update,
        slack=tuple(slacks),
        replicas=replicas,
    )


def _interpolated(curve: Slowdown, staleness: float) -> float:
    """Return the slowdown at a staleness; beyond the last point the curve goes on straight."""
    x, y = np.array(curve, np.float64).T
    if staleness <= x[-1]:
        return float(np.interp(staleness, x, y))
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    # A curve that falls at its end would reach 0, and the worth is divided by it.
    return max(float(y[-1] + slope * (staleness - x[-1])), 1e-3)
