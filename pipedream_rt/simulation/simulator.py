"""Simulates a run: the orders of the schedule, the versions of the ledger, times from the costs.

The time of an action follows from the times of what it waits for, and what a worker or a link does
is a sequence that its order fixes. So nothing has to be sorted by time: actions are executed in any
order in which they can happen (`schedules.execution`), each in constant time. With A actions in all
and V micro-batches in flight at a time this takes O(A) time and O(A) memory for the trace (64 bytes
an action), O(V) without it. Times are whole nanoseconds: no rounding depends on an order of sums.
"""

from __future__ import annotations

import math
import struct
from collections import deque

from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.observe.spans import NOBODY, Recorder
from pipedream_rt.observe.trace import CODES, INJECTED, LOSS_CAME, Trace, WorkerFacts
from pipedream_rt.schedules import Kind, Schedule, VersionLedger
from pipedream_rt.schedules.execution import Execution
from pipedream_rt.schedules.shape import COORDINATOR
from pipedream_rt.simulation.costs import Costs, Samples


def simulate(
    schedule: Schedule, costs: Costs, micro_batches: int, *, credits: int | None = None
) -> Trace:
    """Simulate a run from an empty pipe to an empty pipe.

    Args:
        schedule: Checked; a user's own too.
        costs: What everything takes.
        micro_batches: How many, a multiple of k.
        credits: Mini-batches injected ahead; None for what the schedule has by itself.

    Returns:
        The trace, as of a measured run that starts at time 0.

    Raises:
        ConfigError: Costs for another number of stages, or not whole mini-batches.
        ScheduleError: The schedule deadlocks.
    """
    shape = schedule.shape
    if micro_batches < 1 or micro_batches % shape.per_update:
        raise ConfigError(
            f"micro-batches must be a multiple of {shape.per_update}, one update each, "
            f"not {micro_batches}"
        )
    full = costs.for_stages(shape.num_stages, shape.workers)
    credits = schedule.credits() if credits is None else credits
    try:
        run = _Run(schedule, full, micro_batches, credits)
        run.execute()
    except (struct.error, OverflowError) as error:
        raise ConfigError("the simulated time exceeds 292 years; mind the units") from error
    return Trace(
        schedule=schedule.name,
        shape=shape,
        credits=credits,
        simulated=True,
        workers=tuple(WorkerFacts(name=f"worker-{w}") for w in range(shape.workers)),
        spans=run.recorder.spans(),
        stage_bytes=tuple(round(b) for b in full.weight_bytes),
        activation_bytes=tuple(round(b) for b in full.stash_bytes),
    )


def _ns(seconds: float) -> int:
    """Whole nanoseconds."""
    return round(seconds * 1e9)


class _Link:
    """One direction between two workers: messages queue for it."""

    __slots__ = ("free",)

    def __init__(self) -> None:
        """Free from the start."""
        self.free = 0


class _Run:
    """One simulation.

    Args:
        schedule: What is executed.
        costs: Filled in for its stages.
        micro_batches: How many.
        credits: Mini-batches injected ahead.
    """

    def __init__(self, schedule: Schedule, costs: Costs, micro_batches: int, credits: int) -> None:
        """Bring all costs into nanoseconds."""
        shape = schedule.shape
        stages = range(shape.num_stages)
        self._schedule = schedule
        self._micro_batches = micro_batches
        self._credits = credits
        self._last = shape.num_stages - 1
        overhead = costs.overhead

        def scaled(by_stage: tuple[Samples, ...], senders: range) -> list[tuple[int, ...]]:
            """Nanoseconds by stage, on its worker, with what sending costs those who send."""
            return [
                tuple(_ns((v + overhead * (s in senders)) / speed) for v in by_stage[s])
                for s in stages
                for speed in (costs.speed[shape.worker_of(s)],)
            ]

        self._durations = {
            Kind.FORWARD: scaled(costs.forward, stages),
            Kind.BACKWARD: scaled(costs.backward, stages[1:]),
            Kind.INPUT: scaled(costs.input_gradient, stages[1:]),
            Kind.WEIGHT: scaled(costs.weight_gradient, range(0)),
            Kind.STEP: scaled(costs.step, range(0)),
        }
        self._latency = _ns(costs.latency)
        self._injection = _ns(costs.injection)
        self._turnaround = _ns(costs.turnaround)
        self._bytes_on = [round(b) for b in costs.activation_bytes]
        self._bytes_back = [round(b) for b in costs.gradient_bytes]
        self._on_wire = [self._transmission(b, costs) for b in costs.activation_bytes]
        self._back_wire = [self._transmission(b, costs) for b in costs.gradient_bytes]
        links: dict[tuple[int, int], _Link] = {}

        def link(sender: int, receiver: int) -> _Link | None:
            """The link between the workers of two stages; None on one worker."""
            pair = (shape.worker_of(sender), shape.worker_of(receiver))
            return None if pair[0] == pair[1] else links.setdefault(pair, _Link())

        self._link_on = [link(s, s + 1) if s < self._last else None for s in stages]
        self._link_back = [link(s, s - 1) if s else None for s in stages]
        actions = micro_batches * (3 if self._splits() else 2) + micro_batches // shape.per_update
        self.recorder = Recorder(actions * shape.num_stages + 2 * micro_batches)

    def _splits(self) -> bool:
        """Whether the schedule splits backwards, on any worker."""
        k = self._schedule.per_update
        return any(
            action.kind is Kind.INPUT
            for worker in range(self._schedule.shape.workers)
            for action in self._schedule.order(worker, 0, k)
        )

    @staticmethod
    def _transmission(size: float, costs: Costs) -> int:
        """How long a message occupies its link."""
        return 0 if math.isinf(costs.bandwidth) else _ns(size / costs.bandwidth)

    def execute(self) -> None:
        """Execute every action.

        One long loop over local names: it runs millions of times.
        """
        schedule, last, latency = self._schedule, self._last, self._latency
        shape, k, credits, injection = schedule.shape, schedule.per_update, self._credits, 0
        stages = range(last + 1)
        # An enumeration's member is slow to hash, and slow to look up in its class.
        forward, weight, step = Kind.FORWARD, Kind.WEIGHT, Kind.STEP
        durations_f, durations_s = self._durations[forward], self._durations[step]
        durations_w, durations_i = self._durations[weight], self._durations[Kind.INPUT]
        durations_b = self._durations[Kind.BACKWARD]
        code_f, code_b, code_i, code_w, code_s = (CODES[kind] for kind in Kind)
        reads, record = schedule.recipe.versions.reads, self.recorder.record
        ledgers = [VersionLedger(s) for s in stages]
        clocks = [0] * shape.workers
        forwards, ends = [0] * (last + 1), [0] * (last + 1)
        # When what a stage waits for arrives, in the order of the micro-batches.
        inputs: list[deque[int]] = [deque() for _ in stages]
        gradients: list[deque[int]] = [deque() for _ in stages]
        losses: deque[int] = deque()
        execution = Execution(schedule, self._micro_batches, credits=credits)
        for worker, stage, (kind, m, _) in execution:
            start = ready = clocks[worker]
            ledger = ledgers[stage]
            arrived, waited_for, size = 0, NOBODY, 0
            if kind is forward:
                code, samples = code_f, durations_f[stage]
                if stage:
                    arrived, waited_for = inputs[stage].popleft(), stage - 1
                else:
                    if m % k == 0 and m >= credits * k:
                        # The mini-batch that gave back this credit: all its losses have come.
                        given_back = max(losses.popleft() for _ in range(k))
                        injection = max(injection, given_back) + self._turnaround
                    begun, injection = injection, injection + self._injection
                    record(INJECTED, COORDINATOR, m, 0, 0, 0, NOBODY, begun, 0, begun, injection, 0)
                    arrived, waited_for = injection + latency, COORDINATOR
                version = reads(stage, shape, m)
                ledger.release(version)
                ledger.pin(m, version)
                forwards[stage] += 1
            elif kind is step:
                code, samples = code_s, durations_s[stage]
                next_read = reads(stage, shape, forwards[stage])
                ledger.release(next_read)
                ledger.advance(next_read)
                version = ledger.newest
            else:
                if kind is weight:
                    code, samples = code_w, durations_w[stage]
                else:
                    if stage < last:
                        arrived, waited_for = gradients[stage].popleft(), stage + 1
                    if kind is Kind.INPUT:
                        code, samples = code_i, durations_i[stage]
                    else:
                        code, samples = code_b, durations_b[stage]
                if code == code_i:
                    version = ledger.pinned(m)
                else:
                    version = ledger.unpin(m)
                    ends[stage] += 1
            if arrived > start:
                start = arrived
            end = start + (samples[0] if len(samples) == 1 else samples[m % len(samples)])
            clocks[worker] = end
            if code == code_f:
                if stage < last:
                    size = self._bytes_on[stage]
                    link, transmission = self._link_on[stage], self._on_wire[stage]
                    inputs[stage + 1].append(_arrival(end, transmission, latency, link))
                else:
                    came = end + latency
                    losses.append(came)
                    record(LOSS_CAME, COORDINATOR, m, 0, 0, 0, last, came, came, came, came, 0)
            elif stage and code in (code_b, code_i):
                size = self._bytes_back[stage]
                link, transmission = self._link_back[stage], self._back_wire[stage]
                gradients[stage - 1].append(_arrival(end, transmission, latency, link))
            record(
                code, stage, m, version, len(ledger.kept), forwards[stage] - ends[stage],
                waited_for, ready, arrived, start, end, size,
            )  # fmt: skip
        if execution.waiting:
            worker, action = execution.waiting[0]
            raise ScheduleError(
                f"the schedule {schedule.name} deadlocks: worker {worker} waits for {action}; "
                "`check` shows where"
            )


def _arrival(end: int, transmission: int, latency: int, link: _Link | None) -> int:
    """When a message that is sent at ``end`` arrives; at once where no link is between."""
    if link is None:
        return end
    if transmission:
        link.free = end = max(end, link.free) + transmission
    return end + latency
