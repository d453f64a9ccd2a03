"""The orders: which actions a stage does, one after another. Endless, pure, one function each.

Letters as in the papers: n stages, s = 0..n-1, k micro-batches per update, m a micro-batch,
w(s) = n-1-s warm-up forwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from pipedream_rt.schedules.actions import Action, backward, forward, step, until


class Order(Protocol):
    """Says what each stage does next; knows no version, clock, message or tensor."""

    def actions(self, stage: int, num_stages: int, per_update: int, start: int) -> Iterator[Action]:
        """Yield the endless order of a stage from ``start``, where nothing is in flight."""

    def in_flight(self, stage: int, num_stages: int, per_update: int) -> int:
        """Return the most micro-batches whose backward may be outstanding on a stage."""


def one_forward_one_backward(warm_up: int, per_update: int, start: int) -> Iterator[Action]:
    """Warm-up forwards, then forward and backward in turn, a step after each k-th backward.

    One stage with two warm-up forwards and k = 1::

        F0 F1 | F2 B0 S0 | F3 B1 S1 | F4 B2 S2 ...
    """
    for m in range(start, start + warm_up):
        yield forward(m)
    for m in count(start):
        yield forward(m + warm_up)
        yield backward(m)
        if (m + 1) % per_update == 0:
            yield step(m // per_update)


@dataclass(frozen=True, slots=True)
class Async1F1B:
    """No flush, ever: mini-batches and epochs follow each other without a bubble.

    Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training
    (SOSP 2019), section 3.2 (1F1B).
    """

    def actions(self, stage: int, num_stages: int, per_update: int, start: int) -> Iterator[Action]:
        """See `Order.actions`."""
        return one_forward_one_backward(num_stages - 1 - stage, per_update, start)

    def in_flight(self, stage: int, num_stages: int, per_update: int) -> int:
        """w(s) + 1."""
        return num_stages - stage


@dataclass(frozen=True, slots=True)
class Flushed1F1B:
    """1F1B that drains before every update.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (ICML 2021),
    PipeDream-Flush.
    """

    def actions(self, stage: int, num_stages: int, per_update: int, start: int) -> Iterator[Action]:
        """See `Order.actions`."""
        warm_up = min(num_stages - 1 - stage, per_update)
        for first in count(start, per_update):
            endless = one_forward_one_backward(warm_up, per_update, first)
            yield from until(endless, first + per_update, per_update, first, first // per_update)

    def in_flight(self, stage: int, num_stages: int, per_update: int) -> int:
        """min(w(s) + 1, k)."""
        return min(num_stages - stage, per_update)


@dataclass(frozen=True, slots=True)
class GPipe:
    """All forwards of a mini-batch, then all its backwards, then the update.

    Departure from the paper: backwards run in the order of the forwards, not against it, so that
    gradients are summed in the order in which plain gradient accumulation sums them.

    Source: Huang et al., GPipe (NeurIPS 2019).
    """

    def actions(self, stage: int, num_stages: int, per_update: int, start: int) -> Iterator[Action]:
        """See `Order.actions`."""
        for first in count(start, per_update):
            mini_batch = range(first, first + per_update)
            yield from map(forward, mini_batch)
            yield from map(backward, mini_batch)
            yield step(first // per_update)

    def in_flight(self, stage: int, num_stages: int, per_update: int) -> int:
        """Return k."""
        return per_update
