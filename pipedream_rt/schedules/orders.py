"""The orders: the endless sequences of actions of the workers, one class for each.

The letters are those of the papers: n workers, v stages on each, s a stage, k micro-batches per
update, m a micro-batch, r the replicas of a stage, and w(s) the warm-up forwards of a stage:
n-1-s, plus the slack of the hops after it; with replicas see `Shape.warm_up`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules.actions import (
    ENDS,
    Action,
    Kind,
    backward,
    forward,
    input_gradient,
    reduce,
    step,
    take,
    until,
    weight_gradient,
)
from pipedream_rt.schedules.shape import Shape


class Order(Protocol):
    """The sequence of actions of each worker, without versions, clocks, messages or tensors."""

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        """Yield a worker's endless sequence of actions.

        Args:
            worker: Index of the worker.
            shape: The numbers of the schedule.
            start: The first micro-batch; nothing is in flight before it.
        """

    def in_flight(self, stage: int, shape: Shape) -> int:
        """Return the largest number of micro-batches in flight on a stage."""

    def require(self, shape: Shape) -> None:
        """Refuse a shape for which there is no such order.

        Raises:
            ConfigError: There is no such order for the shape.
        """


def one_forward_one_backward(warm_up: int, per_update: int, start: int) -> Iterator[Action]:
    """Yield warm-up forwards, then forwards and backwards in turn, with a step after k backwards.

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


def replicated_1f1b(worker: int, shape: Shape, start: int) -> Iterator[Action]:
    """Yield the actions of one of several replicas: 1F1B over its own micro-batches, and updates.

    It sends its gradients as soon as it has them, and steps one own micro-batch later, so that
    there is time to reduce them. Replica 0 of two on the first of two stages, k = 2::

        F0 | F2 B0 R0 | F4 B2 R1 S0 | F6 B4 R2 S1 ...
    """
    stage, _, count = shape.place_of(worker)
    ahead, k = count * shape.warm_up(stage), shape.per_update
    first = shape.first_own(worker, start)
    yield from map(forward, range(first, first + ahead, count))
    applied = start // k
    for m in range(first, sys.maxsize, count):
        yield forward(m + ahead)
        yield backward(m)
        if (m + count) // k > m // k:  # the last own micro-batch of its update
            yield reduce(m // k)
        # All micro-batches of these are before m. With r > k there may be several.
        for update in range(applied, m // k):
            yield from _applied(shape, stage, update)
        applied = m // k


def flushed_update(worker: int, shape: Shape, first: int, warm_up: int) -> Iterator[Action]:
    """Yield one mini-batch from micro-batch ``first`` on: forwards, backwards and the update."""
    stage, _, count = shape.place_of(worker)
    update, end = first // shape.per_update, first + shape.per_update
    own = range(shape.first_own(worker, first), end, count)
    yield from map(forward, own[:warm_up])
    for i, m in enumerate(own):
        yield from map(forward, own[i + warm_up : i + warm_up + 1])  # none in the drain
        yield backward(m)
    if count > 1 and own:  # with r > k, some replicas have no micro-batch
        yield reduce(update)
    yield from _applied(shape, stage, update)


def _applied(shape: Shape, stage: int, update: int) -> Iterator[Action]:
    """Yield the step of an update, and with a sharded optimizer the take."""
    yield step(update)
    if shape.shards(stage):
        yield take(update)


def refuse_slack(name: str, shape: Shape) -> None:
    """Refuse slack for an order that would ignore it."""
    if shape.slack:
        raise ConfigError(
            f"{name} has no warm-up that slack could lengthen; slack is for async-1f1b, 2bw and "
            "1f1b"
        )


def refuse_replicas(name: str, shape: Shape) -> None:
    """Refuse replicas for an order that has no place for them."""
    if shape.replicas:
        raise ConfigError(
            f"{name} has one replica of each stage; replicas are for async-1f1b, 2bw, 1f1b and "
            "gpipe"
        )


class _OneStageEach:
    """The base of orders that put one stage on each worker."""

    __slots__ = ()

    def require(self, shape: Shape) -> None:
        if shape.stages_per_worker != 1:
            raise ConfigError(
                f"{type(self).__name__} puts one stage on each worker, "
                f"not {shape.stages_per_worker}; interleaved-1f1b takes several"
            )


@dataclass(frozen=True, slots=True)
class Flushed1F1B(_OneStageEach):
    """1F1B with a flush at every update.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (ICML 2021),
    PipeDream-Flush.
    """

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        stage, _, _ = shape.place_of(worker)
        for first in count(start, shape.per_update):
            yield from flushed_update(worker, shape, first, shape.warm_up(stage))

    def in_flight(self, stage: int, shape: Shape) -> int:
        """Return min(w(s) + 1, ceil(k / r))."""
        return min(shape.warm_up(stage) + 1, _most_own(stage, shape))


@dataclass(frozen=True, slots=True)
class Async1F1B(_OneStageEach):
    """1F1B without a flush: mini-batches and epochs follow each other without a bubble.

    After each of the first `Shape.synchronous` updates, the pipe is flushed.

    Sources: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training
    (SOSP 2019), section 3.2 (1F1B); Yang et al., PipeMare (MLSys 2021), technique T3 (synchronous
    warm-up).
    """

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        first = shape.first_asynchronous
        if start < first:
            k, left = shape.per_update, shape.work(worker, start, first)
            yield from until(Flushed1F1B().order(worker, shape, start), first, k, left)
        stage, _, replicas = shape.place_of(worker)
        if replicas > 1:
            yield from replicated_1f1b(worker, shape, max(start, first))
        else:
            yield from one_forward_one_backward(
                shape.warm_up(stage), shape.per_update, max(start, first)
            )

    def in_flight(self, stage: int, shape: Shape) -> int:
        """Return w(s) + 1."""
        return shape.warm_up(stage) + 1


@dataclass(frozen=True, slots=True)
class GPipe(_OneStageEach):
    """All forwards of a mini-batch, then all its backwards, then the update.

    One departure from the paper: backwards run in the order of the forwards, not in reverse, so
    that gradients are summed in the order of plain gradient accumulation.

    Source: Huang et al., GPipe (NeurIPS 2019).
    """

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        for first in count(start, shape.per_update):
            yield from flushed_update(worker, shape, first, shape.per_update)

    def in_flight(self, stage: int, shape: Shape) -> int:
        """Return ceil(k / r)."""
        return _most_own(stage, shape)

    def require(self, shape: Shape) -> None:
        _OneStageEach.require(self, shape)
        refuse_slack("gpipe", shape)


@dataclass(frozen=True, slots=True)
class Interleaved1F1B:
    """1F1B over v stages on each worker, which makes the bubble v times shorter.

    A worker does the v k forwards of a mini-batch in groups of n micro-batches: a group goes
    through its first stage, then its second, and so on, before the next group. The backwards go
    in the same groups, through its last stage first::

        worker 0 of 2, stages 0 and 2, k = 4
        0:F0 0:F1 2:F0 2:F1 | 0:F2 2:B0 | 0:F3 2:B1 | 2:F2 0:B0 | 2:F3 0:B1 | 2:B2 2:B3 0:B2 0:B3

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM (SC 2021), section 2.2.
    """

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        n, k, v = shape.workers, shape.per_update, shape.stages_per_worker
        stages = shape.stages_of(worker)
        # With one stage on each worker this is plain 1F1B, whose warm-up is shorter.
        warm_up = min(2 * (n - 1 - worker) + (v - 1) * n if v > 1 else n - 1 - worker, v * k)

        def forward_at(i: int) -> tuple[int, int]:
            """Return the micro-batch of the i-th forward, and which stage of this worker it is."""
            group, rest = divmod(i, n * v)
            return group * n + rest % n, rest // n

        for first in count(start, k):
            for i in range(v * k + warm_up):
                if i < v * k:
                    m, chunk = forward_at(i)
                    yield forward(first + m, stages[chunk])
                if i >= warm_up:
                    m, chunk = forward_at(i - warm_up)
                    yield backward(first + m, stages[v - 1 - chunk])
            # From the last stage to the first, as norms go; in another order a step would wait for
            # the norm of a later step of the same worker.
            for stage in reversed(stages):
                yield step(first // k, stage)

    def in_flight(self, stage: int, shape: Shape) -> int:
        """Count it over one mini-batch, since there is no simple formula."""
        order, k = self.order(shape.worker_of(stage), shape, 0), shape.per_update
        return most_in_flight(until(order, k, k, shape.work(0, 0, k)), stage)

    def require(self, shape: Shape) -> None:
        """Refuse slack, and a number of micro-batches k that is no multiple of the workers n."""
        refuse_replicas("interleaved-1f1b", shape)
        refuse_slack("interleaved-1f1b", shape)
        if shape.per_update % shape.workers:
            raise ConfigError(
                "interleaved-1f1b takes the micro-batches in groups of as many as there are "
                f"workers, so micro_batches must be a multiple of {shape.workers}, "
                f"not {shape.per_update}"
            )


def _most_own(stage: int, shape: Shape) -> int:
    """Return ceil(k / r), the most micro-batches of a mini-batch that go to one replica."""
    return -(-shape.per_update // (shape.replicas[stage] if shape.replicas else 1))


def most_in_flight(actions: Iterator[Action], stage: int) -> int:
    """Return the largest number of micro-batches in flight on a stage during a finite order."""
    now = most = 0
    for action in actions:
        if action.stage in (None, stage):
            now += (action.kind is Kind.FORWARD) - (action.kind in ENDS)
            most = max(most, now)
    return most


@dataclass(frozen=True, slots=True)
class ZeroBubbleH1(_OneStageEach):
    """1F1B with split backwards, whose weight halves fill the bubble without more memory.

    Stage s does each weight half s micro-batches late, so that w(s) + 1 + s = n micro-batches are
    in flight, as many as on the first stage of 1F1B. In the drain a weight half follows each input
    half. If F, I and W take the same time, the bubble is a third of that of 1F1B::

        worker 2 of 3, k = 4    F0 I0 F1 I1 | F2 I2 W0 | F3 I3 W1 | W2 W3 S0

    Source: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), section 2.1, ZB-H1.
    """

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        k = shape.per_update
        warm_up, put_off = min(shape.workers - 1 - worker, k), min(worker, k)
        for first in count(start, k):
            for i in range(warm_up):
                yield forward(first + i)
            for i in range(k + put_off):
                if i + warm_up < k:
                    yield forward(first + i + warm_up)
                if i < k:
                    yield input_gradient(first + i)
                if i >= put_off:
                    yield weight_gradient(first + i - put_off)
            yield step(first // k)

    def in_flight(self, stage: int, shape: Shape) -> int:
        """Return min(n, k)."""
        return min(shape.workers, shape.per_update)

    def require(self, shape: Shape) -> None:
        _OneStageEach.require(self, shape)
        refuse_replicas("zero-bubble", shape)
        refuse_slack("zero-bubble", shape)
