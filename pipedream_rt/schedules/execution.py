"""The execution of the orders of all workers against each other, without a clock.

Which actions are executed, and in which order on each worker, does not depend on time. The checker
adds rules to an execution, and the simulator adds times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Protocol, TypeAlias

from pipedream_rt.schedules.actions import Action, Kind
from pipedream_rt.schedules.plan import Edge


class Executable(Protocol):
    """The part of a plan that an execution uses; see `Plan`."""

    @property
    def num_stages(self) -> int:
        """The number of stages."""

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

    def first_of(self, worker: int) -> int:
        """Return the first stage that a worker hosts."""

    def name_of(self, worker: int) -> str:
        """Return a worker's name for people."""

    def needs(self, action: Action, stage: int | None = None) -> tuple[Edge, ...]:
        """Return the edges whose messages an action needs."""

    def gives(self, action: Action, stage: int | None = None) -> tuple[Edge, ...]:
        """Return the edges on which an action sends messages."""

    def neighbours(self, kind: Kind) -> tuple[tuple[int, ...], ...]:
        """Return, by stage, the stages whose messages an action of a kind needs."""


Done: TypeAlias = tuple[int, int, Action]
"""An executed action: worker, stage and action, in a plain tuple because there are millions."""


class _Progress:
    """The progress of all stages in one direction, forward or backward.

    Args:
        needed: By stage, the stages whose messages it needs.

    Attributes:
        done: By stage, one past the last micro-batch that it has done.
        needed: By stage, the stages whose messages it needs.
        sleepers: By stage, the workers that wait for its next message.
    """

    __slots__ = ("done", "needed", "sleepers")

    def __init__(self, needed: tuple[tuple[int, ...], ...]) -> None:
        """Begin with no action done."""
        self.needed = needed
        self.done = [0] * len(needed)
        self.sleepers: list[list[int]] = [[] for _ in needed]


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
        behind = [(stage + 1,) for stage in range(plan.num_stages - 1)]
        down = _Progress((*behind, ())) if self._norms else None
        only_stage = [plan.first_of(worker) for worker in range(plan.workers)]
        unpaid = set(plan.entries) if self._credits else set()
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
                elif kind is Kind.STEP and down is not None:
                    way = down
                else:
                    yield worker, stage, action
                    continue
                done = way.done
                # An action that is not the next one does not wait; the checker refuses it.
                if done[stage] == m:
                    for source in way.needed[stage]:
                        if done[source] <= m:
                            break
                    else:
                        source = self._unpaid(done, m) if way is onward and stage in unpaid else -1
                    if source >= 0:
                        held[worker] = action
                        way.sleepers[source].append(worker)
                        break
                yield worker, stage, action
                done[stage] = m + 1
                if way.sleepers[stage]:
                    ready += way.sleepers[stage]
                    way.sleepers[stage] = []
        self.waiting = [(worker, action) for worker, action in enumerate(held) if action]

    def _unpaid(self, forwards: list[int], micro_batch: int) -> int:
        """Return the stage whose loss must come before a micro-batch is injected; -1 if none."""
        k, credits = self._plan.per_update, self._credits or 0
        (exit_stage,) = self._plan.exits
        awaited = (micro_batch // k - credits + 1) * k
        return exit_stage if forwards[exit_stage] < awaited else -1
