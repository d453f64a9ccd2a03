"""The coordinator: cuts the model, feeds micro-batches, hands back losses.

One thread uses a pipeline at a time, the one that calls its methods. It numbers everything that it
feeds, micro-batches and commands, with one counter (see `stage.messages`).
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import torch
from torch import Tensor, nn

from pipedream_rt.checkpoint import (
    Manifest,
    checkpoints,
    newest_good,
    refuse_unsaveable,
    shapes,
)
from pipedream_rt.cluster.base import Cluster, Fail, Reference
from pipedream_rt.cluster.fork_server import ForkServer
from pipedream_rt.cluster.launch import Workers, start_cluster
from pipedream_rt.coordinator.checkpointer import Checkpointer, result_of
from pipedream_rt.coordinator.distributed_optimizer import (
    DistributedOptimizer,
    OptimizerArgument,
    grouped_names,
    state_by_name,
)
from pipedream_rt.coordinator.group import WorkerGroup, load_argument
from pipedream_rt.coordinator.loading import Loading, begin_epoch_at, between_epochs
from pipedream_rt.coordinator.options import (
    TraceOption,
    restart_option,
    resume_option,
    trace_option,
)
from pipedream_rt.coordinator.recovery import Failures, Restart
from pipedream_rt.coordinator.results import PendingStep, StepResult
from pipedream_rt.coordinator.specs import pickled_jobs
from pipedream_rt.coordinator.trace_collection import SPANS_KEPT, put_together
from pipedream_rt.errors import (
    CheckpointError,
    ConfigError,
    PipelineClosed,
    PipelineError,
)
from pipedream_rt.messages.message import (
    COORDINATOR,
    Channel,
    CommandName,
    Key,
    Loss,
    Message,
    MicroBatch,
    Mode,
    Target,
)
from pipedream_rt.messages.tree import (
    Structure,
    batch_size,
    flat_copy,
    micro_batch_sizes,
    split,
    unflatten,
)
from pipedream_rt.observe.clock import Reading
from pipedream_rt.observe.spans import NOBODY, Recorder
from pipedream_rt.observe.summary import table
from pipedream_rt.observe.trace import INJECTED, LOSS_CAME, Trace
from pipedream_rt.planning.split import (
    layers_of,
    refuse_shared_parameters,
    split_points,
)
from pipedream_rt.schedules import schedule_for
from pipedream_rt.stage.optimizer import Hyper, set_hyper
from pipedream_rt.stage.spec import LossFunction
from pipedream_rt.stage.stage import buffer_slots
from pipedream_rt.transport.base import Receive

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageHandle:
    """One stage, as the coordinator sees it.

    Attributes:
        index: 0-based.
        layers: Names of its layers in the unsplit model.
    """

    index: int
    layers: tuple[str, ...]
    _pipeline: Pipeline

    @property
    def worker(self) -> str:
        """Name of the worker that hosts it now."""
        return self._pipeline._worker_of(self.index)

    @property
    def rref(self) -> Reference:
        """RRef to the sub-module; for inspection, and dead after a failure. Flush before reading.

        In-process pipelines give an object with the same methods.
        """
        return self._pipeline._reference(self.index, "module")


class _Part(NamedTuple):
    """A micro-batch, flattened: structure and tensors of the input and of the target."""

    x: tuple[Structure, tuple[Tensor, ...]]
    y: tuple[Structure, tuple[Tensor, ...]]


def _part(x: Any, y: Any) -> _Part:
    """Flatten a micro-batch, in copies: the caller may change its tensors after the call."""
    return _Part(flat_copy(x), flat_copy(y))


class Pipeline:
    """Trains a model as a pipeline of stages on several workers.

    Example::

        with Pipeline(model, stages=4, loss_fn=F.cross_entropy,
                      optimizer=(torch.optim.AdamW, dict(lr=3e-4))) as pipe:
            for result in pipe.train_epoch(loader):
                print(result.step, result.loss, result.staleness)
            model.load_state_dict(pipe.state_dict())

    The caller's model is read once, at the start, and never changed.

    Args:
        model: ``nn.Sequential`` or list of modules.
        stages: Number of stages (balanced by parameter count), or the first layer, index or name,
            of every stage but the first.
        loss_fn: ``(output, target) -> scalar tensor``, a mean over samples; runs on the last stage.
        optimizer: ``(class, dict of arguments)``, or an optimizer over the model's parameters,
            whose groups are kept. None for inference alone.
        schedule: A name (``pipedream-rt schedule help`` lists them), or an object with a method
            ``order`` (see `schedule_written`), which is checked before anything starts.
        micro_batches: Into how many a mini-batch is split; one update for all of them.
        vertical_sync: With async-1f1b: every stage reads the version that the first one reads.
        stages_per_worker: With interleaved-1f1b, 2 if None; there are stages / this workers.
        workers: ``"local"`` starts worker processes; ``"in-process"`` uses threads; ``"HOST:PORT"``
            listens there for `pipedream-rt worker`. None: what the environment says
            (`pipedream-rt run`, torchrun), else ``"local"``.
        seed: Of all random numbers that layers draw.
        threads: For torch's own parallel loops in each worker that is started here.
        on_nan: ``"raise"`` or ``"ignore"`` a training loss that is not finite.
        credits: Mini-batches injected before the first result is awaited; None for what the
            schedule needs. The memory for inputs is bounded by it, and a learning rate set after
            result i applies from mini-batch i + credits on.
        checkpoint: Folder for checkpoints; the coordinator and all workers must share it.
        checkpoint_every: Mini-batches between two checkpoints that are made by themselves. The
            pipe does not stop for them.
        keep: So many of the newest checkpoints are kept; None for all.
        resume: Go on from the newest whole checkpoint in ``checkpoint``, if there is one. None:
            what `pipedream-rt run --resume` says, or torchrun that starts a job again.
        max_restarts: Failures of workers that are recovered from: others are started, and compute
            again what was fed since the last checkpoint, or since the start, which is kept until
            then. None: what `pipedream-rt run --max-restarts` says, else 3 with
            ``checkpoint_every`` and 0 without.
        trace: A file to which `close` writes what every stage did when, or True to record it for
            `trace` alone. None: what `pipedream-rt run --trace` says, else False. Each worker
            keeps its last 131,072 actions.
        heartbeat: A worker process that is silent for as long has failed. They speak four times
            as often, also while they compute.
        timeout: For an answer that is sure to come; a stall longer than that is a failure.
        start_timeout: For all workers to join.

    Raises:
        ConfigError: Arguments that cannot work, before anything starts.
        RendezvousTimeout: Workers that did not join.
    """

    def __init__(
        self,
        model: nn.Sequential | Iterable[nn.Module],
        *,
        stages: int | Sequence[int | str] = 1,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerArgument = None,
        schedule: str | Any = "async-1f1b",
        micro_batches: int = 1,
        vertical_sync: bool = False,
        stages_per_worker: int | None = None,
        workers: Workers = None,
        seed: int = 0,
        threads: int = 1,
        on_nan: str = "raise",
        credits: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep: int | None = 3,
        resume: bool | None = None,
        max_restarts: int | None = None,
        trace: TraceOption = None,
        heartbeat: timedelta = timedelta(seconds=10),
        timeout: timedelta = timedelta(minutes=5),
        start_timeout: timedelta = timedelta(minutes=2),
    ) -> None:
        """Check everything, then start."""
        layers = layers_of(model)
        _check_number("credits", credits if credits is not None else 1)
        points = split_points(layers, stages)
        refuse_shared_parameters(layers, points)
        self.schedule = schedule_for(
            schedule,
            num_stages=len(points),
            per_update=micro_batches,
            stages_per_worker=stages_per_worker,
            vertical_sync=vertical_sync,
            credits=credits,
        )
        times = {"heartbeat": heartbeat, "timeout": timeout, "start_timeout": start_timeout}
        for name, value in times.items():
            if not isinstance(value, timedelta) or value <= timedelta(0):
                raise ConfigError(f"{name} must be a positive datetime.timedelta, not {value!r}")
        _check_number("threads", threads)
        for name, number in (("checkpoint_every", checkpoint_every), ("keep", keep)):
            _check_number(name, number if number is not None else 1)
        if checkpoint_every is not None and checkpoint is None:
            raise ConfigError("checkpoint_every needs a folder; give it as checkpoint")
        restarts = restart_option(max_restarts, default=3 if checkpoint_every is not None else 0)
        resume = resume_option(resume, checkpoint is not None)
        if on_nan not in ("raise", "ignore"):
            raise ConfigError(f'on_nan must be "raise" or "ignore", not {on_nan!r}')
        if loss_fn is not None and not callable(loss_fn):
            raise ConfigError(f"loss_fn must be callable, not {loss_fn!r}")
        self._whole = nn.Sequential()
        for name, layer in layers.items():
            self._whole.add_module(name, layer)
        self._model = model
        self._names = {id(p): n for n, p in self._whole.named_parameters() if p.requires_grad}
        grouped = grouped_names(optimizer, self._names)
        traced, self._trace_path = trace_option(trace)
        spans = SPANS_KEPT if traced else 0
        jobs = pickled_jobs(layers, points, self.schedule, loss_fn, seed, on_nan, spans)

        self._has_loss = loss_fn is not None
        self._micro_batches = micro_batches
        self._credits = credits or self.schedule.credits()
        self._timeout = timeout
        self._step = self._floor = self._passes = self._epoch = 0
        self._loading: Loading | None = None
        self._last_loader: Iterable[Any] | None = None
        self._attached: dict[str, Any] = {}
        self.resumed: Manifest | None = None
        self._pending: deque[PendingStep] = deque()
        self._optimizer: DistributedOptimizer | None = None
        self._named_references: dict[int, list[tuple[Reference, str]]] = {}
        self._recorder = Recorder(spans) if traced else None
        self._closed = False
        self._failure: BaseException | None = None
        shape = self.schedule.shape

        forks = ForkServer()

        def start(receive: Receive, fail: Fail, generation: int) -> Cluster:
            return start_cluster(
                workers,
                shape=shape,
                receive=receive,
                fail=fail,
                generation=generation,
                timeout=timeout,
                start_timeout=start_timeout,
                threads=threads,
                heartbeat=heartbeat,
                forks=forks,
            )

        failures = Failures(restarts, micro_batches)
        self._group = WorkerGroup(start, jobs, timeout, failures, self.schedule.name, forks.close)
        self._checkpointer = Checkpointer(
            self._group,
            None if checkpoint is None else Path(checkpoint).absolute(),
            checkpoint_every,
            keep,
        )
        # Ends the workers also when a pipeline is dropped, or the interpreter ends, without close.
        self._owner_pid = os.getpid()
        self._end = weakref.finalize(self, _close_here, self._group, self._owner_pid)
        bounds = [*points, len(layers)]
        names = list(layers)
        self.stages = [
            StageHandle(s, tuple(names[bounds[s] : bounds[s + 1]]), self)
            for s in range(len(points))
        ]
        with self._closing_on_error():
            self._clocks: dict[int, list[Reading]] = {}
            if traced:
                self._read_clocks()
            if grouped is not None:
                self._build_optimizer(*grouped)
                self.scatter_optimizer_state(state_by_name(optimizer, self._names))
            if resume:
                self._resume()

    # -- training -----------------------------------------------------------------------------

    def train_epoch(self, loader: Iterable[tuple[Any, Any]]) -> Generator[StepResult, None, None]:
        """Train on every mini-batch of a loader, keeping the pipe full.

        In asynchronous schedules the pipe is not drained at the end; the next epoch follows on.

        Args:
            loader: Yields ``(x, y)``. Always one item ahead of what is injected, neither more
                nor less, so that random numbers drawn by it and by the loop's body do not
                depend on timing.

        Yields:
            The results, in order, all of them before it ends.

        Raises:
            StageFailed: An action raised.
            WorkerLost: A worker died.
            Exception: Whatever the loader raises, after the results before it.
        """
        self._check_usable()
        self._loading = items = self._load_from(loader)
        try:
            while True:
                while len(items.pending) >= self._credits:
                    yield items.pending.popleft().result()
                if not items.fetched:
                    break
                items.pending.append(self._inject(*_pair(items.fetched.pop())))
                self._checkpoint_if_due()
                items.fetch()  # while the pipe computes; the user's loop finds it done
            while items.pending:
                yield items.pending.popleft().result()
        finally:
            self._loading = None
            self._epoch += 1
        if items.error is not None:
            raise items.error

    def _load_from(self, loader: Iterable[Any]) -> Loading:
        """Draw from a loader; from where it was, where the run goes on in this epoch."""
        resumed, place = self.resumed, None
        if resumed is not None and resumed.place is not None and resumed.step == self._step:
            place = resumed.place if resumed.place["epoch"] == self._epoch else None
        self._last_loader = loader
        if place is not None and place["drawn"] is None:
            begin_epoch_at(place, loader)
            place = None
        if place is None or resumed is None:
            return Loading(loader, self._epoch)
        unseen = [PendingStep.finished(self, result_of(r)) for r in resumed.results]
        return Loading(loader, self._epoch, place, unseen)

    def submit(self, x: Any, y: Any) -> PendingStep:
        """Inject one mini-batch with the hyper-parameters that are set now.

        Waits for the oldest mini-batch when as many as there are credits are on their way.

        Args:
            x: Input of the first layer: tensors (B, ...) in any nesting (see `stage.tree`).
            y: Target for ``loss_fn``, in the same way.

        Returns:
            A handle whose ``result()`` waits for the losses.

        Raises:
            ConfigError: No loss or optimizer was given, or the mini-batch cannot be split.
        """
        pending = self._inject(x, y)
        self._checkpoint_if_due()
        return pending

    def _inject(self, x: Any, y: Any) -> PendingStep:
        """See `submit`."""
        self._check_usable()
        if not self._has_loss or self._optimizer is None:
            raise ConfigError("training needs loss_fn and optimizer; give both to Pipeline")
        parts, sizes = self._parts(x, y)
        with self._closing_on_error():
            self._checkpointer.finish_if_written()
        while len(self._pending) >= self._credits:
            self.collect_oldest()
        hyper = self._optimizer.hyper()
        pending = PendingStep(self, self._step, self._group.position, sizes)
        with self._closing_on_error():  # a mini-batch is injected whole or ends the pipeline
            for i, part in enumerate(parts):
                number = self._step * self._micro_batches + i
                start = time.monotonic_ns()
                self._feed(Mode.TRAIN, number, part, share=sizes[i] / sum(sizes), hyper=hyper)
                self._record(INJECTED, number, NOBODY, start, start)
            self._optimizer.step()
            self._step += 1
            self._pending.append(pending)
        return pending

    def _parts(self, x: Any, y: Any) -> tuple[list[_Part | None], list[int]]:
        """Cut a mini-batch into micro-batches; None for the empty ones that fill it up.

        Everything that can be wrong with it is found here, before any of it is sent.
        """
        k = self._micro_batches
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
    ) -> None:
        """Inject one micro-batch at the next position: input first, target to the last stage."""
        structure, tensors = (part or _part(None, None)).x
        feed = MicroBatch(
            micro_batch=number,
            mode=mode,
            empty=part is None,
            hyper=hyper,
            structure=structure,
            requires_grad=[False] * len(tensors),
        )
        with self._closing_on_error():  # a position must never be used half
            self._group.feed(0, feed, tensors)
            if part is not None and mode is not Mode.INFER:
                structure, tensors = part.y
                target = Target(structure=structure, share=share)
                last = len(self.stages) - 1
                self._group.feed(last, target, tensors)
            self._group.advance()

    def _pass(self, mode: Mode, part: _Part) -> None:
        """Inject one micro-batch that trains nothing; these have numbers of their own."""
        self._feed(mode, self._passes, part)
        self._passes += 1

    def collect_oldest(self) -> None:
        """Wait for the losses of the oldest mini-batch on its way."""
        self._check_usable()
        pending = self._pending[0]
        with self._closing_on_error():  # what is taken of it must not be lost
            asked, taken = time.monotonic_ns(), []
            for i in range(len(pending.sizes)):
                taken.append(self._take_loss(pending.first + i)[0])
                number, last = pending.step * self._micro_batches + i, len(self.stages) - 1
                self._group.next_loss = number + 1
                self._record(LOSS_CAME, number, last, asked, time.monotonic_ns())
        losses = [loss.loss for loss in taken]
        total = sum(pending.sizes)
        # A sum in the order of the micro-batches, so that the figure does not depend on timing.
        mean = sum(
            loss * (size / total)
            for loss, size in zip(losses, pending.sizes, strict=True)
            if loss is not None
        )
        trail = taken[-1].trail
        versions = tuple(version for version, _ in trail)
        oldest = min(version for loss in taken for version, _ in loss.trail)
        pending.outcome = StepResult(
            step=pending.step,
            loss=mean,
            losses=tuple(loss for loss in losses if loss is not None),
            versions=versions,
            staleness=max(0, pending.step - oldest),
            busy_s=tuple(busy_ns / 1e9 for _, busy_ns in trail),
        )
        self._pending.popleft()

    def _record(self, kind: int, number: int, waited_for: int, ready: int, start: int) -> None:
        """Write a span of the coordinator, which ends now."""
        if self._recorder is not None:
            arrived = 0 if waited_for == NOBODY else self._group.inbox.arrived_ns
            self._recorder.record(
                kind, COORDINATOR, number, 0, 0, 0,
                waited_for, ready, arrived, start, time.monotonic_ns(), 0,
            )  # fmt: skip

    def _take_loss(self, position: int) -> tuple[Loss, Any]:
        """Wait for what the last stage says of a position: the loss, or the output."""
        message = self._take(self._loss_key(position))
        assert isinstance(message.payload, Loss)
        loss = message.payload
        return loss, unflatten(loss.structure, message.tensors) if loss.structure else None

    def has_losses(self, pending: PendingStep) -> bool:
        """Whether the losses of a mini-batch have all arrived."""
        positions = range(pending.first, pending.first + len(pending.sizes))
        return all(self._group.inbox.holds(self._loss_key(p)) for p in positions)

    def _loss_key(self, position: int) -> Key:
        """Where what the last stage says of a position waits."""
        return Key(Channel.LOSS, position, len(self.stages) - 1)

    def flush(self) -> None:
        """Wait until nothing is in flight on any stage, and every update is applied.

        It changes nothing else: which version a later micro-batch reads depends on its number
        alone, so a run with a flush in it gives the same bits as one without.
        """
        self._check_usable()
        while self._pending:  # before the positions that follow: an inbox takes them in order
            self.collect_oldest()
        self._command(CommandName.FLUSH)

    # -- evaluation and inference ---------------------------------------------------------------

    def evaluate(self, loader: Iterable[tuple[Any, Any]]) -> float:
        """Mean loss over a loader, in eval mode, with every update applied. Trains nothing.

        Args:
            loader: Yields ``(x, y)``.

        Returns:
            The mean of ``loss_fn``, each mini-batch weighed by its samples.

        Raises:
            ConfigError: No loss was given, or the loader is empty.
        """
        self._check_usable()
        if not self._has_loss:
            raise ConfigError("evaluate needs loss_fn; give it to Pipeline")
        self.flush()
        ahead_of: deque[tuple[int, int]] = deque()
        total, samples = 0.0, 0

        def collect() -> None:
            nonlocal total, samples
            position, size = ahead_of.popleft()
            loss = self._take_loss(position)[0].loss
            total += (loss if loss is not None else 0.0) * size
            samples += size

        try:
            for item in loader:
                parts, sizes = self._parts(*_pair(item))
                for part, size in zip(parts, sizes, strict=True):
                    if part is not None:
                        ahead_of.append((self._group.position, size))
                        self._pass(Mode.EVALUATE, part)
                while len(ahead_of) > 2 * len(self.stages):
                    collect()
        finally:
            while ahead_of and not self._closed:
                collect()
        if not samples:
            raise ConfigError("the loader given to evaluate yielded nothing")
        return total / samples

    def __call__(self, x: Any) -> Any:
        """Run the model without gradient, with every update applied, in the mode set last.

        Args:
            x: Input of the first layer, whole (it is not split).

        Returns:
            Output of the last layer.
        """
        self.flush()
        self._pass(Mode.INFER, _part(x, None))
        return self._take_loss(self._group.position - 1)[1]

    def train(self, mode: bool = True) -> Pipeline:
        """Set training mode on every module, as `nn.Module.train`. Flushes the pipe."""
        self.flush()
        self._command(CommandName.TRAINING, bool(mode))
        return self

    def eval(self) -> Pipeline:
        """Set eval mode on every module, as `nn.Module.eval`. Flushes the pipe."""
        return self.train(False)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights and buffers under the keys of the unsplit model. Flushes the pipe."""
        self.flush()
        found: dict[str, Tensor] = {}
        for part in self._command(CommandName.STATE):
            found.update(part)
        return {key: found[key] for key in self._whole.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load weights and buffers, with the keys of the unsplit model. Flushes the pipe.

        Older weight versions are forgotten: the next micro-batches read what was loaded. The
        optimizer state stays.

        Raises:
            ConfigError: Keys are missing or too many, or a shape differs.
        """
        expected = self._whole.state_dict()
        missing = [k for k in expected if k not in state_dict]
        extra = [k for k in state_dict if k not in expected]
        shapes = [
            f"{k} has {tuple(state_dict[k].shape)}, the model {tuple(v.shape)}"
            for k, v in expected.items()
            if k in state_dict and v.shape != state_dict[k].shape
        ]
        if missing or extra or shapes:
            raise ConfigError(
                "the state dict does not fit the model: "
                f"missing {missing or 'none'}, unexpected {extra or 'none'}"
                + "".join(f"; {text}" for text in shapes)
            )
        self.flush()
        self._finish_checkpoint()
        self._command_each(CommandName.LOAD_STATE, self._by_stage(state_dict))
        self._floor = self._step

    def module(self) -> nn.Module:
        """Return a copy of the unsplit model with the weights of now. Flushes the pipe.

        An ``nn.Sequential`` of the layers where a list was given.
        """
        whole = copy.deepcopy(
            self._model if isinstance(self._model, nn.Sequential) else self._whole
        )
        whole.load_state_dict(self.state_dict())
        return whole

    # -- checkpoints ----------------------------------------------------------------------------

    def save(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        keep: int | None = None,
        extra: Any = None,
    ) -> Path:
        """Write a checkpoint, from which `load` goes on with the same bits. Flushes the pipe.

        The flush changes nothing else, so a run that is saved now and then is the same run. Each
        worker writes its own part; all must share the folder. Other tools read the weights: they
        are safetensors under the keys of the unsplit model, with a Hugging Face index.

        Args:
            folder: Of the run; a folder ``step-00000100`` is made in it. None for the one that
                the pipeline was given.
            keep: Remove all but so many of the newest checkpoints there afterwards.
            extra: Of your own: numbers, texts, lists, dicts.

        Returns:
            The folder of the checkpoint. It is whole, or it is not there.

        In the body of a loop over `train_epoch`, what that body does after it is not done again
        by a script that resumes from it: call it last.

        Raises:
            CheckpointError: It cannot be written. The pipeline goes on.
        """
        if keep is not None:
            _check_number("keep", keep)
        root = Path(folder).absolute() if folder is not None else self._checkpointer.folder
        if root is None:
            raise ConfigError("save needs a folder, here or as checkpoint of the pipeline")
        self.flush()
        self._finish_checkpoint()
        self._checkpointer.begin(root, keep, self._manifest(extra), self._unseen())
        with self._closing_on_error(spare=(CheckpointError,)):
            written = self._checkpointer.finish()
        assert written is not None
        return written

    def attach(self, **stateful: Any) -> None:
        """Let objects of yours go into checkpoints and come back with them.

        Call it before training. After a resume it gives each its state at once, and
        `optimizer` its hyper-parameters again, which schedulers change when they are made.

        Args:
            **stateful: By name: what has ``state_dict`` and ``load_state_dict``, as a learning-rate
                scheduler.

        Raises:
            ConfigError: An object lacks these, or its state holds more than numbers, texts, bytes,
                lists and dicts.
        """
        resumed = self.resumed
        back = {} if resumed is None or resumed.step != self._step else resumed.attached
        for name, value in stateful.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ConfigError(f"{name} has no state_dict and load_state_dict")
            refuse_unsaveable(name, value.state_dict())
            if name in back:
                value.load_state_dict(back[name])
        self._attached.update(stateful)
        if resumed is not None and resumed.step == self._step:
            self._set_groups(resumed)

    def _checkpoint_if_due(self) -> None:
        """Begin a checkpoint behind the mini-batch that was injected last, if it is time."""
        if not self._checkpointer.due(self._step):
            return
        if self._checkpointer.is_begun:
            # Not waited for: a flush would take time, and where a layer changes buffers in its
            # backward it would even change the result, and when depends on the disk.
            _log.info("no checkpoint after step %d: the one before is not done", self._step)
            return
        with self._closing_on_error():
            self._checkpointer.begin_by_itself(self._manifest(None), self._unseen())

    def _unseen(self) -> list[PendingStep]:
        """The mini-batches so far whose results the script has not seen."""
        return list(self._pending if self._loading is None else self._loading.pending)

    def _finish_checkpoint(self) -> None:
        """Wait for a checkpoint that was begun by itself; after a flush."""
        with self._closing_on_error():
            try:
                self._checkpointer.finish()
            except CheckpointError as error:
                _log.error("%s", error)

    def _manifest(self, extra: Any) -> Manifest:
        """What a checkpoint that is begun now says of itself, but for its files."""
        shape = self.schedule.shape
        return Manifest(
            step=self._step,
            schedule=self.schedule.name,
            workers=shape.workers,
            stages_per_worker=shape.stages_per_worker,
            per_update=shape.per_update,
            groups=self._optimizer.hyper() if self._optimizer else [],
            extra=extra,
            floor=self._floor,
            passes=self._passes,
            place=self._loading.place()
            if self._loading
            else between_epochs(self._epoch, self._last_loader),
            attached={name: copy.deepcopy(v.state_dict()) for name, v in self._attached.items()},
        )

    def load(self, folder: str | os.PathLike[str]) -> Manifest:
        """Go on from a checkpoint: weights, versions, optimizer state, its parameter groups, step.

        With the same schedule and number of stages the run that follows gives the bits of a run
        that never stopped; with another number of stages or another split too, in schedules that
        flush. In asynchronous ones the first micro-batches then read the newest weights in the
        place of older ones, and a warning says so.

        What was given to `attach` gets its state of then. The next `train_epoch` gives the random
        generators of this process theirs, brings its loader to the place where it was (see
        `coordinator.loading`), and yields the results that the script had not seen first.

        Args:
            folder: Of a checkpoint, or of a run: then its newest one that is whole.

        Returns:
            What the checkpoint says of itself; ``extra`` is what `save` was given.

        Raises:
            CheckpointError: None is whole, or it is of another model; nothing was changed.
        """
        self._check_usable()
        found, manifest = newest_good(Path(folder).absolute())
        if manifest.per_update != self._micro_batches:
            raise CheckpointError(
                f"{found} was made with {manifest.per_update} micro-batches per update, this "
                f"pipeline has {self._micro_batches}; which micro-batch comes next would differ"
            )
        groups = self._optimizer.param_groups if self._optimizer else []
        if self._optimizer and len(groups) != len(manifest.groups):
            raise CheckpointError(
                f"{found} has {len(manifest.groups)} parameter groups, the optimizer {len(groups)}"
            )
        # Buffers may have been made, or have grown, in a forward.
        flexible = buffer_slots(self._whole)
        expected = {
            k: tuple(v.shape) for k, v in self._whole.state_dict().items() if k not in flexible
        }
        there = {k: shape for k, shape in shapes(found).items() if k not in flexible}
        if differing := sorted(there.items() ^ expected.items()):
            key = differing[0][0]
            raise CheckpointError(
                f"{found} is of another model: {key} has the shape {there.get(key)} there, "
                f"{expected.get(key)} here"
            )
        self.flush()
        self._finish_checkpoint()
        self._floor = manifest.floor
        if not all(self._command(CommandName.LOAD, load_argument(found, manifest))):
            _log.warning(
                "%s has not all weight versions that this split reads: the first micro-batches "
                "read newer ones",
                found,
            )
            # On every stage, so that what follows does not depend on which of them had all.
            self._floor = manifest.step
            self._command(CommandName.LOAD, load_argument(found, manifest, self._floor))
        self.flush()  # the stages begin their orders anew, from that step
        here = dataclasses.replace(self._group.origin(), folder=found, floor=self._floor)
        self._group.log.begin(here)
        self._step, self._passes = manifest.step, manifest.passes
        self._group.next_micro_batch = self._group.next_loss = self._step * self._micro_batches
        if manifest.place is not None:
            self._epoch = manifest.place["epoch"]
        self.resumed = manifest
        self.attach(**self._attached)
        return manifest

    def _resume(self) -> None:
        """Load the newest checkpoint, if there is one at all."""
        folder = self._checkpointer.folder
        assert folder is not None
        if not checkpoints(folder):
            _log.warning("there is no checkpoint in %s yet; beginning at the start", folder)
            return
        self.load(folder)
        _log.warning("going on after step %d of %s", self._step, folder)

    def _set_groups(self, manifest: Manifest) -> None:
        """Give the parameter groups the values that they had."""
        groups = self._optimizer.param_groups if self._optimizer else []
        for group, saved in zip(groups, manifest.groups):
            set_hyper(group, saved)

    @property
    def step(self) -> int:
        """Mini-batches injected so far."""
        return self._step

    @property
    def epoch(self) -> int:
        """Number of the epoch under way: how many calls of `train_epoch` have ended.

        ``for epoch in range(pipe.epoch, epochs)`` goes on in the right one after a resume.
        """
        return self._epoch

    # -- optimizer ------------------------------------------------------------------------------

    @property
    def optimizer(self) -> DistributedOptimizer:
        """The optimizer; give its ``param_groups`` to a scheduler. Can be replaced.

        Raises:
            ConfigError: There is none.
        """
        if self._optimizer is None:
            raise ConfigError("this pipeline was made without an optimizer")
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: DistributedOptimizer) -> None:
        """Let the stages step with another optimizer, whose state starts empty. Flushes."""
        if not isinstance(optimizer, DistributedOptimizer):
            raise ConfigError(
                "assign a DistributedOptimizer over pipe.parameter_rrefs(), not a "
                f"{type(optimizer).__name__}"
            )
        # Those of earlier generations too: the optimizer may have been made before a recovery.
        self._references()
        every = self._named_references.values()
        names = {id(reference): name for named in every for reference, name in named}
        try:
            spec = optimizer.spec(lambda reference: names[id(reference)])
        except KeyError:
            raise ConfigError("the optimizer has references of another pipeline") from None
        self.flush()
        self._command(CommandName.OPTIMIZER, cloudpickle.dumps(spec))
        optimizer.attach(self, spec)
        self._optimizer = optimizer

    def parameter_rrefs(self) -> list[Reference]:
        """Return RRefs to all trainable parameters, in the order of the unsplit model."""
        return [reference for reference, _ in self._references()]

    def _references(self) -> list[tuple[Reference, str]]:
        """References with names; made once, since they are compared by identity."""
        self._check_usable()
        with self._closing_on_error():
            references = self._group.call(
                lambda cluster: (
                    [r for s in self.stages for r in cluster.parameter_references(s.index)]
                    if self._group.generation not in self._named_references
                    else []
                )
            )
        generation = self._group.generation
        if generation not in self._named_references:
            names = list(self._names.values())
            self._named_references[generation] = list(zip(references, names, strict=True))
        return self._named_references[generation]

    def _build_optimizer(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        kwargs: dict[str, Any],
        groups: list[tuple[list[str], Hyper]],
    ) -> None:
        """Make the optimizer that the constructor was asked for."""
        by_name = {name: reference for reference, name in self._references()}
        self.optimizer = DistributedOptimizer(
            optimizer_class,
            [{"params": [by_name[name] for name in names], **options} for names, options in groups],
            **kwargs,
        )

    def optimizer_references(self) -> list[Reference]:
        """See `OptimizerLink`."""
        return [self._reference(s.index, "optimizer") for s in self.stages]

    def gather_optimizer_state(self) -> dict[str, dict[str, Any]]:
        """See `OptimizerLink`. Flushes the pipe."""
        self.flush()
        state: dict[str, dict[str, Any]] = {}
        for part in self._command(CommandName.OPTIMIZER_STATE):
            state.update(part)
        return state

    def scatter_optimizer_state(self, state: dict[str, dict[str, Any]]) -> None:
        """See `OptimizerLink`. Flushes the pipe."""
        if state:
            self.flush()
            self._command_each(CommandName.LOAD_OPTIMIZER_STATE, self._by_stage(state))

    def _by_stage(self, named: Mapping[str, T]) -> list[dict[str, T]]:
        """Part what is named as in the unsplit model by the stage that it belongs to."""
        prefixes = [tuple(f"{name}." for name in handle.layers) for handle in self.stages]
        return [{k: v for k, v in named.items() if k.startswith(own)} for own in prefixes]

    # -- inspection -----------------------------------------------------------------------------

    def statistics(self) -> list[dict[str, int]]:
        """Return counters of every stage (see `Stage.statistics`). Does not flush."""
        self._check_usable()
        return self._command(CommandName.STATISTICS)

    def trace(self) -> Trace:
        """Return what every stage did so far. Flushes the pipe.

        Raises:
            ConfigError: Nothing is recorded; give Pipeline ``trace=True`` or a file.
        """
        if self._recorder is None:
            raise ConfigError("nothing is recorded; give Pipeline trace=True or a file")
        self.flush()
        recorded = self._command(CommandName.TRACE)
        with self._closing_on_error():
            before = self._read_clocks()
            clocks = list(
                zip(before, self._group.call(lambda cluster: cluster.clocks()), strict=True)
            )
        return put_together(
            self.schedule,
            self._credits,
            self._group.cluster.names,
            recorded,
            self._recorder,
            clocks,
        )

    def _read_clocks(self) -> list[Reading]:
        """The clocks of the workers of now, as they were when first asked for."""
        generation = self._group.generation
        if generation not in self._clocks:
            self._clocks[generation] = self._group.call(lambda cluster: cluster.clocks())
        return self._clocks[generation]

    def explain(self) -> str:
        """Describe the split, the versions and the memory, as a table of text."""
        rows = [("stage", "worker", "layers", "parameters", "in flight", "versions", "peak MiB")]
        for handle, counters in zip(self.stages, self.statistics(), strict=True):
            layers = handle.layers
            span = layers[0] if len(layers) == 1 else f"{layers[0]}..{layers[-1]}"
            rows.append(
                (
                    str(handle.index),
                    handle.worker,
                    span,
                    f"{counters['parameters']:,}",
                    f"<= {self.schedule.in_flight(handle.index)}",
                    f"{counters['versions_kept']} of {self.schedule.kept(handle.index)}",
                    f"{counters['peak_memory_bytes'] / 2**20:.0f}",
                )
            )
        head = f"schedule {self.schedule.name}, {self._micro_batches} micro-batches per update"
        return f"{head}\n{table(rows)}"

    # -- commands and life ----------------------------------------------------------------------

    def _command(self, name: CommandName, argument: object = None) -> list[Any]:
        """Tell every stage the same; see `_command_each`."""
        return self._command_each(name, [argument] * len(self.stages))

    def _command_each(self, name: CommandName, arguments: Sequence[object]) -> list[Any]:
        """Tell every stage something at the next position, and wait for what each replies."""
        self._check_usable()
        with self._closing_on_error():
            return self._group.replies(self._group.tell(name, *arguments))

    def _take(self, key: Key) -> Message:
        """Wait for a message; a failure that cannot be helped closes the pipeline."""
        with self._closing_on_error():
            return self._group.take(key)

    @contextmanager
    def _closing_on_error(self, spare: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """End everything if the body fails: nothing may be left running behind an error.

        Args:
            spare: What ends nothing.
        """
        try:
            yield
        except spare:
            raise
        except BaseException as error:
            if isinstance(error, Exception) and not self._closed:
                self._failure = error
            self._end_all()
            raise

    def _reference(self, stage: int, part: str) -> Reference:
        """A reference to a part of a stage."""
        self._check_usable()
        with self._closing_on_error():
            return self._group.call(lambda cluster: cluster.reference(stage, part))

    def _worker_of(self, stage: int) -> str:
        """Name of the worker that hosts a stage."""
        return self._group.cluster.names[self.schedule.shape.worker_of(stage)]

    @property
    def restarts(self) -> tuple[Restart, ...]:
        """The recoveries from failed workers so far."""
        return tuple(self._group.restarts)

    def _check_usable(self) -> None:
        """Refuse to go on after close, or after a failure.

        Raises:
            PipelineClosed: It is closed; ``__cause__`` is the failure, if that closed it.
        """
        if self._closed:
            reason = self._failure
            failed = reason is not None and not isinstance(reason, PipelineClosed)
            raise PipelineClosed(
                f"the pipeline has failed: {reason}" if failed else "the pipeline is closed"
            ) from (reason if failed else None)

    def close(self) -> None:
        """End all workers. Idempotent. What is in flight is dropped; read `state_dict` before.

        With a trace to write, the pipe is flushed and the trace written first.

        Raises:
            TraceError: It cannot be written; everything has ended all the same.
        """
        try:
            # Not after a failure, and not where a signal interrupted a wait.
            inbox = self._group.inbox
            healthy = self._failure is None and inbox.reason is None and not inbox.busy
            healthy = healthy and os.getpid() == self._owner_pid
            healthy = healthy and not self._closed
            if healthy and self._checkpointer.is_begun:
                self.flush()
                self._finish_checkpoint()
            if self._trace_path is not None and healthy:
                self.trace().save(self._trace_path)
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """End all workers, now."""
        if not self._closed:
            self._closed = True
            self._end.detach()
            self._checkpointer.abandon()
            if os.getpid() == self._owner_pid:  # a forked child must not end its parent's workers
                self._group.close()

    def __enter__(self) -> Pipeline:
        """Return the pipeline."""
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *exception: object) -> None:
        """Close it; after Ctrl-C and the like without waiting for anything."""
        if exception_type is None:
            self.close()
            return
        try:
            self._checkpointer.abandon()
            if issubclass(exception_type, Exception):
                self.close()
        except PipelineError as error:  # the caller's own error is the one to be seen
            _log.warning("no trace is left: %s", error)
        finally:
            self._end_all()


def _close_here(group: WorkerGroup, owner_pid: int) -> None:
    """End the workers; called by the garbage collector or at the interpreter's end.

    The collector may run on any thread, also on one that closing waits for, hence the thread.
    """
    if os.getpid() != owner_pid:
        return
    if threading.current_thread() is threading.main_thread():
        group.close()
    else:
        threading.Thread(target=group.close, name="close", daemon=True).start()


def _pair(item: Any) -> tuple[Any, Any]:
    """Check an item of a loader."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    length = f" of {len(item)}" if isinstance(item, tuple | list) else ""
    raise ConfigError(
        f"the loader must yield pairs (x, y); this item is a {type(item).__name__}{length}"
    )


def _check_number(name: str, value: int) -> None:
    """Refuse what is no positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}")
