"""Executes the orders of all workers against each other: who can go on, and who waits for whom.

No clock here: what is executed, and in which order on each worker, does not depend on time. The
checker puts rules on top of it, the simulator puts times on top of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Protocol, TypeAlias

from pipedream_rt.schedules.actions import Action, Kind
from pipedream_rt.schedules.shape import Shape


class Executable(Protocol):
    """What is needed of a schedule to execute it."""

    @property
    def shape(self) -> Shape:
        """Workers, stages, micro-batches per update."""

    def order(self, worker: int, start: int = 0, stop: int | None = None) -> Iterator[Action]:
        """Yield what a worker does."""


Done: TypeAlias = tuple[int, int, Action]
"""One action, executed: worker, stage, what. A plain tuple, since there are millions."""


class Execution:
    """Iterates over all actions of a run in an order in which they can happen.

    Each worker follows its order as far as the messages it needs have been sent, then the next
    that can go on. An action waits for the same micro-batch's action on the neighbour stage: a
    forward for the stage before, a backward (or its input half) for the stage after.

    Args:
        schedule: What to execute.
        micro_batches: How many there are, a multiple of k.
        flushes: Multiples of k at which the pipe is flushed on the way.
        credits: Mini-batches injected before the first loss is waited for; None for no limit.

    Attributes:
        waiting: After the iteration, the workers that wait for ever, with what they wait to do.
    """

    def __init__(
        self,
        schedule: Executable,
        micro_batches: int,
        *,
        flushes: Sequence[int] = (),
        credits: int | None = None,
    ) -> None:
        """Take nothing yet."""
        self._shape = schedule.shape
        bounds = list(pairwise((0, *flushes, micro_batches)))
        self._orders = [
            chain(*[schedule.order(worker, a, b) for a, b in bounds])
            for worker in range(self._shape.workers)
        ]
        self._credits = credits
        self.waiting: list[tuple[int, Action]] = []

    def __iter__(self) -> Iterator[Done]:
        """Execute; constant time for each action."""
        shape, orders, credits = self._shape, self._orders, self._credits
        forward, backward, input_half = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT
        last, k = shape.num_stages - 1, shape.per_update
        forwards, backs = [0] * (last + 1), [0] * (last + 1)
        # Who is to be woken when the stage has gone on: nobody is -1, a stage has one neighbour.
        on_forward, on_back = [-1] * (last + 1), [-1] * (last + 1)
        held: list[Action | None] = [None] * shape.workers
        ready = list(range(shape.workers))
        while ready:
            worker = ready.pop()
            first, held[worker] = held[worker], None
            for action in chain(() if first is None else (first,), orders[worker]):
                kind, m, stage = action
                if stage is None:
                    stage = worker
                # What is out of turn does not wait: the rules are the checker's business.
                if kind is forward:
                    if stage:
                        if forwards[stage - 1] <= m == forwards[stage]:
                            held[worker], on_forward[stage - 1] = action, worker
                            break
                    elif credits and forwards[last] < (m // k - credits + 1) * k:
                        held[worker], on_forward[last] = action, worker
                        break
                    yield worker, stage, action
                    forwards[stage] = m + 1
                    if on_forward[stage] >= 0:
                        ready.append(on_forward[stage])
                        on_forward[stage] = -1
                elif kind is backward or kind is input_half:
                    if stage < last and backs[stage + 1] <= m == backs[stage]:
                        held[worker], on_back[stage + 1] = action, worker
                        break
                    yield worker, stage, action
                    backs[stage] = m + 1
                    if on_back[stage] >= 0:
                        ready.append(on_back[stage])
                        on_back[stage] = -1
                else:
                    yield worker, stage, action
        self.waiting = [(worker, action) for worker, action in enumerate(held) if action]
