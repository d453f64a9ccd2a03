"""The simulator: it executes the orders of a plan, and computes times from costs.

The time of an action follows from the times of the actions whose messages it needs, and the order
fixes the sequence of what a worker or a link does. So nothing has to be sorted by time: actions are
executed in any order in which they can happen (`schedules/execution.py`), each in constant time. A
run of A actions takes O(A) time, and O(A) memory for its trace, 64 bytes for each action. Times are
whole nanoseconds, so that no rounding depends on the order of a sum.
"""

from __future__ import annotations

import functools
import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.observe.spans import NOBODY, Recorder
from pipedream_rt.observe.trace import CODES, INJECTED, LOSS_CAME, Trace, WorkerFacts
from pipedream_rt.schedules import COORDINATOR, Action, Edge, EdgeKind, Kind, Plan, VersionLedger
from pipedream_rt.schedules.actions import OF_UPDATES
from pipedream_rt.schedules.execution import Execution
from pipedream_rt.schedules.plan import Address
from pipedream_rt.simulation.costs import Costs, Samples

_CARRIED = (EdgeKind.ACTIVATION, EdgeKind.GRADIENT, EdgeKind.PARTIAL, EdgeKind.STEPPED)
"""The kinds of messages between workers whose time is simulated."""


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
        run = _Run(plan, full, micro_batches, credits)
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
    """Return seconds as whole nanoseconds."""
    return round(seconds * 1e9)


@dataclass(slots=True)
class _Link:
    """The link from one worker to another, for which messages queue.

    Attributes:
        free: The time when the last message will have left, in ns.
    """

    free: int = 0


@dataclass(slots=True)
class _Way:
    """An edge between two addresses with the costs of its messages. Times are in nanoseconds.

    Attributes:
        source: The address that sends.
        transmission: The time for which a message occupies the link.
        latency: The time from the end of the transmission to the arrival.
        link: The link between the two workers; None if one worker hosts both stages.
        size: The size of a message in bytes.
        arrivals: The times of arrival of the messages that are sent and not used yet, oldest first.
    """

    source: int
    transmission: int
    latency: int
    link: _Link | None
    size: int
    arrivals: deque[int] = field(default_factory=deque)

    def send(self, now: int) -> None:
        """Send a message; if there is no link, it arrives at once."""
        link = self.link
        if link is None:
            self.arrivals.append(now)
            return
        if self.transmission:
            link.free = now = max(now, link.free) + self.transmission
        self.arrivals.append(now + self.latency)


@dataclass(slots=True)
class _Doing:
    """The costs and the messages of one kind of action on one replica of a stage.

    Attributes:
        code: The number of the kind in a span.
        samples: The times that it takes, in nanoseconds, by micro-batch or update in turn.
        comes: The edges whose messages it needs.
        goes: The edges on which it sends messages.
        injected: Whether the coordinator sends its input.
        reports: Whether it sends a loss to the coordinator.
        size: The bytes that it sends in all.
    """

    code: int
    samples: tuple[int, ...]
    comes: Sequence[_Way]
    goes: Sequence[_Way]
    injected: bool
    reports: bool
    size: int


class _Doings(dict[int, _Doing]):
    """The costs and the messages of a kind of action on a replica, by micro-batch or update.

    With replicas, messages go to others for each micro-batch, until they are the same again. There
    may be many ways until then, so an entry is made when it is asked for.

    Args:
        make: Returns the entry for a number.
    """

    def __init__(self, make: Callable[[int], _Doing]) -> None:
        """Make no entry yet."""
        super().__init__()
        self._make = make

    def __missing__(self, number: int) -> _Doing:
        """Make an entry."""
        made = self[number] = self._make(number)
        return made


class _Run:
    """One simulation.

    Args:
        plan: The plan to execute.
        costs: The costs, with an entry for each of its stages.
        micro_batches: The number of micro-batches.
        credits: The number of mini-batches that the coordinator injects ahead.

    Attributes:
        recorder: The spans of the run.
    """

    def __init__(self, plan: Plan, costs: Costs, micro_batches: int, credits: int) -> None:
        """Convert all costs to nanoseconds."""
        self._plan, self._costs = plan, costs
        self._micro_batches, self._credits = micro_batches, credits
        self._latency = _ns(costs.latency)
        self._injection_ns, self._turnaround_ns = _ns(costs.injection), _ns(costs.turnaround)
        links: dict[tuple[int, int], _Link] = {}
        edges = [edge for kind in _CARRIED for edge in plan.edges(kind)]
        self._ways = {e: self._way(e, links) for e in edges if e.source != COORDINATOR}
        self._doings = {kind: self._doings_of(kind) for kind in Kind}
        self._ledgers = [VersionLedger(plan.stage_of(a)) for a in plan.addresses]
        self._next = [plan.next_own(a, 0) for a in plan.addresses]
        self._stage_of = [plan.stage_of(a) for a in plan.addresses]
        self._injected = self._injected_until = 0
        # By micro-batch: the time when its input arrives, and how many stages still need it.
        self._inputs: dict[int, list[int]] = {}
        self._losses: dict[int, int] = {}
        each = micro_batches * (3 if self._splits() else 2)
        updates = micro_batches // plan.per_update * (3 if plan.replicated else 1)
        coordinators = micro_batches * (len(plan.entries) + len(plan.exits))
        most = each * plan.num_stages + updates * len(plan.addresses)
        self.recorder = Recorder(most + coordinators)

    def _way(self, edge: Edge, links: dict[tuple[int, int], _Link]) -> _Way:
        """Return an edge with its costs.

        Args:
            edge: The edge.
            links: The link of each pair of workers, to which this call adds.
        """
        costs, plan = self._costs, self._plan
        source, target = plan.stage_of(edge.source), plan.stage_of(edge.target)
        if edge.kind is EdgeKind.ACTIVATION:
            size = costs.activation_bytes[source]
        elif edge.kind is EdgeKind.GRADIENT:
            size = costs.gradient_bytes[source]
        else:
            parts = plan.replicas[source] if edge.kind is EdgeKind.STEPPED else 1
            size = costs.weight_bytes[source] / parts
        pair = (plan.worker_of(edge.source), plan.worker_of(edge.target))
        if source == target:
            more = costs.peer_latency[source]
        else:
            more = costs.hop_latency[min(source, target)]
        return _Way(
            source=edge.source,
            transmission=0 if math.isinf(costs.bandwidth) else _ns(size / costs.bandwidth),
            latency=self._latency + _ns(more),
            link=None if pair[0] == pair[1] else links.setdefault(pair, _Link()),
            size=round(size),
        )

    def _doings_of(self, kind: Kind) -> list[_Doings]:
        """Return the costs and the messages of a kind of action, by address."""
        costs, plan = self._costs, self._plan
        seconds: Sequence[Samples] = {
            Kind.FORWARD: costs.forward,
            Kind.BACKWARD: costs.backward,
            Kind.INPUT: costs.input_gradient,
            Kind.WEIGHT: costs.weight_gradient,
            Kind.STEP: costs.step,
            Kind.REDUCE: ((0.0,),) * plan.num_stages,
            Kind.TAKE: ((0.0,),) * plan.num_stages,
        }[kind]

        def doing(address: Address, number: int) -> _Doing:
            action, stage = Action(kind, number, address), plan.stage_of(address)
            needs, gives = plan.needs(action), plan.gives(action)
            goes = [self._ways[edge] for edge in gives if edge in self._ways]
            speed = costs.speed[plan.worker_of(address)]
            sending = costs.overhead * len(gives)
            return _Doing(
                code=CODES[kind],
                samples=tuple(_ns((value + sending) / speed) for value in seconds[stage]),
                comes=[self._ways[edge] for edge in needs if edge in self._ways],
                goes=goes,
                injected=kind is Kind.FORWARD and stage in plan.entries,
                reports=any(edge.kind is EdgeKind.LOSS for edge in gives),
                size=sum(way.size for way in goes),
            )

        return [_Doings(functools.partial(doing, address)) for address in plan.addresses]

    def _splits(self) -> bool:
        """Whether the schedule splits backwards on some worker."""
        return any(
            action.kind is Kind.INPUT
            for worker in range(self._plan.workers)
            for action in self._plan.order(worker, 0, self._plan.per_update)
        )

    def execute(self) -> None:
        """Execute every action: find its start and its version, write its span, send its messages.

        The loop uses local names, because it runs millions of times.

        Raises:
            ScheduleError: The schedule deadlocks.
        """
        plan, clocks, ledgers = self._plan, [0] * self._plan.workers, self._ledgers
        cycles = [plan.cycle(a) for a in plan.addresses] if plan.replicated else []
        found: dict[Kind, Any] = dict(self._doings)
        if not cycles:
            found = {kind: [row[0] for row in rows] for kind, rows in found.items()}
        doings_f, doings_b, doings_i, doings_w, doings_s, doings_r, doings_t = found.values()
        forward, backward, input_half, weight, step, reduce, _ = Kind
        record, version_of = self.recorder.record, self._version_of
        execution = Execution(self._plan, self._micro_batches, credits=self._credits)
        for worker, stage, (kind, m, _) in execution:
            # No dictionary, because a member of an enumeration is slow to hash.
            if kind is forward:
                row = doings_f[stage]
            elif kind is backward:
                row = doings_b[stage]
            elif kind is step:
                row = doings_s[stage]
            elif kind is input_half:
                row = doings_i[stage]
            elif kind is weight:
                row = doings_w[stage]
            else:
                row = (doings_r if kind is reduce else doings_t)[stage]
            doing = row[m % cycles[stage]] if cycles else row
            ready = start = clocks[worker]
            arrived, waited_for = self._injection(m) if doing.injected else (0, NOBODY)
            for way in doing.comes:
                came = way.arrivals.popleft()
                if came >= arrived:
                    arrived, waited_for = came, way.source
            version = version_of(kind, stage, m)
            if arrived > start:
                start = arrived
            samples = doing.samples
            end = start + (samples[0] if len(samples) == 1 else samples[m % len(samples)])
            clocks[worker] = end
            for way in doing.goes:
                way.send(end)
            if doing.reports:
                self._report(stage, m, end)
            ledger = ledgers[stage]
            record(
                doing.code, stage, m, version, len(ledger.kept), len(ledger.in_flight),
                waited_for, ready, arrived, start, end, doing.size,
            )  # fmt: skip
        if execution.waiting:
            worker, action = execution.waiting[0]
            raise ScheduleError(
                f"the schedule {self._plan.name} deadlocks: worker {worker} waits for {action}; "
                "pipedream_rt.schedules.check shows where"
            )

    def _injection(self, micro_batch: int) -> tuple[int, int]:
        """Return when the input of a micro-batch arrives at a stage, and its sender."""
        while self._injected <= micro_batch:  # in order, whichever replica is the first to ask
            self._inputs[self._injected] = [self._inject(self._injected), len(self._plan.entries)]
            self._injected += 1
        of_input = self._inputs[micro_batch]
        of_input[1] -= 1
        if not of_input[1]:
            del self._inputs[micro_batch]
        return of_input[0], COORDINATOR

    def _inject(self, micro_batch: int) -> int:
        """Let the coordinator inject a micro-batch; return when its input arrives."""
        k, begun = self._plan.per_update, self._injected_until
        if micro_batch % k == 0 and micro_batch >= self._credits * k:
            # This credit is given back when all losses of an earlier mini-batch have come.
            first = micro_batch - self._credits * k
            given_back = max(self._losses.pop(m) for m in range(first, first + k))
            begun = max(begun, given_back) + self._turnaround_ns
        self._injected_until = end = begun + self._injection_ns
        self.recorder.record(
            INJECTED, COORDINATOR, micro_batch, 0, 0, 0, NOBODY, begun, 0, begun, end, 0
        )
        return end + self._latency

    def _version_of(self, kind: Kind, address: Address, index: int) -> int:
        """Update the ledger of a stage, and return the version that an action reads or makes."""
        ledger, plan = self._ledgers[address], self._plan
        stage = self._stage_of[address]
        if kind is Kind.FORWARD:
            version = plan.reads(stage, index)
            ledger.read(index, version)
            self._next[address] = index + plan.replicas[stage]
            return version
        if kind is Kind.STEP:
            following = plan.next_of_stage(address, self._next[address], index)
            ledger.update(plan.reads(stage, following))
            return ledger.newest
        if kind in OF_UPDATES:
            return index + 1
        return ledger.pinned(index) if kind is Kind.INPUT else ledger.unpin(index)

    def _report(self, stage: Address, micro_batch: int, end: int) -> None:
        """Let the loss of a micro-batch arrive at the coordinator."""
        came = end + self._latency
        self._losses[micro_batch] = came
        self.recorder.record(
            LOSS_CAME, COORDINATOR, micro_batch, 0, 0, 0, stage, came, came, came, came, 0
        )
