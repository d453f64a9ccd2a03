"""Feeding mini-batches into the pipe and taking losses out of it.

The feeder cuts a mini-batch into micro-batches and feeds them one after another. When as many
mini-batches are on their way as there are credits, it waits for the losses of the oldest one before
it feeds the next.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch

from pipedream_rt.batches.cutting import is_cut_elsewhere, samples_of
from pipedream_rt.batches.forwards import TOTAL, Cache, Forwards
from pipedream_rt.batches.items import (
    Accumulated,
    Batch,
    Items,
    Prepare,
    require_loader,
)
from pipedream_rt.batches.looking import begun
from pipedream_rt.batches.micro_batches import CutBatch, Cutter, LossChecks, MicroBatch
from pipedream_rt.batches.weighing import Samples, WeighedMean, Weighing
from pipedream_rt.coordinator.distributed_optimizer import DistributedOptimizer
from pipedream_rt.coordinator.feed.loss_decision import ELSEWHERE, LossDecision
from pipedream_rt.coordinator.recovery.group import WorkerGroup
from pipedream_rt.coordinator.results import PendingStep, StepResult
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.script_values import ScriptValues
from pipedream_rt.messages.head import Head, LossTask, MiniBatch, Mode, OfLoss, Together
from pipedream_rt.messages.message import CommandName, Key, Loss, Message
from pipedream_rt.messages.tree import unflatten
from pipedream_rt.models.settings import (
    Settings,
    refuse_contexts,
    refuse_no_grad,
    refuse_other_settings,
)
from pipedream_rt.models.shipping import Range
from pipedream_rt.schedules import COORDINATOR, Edge, EdgeKind
from pipedream_rt.stage.evaluation import (
    NO_WEIGHTS,
    Metric,
    packed_metrics,
    refuse_bad_metrics,
    words_of_bad_metric,
)
from pipedream_rt.stage.fingerprint import total as combined
from pipedream_rt.stage.loss_check import RANDOM, rounding_of, why_no_mean
from pipedream_rt.stage.spec import LossFunction
from pipedream_rt.stage.whole_loss import mean
from pipedream_rt.telling import log_of
from pipedream_rt.tracing.spans import NOBODY, Recorder
from pipedream_rt.tracing.trace import INJECTED, LOSS_CAME

_log = log_of(__name__)


class FeedHooks:
    """The hooks of a feeder, which do nothing here."""

    def first(self, batch: Batch, count: int) -> None:
        """Look at the first mini-batch, of ``count`` micro-batches, before it is fed."""

    def refuse_changes(self) -> None:
        """Refuse to train where the script has changed what it may not; before each mini-batch."""

    def injected(self, cut: CutBatch, optimizer: DistributedOptimizer) -> None:
        """Note a mini-batch that was fed, and the optimizer that steps with it."""

    def came(self, result: StepResult, waited_s: float) -> None:
        """Note the next result; the script has waited for results for so many seconds so far."""


class Feeder:
    """The feeder of micro-batches for training, evaluation and inference.

    Attributes:
        optimizer: The optimizer that the stages step with; None if there is none.
        decision: What the last stage computes the loss of.
        credits: Number of mini-batches that may be on their way at a time.
        items: The reader of items of loaders.
        step: Number of mini-batches injected so far.
        script: The values of the script that stages have copies of.
        hooks: What the run does with mini-batches.
        passes: Number of micro-batches fed so far for evaluation and inference.
        numbers: Numbers for the caches and buffers that stages keep from pass to pass.
        pending: The mini-batches on their way, oldest first.
        waited_s: The seconds for which the script has waited for results.
    """

    def __init__(
        self,
        group: WorkerGroup,
        hooks: FeedHooks,
        *,
        forwards: Forwards,
        credits: int,
        has_loss: bool,
        settings: Settings,
        weighing: Weighing,
        items: Items,
        weights: Callable[[], Mapping[int, tuple[Range, str]]],
        pairs: Callable[[Batch], bool],
        check_loss: int,
        of_loss: OfLoss,
        recorder: Recorder | None,
        fingerprint_every: int | None = None,
        script: ScriptValues,
    ) -> None:
        self.hooks = hooks
        self._fingerprint_every = fingerprint_every  # in mini-batches
        self.script = script
        self._settings = settings
        self.forwards = forwards
        self._group = group
        self._has_loss, self._weights = has_loss, weights
        self._weighing = weighing
        self._checks = LossChecks(check_loss)
        self.decision = LossDecision(of_loss, own=forwards.own_loss)
        self._recorder = recorder
        self._per_update = self._group.plan.per_update
        self._cutter = Cutter(forwards, weighing, self._per_update, pairs)
        self.credits, self.items = credits, items
        self.optimizer: DistributedOptimizer | None = None
        self.step = self.passes = 0
        self.numbers = itertools.count(1)
        self.pending: deque[PendingStep] = deque()
        self.waited_s = 0.0
        self._adds: bool | None = None  # see `_losses_add`; None until the model was asked
        self._bad_metrics: set[str] = set()
        self._look: Callable[[CutBatch, PendingStep], bool] | None = None
        self._newest: PendingStep | None = None
        # No strong reference: workers of a dropped pipeline would never end.
        part = weakref.WeakMethod(self._part)
        group.recovery.tell_parts(lambda number: "" if (still := part()) is None else still(number))

    @property
    def training(self) -> bool | None:
        """The mode that all modules were set to (`Module.train`); None if never."""
        return self._group.feed.training

    def set_training(self, training: bool) -> None:
        """Flush, and set the mode of all modules."""
        self.flush()
        self._group.command(CommandName.TRAINING, (None, training))

    @property
    def is_open(self) -> bool:
        """Whether the pipeline can be used."""
        return self._group.life.is_open

    @property
    def was_touched(self) -> bool:
        """Whether something but training may have changed weights or optimizers since the start."""
        return self._group.feed.touched

    def parts(self, batch: Batch, count: int) -> list[MicroBatch]:
        """Return the micro-batches, up to ``count``, of what is to be trained on."""
        self._refuse_elsewhere(batch, count)
        return self._cutter.parts(batch, count, self.training)

    @staticmethod
    def _refuse_elsewhere(batch: Batch, count: int) -> None:
        """Refuse to cut what is not cut along its first dimension, as outputs are joined."""
        if count > 1 and is_cut_elsewhere(batch):
            raise ConfigError(ELSEWHERE)

    def places_of_inputs(self, part: MicroBatch) -> Iterator[tuple[int, list[int]]]:
        """Yield stages, with the places of their inputs among those that ask for gradients."""
        asks = zip(part.inputs.tensors, part.inputs.requires_grad)
        at = {id(each): i for i, each in enumerate(t for t, asked in asks if asked)}
        for stage, _, tensors in self.forwards.shares(part.program, part.inputs):
            yield stage, [at[id(tensor)] for tensor in tensors if id(tensor) in at]

    def cut(self, batch: Batch) -> CutBatch:
        """Cut a mini-batch as it would be fed, without feeding it."""
        return self.decision.applied(self._cutter.cut(batch, self.training))

    # -- training -------------------------------------------------------------------------------

    def inject(self, batch: Batch | Accumulated, metrics: bytes = b"") -> PendingStep:
        """Wait for a credit, then feed one mini-batch with the present hyper-parameters."""
        optimizer = self.ready()
        given = self.script.now()
        if not self.step:
            first = batch if isinstance(batch, Batch) else batch.parts[0]
            self.hooks.first(first, self._per_update)
        if isinstance(batch, Batch) and self._group.plan.loss_in_script:
            self._refuse_elsewhere(batch, self._per_update)
        cut = self._cut(batch)
        if why := self._why_no_mean(cut.first_part or cut):
            self.decision.is_no_mean(why, batch, cut.told)
            cut = self._cut(batch)
        together = self._together(cut.first_part or cut)
        while len(self.pending) >= self.credits:
            self.collect_oldest()
        mini_batch = MiniBatch(optimizer.hyper(), given)
        self._group.feed.define()
        shares, sizes = ([getattr(p, of) for p in cut.parts] for of in ("share", "samples"))
        pending = PendingStep(self, self.step, self._group.feed.position, shares, sizes)
        self._newest = pending
        every = self._fingerprint_every
        wants_mark = every is not None and (self.step + 1) % every == 0
        # A mini-batch that is fed in part must end the pipeline.
        with self._group.life.guard("a mini-batch was fed"):
            for i, part in enumerate(cut.parts):
                number = self.step * self._per_update + i
                marks = wants_mark and i == len(cut.parts) - 1
                self.feed(part, number, mini_batch, marks, together.get(i), metrics)
            optimizer.count_step()
            self.step += 1
            self.pending.append(pending)
        self.hooks.injected(cut, optimizer)
        if cut.parts[0].loss is OfLoss.DECIDE:
            pending.result()  # by which the next one is fed
        if (look := self._look) is not None:
            self._look = None  # not once more, if it raises
            self._look = look if look(cut, pending) else None
        return pending

    def watch(self, look: Callable[[CutBatch, PendingStep], bool]) -> None:
        """Call a function with each injected mini-batch from now on, until it returns False."""
        self._look = look

    def _cut(self, batch: Batch | Accumulated) -> CutBatch:
        """Cut a mini-batch that is to be trained on."""
        if isinstance(batch, Batch) and self.decision.leaves_uncut:
            return self._cutter.uncut(batch, self.training)
        adds = isinstance(batch, Accumulated) and self._losses_add(batch)
        return self.decision.applied(self._cutter.cut(batch, self.training, adds))

    def _part(self, number: int) -> str:
        """Say which part of its mini-batch a training micro-batch is; empty for all of it."""
        step, i = divmod(number, self._per_update)
        known = [self._newest] if self._newest is not None else []
        for pending in (*self.pending, *known):
            sizes = pending.samples
            if pending.step != step:
                continue
            if self.decision.whole is not False and not any(sizes[i + 1 :]):
                return ""  # the loss was given all of them
            if i < len(sizes) and 0 < sizes[i] < sum(sizes):
                return (
                    f"it was given {sizes[i]} of the {sum(sizes)} samples of mini-batch {step}, "
                    f"which is cut into {self._per_update} micro-batches; micro_batches=1, "
                    'schedule="gpipe" gives layers all of them, Training(loss="whole") the loss'
                )
        return ""

    def ready(self) -> DistributedOptimizer:
        """Return the optimizer; refuse to train where that cannot be, or would differ."""
        self._group.life.check()
        optimizer = self.optimizer
        if optimizer is None or not (self._has_loss or self._group.plan.loss_in_script):
            raise ConfigError("training needs loss_fn and optimizer; give both to Pipeline")
        refuse_no_grad()
        self._refuse_local_contexts()
        self.hooks.refuse_changes()
        return optimizer

    def feed(
        self,
        part: MicroBatch,
        number: int,
        mini_batch: MiniBatch,
        fingerprint: bool = False,
        together: Together | None = None,
        metrics: bytes = b"",
    ) -> int:
        """Feed a micro-batch to train on; return its position."""
        start = time.monotonic_ns()
        head = Head(
            position=self._group.feed.position,
            micro_batch=number,
            mode=Mode.TRAIN,
            mini_batch=mini_batch,
            empty=not part.samples,
            has_target=not self._group.plan.loss_in_script,
            program=part.program,
            numbers=[*part.numbers],
            fingerprint=fingerprint,
        )
        task = LossTask(share=part.share, loss=part.loss, together=together, metrics=metrics)
        self._group.feed.micro_batch(head, part, task)
        self.record(INJECTED, number, NOBODY, start, start)
        return head.position

    def _losses_add(self, batch: Accumulated) -> bool:
        """Whether losses of micro-batches add up to that of the whole where the total is given."""
        if TOTAL not in batch.parts[0].kwargs or self._per_update == batch.of:
            return False
        for part in batch.parts if self._adds is None else ():
            # A model may take the total and not divide by it, so it is asked once, in eval mode.
            total = torch.as_tensor(part.kwargs[TOTAL])
            others = [part.kwargs | {TOTAL: total * factor} for factor in (1, 2)]
            asked = [self.part(Batch((), each, each), Mode.EVALUATE) for each in others]
            once, twice = [loss or 0.0 for loss in self._tried(asked)]
            if once and math.isfinite(once + twice):  # else it says nothing, as without labels
                self._adds = once != twice
                break
        return self._adds is not False

    def _refuse_local_contexts(self) -> None:
        """Refuse settings and contexts of this process that would not reach the workers."""
        refuse_other_settings(self._settings)
        refuse_contexts()

    def part(self, batch: Batch, mode: Mode, samples: int = 1) -> MicroBatch:
        """Return a micro-batch as it is fed."""
        return self._cutter.part(batch, mode, self._group.feed.training, samples)

    def _together(self, cut: CutBatch) -> dict[int, Together]:
        """Arrange the loss check of a mini-batch; return `LossTask.together` by micro-batch."""
        if cut.parts[0].loss is not OfLoss.PARTS:  # the last stage has all outputs
            return {i: Together(len(cut.filled), p.samples) for i, p in cut.filled.items()}
        # A loss function is compared by the stage that computes it.
        if self.forwards.own_loss or not self._checks.takes(cut, self.step):
            return {}
        first = self.step * self._per_update
        at = {i: self._loss_edge(first + i).source for i in cut.filled}
        counts = Counter(at.values())  # replicas of the last stage compare what they have
        return {i: Together(counts[at[i]], part.samples) for i, part in cut.filled.items()}

    def _why_no_mean(self, cut: CutBatch) -> str:
        """Compare the model's own loss of a mini-batch, in eval mode, with its micro-batches'."""
        if not (self.forwards.own_loss and self._checks.takes(cut, self.step)):
            return ""
        labels = all(part.only_labels for part in cut.filled.values())
        if labels and not self._weighing.is_given:
            return ""
        # As many micro-batches as are in flight in training, so that it takes no more memory.
        pairs = cut.first(max(2, self._group.plan.in_flight(0)))
        # The first micro-batch once more: where its loss differs, the model is random in eval mode.
        parts = [self.part(each, Mode.EVALUATE, size) for each, size in (*pairs, pairs[1])]
        losses = self._tried(parts)
        whole, *of_parts, again = [math.nan if loss is None else loss for loss in losses]
        if again != of_parts[0] and not math.isnan(again):
            _log.warning(RANDOM)
            return ""
        # Losses that were divided by the total add up, and means are compared.
        whole = whole / len(of_parts) if cut.told else whole
        filled = cut.filled.values()
        weighed = [(loss, part.share) for loss, part in zip(of_parts, filled, strict=False)]
        self._checks.came(self.step, [whole, *(loss for loss, share in weighed if share)])
        return why_no_mean(whole, weighed, rounding_of(self.forwards.dtype))

    def _tried(self, parts: Iterable[MicroBatch]) -> list[Any]:
        """Return the losses of micro-batches in eval mode, for a look at the model."""
        passes = self.passes
        try:
            return [loss.loss for _, loss, _ in self._passed(Mode.EVALUATE, parts)]
        finally:
            self.passes = passes  # layers must draw random numbers as if these had not been

    def collect_oldest(self) -> None:
        """Wait for the losses of the oldest mini-batch on its way, and set its outcome."""
        self.messages_of(self.pending[0])
        self.pending.popleft().taken = []

    def messages_of(self, pending: PendingStep) -> list[Message]:
        """Wait for the losses, or the outputs, of the oldest mini-batch, and set its outcome."""
        self._group.check_settings_unchanged()
        keys, asked = self.keys_of(pending), time.monotonic_ns()

        def is_whole() -> bool:
            """Whether all messages that have left the inbox are in `pending.taken`."""
            left = keys[len(pending.taken) :]
            return not left or not self._group.recovery.inbox.has_taken(left[0][0])

        # What a signal handler raises while this waits may let it be waited for once more.
        with self._group.life.guard("a result was taken", is_whole):
            for key, number in keys[len(pending.taken) :]:
                pending.taken.append(self.take(key, number, again=True))
        self.waited_s += (time.monotonic_ns() - asked) / 1e9
        self._came(pending, pending.taken)
        return pending.taken

    def take(self, key: Key, number: int, again: bool = False) -> Message:
        """Wait for the loss, or the output, of a training micro-batch; see `Recovery.take`."""
        asked = time.monotonic_ns()
        message = self._group.take(key, again)
        self._group.recovery.next_loss = number + 1
        self.record(LOSS_CAME, number, key.edge.source, asked, time.monotonic_ns())
        return message

    def _came(self, pending: PendingStep, messages: Sequence[Message]) -> None:
        """Set the outcome of a mini-batch, and show it to those who watch."""
        payloads = (message.payload for message in messages)
        taken = [each for each in payloads if isinstance(each, Loss)]
        pending.outcome = _result(pending, taken)
        self.decision.came(taken)
        self._checks.came(pending.step, pending.outcome.losses)
        self._say_of_bad_metrics(taken)
        self.hooks.came(pending.outcome, self.waited_s)

    def closed(self, cut: CutBatch, messages: Sequence[Message]) -> None:
        """Count an update whose micro-batches were fed one by one; their outputs are there."""
        pending = PendingStep(self, self.step, 0, [0.0] * len(messages))
        assert self.optimizer is not None
        self.optimizer.count_step()
        self.step += 1
        self.hooks.injected(cut, self.optimizer)
        self._came(pending, messages)

    def _say_of_bad_metrics(self, taken: Sequence[Loss]) -> None:
        """Warn once of each metric that gave no number."""
        for name, said in ((n, s) for loss in taken for n, s in loss.metrics.items()):
            if isinstance(said, str) and name not in self._bad_metrics:
                self._bad_metrics.add(name)
                _log.warning("%s", words_of_bad_metric(name, said))

    def has_losses(self, pending: PendingStep) -> bool:
        """Whether the losses of a mini-batch have all arrived."""
        return all(self._group.holds(key) for key, _ in self.keys_of(pending))

    def keys_of(self, pending: PendingStep) -> list[tuple[Key, int]]:
        """Return the keys of the losses, or outputs, of a mini-batch, and their micro-batches."""
        numbers = range(pending.step * self._per_update, (pending.step + 1) * self._per_update)
        return [(self.key_of(m, pending.first + i), m) for i, m in enumerate(numbers)]

    def key_of(self, number: int, position: int) -> Key:
        """Return the key of the loss, or the output, of a training micro-batch."""
        return Key(self._loss_edge(number), position)

    def flush(self) -> None:
        """Wait until nothing is in flight on any stage, and every update is applied."""
        self._group.check_settings_unchanged()
        self._group.settle()
        while self.pending:  # first, because the messages of an edge are taken by rising position
            self.collect_oldest()
        self._group.command(CommandName.FLUSH, self._group.feed.next_micro_batch)

    def _loss_edge(self, number: int) -> Edge:
        """Return the edge on which the loss of a training micro-batch comes."""
        plan = self._group.plan
        return Edge(EdgeKind.LOSS, plan.address_of(plan.exits[0], number), COORDINATOR)

    def _take_loss(self, position: int) -> tuple[Loss, Any]:
        """Wait for the last stage's message about a position; return it, and the output in it."""
        message = self._group.take(self.key_of(0, position), again=True)
        loss = message.payload
        assert isinstance(loss, Loss)
        return loss, unflatten(loss.structure, message.tensors) if loss.structure else None

    def record(self, kind: int, number: int, waited_for: int, ready: int, start: int) -> None:
        """Record a span of the coordinator that ends now; times are of ``time.monotonic_ns``."""
        if self._recorder is not None:
            arrived = 0 if waited_for == NOBODY else self._group.recovery.inbox.arrived_ns
            self._recorder.record(
                kind, COORDINATOR, number, 0, 0, 0,
                waited_for, ready, arrived, start, time.monotonic_ns(), 0,
            )  # fmt: skip

    # -- evaluation and inference ---------------------------------------------------------------

    def evaluate(
        self,
        loader: Iterable[Any],
        prepare: Prepare | None = None,
        version: int = 0,
        *,
        loss_fn: LossFunction | None = None,
        metrics: Mapping[str, Metric] | None = None,
        keep_buffers: bool = False,
    ) -> dict[str, float]:
        """Return the mean loss and metrics over a loader; see `Pipeline.evaluate`."""
        self._group.life.check()
        if not self._has_loss and loss_fn is None:
            raise ConfigError(
                "evaluate needs a loss: give it loss_fn=, or Pipeline; or, for a model that "
                "computes its loss itself, give Pipeline example=, a mini-batch with the labels"
            )
        require_loader(loader, "evaluate")
        packed, items, other = self.packed(metrics, loss_fn), self.items, None
        if loss_fn is not None:
            items, other = items.for_loss(loss_fn), self._weighing.for_loss(loss_fn)
        mode = Mode.EVALUATE_AND_KEEP if keep_buffers else Mode.EVALUATE
        means = {"loss": WeighedMean()}
        batches = (items.batch(item, prepare) for item in begun(loader))
        clear, training = Samples(), self._group.feed.training
        parts = (
            self._cutter.part(each, mode, training, samples_of(each) or 1, clear, other)
            for each in batches
        )
        number = next(self.numbers)
        with (
            self._buffers_of(number) as stays,
            closing(self._passed(mode, parts, version, number, packed, stays)) as passed,
        ):
            for part, loss, _ in passed:
                refuse_bad_metrics(loss.metrics)
                said = {"loss": math.nan if loss.loss is None else loss.loss, **loss.metrics}
                for name, value in said.items():
                    means.setdefault(name, WeighedMean()).add(float(value), part.weight)
        if not means["loss"].count:
            raise ConfigError("the loader given to evaluate yielded nothing")
        return {name: mean.value for name, mean in means.items()}

    def packed(
        self, metrics: Mapping[str, Metric] | None, loss_fn: LossFunction | None = None
    ) -> bytes:
        """Return metrics, and the loss of an evaluation, for the stage that computes the loss."""
        there = metrics or loss_fn is not None
        return packed_metrics(metrics or {}, loss_fn, self._weights() if there else NO_WEIGHTS)

    @contextmanager
    def _buffers_of(self, number: int) -> Iterator[list[int]]:
        """Let stages keep buffers of an evaluation in the body, and recoveries redo ``stays``."""
        stays: list[int] = []
        try:
            yield stays
        finally:
            if stays and not self._group.life.is_over:
                self._group.feed.command(CommandName.END_CACHE, number)
            for position in stays:
                self._group.feed.log.forget(position)

    def _passed(
        self,
        mode: Mode,
        parts: Iterable[MicroBatch],
        version: int = 0,
        cache: int = 0,
        metrics: bytes = b"",
        stays: list[int] | None = None,
    ) -> Generator[tuple[MicroBatch, Loss, Any], None, None]:
        """Flush, then pass micro-batches through the stages, several at a time."""
        self._refuse_local_contexts()
        self.script.end()
        self.flush()
        yield from self._on_their_way(mode, parts, version, cache, metrics, stays)

    def _on_their_way(
        self,
        mode: Mode,
        parts: Iterable[MicroBatch],
        version: int = 0,
        cache: int = 0,
        metrics: bytes = b"",
        stays: list[int] | None = None,
    ) -> Generator[tuple[MicroBatch, Loss, Any], None, None]:
        """Pass micro-batches through the stages; what is fed is taken, whatever happens."""
        ahead: deque[tuple[int, MicroBatch]] = deque()

        def collect(fails: bool = True) -> tuple[MicroBatch, Loss, Any]:
            """Take the result of the oldest micro-batch on its way; raise the error of a stage."""
            position, part = ahead[0]
            loss, output = self._take_loss(position)
            ahead.popleft()  # now: what is waited for again must still be there
            # Where the pass has changed buffers, a recovery must do it again until the end.
            if stays is not None and any(passed.changed_buffers for passed in loss.trail):
                stays.append(position)
            elif mode.leaves_no_trace:
                self._group.feed.log.forget(position)
            if fails:
                self._refuse_failed(loss)
            return part, loss, output

        try:
            for part in parts:
                ahead.append((self._pass(mode, part, version, cache, metrics), part))
                while len(ahead) > 2 * self._group.plan.num_stages:
                    yield collect()
            while ahead:
                yield collect()
        finally:
            # Where the iteration ends early, as by an error of a stage, what is on its way must
            # still leave inbox and log.
            while ahead and not self._group.life.is_over:
                collect(fails=False)

    def _refuse_failed(self, loss: Loss) -> None:
        """Raise the error of a stage in a pass that does not train."""
        if loss.failed is not None:
            raise self._group.recovery.error_of(loss.failed)

    def predict(
        self, loader: Iterable[Any], prepare: Prepare | None, version: int
    ) -> Generator[Any, None, None]:
        """Yield the model's output for each item of a loader; see `Pipeline.predict`."""
        self._group.life.check()
        require_loader(loader, "predict")
        batches = (self.items.inputs(item, prepare) for item in begun(loader))
        parts = (self.part(batch, Mode.INFER) for batch in batches)
        with closing(self._passed(Mode.INFER, parts, version)) as passed:
            for _, _, output in passed:
                yield output

    def infer(self, batch: Batch, *, training: bool, flushes: bool = True) -> Any:
        """Return the model's output for one input; see `Pipeline.__call__`.

        ``flushes``: whether to flush first; not where all updates are applied, and others wait.
        """
        self._refuse_local_contexts()
        if flushes:
            self.flush()
        mode = Mode.INFER_IN_TRAINING_MODE if training else Mode.INFER
        ((_, _, output),) = self._on_their_way(mode, [self.part(batch, mode)])
        return output

    def _pass(
        self,
        mode: Mode,
        part: MicroBatch,
        version: int = 0,
        cache: int = 0,
        metrics: bytes = b"",
    ) -> int:
        """Feed one micro-batch for evaluation or inference, and return its position."""
        self._group.feed.define()
        head = Head(
            position=self._group.feed.position,
            micro_batch=self.passes,
            mode=mode,
            mini_batch=MiniBatch([], self.script.now()),
            has_target=mode.evaluates,
            program=part.program,
            numbers=[*part.numbers],
            version=version,
            cache=cache,
        )
        task = LossTask(share=part.share, loss=part.loss, metrics=metrics)
        self._group.feed.micro_batch(head, part, task)
        self.passes += 1
        return head.position

    # -- generation, and versions that are kept -------------------------------------------------

    def generated(
        self,
        batch: Batch,
        version: int,
        cache: Cache | None = None,
        number: int = 0,
        length: int = 0,
    ) -> tuple[Any, int]:
        """Return the model's output for one forward of a generation, and the forward's position."""
        self._refuse_local_contexts()
        if cache is None:
            part = self.part(batch, Mode.INFER)
        else:
            part = self._cutter.cached(batch, cache, length)
        position = self._pass(Mode.INFER, part, version, number)
        while self.pending:  # the messages of an edge are taken by rising position
            self.collect_oldest()
        loss, output = self._take_loss(position)
        if loss.failed is not None:  # the caller, which forgets the others, never learns of it
            self._group.feed.log.forget(position)
        self._refuse_failed(loss)
        return output, position

    def hold(self) -> None:
        """Let recoveries redo all that is fed from now on, until `end_generation`."""
        self._group.feed.log.hold()

    def end_generation(self, caches: Iterable[int], positions: Iterable[int]) -> None:
        """Forget the forwards of a generation, and the caches that they filled."""
        for cache in caches:
            if not self._group.life.is_over:
                self._group.feed.command(CommandName.END_CACHE, cache)
        for position in positions:
            self._group.feed.log.forget(position)
        self._group.feed.log.release()


def _result(pending: PendingStep, taken: list[Loss]) -> StepResult:
    losses: Sequence[float | None] = [loss.loss for loss in taken]
    shares: Sequence[float] = pending.shares
    if parts := next((each.parts for each in taken if each.parts), None):
        losses = [*parts, *[None] * (len(taken) - len(parts))]
    elif any(each.whole for each in taken):
        shares = [float(bool(each.whole)) for each in taken]
    pairs = zip(losses, shares, strict=True)
    weighed = [(loss, share) for loss, share in pairs if loss is not None and share]
    in_script = any(loss.structure for loss in taken)  # the outputs came, for the script's loss
    oldest, trail = min(passed.version for loss in taken for passed in loss.trail), taken[-1].trail
    marks = [passed.fingerprint for passed in trail]
    said: dict[str, list[tuple[float, float]]] = {}
    together = any(each.parts or each.whole for each in taken)
    for loss, share in zip(taken, shares, strict=True):
        for name, value in loss.metrics.items() if share or together else ():
            weight = 1.0 if together else share
            said.setdefault(name, []).append(
                (math.nan if isinstance(value, str) else value, weight)
            )
    return StepResult(
        step=pending.step,
        # Summed in the order of the micro-batches, so that no timing can change the bits.
        loss=math.nan if in_script else sum(loss * share for loss, share in weighed),
        losses=tuple(loss for loss, _ in weighed),
        versions=tuple(passed.version for passed in trail),
        staleness=max(0, pending.step - oldest),
        busy_s=tuple(passed.busy_ns / 1e9 for passed in trail),
        processor_s=tuple(passed.processor_ns / 1e9 for passed in trail),
        process_s=tuple(passed.process_ns / 1e9 for passed in trail),
        fingerprint=combined(marks) if all(marks) else None,
        metrics={
            name: mean(found, together or len(found) == len(weighed))
            for name, found in said.items()
        },
    )
