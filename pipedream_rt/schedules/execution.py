"""Executes the orders of all workers against each other: who can go on, and who waits for whom.

No clock here: what is executed, and in which order on each worker, does not depend on time. The
checker puts rules on top of it, the simulator puts times on top of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Protocol, TypeAlias

from pipedream_rt.schedules.actions import Action, Kind
from pipedream_rt.schedules.plan import Edge


class Executable(Protocol):
    """What is needed of a plan to execute it; see `Plan`."""

    @property
    def num_stages(self) -> int:
        """Stages of the model."""

    @property
    def workers(self) -> int:
        """Workers that are needed."""

    @property
    def per_update(self) -> int:
        """Micro-batches per update."""

    @property
    def entries(self) -> tuple[int, ...]:
        """The stages that take the model's input."""

    @property
    def exits(self) -> tuple[int, ...]:
        """The stages that compute the loss."""

    def order(self, worker: int, start: int = 0, stop: int | None = None) -> Iterator[Action]:
        """Yield what a worker does."""

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """Return the stages that a worker hosts."""

    def name_of(self, worker: int) -> str:
        """Return what people call a worker."""

    def needs(self, action: Action, stage: int | None = None) -> tuple[Edge, ...]:
        """Return the edges whose message an action waits for."""

    def gives(self, action: Action, stage: int | None = None) -> tuple[Edge, ...]:
        """Return the edges on which an action sends."""

    def neighbours(self, kind: Kind) -> tuple[tuple[int, ...], ...]:
        """Return, by stage, the stages whose message an action of a kind waits for."""


Done: TypeAlias = tuple[int, int, Action]
"""One action, executed: worker, stage, what. A plain tuple, since there are millions."""


class _Progress:
    """How far the stages have come with one direction, and who waits for them there.

    Attributes:
        done: By stage, one past the last micro-batch.
        needed: By stage, the stages whose message it waits for.
        sleepers: By stage, the workers that wait for its next message.
    """

    __slots__ = ("done", "needed", "sleepers")

    def __init__(self, needed: tuple[tuple[int, ...], ...]) -> None:
        """Nothing is done."""
        self.needed = needed
        self.done = [0] * len(needed)
        self.sleepers: list[list[int]] = [[] for _ in needed]


class Execution:
    """Iterates over all actions of a run in an order in which they can happen.

    Each worker follows its order as far as the messages that it needs have been sent; then the next
    worker that can go on does. What an action waits for is what the plan says it needs.

    Args:
        plan: What to execute.
        micro_batches: How many there are, a multiple of k.
        flushes: Multiples of k at which the pipe is flushed on the way.
        credits: Mini-batches injected before the first loss is waited for; None for no limit.

    Attributes:
        waiting: After the iteration, the workers that wait for ever, with what they wait to do.
    """

    def __init__(
        self,
        plan: Executable,
        micro_batches: int,
        *,
        flushes: Sequence[int] = (),
        credits: int | None = None,
    ) -> None:
        """Take nothing yet."""
        self._plan = plan
        bounds = list(pairwise((0, *flushes, micro_batches)))
        self._orders = [
            chain(*[plan.order(worker, a, b) for a, b in bounds]) for worker in range(plan.workers)
        ]
        self._credits = credits
        self.waiting: list[tuple[int, Action]] = []

    def __iter__(self) -> Iterator[Done]:
        """Execute; constant time for each action."""
        plan, orders = self._plan, self._orders
        forward, backward, input_half = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT
        onward, back = (_Progress(plan.neighbours(kind)) for kind in (forward, backward))
        only_stage = [plan.stages_of(worker)[0] for worker in range(plan.workers)]
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
                else:
                    yield worker, stage, action
                    continue
                done = way.done
                # What is out of turn does not wait: the rules are the checker's business.
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
        """Return the stage whose loss the injection of a micro-batch waits for; -1 for none."""
        k, credits = self._plan.per_update, self._credits or 0
        (exit_stage,) = self._plan.exits
        awaited = (micro_batch // k - credits + 1) * k
        return exit_stage if forwards[exit_stage] < awaited else -1
