"""The simulator: it executes the orders of a plan, and computes times from costs.

The time of an action follows from the times of the actions whose messages it needs, and the order
fixes the sequence of what a worker or a link does. So no queue of events sorted by time is needed:
actions are executed in any order in which they can happen (`schedules/execution.py`), each in
constant time. A run of A actions takes O(A) time, and O(A) memory for its trace, 64 bytes for each
action. Times are whole nanoseconds, so that no rounding depends on the order of a sum.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.schedules import COORDINATOR, Action, Edge, EdgeKind, Kind, Plan, VersionLedger
from pipedream_rt.schedules.edges import Address, EdgeRule
from pipedream_rt.schedules.execution import Execution, deadlock_of
from pipedream_rt.simulation.costs import Costs, Samples
from pipedream_rt.tracing.spans import NOBODY, Recorder
from pipedream_rt.tracing.trace import CODES, LOSS_CAME, Trace, WorkerFacts

_FREE: Samples = (0.0,)

# Module globals, because looking a member up in its class takes long if done for every action.
_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT

_COUNTED = (EdgeKind.LOSS, EdgeKind.WEIGHT, EdgeKind.SHARE, EdgeKind.TOTAL)
"""The kinds of messages of which one action may need several, or none."""


def simulate(plan: Plan, costs: Costs, micro_batches: int, *, credits: int | None = None) -> Trace:
    """Simulate a run that begins and ends with an empty pipe.

    Args:
        plan: A plan whose schedule was checked.
        costs: The costs of actions and messages.
        micro_batches: The number of micro-batches, a multiple of k.
        credits: The number of mini-batches that the coordinator injects ahead; None for what the
            plan says.

    Returns:
        The trace of the run, which starts at time 0.

    Raises:
        ConfigError: The costs are for another number of stages, or the micro-batches are no whole
            mini-batches.
        ScheduleError: The schedule deadlocks.
    """
    if micro_batches < 1 or micro_batches % plan.per_update:
        raise ConfigError(
            f"micro-batches must be a multiple of {plan.per_update}, one update each, "
            f"not {micro_batches}"
        )
    full = costs.for_stages(plan.num_stages, plan.workers)
    credits = plan.credits() if credits is None else credits
    try:
        run = _SimulatedRun(plan, full, micro_batches, credits)
        run.execute()
    except (struct.error, OverflowError) as error:
        raise ConfigError("the simulated time exceeds 292 years; mind the units") from error
    return Trace(
        plan=plan,
        credits=credits,
        simulated=True,
        workers=tuple(WorkerFacts(name=f"worker-{w}") for w in range(plan.workers)),
        spans=run.recorder.spans(),
        stage_bytes=tuple(round(b) for b in full.weight_bytes),
        activation_bytes=tuple(round(b) for b in full.stash_bytes),
    )


def _ns(seconds: float) -> int:
    """Return whole nanoseconds."""
    return round(seconds * 1e9)


@dataclass(slots=True)
class _SimulatedLink:
    """The link from one worker to another, for which the messages of all its edges queue.

    Attributes:
        free: The time when the last message will have left, in ns.
    """

    free: int = 0


@dataclass(slots=True)
class _Channel:
    """An edge between two addresses with the costs of its messages. Times are in nanoseconds.

    Attributes:
        source: The address that sends.
        transmission: The time for which a message occupies the link.
        latency: The time from the end of the transmission to the arrival.
        link: The link between the two workers; None if one worker hosts both stages.
        size: The size of a message in bytes.
        arrivals: When the messages that are sent and not taken yet arrive, oldest first.
        numbers: Of the kinds `_COUNTED`, the numbers of these messages.
        last: Of the kinds `_COUNTED`, the number of the last message that was sent.
    """

    source: int
    transmission: int
    latency: int
    link: _SimulatedLink | None
    size: int
    arrivals: deque[int] = field(default_factory=deque)
    numbers: deque[int] = field(default_factory=deque)
    last: int = -1

    def send(self, now: int) -> None:
        """Send a message; without a link it arrives at once."""
        link = self.link
        if link is None:
            self.arrivals.append(now)
            return
        if self.transmission:
            link.free = now = max(now, link.free) + self.transmission
        self.arrivals.append(now + self.latency)

    def send_up_to(self, number: int, now: int) -> None:
        """Send the message with a number, unless it was sent."""
        if number > self.last:
            self.last = number
            self.numbers.append(number)
            self.send(now)

    def take_up_to(self, number: int) -> int:
        """Take all messages up to a number; return when the last of them came, -1 for none."""
        arrival = -1
        while self.numbers and self.numbers[0] <= number:
            self.numbers.popleft()
            arrival = max(arrival, self.arrivals.popleft())
        return arrival


@dataclass(slots=True)
class _Doing:
    """The costs and the messages of one kind of action on one replica of a stage.

    Attributes:
        code: The number of the kind in a span.
        samples: The times that it takes, in nanoseconds, by micro-batch or update in turn.
        comes: The edges of which it needs one message.
        counted_in: Those of the kinds `_COUNTED`, with the row that says up to which number.
        peeks: The edges on which a message must have come, but is left for a later forward.
        goes: The edges on which it sends one message.
        counted_out: Those of the kinds `_COUNTED`, with the row that says which number.
        loss: The edge of its loss to the coordinator; None if it gives none.
        plain: Whether all its messages are in `comes` and `goes`, and it is no injection.
        size: The bytes that it sends in all.
    """

    code: int
    samples: tuple[int, ...]
    comes: Sequence[_Channel]
    counted_in: Sequence[tuple[_Channel, EdgeRule]]
    peeks: Sequence[tuple[_Channel, EdgeRule]]
    goes: Sequence[_Channel]
    counted_out: Sequence[tuple[_Channel, EdgeRule]]
    loss: _Channel | None
    plain: bool
    size: int


class _Doings(dict[int, _Doing]):
    """The costs and the messages of a kind of action on a replica, by its place in the cycle."""

    def __init__(self, make: Callable[[int], _Doing]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, number: int) -> _Doing:
        # Made when first asked for, since a cycle (`Placement.cycle`) may be long.
        made = self[number] = self._make(number)
        return made


class _SimulatedRun:
    """One simulation; its spans are in `recorder`."""

    def __init__(self, plan: Plan, costs: Costs, micro_batches: int, credits: int) -> None:
        self._plan = plan = replace(plan, ahead=credits)
        self._costs, self._micro_batches, self._credits = costs, micro_batches, credits
        self._latency, self._turnaround = _ns(costs.latency), _ns(costs.turnaround)
        self._links: dict[tuple[int, int], _SimulatedLink] = {}
        self._channels: dict[Edge, _Channel] = {}
        # By address; the coordinator comes last, where its address -1 finds it.
        places = [*plan.addresses, COORDINATOR]
        self._doings = {kind: [self._doings_of(kind, a) for a in places] for kind in Kind}
        self._ledgers = [VersionLedger(plan.stage_of(a)) for a in plan.addresses]
        self._ledgers.append(VersionLedger(COORDINATOR))
        self._next = [plan.next_own(a, 0) for a in plan.addresses]
        self._stage_of = [plan.stage_of(a) for a in plan.addresses]
        self._applied_by = [plan.applied_by(a) for a in plan.addresses]
        # At least as many spans as the run has, since a recorder overwrites the oldest.
        each = micro_batches * (3 if self._splits() else 2)
        updates = micro_batches // plan.per_update * (3 if plan.replicated else 2) + 1
        most = each * plan.num_stages + updates * len(plan.addresses)
        self.recorder = Recorder(most + (3 if plan.loss_in_script else 2) * micro_batches)

    def _channel(self, edge: Edge) -> _Channel:
        """Return an edge with its costs."""
        found = self._channels.get(edge)
        if found is None:
            found = self._channels[edge] = self._made(edge)
        return found

    def _made(self, edge: Edge) -> _Channel:
        """Make an edge with its costs; to and from the coordinator they are a latency alone."""
        costs, plan = self._costs, self._plan
        if COORDINATOR in (edge.source, edge.target):
            return _Channel(edge.source, 0, self._latency, _SimulatedLink(), 0)
        source, target = plan.stage_of(edge.source), plan.stage_of(edge.target)
        sizes = {  # others count as 0: norms are small, and costs do not tell of tied weights
            EdgeKind.ACTIVATION: costs.activation_bytes[source],
            EdgeKind.GRADIENT: costs.gradient_bytes[source],
            EdgeKind.PARTIAL: costs.weight_bytes[source],
            EdgeKind.STEPPED: costs.weight_bytes[source] / plan.replicas[source],
        }
        size = sizes.get(edge.kind, 0.0)
        pair = (plan.worker_of(edge.source), plan.worker_of(edge.target))
        same = source == target
        more = costs.peer_latency[source] if same else costs.hop_latency[min(source, target)]
        return _Channel(
            source=edge.source,
            transmission=0 if math.isinf(costs.bandwidth) else _ns(size / costs.bandwidth),
            latency=self._latency + _ns(more),
            link=None if pair[0] == pair[1] else self._links.setdefault(pair, _SimulatedLink()),
            size=round(size),
        )

    def _doings_of(self, kind: Kind, address: Address) -> _Doings:
        """Return the costs and the messages of a kind of action at an address."""
        costs, plan = self._costs, self._plan
        seconds: dict[Kind, Sequence[Samples]] = {
            Kind.FORWARD: costs.forward,
            Kind.BACKWARD: costs.backward,
            Kind.INPUT: costs.input_gradient,
            Kind.WEIGHT: costs.weight_gradient,
            Kind.STEP: costs.step,
            Kind.APPLY: costs.step,
        }

        def doing(number: int) -> _Doing:
            needs, gives = plan.rows(Action(kind, number), address)
            # The gradient of an input goes to the script only where that asks for it.
            gives = tuple(row for row in gives if row.edge[::2] != (EdgeKind.GRADIENT, COORDINATOR))
            took: Samples = (costs.injection,)
            speed, sending = 1.0, 0.0
            if address != COORDINATOR:
                # The time of a step is spent where gradients are applied: in S, or in A.
                idle = kind is Kind.STEP and plan.applied_by(address) is not Kind.STEP
                of_stages = seconds.get(kind, ())
                took = of_stages[plan.stage_of(address)] if of_stages and not idle else _FREE
                speed, sending = costs.speed[plan.worker_of(address)], costs.overhead * len(gives)
            goes = [(self._channel(row.edge), row) for row in gives]
            comes = [(self._channel(row.edge), row) for row in needs if not row.peek]
            counted = any(row.peek or row.edge.kind in _COUNTED for row in (*needs, *gives))
            losses = [channel for channel, row in goes if row.edge.kind is EdgeKind.LOSS]
            return _Doing(
                code=CODES[kind],
                samples=tuple(_ns((value + sending) / speed) for value in took),
                comes=[channel for channel, row in comes if row.edge.kind not in _COUNTED],
                counted_in=[(channel, row) for channel, row in comes if row.edge.kind in _COUNTED],
                peeks=[(self._channel(row.edge), row) for row in needs if row.peek],
                goes=[channel for channel, row in goes if row.edge.kind not in _COUNTED],
                counted_out=[(channel, row) for channel, row in goes if row.edge.kind in _COUNTED],
                loss=losses[0] if losses else None,
                plain=not counted and address != COORDINATOR,
                size=sum(channel.size for channel, _ in goes),
            )

        return _Doings(doing)

    def _splits(self) -> bool:
        """Whether the schedule splits backwards on some worker."""
        return any(
            action.kind is Kind.INPUT
            for worker in range(self._plan.workers)
            for action in self._plan.order(worker, 0, self._plan.per_update)
        )

    def execute(self) -> None:
        """Execute every action: find its start and version, write its span, send its messages."""
        # The loop uses local names, because it runs millions of times.
        plan, ledgers = self._plan, self._ledgers
        clocks = [0] * (plan.workers + 1)  # the last is the coordinator's
        cycles = [plan.cycle(a) for a in plan.addresses] if plan.replicated else []
        if cycles:
            cycles.append(plan.cycle(COORDINATOR))
        found: dict[Kind, Any] = dict(self._doings)
        if not cycles:
            found = {kind: [row[0] for row in rows] for kind, rows in found.items()}
        record, version_of = self.recorder.record, self._version_of
        execution = Execution(plan, self._micro_batches, credits=self._credits)
        for worker, stage, (kind, m, _) in execution:
            row = found[kind][stage]
            doing = row[m % cycles[stage]] if cycles else row
            ready = start = clocks[worker]
            arrived, waited_for = 0, NOBODY
            for channel in doing.comes:
                arrival = channel.arrivals.popleft()
                if arrival >= arrived:
                    arrived, waited_for = arrival, channel.source
            if doing.plain:
                version = version_of(kind, stage, m)
            else:
                arrived, waited_for, start, version = self._others_come(
                    doing, stage, kind, m, arrived, waited_for, start
                )
            if arrived > start:
                start = arrived
            samples = doing.samples
            end = start + (samples[0] if len(samples) == 1 else samples[m % len(samples)])
            clocks[worker] = end
            for channel in doing.goes:
                channel.send(end)
            if not doing.plain:
                self._others_go(doing, stage, m, end)
            ledger = ledgers[stage]
            record(
                doing.code, stage, m, version, len(ledger.kept), len(ledger.in_flight),
                waited_for, ready, arrived, start, end, doing.size,
            )  # fmt: skip
        if text := deadlock_of(execution.waiting, plan.title_of):
            raise ScheduleError(
                f"the schedule {self._plan.name} does not end; {text}; "
                "pipedream_rt.schedules.check shows where"
            )

    def _others_come(
        self, doing: _Doing, address: Address, kind: Kind, index: int,
        arrived: int, waited_for: int, start: int,
    ) -> tuple[int, int, int, int]:  # fmt: skip
        """Take the messages that are not plain; return (arrived, waited_for, start, version)."""
        last = -1
        for channel, row in doing.counted_in:
            arrival = channel.take_up_to(row.of(index).number)
            last = max(last, arrival)
            if arrival > arrived:
                arrived, waited_for = arrival, channel.source
        for channel, row in doing.peeks:
            # Nothing to peek at if its forward is done, or a flush comes before it.
            if channel.arrivals and row.of(index).number >= self._next[address]:
                arrived, waited_for = max(
                    (arrived, waited_for), (channel.arrivals[0], channel.source)
                )
        if address != COORDINATOR:
            return arrived, waited_for, start, self._version_of(kind, address, index)
        if last >= 0:  # the last loss of a mini-batch has given a credit back
            start = max(start, last) + self._turnaround
        return 0, NOBODY, start, 0

    def _others_go(self, doing: _Doing, address: Address, index: int, end: int) -> None:
        """Send the counted messages, and record when a loss arrives at the coordinator."""
        for channel, row in doing.counted_out:
            channel.send_up_to(row.of(index).number, end)
        if doing.loss is not None:
            arrival = doing.loss.arrivals[-1]
            self.recorder.record(
                LOSS_CAME,
                COORDINATOR,
                index,
                0,
                0,
                0,
                address,
                arrival,
                arrival,
                arrival,
                arrival,
                0,
            )

    def _version_of(self, kind: Kind, address: Address, index: int) -> int:
        """Update the ledger of a stage, and return the version that an action reads or makes."""
        ledger, plan = self._ledgers[address], self._plan
        if kind is _FORWARD:
            stage = self._stage_of[address]
            version = plan.reads(stage, index)
            ledger.read(index, version)
            self._next[address] = index + plan.replicas[stage]
            return version
        if kind is _BACKWARD or kind is _WEIGHT:
            return ledger.unpin(index)
        if kind is self._applied_by[address]:
            following = plan.next_of_stage(address, self._next[address], index)
            ledger.update(plan.reads(self._stage_of[address], following))
            return ledger.newest
        if kind is _INPUT:
            return ledger.pinned(index)
        return index if kind is Kind.DRAIN else index + 1
