"""Costs fitted to a trace, a prediction of the run from them, and simulations with changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipedream_rt.errors import ConfigError, TraceError
from pipedream_rt.schedules import (
    COORDINATOR,
    RECIPES,
    Kind,
    Plan,
    Shape,
    plan_for,
    schedule_named,
)
from pipedream_rt.schedules.actions import OF_UPDATES
from pipedream_rt.schedules.shape import parse_slack
from pipedream_rt.schema import is_count
from pipedream_rt.simulation.costs import Costs, Samples, parsed
from pipedream_rt.simulation.simulator import simulate
from pipedream_rt.tracing.replay import Replay
from pipedream_rt.tracing.spans import Spans
from pipedream_rt.tracing.summary import (
    hop_latencies,
    hop_times,
    hops_between,
    longest_stretch,
    summarize,
)
from pipedream_rt.tracing.trace import CODES, COMPUTES, DRAIN, INJECTED, LOSS_CAME, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The measured throughput of a run, and the simulated one.

    Attributes:
        measured: The measured number of micro-batches per second in the steady phase.
        predicted: The simulated number of micro-batches per second in the steady phase.
        trace: The trace of the simulated run.
    """

    measured: float
    predicted: float
    trace: Trace

    @property
    def error(self) -> float:
        """The error of the prediction, as a share of the measured throughput."""
        return self.predicted / self.measured - 1


def plan_of(trace: Trace) -> Plan:
    """Return the plan of a trace; a schedule of which only the name is known becomes a replay."""
    plan = trace.plan
    if plan.recipe is not None:
        return plan
    again = plan_for(
        Replay(trace),
        num_stages=plan.num_stages,
        per_update=plan.per_update,
        stages_per_worker=plan.shape.stages_per_worker,
        slack=plan.shape.slack,
    )
    return replace(plan, name=again.name, recipe=again.recipe)


def _stretches(trace: Trace) -> list[Spans]:
    """Return, by address, the spans of the stretch between flushes that has the most updates."""
    stages = trace.by_stage()
    first = longest_stretch(stages[0])
    if not len(first):
        raise TraceError(
            "the trace has no update of stage 0, so no costs can be fitted; record a run of at "
            "least two updates"
        )
    # All stages are flushed between the same micro-batches, so the limits found on one are those of
    # all.
    forwards = first["index"][first["kind"] == CODES[Kind.FORWARD]]
    if not len(forwards):
        raise TraceError("there is no forward in the trace; no costs can be fitted")
    low, high = int(forwards.min()), int(forwards.max())
    k = trace.plan.per_update
    # Whole updates alone: a ring of spans may have lost the beginning of the first one.
    low, high = -(-low // k) * k, (high + trace.plan.replicas[0]) // k * k
    found = []
    for spans in stages:
        of_update = np.isin(spans["kind"], [CODES[kind] for kind in OF_UPDATES])
        index = np.where(of_update, spans["index"] * k, spans["index"])
        acts = np.isin(spans["kind"], COMPUTES)
        found.append(spans[acts & (index >= low) & (index < high)])
    return found


def _samples(trace: Trace, stretches: list[Spans], stage: int, kind: Kind) -> Samples:
    """Return the seconds that each action took, in the order of the micro-batches or updates.

    An action counts from when it could begin, so the time to wake up is included. Of actions on
    updates, those of replica 0 count.
    """
    first = trace.plan.address_of(stage)
    kind = trace.plan.applied_by(first) if kind is Kind.STEP else kind
    replicas = (first,) if kind in OF_UPDATES else (first, *trace.plan.others(first))
    of_stage = np.concatenate([stretches[address] for address in replicas])
    mine = of_stage[of_stage["kind"] == CODES[kind]]
    mine = mine[np.argsort(mine["index"], kind="stable")]
    begun = np.maximum(mine["ready"], mine["arrived"])
    return tuple((np.maximum(mine["end"] - begun, 0) / 1e9).tolist())


def fit(trace: Trace) -> Costs:
    """Return the costs of the actions and messages of a trace.

    Each action keeps its own measured time, in the order of the micro-batches. The latency is the
    mean over the messages that a stage waited for.

    Args:
        trace: A trace, measured or simulated.

    Returns:
        The costs. Their bandwidth is infinite, because the latency includes the transmission.

    Raises:
        TraceError: The trace is too short.
    """
    stretches = _stretches(trace)
    made: dict[str, Any] = {}
    for name, kind in (
        ("forward", Kind.FORWARD),
        ("backward", Kind.BACKWARD),
        ("input_gradient", Kind.INPUT),
        ("weight_gradient", Kind.WEIGHT),
        ("step", Kind.STEP),
    ):
        stages = range(trace.plan.num_stages)
        by_stage = tuple(_samples(trace, stretches, stage, kind) for stage in stages)
        if all(by_stage):
            made[name] = by_stage
    if "forward" not in made or ("backward" not in made and "input_gradient" not in made):
        raise TraceError("a stage has done no forward or no backward; no costs can be fitted")
    coordinator = trace.of_stage(COORDINATOR)
    injected = coordinator[coordinator["kind"] == INJECTED]
    return Costs(
        **made,
        activation_bytes=_bytes(trace.plan, stretches, (Kind.FORWARD,)),
        gradient_bytes=_bytes(trace.plan, stretches, (Kind.BACKWARD, Kind.INPUT)),
        stash_bytes=tuple(map(float, trace.activation_bytes)) or (0.0,),
        weight_bytes=tuple(map(float, trace.stage_bytes)) or (0.0,),
        latency=_latency(trace.plan, stretches),
        injection=_mean(injected["end"] - injected["start"]),
        turnaround=_turnaround(trace, coordinator, injected),
    )


def _mean(nanoseconds: Any) -> float:
    """Return the mean of nanoseconds in seconds, at least 0; 0 for no values."""
    return max(float(np.mean(nanoseconds)) / 1e9, 0.0) if len(nanoseconds) else 0.0


def _bytes(plan: Plan, stretches: list[Spans], kinds: tuple[Kind, ...]) -> tuple[float, ...]:
    """Return, by stage, the mean bytes that an action of some kinds sends."""
    codes = [CODES[kind] for kind in kinds]
    of_stages = (stretches[plan.address_of(stage)] for stage in range(plan.num_stages))
    sizes = (stretch["bytes"][np.isin(stretch["kind"], codes)] for stretch in of_stages)
    return tuple(float(np.mean(size)) if len(size) else 0.0 for size in sizes)


def _latency(plan: Plan, stretches: list[Spans]) -> float:
    """Return the mean seconds that the messages that a stage waited for were under way."""
    # Others do not count: a busy receiver notes their arrival late, which delays nothing.
    waited = [stretch[stretch["arrived"] > stretch["ready"]] for stretch in stretches]
    found = [np.zeros(0)]
    found += [hop_times(e, stretches[e.source], waited[e.target]) for e in hops_between(plan)]
    latencies = np.concatenate(found)
    return _mean(latencies) if len(latencies) else _mean(hop_latencies(plan, stretches))


def _turnaround(trace: Trace, coordinator: Spans, injected: Spans) -> float:
    """Return the mean seconds from the loss that gives a credit back to the next injection."""
    # It counts from the later of that loss and the end of the injection before. An injection after
    # a flush waits for the flush, so it does not count.
    k = trace.plan.per_update
    ahead = trace.credits * k
    losses = coordinator[coordinator["kind"] == LOSS_CAME]
    arrived = dict(zip(losses["index"].tolist(), losses["arrived"].tolist(), strict=True))
    starts = dict(zip(injected["index"].tolist(), injected["start"].tolist(), strict=True))
    ends = dict(zip(injected["index"].tolist(), injected["end"].tolist(), strict=True))
    flushed = _flushed_at(trace)
    found = [
        max(starts[m] - max(arrived[m - ahead + k - 1], ends[m - 1]), 0)
        for m in starts
        if m % k == 0 and m not in flushed and m - 1 in ends and m - ahead + k - 1 in arrived
    ]
    return _mean(found)


def _flushed_at(trace: Trace) -> set[int]:
    """Return the first micro-batch after each flush."""
    spans = trace.of_stage(0)
    forwards = spans[np.isin(spans["kind"], (CODES[Kind.FORWARD], DRAIN))]
    kinds, index = forwards["kind"].tolist(), forwards["index"].tolist()
    return {
        m
        for before, kind, m in zip(kinds, kinds[1:], index[1:], strict=False)
        if before == DRAIN and kind != DRAIN
    }


def predict(trace: Trace) -> Prediction:
    """Fit costs to a trace and simulate its schedule with them.

    Raises:
        TraceError: There are fewer than two updates without a flush between them.
    """
    measured = summarize(trace).throughput
    if not measured:
        raise TraceError(
            "there are fewer than two updates without a flush between them; record a longer run"
        )
    costs = fit(trace)
    # As many micro-batches as there are samples, so that each has its own measured time.
    made = simulate(plan_of(trace), costs, len(costs.forward[0]), credits=trace.credits)
    return Prediction(measured=measured, predicted=summarize(made).throughput, trace=made)


_NUMBERS = ("stages", "micro_batches", "stages_per_worker", "credits")
_LISTS = ("speed", "slack")
_COSTS = ("bandwidth", "latency", "overhead", "speed", "injection", "turnaround")


def changes_of(text: str) -> dict[str, Any]:
    """Return changes from a text, as ``"stages=8,bandwidth=100Mbit"``."""
    known = ("schedule", "slack", *_NUMBERS, *_COSTS)
    changes: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (p.strip() for p in part.partition("="))
        name = name.replace("-", "_")
        if not equals:
            raise ConfigError(
                f"{part.strip()!r} has no =; write a change as NAME=VALUE, where NAME is one of "
                f"{', '.join(known)}"
            )
        if name not in known:
            raise ConfigError(f"{name!r} cannot be changed; what can be is {', '.join(known)}")
        if name in _NUMBERS:
            if not is_count(value) or int(value) < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}")
            changes[name] = int(value)
        else:
            # Commas already separate the changes, so colons separate the entries of a list.
            changes[name] = value.split(":") if name in _LISTS else value
    return changes


def what_if(trace: Trace, changes: Mapping[str, Any]) -> Trace:
    """Simulate the run of a trace with changes.

    Micro-batches keep their size. The number of workers stays the same unless ``stages`` changes;
    for a schedule that interleaves, the stage of each worker is cut into several. With another
    number of stages, the simulation assumes that the work of all layers divides evenly, and that
    every hop carries as much as the mean hop.

    Args:
        trace: The trace of a measured run.
        changes: The changes by name, as `changes_of` returns them.

    Returns:
        The trace of the simulated run.

    Raises:
        ConfigError: There is no such schedule or cost.
        TraceError: The trace is too short.
    """
    plan = trace.plan
    other = _changed_plan(plan, changes)
    fitted = fit(trace)
    costs = regrouped(fitted, plan.shape, other.shape)
    costs = replace(costs, **{k: parsed(k, v) for k, v in changes.items() if k in _COSTS})
    as_it_was = (other.name, other.workers) == (plan.name, plan.workers)
    credits = changes.get("credits", trace.credits if as_it_was else other.credits())
    k = other.per_update
    enough = max(len(fitted.forward[0]), 8 * other.num_stages, 8 * k)
    return simulate(other, costs, -(-enough // k) * k, credits=credits)


def _changed_plan(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    name = changes.get("schedule", plan.name)
    if name not in RECIPES and "schedule" not in changes:
        raise ConfigError(
            f"the schedule {name} is no built-in schedule; add schedule=NAME to the changes"
        )
    if "schedule" in changes:
        name = schedule_named(name)
    each = changes.get("stages_per_worker")
    if each is None:
        same = name == plan.name
        each = plan.shape.stages_per_worker if same else RECIPES[name].stages_per_worker
    stages = changes.get("stages", plan.num_stages if plan.replicated else plan.workers * each)
    if "slack" in changes:
        slack = parse_slack(changes["slack"])
    else:
        keeps = name == plan.name and stages == plan.num_stages
        slack = plan.shape.slack if keeps else 0
    same_stages = stages == plan.num_stages and each == plan.shape.stages_per_worker
    return plan_for(
        name,
        num_stages=stages,
        per_update=changes.get("micro_batches", plan.per_update),
        stages_per_worker=each,
        slack=slack,
        synchronous=plan.shape.synchronous if name == plan.name else 0,
        replicas=plan.shape.replicas if same_stages else (),
    )


def regrouped(costs: Costs, before: Shape, after: Shape) -> Costs:
    """Return the costs of the same model with other stages.

    If the workers stay the same and had one stage each, each stage is cut into equal pieces; else
    the work of all stages is spread evenly.
    """
    if before.num_stages == after.num_stages and before.workers == after.workers:
        return costs
    full = costs.for_stages(before.num_stages, before.workers)
    if before.workers == after.workers == before.num_stages:
        return full.cut(after.stages_per_worker)
    return evenly(full, after.num_stages)


def evenly(costs: Costs, stages: int) -> Costs:
    """Spread the work of all stages evenly over ``stages``; one entry then stands for all."""

    def spread(by_stage: tuple[Samples, ...]) -> tuple[Samples, ...]:
        longest = max(map(len, by_stage))
        sums = (sum(s[i % len(s)] for s in by_stage) / stages for i in range(longest))
        return (tuple(sums),)

    def mean(sizes: tuple[float, ...]) -> tuple[float, ...]:
        return (sum(sizes) / max(len(sizes), 1),)

    # Means are over hops: the last stage sends no activation, and the first one no gradient.
    return replace(
        costs,
        forward=spread(costs.forward),
        backward=spread(costs.backward),
        input_gradient=spread(costs.input_gradient),
        weight_gradient=spread(costs.weight_gradient),
        step=spread(costs.step),
        activation_bytes=mean(costs.activation_bytes[:-1]),
        gradient_bytes=mean(costs.gradient_bytes[1:]),
        stash_bytes=(sum(costs.stash_bytes) / stages,),
        weight_bytes=(sum(costs.weight_bytes) / stages,),
        hop_latency=mean(costs.hop_latency),
        peer_latency=mean(costs.peer_latency),
        speed=(1.0,),
    )
