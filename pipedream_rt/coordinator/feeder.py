"""Feeding mini-batches into the pipe and taking losses out of it.

The feeder cuts a mini-batch into micro-batches and feeds them one after another. When as many
mini-batches are on their way as there are credits, it waits for the losses of the oldest one before
it feeds the next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

from torch import Tensor

from pipedream_rt.coordinator.batches import Batch, Prepare, batch_of, cut_batch, example_of
from pipedream_rt.coordinator.distributed_optimizer import DistributedOptimizer
from pipedream_rt.coordinator.forwards import Cache, Fed, Forwards
from pipedream_rt.coordinator.lease import Lease
from pipedream_rt.coordinator.results import PendingStep, StepResult
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.message import CommandName, Key, Loss, MicroBatch, Mode, Target
from pipedream_rt.messages.tree import (
    Structure,
    batch_size,
    flat_copy,
    micro_batch_sizes,
    unflatten,
)
from pipedream_rt.observe.spans import NOBODY, Recorder
from pipedream_rt.observe.trace import INJECTED, LOSS_CAME
from pipedream_rt.schedules import COORDINATOR, Edge, EdgeKind
from pipedream_rt.stage.fingerprint import total as combined
from pipedream_rt.stage.optimizer import Hyper
from pipedream_rt.stage.settings import (
    refuse_contexts,
    refuse_no_grad,
    refuse_other_settings,
    settings_now,
)


class _Part(NamedTuple):
    """A flattened micro-batch.

    Attributes:
        x: What is fed of its inputs.
        y: The structure and the tensors of the target.
    """

    x: Fed
    y: tuple[Structure, tuple[Tensor, ...]]


_NOTHING = Fed(0, b"", *flat_copy(None))
"""What is fed of a micro-batch without samples."""


class Feeder:
    """The feeder of micro-batches for training, evaluation and inference.

    Args:
        lease: Keeps the workers.
        credits: Number of mini-batches on their way at a time.
        forwards: What the forwards of the model do.
        has_loss: Whether the last stage computes a loss.
        recorder: Where the coordinator writes its spans; None for no trace.
        fingerprint_every: Number of mini-batches after which a result has a fingerprint; None for
            no fingerprints.
        refuse: Called before every injection, to refuse what would not reach the stages.
        first: Called with the first mini-batch, before it is fed; None for nothing.

    Attributes:
        forwards: What the forwards of the model do.
        credits: Number of mini-batches on their way at a time.
        optimizer: The optimizer that the stages step with; None if there is none.
        step: Number of mini-batches injected so far.
        passes: Number of micro-batches fed so far for evaluation and inference.
        pending: The mini-batches on their way, oldest first.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        forwards: Forwards,
        credits: int,
        has_loss: bool,
        recorder: Recorder | None,
        fingerprint_every: int | None = None,
        refuse: Callable[[], None] = lambda: None,
        first: Callable[[Batch], object] | None = None,
    ) -> None:
        """Feed nothing yet."""
        self._first = first
        self._fingerprint_every = fingerprint_every
        self._refuse = refuse
        self._settings = settings_now()
        self.forwards = forwards
        self._lease = lease
        self._group = lease.group
        self._has_loss = has_loss
        self._recorder = recorder
        self._per_update = self._group.plan.per_update
        self.credits = credits
        self.optimizer: DistributedOptimizer | None = None
        self.step = self.passes = 0
        self.pending: deque[PendingStep] = deque()

    # -- training -------------------------------------------------------------------------------

    def inject(self, batch: Batch) -> PendingStep:
        """Feed one mini-batch, with the hyper-parameters that the optimizer has now.

        If as many mini-batches are on their way as there are credits, wait for the oldest first.

        Raises:
            ConfigError: No loss or optimizer was given, or the mini-batch cannot be split.
            PipelineClosed: The pipeline is closed.
        """
        self._group.life.check()
        optimizer = self.optimizer
        if not self._has_loss or optimizer is None:
            raise ConfigError("training needs loss_fn and optimizer; give both to Pipeline")
        refuse_no_grad()
        self._refuse_what_stays_here()
        self._refuse()
        if self._first is not None and not self.step:
            self._first(batch)
        parts, sizes = self._parts(batch, Mode.TRAIN)
        while len(self.pending) >= self.credits:
            self.collect_oldest()
        hyper = optimizer.hyper()
        pending = PendingStep(self, self.step, self._group.position, sizes)
        every = self._fingerprint_every
        wants_mark = every is not None and (self.step + 1) % every == 0
        with self._group.life.guard():  # a mini-batch that is fed in part must end the pipeline
            for i, part in enumerate(parts):
                number = self.step * self._per_update + i
                start = time.monotonic_ns()
                share = sizes[i] / sum(sizes)
                marks = wants_mark and i == len(parts) - 1
                self._feed(Mode.TRAIN, number, part, share=share, hyper=hyper, fingerprint=marks)
                self._record(INJECTED, number, NOBODY, start, start)
            optimizer.count_step()
            self.step += 1
            self.pending.append(pending)
        return pending

    def _refuse_what_stays_here(self) -> None:
        """Refuse settings and contexts of this process that would not reach the workers.

        Raises:
            ConfigError: There is one.
        """
        refuse_other_settings(self._settings)
        refuse_contexts()

    def _part(self, batch: Batch, mode: Mode) -> _Part:
        """Flatten a copy of a micro-batch: the caller may change its tensors afterwards."""
        fed = self.forwards.fed(batch, mode, self._group.training)
        return _Part(fed, flat_copy(batch.target if mode.has_target else None))

    def _parts(self, batch: Batch, mode: Mode) -> tuple[list[_Part | None], list[int]]:
        """Cut a mini-batch into micro-batches, before any of it is sent.

        Returns:
            The micro-batches, with None for the empty ones at the end of a short mini-batch; and
            the number of samples in each.

        Raises:
            ConfigError: The mini-batch has no samples, or cannot be split.
        """
        k, samples = self._per_update, batch_size((batch.args, batch.kwargs))
        if samples == 0 or (samples is None and k > 1):
            raise ConfigError("a mini-batch without samples cannot be trained on")
        if k == 1 or samples is None:
            return [self._part(batch, mode)], [samples or 1]
        sizes = micro_batch_sizes(samples, k)
        pairs = zip(cut_batch(batch, sizes), sizes, strict=True)
        return [self._part(each, mode) if size else None for each, size in pairs], sizes

    def _feed(
        self,
        mode: Mode,
        number: int,
        part: _Part | None,
        *,
        share: float = 1.0,
        hyper: list[Hyper] | None = None,
        fingerprint: bool = False,
        version: int = 0,
        cache: int = 0,
    ) -> int:
        """Feed one micro-batch, with its target where the stages compute a loss.

        Args:
            mode: What the stages do with it.
            number: Number of the micro-batch, counted by itself for training and for other modes.
            part: The micro-batch; None for an empty one.
            share: Share of the mini-batch's samples that it has, between 0 and 1.
            hyper: Hyper-parameters of its update, by parameter group; None unless it is trained on.
            fingerprint: Whether each stage adds a fingerprint.
            version: Number of the kept version that is read; 0 for the newest weights.
            cache: Number of the cache that layers use; 0 for none.

        Returns:
            Its position.
        """
        program, definition, structure, tensors = part.x if part else _NOTHING
        head = MicroBatch(
            micro_batch=number,
            mode=mode,
            empty=part is None,
            program=program,
            definition=definition,
            version=version,
            cache=cache,
            fingerprint=fingerprint,
            hyper=hyper,
            structure=structure,
        )
        if part is None or not mode.has_target:
            return self._group.feed(head, tensors)
        structure, of_target = part.y
        target = Target(structure=structure, share=share)
        return self._group.feed(head, tensors, target, of_target)

    def collect_oldest(self) -> None:
        """Wait for the losses of the oldest mini-batch on its way, and set its outcome.

        Raises:
            ConfigError: The script has changed what workers in its own process compute with.
        """
        self._group.may_wait()
        pending = self.pending[0]
        with self._group.life.guard():  # an error in between loses the losses taken before it
            asked, taken = time.monotonic_ns(), []
            for i in range(len(pending.sizes)):
                number = pending.step * self._per_update + i
                taken.append(self._take_loss(pending.first + i, number)[0])
                self._group.next_loss = number + 1
                source = self._loss_edge(number).source
                self._record(LOSS_CAME, number, source, asked, time.monotonic_ns())
        pending.outcome = _result(pending, taken)
        self.pending.popleft()

    def has_losses(self, pending: PendingStep) -> bool:
        """Whether the losses of a mini-batch have all arrived."""
        number = pending.step * self._per_update
        keys = (
            Key(self._loss_edge(number + i), pending.first + i) for i in range(len(pending.sizes))
        )
        return all(map(self._group.inbox.holds, keys))

    def flush(self) -> None:
        """Wait until nothing is in flight on any stage, and every update is applied.

        Raises:
            ConfigError: The script has changed what workers in its own process compute with.
        """
        self._group.may_wait()
        while self.pending:  # first, because the messages of an edge are taken by rising position
            self.collect_oldest()
        self._group.command(CommandName.FLUSH, self._group.next_micro_batch)

    def _loss_edge(self, number: int) -> Edge:
        """Return the way of the loss of a micro-batch to train on."""
        plan = self._group.plan
        return Edge(EdgeKind.LOSS, plan.address_of(plan.exits[0], number), COORDINATOR)

    def _take_loss(self, position: int, number: int = 0) -> tuple[Loss, Any]:
        """Wait for the last stage's message about a position; return it, and the output in it.

        Args:
            position: The position of the micro-batch.
            number: Its number, if it is trained on.
        """
        message = self._group.take(Key(self._loss_edge(number), position))
        loss = message.payload
        assert isinstance(loss, Loss)
        return loss, unflatten(loss.structure, message.tensors) if loss.structure else None

    def _record(self, kind: int, number: int, waited_for: int, ready: int, start: int) -> None:
        """Record a span of the coordinator that ends now.

        Args:
            kind: Kind of the span.
            number: Number of the micro-batch.
            waited_for: The stage whose message was waited for; `NOBODY` if none was.
            ready: When the wait began, in ns.
            start: When the wait ended, in ns.
        """
        if self._recorder is not None:
            arrived = 0 if waited_for == NOBODY else self._group.inbox.arrived_ns
            self._recorder.record(
                kind, COORDINATOR, number, 0, 0, 0,
                waited_for, ready, arrived, start, time.monotonic_ns(), 0,
            )  # fmt: skip

    # -- evaluation and inference ---------------------------------------------------------------

    def evaluate(
        self, loader: Iterable[Any], prepare: Prepare | None = None, version: int = 0
    ) -> float:
        """Return the mean loss over a loader; see `Pipeline.evaluate`."""
        self._group.life.check()
        if not self._has_loss:
            raise ConfigError("evaluate needs loss_fn; give it to Pipeline")
        total, samples = 0.0, 0
        parts = self._with_samples(loader, prepare)
        for loss, _, size in self._passed(Mode.EVALUATE, parts, version):
            total += (loss if loss is not None else 0.0) * size
            samples += size
        if not samples:
            raise ConfigError("the loader given to evaluate yielded nothing")
        return total / samples

    def _with_samples(
        self, loader: Iterable[Any], prepare: Prepare | None
    ) -> Iterator[tuple[_Part, int]]:
        """Yield the micro-batches of a loader that have samples, and their numbers of samples."""
        for item in loader:
            parts, sizes = self._parts(batch_of(item, prepare), Mode.EVALUATE)
            for part, size in zip(parts, sizes, strict=True):
                if part is not None:
                    yield part, size

    def _passed(
        self, mode: Mode, parts: Iterable[tuple[_Part, int]], version: int
    ) -> Generator[tuple[float | None, Any, int], None, None]:
        """Flush, then pass micro-batches through the stages, several at a time.

        What is on its way when the iteration ends early is taken and dropped.

        Args:
            mode: One that leaves no trace.
            parts: The micro-batches, each with a number that is handed back.
            version: Number of the kept version that is read; 0 for the newest weights.

        Yields:
            The loss, the output and the number of each, in order.
        """
        self._refuse_what_stays_here()
        self.flush()
        ahead: deque[tuple[int, int]] = deque()

        def collect() -> tuple[float | None, Any, int]:
            """Take what came of the oldest micro-batch on its way."""
            position, number = ahead.popleft()
            loss, output = self._take_loss(position)
            self._group.log.forget(position)
            return loss.loss, output, number

        try:
            for part, number in parts:
                ahead.append((self._pass(mode, part, version), number))
                while len(ahead) > 2 * self._group.plan.num_stages:
                    yield collect()
            while ahead:
                yield collect()
        finally:
            while ahead and not self._group.life.is_over:
                collect()

    def predict(
        self, loader: Iterable[Any], prepare: Prepare | None, version: int
    ) -> Generator[Any, None, None]:
        """Yield the model's output for each item of a loader; see `Pipeline.predict`."""
        self._group.life.check()
        batches = (example_of(item if prepare is None else prepare(item)) for item in loader)
        parts = ((self._part(batch, Mode.INFER), 0) for batch in batches)
        with closing(self._passed(Mode.INFER, parts, version)) as passed:
            for _, output, _ in passed:
                yield output

    def infer(self, batch: Batch, *, training: bool) -> Any:
        """Flush, and return the model's output for one input; see `Pipeline.__call__`."""
        self._refuse_what_stays_here()
        self.flush()
        mode = Mode.INFER_IN_TRAINING_MODE if training else Mode.INFER
        position = self._pass(mode, self._part(batch, mode))
        _, output = self._take_loss(position)
        if mode.leaves_no_trace:
            self._group.log.forget(position)
        return output

    def _pass(self, mode: Mode, part: _Part, version: int = 0, cache: int = 0) -> int:
        """Feed one micro-batch for evaluation or inference, and return its position."""
        position = self._feed(mode, self.passes, part, version=version, cache=cache)
        self.passes += 1
        return position

    # -- generation, and versions that are kept -------------------------------------------------

    def generated(
        self,
        batch: Batch,
        version: int,
        cache: Cache | None = None,
        number: int = 0,
        length: int = 0,
    ) -> tuple[Any, int]:
        """Return the model's output for one forward of a generation, and the forward's position.

        Args:
            batch: The input.
            version: Number of the kept version that is read; 0 for the newest weights.
            cache: What is known here of the caches on the stages; None if none is used.
            number: Number of these caches.
            length: The number of positions that the forward adds to them.
        """
        self._refuse_what_stays_here()
        if cache is None:
            part = self._part(batch, Mode.INFER)
        else:
            part = _Part(self.forwards.cached(batch, cache, length), flat_copy(None))
        position = self._pass(Mode.INFER, part, version, number)
        while self.pending:  # the messages of an edge are taken by rising position
            self.collect_oldest()
        return self._take_loss(position)[1], position

    def hold(self) -> None:
        """Let recoveries make what is made from now on again, until `end_generation`."""
        self._group.log.hold()

    def end_generation(self, caches: Iterable[int], positions: Iterable[int]) -> None:
        """Forget the forwards of a generation, and the caches that they have filled.

        Args:
            caches: Numbers of the caches.
            positions: The positions of the forwards.
        """
        for cache in caches:
            if not self._group.life.is_over:
                self._group.command(CommandName.END_CACHE, cache)
        for position in positions:
            self._group.log.forget(position)
        self._group.log.release()


def _result(pending: PendingStep, taken: list[Loss]) -> StepResult:
    """Return the result of a mini-batch.

    Args:
        pending: The mini-batch.
        taken: The payload of the last stage's message about each of its micro-batches.
    """
    losses = [loss.loss for loss in taken]
    total = sum(pending.sizes)
    # The sum is taken in the order of the micro-batches, so that no timing can change its bits.
    mean = sum(
        loss * (size / total)
        for loss, size in zip(losses, pending.sizes, strict=True)
        if loss is not None
    )
    oldest = min(version for loss in taken for _, version, *_ in loss.trail)
    marks = [mark for *_, mark in taken[-1].trail]
    return StepResult(
        step=pending.step,
        loss=mean,
        losses=tuple(loss for loss in losses if loss is not None),
        versions=tuple(version for _, version, *_ in taken[-1].trail),
        staleness=max(0, pending.step - oldest),
        busy_s=tuple(busy_ns / 1e9 for _, _, busy_ns, _ in taken[-1].trail),
        fingerprint=combined(marks) if all(marks) else None,
    )
