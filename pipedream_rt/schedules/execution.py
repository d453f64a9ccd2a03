"""The execution of the orders of all workers against each other, without a clock.

Which actions are executed, and in which order on each worker, does not depend on time. The checker
adds rules to an execution, and the simulator adds times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Protocol, TypeAlias

from pipedream_rt.schedules.actions import Action, Kind
from pipedream_rt.schedules.plan import COORDINATOR, Address, Edge


class Executable(Protocol):
    """The part of a plan that an execution uses; see `Plan`."""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All addresses but the coordinator's: one for each replica of a stage."""

    @property
    def workers(self) -> int:
        """The number of workers."""

    @property
    def per_update(self) -> int:
        """The number of micro-batches per update."""

    @property
    def entries(self) -> tuple[int, ...]:
        """The stages that take the model's input."""

    @property
    def exits(self) -> tuple[int, ...]:
        """The stages that compute the loss."""

    def order(self, worker: int, start: int = 0, stop: int | None = None) -> Iterator[Action]:
        """Return an iterator over the actions of a worker, in order."""

    def first_of(self, worker: int) -> Address:
        """Return the first address that a worker hosts."""

    def name_of(self, worker: int) -> str:
        """Return a worker's name for people."""

    def stage_of(self, address: Address) -> int:
        """Return the stage of which an address has a replica."""

    def address_of(self, stage: int, micro_batch: int = 0) -> Address:
        """Return the address of the replica of a stage that a micro-batch goes to."""

    def next_own(self, address: Address, micro_batch: int) -> int:
        """Return the first micro-batch from a number on that goes to an address."""

    def others(self, address: Address) -> tuple[Address, ...]:
        """Return the addresses of the other replicas of its stage."""

    def needs(self, action: Action, address: Address | None = None) -> tuple[Edge, ...]:
        """Return the edges whose messages an action needs."""

    def gives(self, action: Action, address: Address | None = None) -> tuple[Edge, ...]:
        """Return the edges on which an action sends messages."""

    def norms(self, address: Address, update: int) -> tuple[Edge, ...]:
        """Return the edge on which the norms of the stages behind come for an update."""

    def neighbours(self, kind: Kind) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return, by address, the first address and the replicas of each stage that it needs."""


Done: TypeAlias = tuple[int, Address, Action]
"""An executed action: worker, address and action, in a plain tuple because there are millions."""

_Sources: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""By address, the first address and the number of replicas of each stage that it waits for."""


class _Progress:
    """The progress of all replicas in one direction, forward or backward.

    Args:
        needed: The stages that each replica waits for.

    Attributes:
        done: By address, one past the last micro-batch, or update, that it has done.
        needed: The stages that each replica waits for.
        sleepers: By address, the workers that wait for its next message.
    """

    __slots__ = ("done", "needed", "sleepers")

    def __init__(self, needed: _Sources) -> None:
        """Begin with no action done."""
        self.needed = needed
        self.done = [0] * len(needed)
        self.sleepers: list[list[int]] = [[] for _ in needed]

    def note(self, address: Address, index: int) -> list[int]:
        """Note that an action is done; return the workers that can go on."""
        self.done[address] = index + 1
        woken = self.sleepers[address]
        if woken:
            self.sleepers[address] = []
        return woken


class Execution:
    """An iterable over all actions of a run, in an order in which they can happen.

    Each worker follows its order until an action needs a message that is not sent yet; then another
    worker, one that can go on, does so.

    Args:
        plan: The plan to execute.
        micro_batches: The number of micro-batches, a multiple of k.
        flushes: The micro-batches before which the pipe is flushed, multiples of k.
        credits: The number of mini-batches that the coordinator injects before it waits for the
            first loss; None for no limit.
        norms: Whether the step of a stage waits for that of the stage behind it, which sends the
            norms of its gradients.

    Attributes:
        waiting: After the iteration, each worker that waits for ever, with its next action.
    """

    def __init__(
        self,
        plan: Executable,
        micro_batches: int,
        *,
        flushes: Sequence[int] = (),
        credits: int | None = None,
        norms: bool = False,
    ) -> None:
        """Execute no action yet."""
        self._plan = plan
        self._norms = norms
        bounds = list(pairwise((0, *flushes, micro_batches)))
        self._orders = [
            chain(*[plan.order(worker, a, b) for a, b in bounds]) for worker in range(plan.workers)
        ]
        self._credits = credits
        self.waiting: list[tuple[int, Action]] = []

    def __iter__(self) -> Iterator[Done]:
        """Yield the actions, each in constant time."""
        plan, orders = self._plan, self._orders
        forward, backward, input_half = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT
        onward, back = (_Progress(plan.neighbours(kind)) for kind in (forward, backward))
        down = _Progress(((),) * len(plan.addresses))
        reduced = _Progress(((),) * len(plan.addresses))
        alone = not any(map(plan.others, plan.addresses))
        only_stage = [plan.first_of(worker) for worker in range(plan.workers)]
        entries = {a for a in plan.addresses if plan.stage_of(a) in plan.entries}
        unpaid = entries if self._credits else set()
        held: list[Action | None] = [None] * plan.workers
        ready = list(range(plan.workers))
        while ready:
            worker = ready.pop()
            first, held[worker] = held[worker], None
            for action in chain(() if first is None else (first,), orders[worker]):
                kind, m, stage = action
                if stage is None:
                    stage = only_stage[worker]
                if kind is forward:
                    way = onward
                elif kind is backward or kind is input_half:
                    way = back
                elif kind is Kind.WEIGHT or (alone and not self._norms):
                    yield worker, stage, action
                    continue
                else:
                    if kind is not Kind.REDUCE:
                        missing = self._awaited_by_step(reduced, down, stage, action)
                        if missing is not None:
                            held[worker] = action
                            missing.append(worker)
                            break
                    yield worker, stage, action
                    if kind is not Kind.TAKE:  # for which nobody waits
                        ready += (down if kind is Kind.STEP else reduced).note(stage, m)
                    continue
                done = way.done
                # An action that is not the next one does not wait; the checker refuses it.
                if m == (done[stage] if alone else plan.next_own(stage, done[stage])):
                    for first_of_it, count in way.needed[stage]:
                        source = first_of_it + m % count
                        if done[source] <= m:
                            break
                    else:
                        source = COORDINATOR
                        if way is onward and stage in unpaid:
                            source = self._unpaid(done, m)
                    if source >= 0:
                        held[worker] = action
                        way.sleepers[source].append(worker)
                        break
                yield worker, stage, action
                done[stage] = m + 1
                if way.sleepers[stage]:
                    ready += way.note(stage, m)
        self.waiting = [(worker, action) for worker, action in enumerate(held) if action]

    def _awaited_by_step(
        self, reduced: _Progress, down: _Progress, address: Address, action: Action
    ) -> list[int] | None:
        """Return who sleeps until a message comes that a step waits for; None if all are there.

        It waits for the gradients of the other replicas, and for the norms of the stage behind; a
        replica that takes weights waits for the steps of the others.
        """
        is_step = action.kind is Kind.STEP
        ways = [(reduced if is_step else down, self._plan.needs(action, address))]
        if self._norms and is_step:
            ways.append((down, self._plan.norms(address, action.index)))
        for way, edges in ways:
            for edge in edges:
                if way.done[edge.source] <= action.index:
                    return way.sleepers[edge.source]
        return None

    def _unpaid(self, forwards: list[int], micro_batch: int) -> Address:
        """Return an address whose loss must come before a micro-batch is injected."""
        plan, k, credits = self._plan, self._plan.per_update, self._credits or 0
        (exit_stage,) = plan.exits
        awaited = (micro_batch // k - credits + 1) * k
        last = plan.address_of(exit_stage)
        for address in (last, *plan.others(last)):
            if plan.next_own(address, forwards[address]) < awaited:
                return address
        return COORDINATOR
