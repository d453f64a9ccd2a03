"""Feeds mini-batches into the pipe and takes losses out of it.

A mini-batch is cut into micro-batches, which are fed one after another. So many mini-batches are on
their way at a time as there are credits; then the losses of the oldest are waited for first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from pipedream_rt.coordinator.distributed_optimizer import DistributedOptimizer
from pipedream_rt.coordinator.group import Lease
from pipedream_rt.coordinator.results import PendingStep, StepResult
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.message import CommandName, Key, Loss, MicroBatch, Mode, Target
from pipedream_rt.messages.tree import (
    Structure,
    batch_size,
    flat_copy,
    micro_batch_sizes,
    split,
    unflatten,
)
from pipedream_rt.observe.spans import NOBODY, Recorder
from pipedream_rt.observe.trace import INJECTED, LOSS_CAME
from pipedream_rt.schedules import COORDINATOR, EdgeKind
from pipedream_rt.stage.optimizer import Hyper


class _Part(NamedTuple):
    """A micro-batch, flattened: structure and tensors of the input and of the target."""

    x: tuple[Structure, tuple[Tensor, ...]]
    y: tuple[Structure, tuple[Tensor, ...]]


def _part(x: Any, y: Any) -> _Part:
    """Flatten a micro-batch, in copies: the caller may change its tensors after the call."""
    return _Part(flat_copy(x), flat_copy(y))


def pair_of(item: Any) -> tuple[Any, Any]:
    """Return an item of a loader as input and target.

    Raises:
        ConfigError: It is no pair.
    """
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    length = f" of {len(item)}" if isinstance(item, tuple | list) else ""
    raise ConfigError(
        f"the loader must yield pairs (x, y); this item is a {type(item).__name__}{length}"
    )


class Feeder:
    """Feeds what is trained on, evaluated and inferred from; hands back losses and outputs.

    Args:
        lease: Of the workers.
        credits: Mini-batches on their way at a time.
        has_loss: Whether the last stage computes a loss.
        recorder: Where the coordinator's spans are written; None for no trace.

    Attributes:
        credits: Mini-batches on their way at a time.
        optimizer: That the stages step with, for its hyper-parameters; None if there is none.
        step: Mini-batches injected so far.
        passes: Micro-batches that were evaluated or inferred from so far.
        pending: Mini-batches on their way, oldest first.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        credits: int,
        has_loss: bool,
        recorder: Recorder | None,
    ) -> None:
        """Feed nothing yet."""
        self._lease = lease
        self._group = lease.group
        self._has_loss = has_loss
        self._recorder = recorder
        self._per_update = self._group.plan.per_update
        (self._loss_edge,) = self._group.plan.edges(EdgeKind.LOSS)
        self.credits = credits
        self.optimizer: DistributedOptimizer | None = None
        self.step = self.passes = 0
        self.pending: deque[PendingStep] = deque()

    # -- training -------------------------------------------------------------------------------

    def inject(self, x: Any, y: Any) -> PendingStep:
        """Feed one mini-batch with the hyper-parameters that are set now.

        Waits for the oldest mini-batch when as many as there are credits are on their way.

        Raises:
            ConfigError: No loss or optimizer was given, or the mini-batch cannot be split.
        """
        self._group.life.check()
        optimizer = self.optimizer
        if not self._has_loss or optimizer is None:
            raise ConfigError("training needs loss_fn and optimizer; give both to Pipeline")
        parts, sizes = self._parts(x, y)
        while len(self.pending) >= self.credits:
            self.collect_oldest()
        hyper = optimizer.hyper()
        pending = PendingStep(self, self.step, self._group.position, sizes)
        with self._group.life.guard():  # a mini-batch is fed whole or ends the pipeline
            for i, part in enumerate(parts):
                number = self.step * self._per_update + i
                start = time.monotonic_ns()
                self._feed(Mode.TRAIN, number, part, share=sizes[i] / sum(sizes), hyper=hyper)
                self._record(INJECTED, number, NOBODY, start, start)
            optimizer.step()
            self.step += 1
            self.pending.append(pending)
        return pending

    def _parts(self, x: Any, y: Any) -> tuple[list[_Part | None], list[int]]:
        """Cut a mini-batch into micro-batches; None for the empty ones that fill it up.

        Everything that can be wrong with it is found here, before any of it is sent.
        """
        k = self._per_update
        samples = batch_size(x)
        if samples == 0 or (samples is None and k > 1):
            raise ConfigError("a mini-batch without samples cannot be trained on")
        if k == 1 or samples is None:
            return [_part(x, y)], [samples or 1]
        sizes = micro_batch_sizes(samples, k)
        pairs = zip(split(x, sizes), split(y, sizes), sizes, strict=True)
        return [_part(xi, yi) if size else None for xi, yi, size in pairs], sizes

    def _feed(
        self,
        mode: Mode,
        number: int,
        part: _Part | None,
        *,
        share: float = 1.0,
        hyper: list[Hyper] | None = None,
    ) -> int:
        """Feed one micro-batch, with its target where a loss is asked for; return its position."""
        structure, tensors = (part or _part(None, None)).x
        head = MicroBatch(
            micro_batch=number,
            mode=mode,
            empty=part is None,
            hyper=hyper,
            structure=structure,
            requires_grad=[False] * len(tensors),
        )
        if part is None or mode is Mode.INFER:
            return self._group.feed(head, tensors)
        structure, of_target = part.y
        target = Target(structure=structure, share=share)
        return self._group.feed(head, tensors, target, of_target)

    def collect_oldest(self) -> None:
        """Wait for the losses of the oldest mini-batch on its way; see `LossSource`."""
        self._group.life.check()
        pending = self.pending[0]
        with self._group.life.guard():  # what is taken of it must not be lost
            asked, taken = time.monotonic_ns(), []
            for i in range(len(pending.sizes)):
                taken.append(self._take_loss(pending.first + i)[0])
                number = pending.step * self._per_update + i
                self._group.next_loss = number + 1
                self._record(LOSS_CAME, number, self._loss_edge.source, asked, time.monotonic_ns())
        pending.outcome = _result(pending, taken)
        self.pending.popleft()

    def has_losses(self, pending: PendingStep) -> bool:
        """Whether the losses of a mini-batch have all arrived; see `LossSource`."""
        positions = range(pending.first, pending.first + len(pending.sizes))
        return all(self._group.inbox.holds(Key(self._loss_edge, p)) for p in positions)

    def flush(self) -> None:
        """Wait until nothing is in flight on any stage, and every update is applied."""
        self._group.life.check()
        while self.pending:  # before the positions that follow: an inbox takes them in order
            self.collect_oldest()
        self._group.command(CommandName.FLUSH)

    def _take_loss(self, position: int) -> tuple[Loss, Any]:
        """Wait for what the last stage says of a position: the loss, or the output."""
        message = self._group.take(Key(self._loss_edge, position))
        loss = message.payload
        assert isinstance(loss, Loss)
        return loss, unflatten(loss.structure, message.tensors) if loss.structure else None

    def _record(self, kind: int, number: int, waited_for: int, ready: int, start: int) -> None:
        """Write a span of the coordinator, which ends now."""
        if self._recorder is not None:
            arrived = 0 if waited_for == NOBODY else self._group.inbox.arrived_ns
            self._recorder.record(
                kind, COORDINATOR, number, 0, 0, 0,
                waited_for, ready, arrived, start, time.monotonic_ns(), 0,
            )  # fmt: skip

    # -- what is no training --------------------------------------------------------------------

    def evaluate(self, loader: Iterable[Any]) -> float:
        """Return the mean loss over a loader; see `Pipeline.evaluate`."""
        self._group.life.check()
        if not self._has_loss:
            raise ConfigError("evaluate needs loss_fn; give it to Pipeline")
        self.flush()
        ahead: deque[tuple[int, int]] = deque()
        losses: list[tuple[float, int]] = []

        def collect() -> None:
            """Take the oldest loss of those on their way."""
            position, size = ahead.popleft()
            loss = self._take_loss(position)[0].loss
            losses.append((loss if loss is not None else 0.0, size))

        try:
            for item in loader:
                parts, sizes = self._parts(*pair_of(item))
                for part, size in zip(parts, sizes, strict=True):
                    if part is not None:
                        ahead.append((self._pass(Mode.EVALUATE, part), size))
                while len(ahead) > 2 * self._group.plan.num_stages:
                    collect()
        finally:
            while ahead and not self._group.life.is_over:
                collect()
        samples = sum(size for _, size in losses)
        if not samples:
            raise ConfigError("the loader given to evaluate yielded nothing")
        total = 0.0
        for loss, size in losses:
            total += loss * size
        return total / samples

    def infer(self, x: Any) -> Any:
        """Return the model's output for an input, which is not split; see `Pipeline.__call__`."""
        self.flush()
        return self._take_loss(self._pass(Mode.INFER, _part(x, None)))[1]

    def _pass(self, mode: Mode, part: _Part) -> int:
        """Feed one micro-batch that trains nothing; these have numbers of their own."""
        position = self._feed(mode, self.passes, part)
        self.passes += 1
        return position


def _result(pending: PendingStep, taken: list[Loss]) -> StepResult:
    """Put together what became of a mini-batch.

    Args:
        pending: The mini-batch.
        taken: What the last stage said of each of its micro-batches.
    """
    losses = [loss.loss for loss in taken]
    total = sum(pending.sizes)
    # A sum in the order of the micro-batches, so that the figure does not depend on timing.
    mean = sum(
        loss * (size / total)
        for loss, size in zip(losses, pending.sizes, strict=True)
        if loss is not None
    )
    oldest = min(version for loss in taken for _, version, _ in loss.trail)
    return StepResult(
        step=pending.step,
        loss=mean,
        losses=tuple(loss for loss in losses if loss is not None),
        versions=tuple(version for _, version, _ in taken[-1].trail),
        staleness=max(0, pending.step - oldest),
        busy_s=tuple(busy_ns / 1e9 for _, _, busy_ns in taken[-1].trail),
    )
