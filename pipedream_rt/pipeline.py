"""The public face of the runtime: a pipeline over the stages of a model.

The methods here document; the objects in ``coordinator/`` do the work, one job each. One thread at
a time uses a pipeline.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, overload

from torch import Tensor, nn

from pipedream_rt import extras
from pipedream_rt.batches.items import Accumulated, Batch, Prepare, require_loader
from pipedream_rt.checkpoint import Manifest
from pipedream_rt.cluster.environment import VERIFY, count_of_environment
from pipedream_rt.cluster.generations import starts_here
from pipedream_rt.cluster.interface import Reference
from pipedream_rt.cluster.worker.role import refuse_in_worker
from pipedream_rt.coordinator.checkpointing.pipeline_fingerprint import Fingerprint
from pipedream_rt.coordinator.distributed_optimizer import DistributedOptimizer
from pipedream_rt.coordinator.feed.epochs import Epoch
from pipedream_rt.coordinator.feed.graph import refusing_backward
from pipedream_rt.coordinator.feed.script_loss import ScriptLoss
from pipedream_rt.coordinator.kept_versions import KeptVersion
from pipedream_rt.coordinator.recovery.decision import Restart
from pipedream_rt.coordinator.results import PendingStep, StepResult, Steps
from pipedream_rt.coordinator.run import Run, attach, notices_of, start, warm_up
from pipedream_rt.coordinator.script_environment import resolved, take_place, tried
from pipedream_rt.coordinator.views.attribute_hints import ADVICE
from pipedream_rt.coordinator.views.explanation import Explanation, explain
from pipedream_rt.coordinator.views.tracebacks import (
    ShorterTracebacks,
    shorten,
    with_shorter_tracebacks,
)
from pipedream_rt.devices.hosted import on_host
from pipedream_rt.dynamo import dynamo_spared
from pipedream_rt.errors import ConfigError, PipelineError
from pipedream_rt.job.devices import Devices
from pipedream_rt.job.given_optimizer import OptimizerArgument
from pipedream_rt.job.identity import require_acceptable
from pipedream_rt.job.job import Job
from pipedream_rt.job.job import prepare as prepare_job
from pipedream_rt.job.notices import LEFT_OUT
from pipedream_rt.job.options import (
    CheckpointOption,
    Layout,
    Observe,
    Options,
    Recovery,
    Training,
    Workers,
)
from pipedream_rt.job.requirements import (
    options_of,
    require_choice,
    require_count,
    require_instance,
)
from pipedream_rt.job.splitting import Stages
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.lifecycle import Life
from pipedream_rt.messages.message import CommandName
from pipedream_rt.models import dumps
from pipedream_rt.models.refusals import refuse_loss
from pipedream_rt.paths import given_path
from pipedream_rt.schedules.custom import WrittenSchedule
from pipedream_rt.schedules.recipes import ScheduleName
from pipedream_rt.stage.correction import Correction
from pipedream_rt.stage.evaluation import Metric
from pipedream_rt.stage.spec import LossFunction
from pipedream_rt.telling import log_of, note, shell
from pipedream_rt.tracing.summary import Lines
from pipedream_rt.tracing.trace import Trace

_log = log_of(__name__)

T = TypeVar("T")


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
        model: Any ``nn.Module``, or a list of modules that are called one after another.
        stages: The number of stages, which are then balanced by the work of their layers on the
            example, or by parameter count without one; or a list with the first layer, by index or
            name, of every stage but the first. ``"auto"`` measures the layers on the example, and
            chooses stages and slack for the workers of this machine, as `choose` does; with
            ``checkpoint``, the choice is kept in its folder for a run that resumes. None: one
            stage, which a warning says.
        example: A mini-batch as the loader yields it, the input alone, or the loader, at whose
            first item is looked: the model is run on it once, for shapes alone, to find out what
            passes between its layers and how much each of them does. Later mini-batches may have
            other shapes. A sequence of layers needs none, and its layers are run on it only where
            all of them are torch's own.
        prepare: A function of an item of a loader, for items that have another form than
            `train_epoch` takes; it returns such a form, as ``((a, b), {}, y)``. It is called in the
            script, with each item to train on, to evaluate, to predict or to verify, and with the
            example. A call's own ``prepare`` goes before it.
        loss_fn: A function ``(output, target) -> scalar tensor``, which runs on the last stage: a
            mean over samples, or over what ``weigh`` counts, or any loss of whole mini-batches, as
            `Training` says under ``loss``. It may return a dict with the
            scalar under ``"loss"`` and parts of it, which appear in ``result.metrics``. If it is an
            ``nn.Module``, its parameters are trained with the model's (see `loss_module`). None for
            inference only, or if the model computes its loss itself and returns it as ``loss``.
        optimizer: A pair ``(class, dict of arguments)``; the same with rules for parameter groups,
            ``(class, dict, [("*.bias", {"weight_decay": 0.0})])``, each with a pattern of names or
            a function of name and parameter; or an optimizer over the model's parameters, whose
            groups and state are kept. None for inference only.
        schedule: A name (``pipedream-rt schedule help`` lists them), or an object with a method
            ``order`` (see `WrittenSchedule`), which is checked before anything starts. None: what
            reaches a loss soonest with the optimizer, as far as it was measured. That is
            ``"1f1b"``; with a loss that torch does not bring ``"gpipe"``, which has the same bits
            and can compute it of the whole; or ``"async-1f1b"`` where waiting clearly costs more
            than staleness, with fewer micro-batches than stages, and for options that are about
            staleness.
        micro_batches: The number of micro-batches that a mini-batch is cut into; the model is
            updated once for all of them. None: if ``schedule`` is None too, 4 for each stage, or 1
            where there is BatchNorm; in ``async-1f1b`` and ``2bw`` as many as make no gradient more
            than one update stale, which is the number of stages (more with slack or replicas); in
            schedules that flush 1, whose bits are those of plain PyTorch.
        workers: ``"local"`` starts worker processes; ``"serial"`` does everything in the thread of
            the script; ``"HOST:PORT"`` listens there for `pipedream-rt worker`. None: what the
            environment says (`pipedream-rt run`, torchrun), else ``"local"``.
        devices: What the stages compute on: ``"cuda"`` or another kind of accelerator that torch
            knows (with fewer of them than stages, neighbouring stages share one); ``"cuda:1"``; or
            a list with one for each stage or worker, in which some may be ``"cpu"``. A worker that
            was started elsewhere may have a device of its own (`pipedream-rt worker --device`).
            None: where the model's tensors are.
        seed: The seed of all random numbers that layers draw, an integer.
        corrections: What every stage does about stale gradients, in this order: objects of
            `pipedream_rt.corrections`, or of classes of your own (`Correction`). ``"auto"``: those
            that were measured to be the best for the optimizer and the staleness
            (`pipedream_rt.corrections.advice`). None: the same, where nothing speaks against it.
            ``()``: none.
        checkpoint: The folder for checkpoints, or `Checkpoints`, which also says when to make them.
        training: How the stages train: clipping, averages, autocast, recomputation...
        layout: How stages are laid out on workers: replicas, slack, credits...
        recovery: How many failures to recover from, and how long to wait before one counts.
        observe: What is recorded and shown: a trace, fingerprints, a report.

    Raises:
        ConfigError: The arguments cannot work; nothing was started.
        ScheduleError: A schedule that a user wrote breaks a rule; nothing was started.
        RendezvousTimeout: Some workers did not join in time; all were ended.
    """

    @options_of("Pipeline")
    @dynamo_spared()
    @with_shorter_tracebacks
    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        *,
        stages: Stages | Literal["auto"] | None = None,
        example: Any = None,
        prepare: Prepare | None = None,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerArgument = None,
        schedule: ScheduleName | WrittenSchedule | None = None,
        micro_batches: int | None = None,
        corrections: Sequence[Correction] | Literal["auto"] | None = None,
        workers: Workers = None,
        checkpoint: CheckpointOption = None,
        devices: Devices = None,
        seed: int = 0,
        training: Training = Training(),  # noqa: B008 - frozen, as the other groups
        layout: Layout = Layout(),  # noqa: B008
        recovery: Recovery = Recovery(),  # noqa: B008
        observe: Observe = Observe(),  # noqa: B008
    ) -> None:
        refuse_in_worker()
        if shell() is not None:
            extras.close_earlier()
        given = Options(
            stages=1 if stages is None else stages,
            example=example,
            prepare=prepare,
            loss_fn=loss_fn,
            optimizer=optimizer,
            schedule=schedule,
            micro_batches=micro_batches,
            corrections=corrections,
            workers=workers,
            checkpoint=checkpoint,
            devices=devices,
            seed=seed,
            training=training,
            layout=layout,
            recovery=recovery,
            observe=observe,
        )
        given = tried(given)
        unsplit = UnsplitModel(model, loss_fn, opens=example is not None)
        options, self._why = resolved(given), ""
        if options.stages == "auto":
            options, self._why = extras.with_stages_chosen(unsplit, options)
        warm_up(unsplit, options)
        starts = options.workers == "serial" or starts_here(options.workers)
        job = prepare_job(unsplit, options, starts)
        self._job, self.plan = job.without_start_data, job.plan
        take_place(given)
        self._publisher = _publisher_of(options)
        if stages is None and job.plan.workers == 1:
            _log.warning("%s", LEFT_OUT)
        elif job.chosen:
            note(_log, job.chosen)
        for text in notices_of(job):
            _log.warning("%s", text)
        # From here on there are workers, which an error ends.
        self._group = start(job, self._publisher)
        with self._group.life.guard("it was opened"):
            self._run = run = attach(job, self._group, self._publisher)
            self.stages = run.parameters.handles()
            self._watching = _watching(job.without_start_data, run)
            if self._watching is not None:
                run.feeder.watch(self._watching.injected)
        if shell() is not None:
            extras.remember(self)

    # -- training -------------------------------------------------------------------------------

    def train_epoch(
        self,
        loader: Iterable[Any],
        *,
        prepare: Prepare | None = None,
        metrics: Mapping[str, Metric] | None = None,
        progress: bool = False,
    ) -> Epoch[StepResult]:
        """Train on every mini-batch of a loader, keeping the pipe full.

        In asynchronous schedules the pipe is not drained at the end: the next epoch follows at
        once. A result comes some mini-batches after their injection. After a ``break``, the
        mini-batches from `seen` up to `step` are trained on all the same, without their results.

        Args:
            loader: An iterable of pairs ``(x, y)``: the model is called with x, the loss with its
                output and y; or of dicts: the entries are the model's keyword arguments, and the
                loss gets the dict in place of y; or of ``(args, kwargs, y)``. Of other items the
                signatures of forward and loss say what is what, if they can: of ``((a, b), y)``,
                of ``(a, b, y)``, and of dicts with entries that the forward does not take. The
                pipeline always draws exactly one item ahead of what is injected, so that random
                numbers drawn by the loader and by the body of the loop do not depend on timing.
            prepare: A function that makes one of these out of an item, where the loader yields
                something else. None: that of the pipeline.
            metrics: Functions of output and target that return a number, by name, as in `evaluate`.
                They get what the loss gets, in training mode, and their value for a mini-batch is
                in its result: ``result.metrics["accuracy"]``.
            progress: Whether to show a bar, on standard error or in the notebook.

        Yields:
            The result of each mini-batch, in order; all of them before the iteration ends. The
            ``len`` of the iterator is that of the loader, if it has one.

        Raises:
            ConfigError: Another epoch is under way, or what the script does around the loop would
                not reach the stages: autocast, other settings of torch, a changed optimizer.
            StageFailed: An action raised.
            WorkerLost: A worker died.
            CheckpointError: Too many checkpoints in a row could not be written.
            Exception: The loader raised it; the results of the mini-batches before came first.
        """
        self._group.life.check()
        self._require_loss("train_epoch")
        results = self._results_of(loader, prepare, metrics, progress)
        return Epoch("train_epoch", results, loader)

    def _results_of(
        self,
        loader: Iterable[Any],
        prepare: Prepare | None,
        metrics: Mapping[str, Metric] | None,
        progress: bool,
    ) -> Generator[StepResult, None, None]:
        """Train, and yield the results."""
        with ShorterTracebacks():
            fed = self._run.run_state.mini_batch_was_fed
            results = self._run.epochs.train(loader, fed, prepare, metrics)
            if progress:
                results = extras.with_bar(
                    results,
                    f"epoch {self.epoch}",
                    extras.count_of(loader),
                    extras.loss_words,
                    self._run.epochs.passed,
                )
            yield from _calmly(results)

    def submit(self, *item: Any) -> PendingStep:
        """Inject one mini-batch with the hyper-parameters that are set now.

        When as many mini-batches are in flight as there are credits, it first waits for the losses
        of the oldest one.

        Args:
            *item: An item as `train_epoch` takes it from a loader, in its parts: x and y; or a
                dict; or args, kwargs and y; or what the pipeline's ``prepare`` takes. Tensors are
                (B, ...), in any nesting of tuples, lists, dicts and dataclasses.

        Returns:
            A handle; its ``result()`` waits for the losses.

        Raises:
            ConfigError: No loss or optimizer was given, or the mini-batch cannot be split.
        """
        self._require_loss("submit")
        one = item[0] if len(item) == 1 else item
        feeder = self._run.feeder
        pending = feeder.inject(one if isinstance(one, Accumulated) else feeder.items.batch(one))
        self._run.run_state.mini_batch_was_fed()
        return pending

    def _require_loss(self, what: str) -> None:
        """Refuse to train on a loss of the stages where the script computes it."""
        if self._run.script_loss is not None:
            raise ConfigError(
                f"{what} needs a loss on the stages, and training needs loss_fn and optimizer: "
                "give Pipeline loss_fn=, or an example= with what makes the model compute its "
                "loss (such as labels). To compute the loss in the script, iterate over "
                "outputs(loader), or call forward() and step()"
            )

    def _script_loss(self, what: str) -> ScriptLoss:
        """Return the script's place in the plan; refuse where it has none."""
        self._group.life.check()
        if (found := self._run.script_loss) is not None:
            return found
        if self._job.reading.optimizer is None:
            raise ConfigError(f"{what} trains the model, so Pipeline needs an optimizer")
        raise ConfigError(
            f"{what} is for a loss that the script computes, and this pipeline has one on its last "
            "stage: leave loss_fn out, and labels out of example=; or use train_epoch and submit"
        )

    def outputs(
        self, loader: Iterable[Any], *, prepare: Prepare | None = None
    ) -> Epoch[tuple[Any, Any]]:
        """Train with a loss that the script computes, keeping the pipe full.

        For a pipeline with an optimizer and without ``loss_fn``::

            for output, (x, y) in pipe.outputs(loader):
                loss = anything(output, y)  # of the whole mini-batch
                loss.backward()

        The tensors of ``output`` are leaves. When the next item is asked for, their gradients go to
        the stages. Any use of autograd is right: several backwards, ``autograd.grad``, parts of the
        model and optimizers of the script behind it. A mini-batch without a backward changes no
        weight. In asynchronous schedules others are on their way meanwhile: what needs the stages,
        as `state_dict`, `predict` or `statistics`, comes after the loop, and a loop that is left
        skips their updates.

        Args:
            loader: As in `train_epoch`; or it yields the input of the model alone, a tensor.
                Targets stay in the script.
            prepare: As in `train_epoch`; the items that come with the outputs are the loader's.

        Yields:
            The output of the model for a mini-batch, its micro-batches joined; and the item.

        Raises:
            ConfigError: Nothing can be trained, another epoch is under way, or outputs cannot be
                joined.
            NonFiniteLoss: A gradient is NaN or infinite (`Training.on_nan`); it was not sent.
            StageFailed: An action raised.
            WorkerLost: A worker died.
            Exception: The loader raised it; the mini-batches before came first.
        """
        script = self._script_loss("outputs")
        return Epoch("outputs", self._outputs_of(loader, script, prepare), loader)

    def _outputs_of(
        self, loader: Iterable[Any], script: ScriptLoss, prepare: Prepare | None
    ) -> Generator[tuple[Any, Any], None, None]:
        """Train, and yield the outputs with their items."""
        with ShorterTracebacks():
            state = self._run.run_state
            yield from _calmly(self._run.epochs.outputs(loader, script, state, prepare))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward to train on, whose output is in the autograd graph of the script.

        For a pipeline with an optimizer and without ``loss_fn``: the loop of PyTorch by hand::

            loss = anything(pipe.forward(x), y)
            loss.backward()
            pipe.step()

        Each call is one micro-batch of the update that `step` closes, of ``micro_batches`` at most.
        It waits for its output, so that no two calls overlap; `outputs` keeps the pipe full.
        Gradients flow on to inputs that require one, in schedules that flush. Under ``no_grad`` it
        is an inference in training mode.

        Args:
            *args: The positional arguments of the model; for a sequence of layers the input of the
                first one. They are not cut into micro-batches.
            **kwargs: The keyword arguments of the model.

        Returns:
            The output of the model.

        Raises:
            ConfigError: The update has no place for it, or nothing can be trained. In a backward: a
                second derivative, or a second backward to an input.
            StageFailed: An action raised.
            WorkerLost: A worker died.
        """
        return self._forward(Batch(args, kwargs, None), 1)

    def _forward(self, batch: Batch, count: int) -> Any:
        """Run one forward to train on, in ``count`` micro-batches."""
        script = self._script_loss("forward")
        with ShorterTracebacks():
            if script.has_closed():
                self._run.run_state.mini_batch_was_fed()
            return script.forward(on_host(batch), count)

    def flush(self) -> None:
        """Wait until nothing is in flight on any stage, and every update is applied.

        Nothing else changes: the version that a later micro-batch reads depends on its number only,
        so a run with a flush gives the same bits as one without.
        """
        self._run.feeder.flush()

    @property
    def step(self) -> Steps:
        """The number of mini-batches injected so far; called, it closes an update of `forward`.

        ``pipe.step()`` gives the gradients that have come to the outputs since the last call, and
        the stages update their weights. ``pipe.step(update=False)`` drops them, as for a model that
        only passes gradients on: a discriminator, while its generator learns. Either way the update
        counts. Where a backward has asked for the gradient of an input of the last of
        ``micro_batches`` forwards, the update is applied by that, and cannot be dropped any more:
        give one micro-batch more than there are forwards.

        Raises:
            ConfigError: No forward was called, or the update to drop was applied already.
            NonFiniteLoss: A gradient is NaN or infinite (`Training.on_nan`); it was not sent.
        """
        return Steps.of(self._run.feeder.step, self._close_update)

    def _close_update(self, update: bool) -> None:
        """Close the update of the forwards since the last one."""
        require_choice("update", update, (True, False))
        with ShorterTracebacks():
            self._script_loss("step()").step(update)
            self._run.epochs.seen = self._run.feeder.step

    @property
    def seen(self) -> int:
        """The number of mini-batches up to the last result that the script has seen.

        It is behind `step` while results are in flight, and stays behind after a ``break``.
        """
        return self._run.epochs.seen

    @property
    def epoch(self) -> int:
        """The number of the current epoch: how many of `train_epoch` and `outputs` have ended.

        ``for epoch in range(pipe.epoch, epochs)`` goes on in the right one after a resume.
        """
        return self._run.epochs.number

    # -- evaluation and inference ---------------------------------------------------------------

    @overload
    def evaluate(
        self,
        loader: Iterable[Any],
        *,
        prepare: Prepare | None = ...,
        loss_fn: LossFunction | None = ...,
        version: KeptVersion | None = ...,
        metrics: None = ...,
        keep_buffers: bool = ...,
        progress: bool = ...,
    ) -> float: ...

    @overload
    def evaluate(
        self,
        loader: Iterable[Any],
        *,
        prepare: Prepare | None = ...,
        loss_fn: LossFunction | None = ...,
        version: KeptVersion | None = ...,
        metrics: Mapping[str, Metric],
        keep_buffers: bool = ...,
        progress: bool = ...,
    ) -> dict[str, float]: ...

    def evaluate(
        self,
        loader: Iterable[Any],
        *,
        prepare: Prepare | None = None,
        loss_fn: LossFunction | None = None,
        version: KeptVersion | None = None,
        metrics: Mapping[str, Metric] | None = None,
        keep_buffers: bool = False,
        progress: bool = False,
    ) -> float | dict[str, float]:
        """Return the mean loss over a loader, in eval mode, with every update applied.

        The model gets each mini-batch whole, as in plain PyTorch, and its buffers carry over from
        one to the next. Then every module, the loss too, gets its mode, weights and buffers back.

        Args:
            loader: Yields what `train_epoch` takes. Nothing is trained on it.
            prepare: As in `train_epoch`.
            loss_fn: Another loss than that of training, which may be a loss for targets of another
                kind; a pipeline without a loss takes one too. It travels with the mini-batches, and
                changes nothing. A module computes with the weights that it has in the script. None:
                the loss of training, with the weights that it has on its stage.
            version: The kept version whose weights are read; None for the current ones.
            metrics: Functions of output and target that return a number, by name, as
                ``{"accuracy": lambda output, y: (output.argmax(-1) == y).float().mean()}``. They
                are computed on the last stage, like the loss.
            keep_buffers: Whether buffers stay as the evaluation leaves them.
            progress: Whether to show a bar; see `train_epoch`.

        Returns:
            The mean of the loss, weighted by the number of samples of each mini-batch, by the
            labels that count, or by what ``weigh`` returns for it. With ``metrics``, a dict: the
            loss under ``"loss"``, and the means of the metrics, weighted likewise, under their
            names.

        Raises:
            ConfigError: No loss was given, the loader is empty, a metric returned no number, or
                ``loss_fn`` or a metric cannot travel: it does not pickle, or holds a weight of the
                model.
            StageFailed: A layer or the loss raised an error. As after the others, the pipeline can
                still be used, and is as it was.
        """
        if version is not None and keep_buffers:
            raise ConfigError("keep_buffers changes the newest buffers, and version reads others")
        require_choice("keep_buffers", keep_buffers, (True, False))
        refuse_loss(loss_fn)
        loss_fn = None if loss_fn is self._job.options.loss_fn else loss_fn
        if progress:
            require_loader(loader, "evaluate")
            loader = extras.Barred(loader, "evaluate")
        with ShorterTracebacks():
            number = self._number_of(version)
            evaluate = functools.partial(
                self._run.feeder.evaluate,
                prepare=prepare,
                version=number,
                loss_fn=loss_fn,
                metrics=metrics,
                keep_buffers=keep_buffers,
            )
            found = evaluate(loader) if shell() is None else extras.calm_call(evaluate, loader)
        if self._publisher is not None:
            self._publisher.evaluated(self.step, found)
        return found["loss"] if metrics is None else found

    def predict(
        self,
        loader: Iterable[Any],
        *,
        prepare: Prepare | None = None,
        version: KeptVersion | None = None,
        progress: bool = False,
    ) -> Generator[Any, None, None]:
        """Run the model on every item of a loader, several at a time, in eval mode.

        Args:
            loader: Yields what `train_epoch` takes, whose targets are not used; or only the input
                of the model, a tensor.
            prepare: As in `train_epoch`.
            version: The kept version whose weights are read; None for the current ones.
            progress: Whether to show a bar; see `train_epoch`.

        Yields:
            The output of the model for each item, in order. It is what ``pipe(...)`` returns.

        Raises:
            StageFailed: A layer raised an error. The pipeline can still be used, and is as it was.
        """
        with ShorterTracebacks():
            outputs = self._run.feeder.predict(loader, prepare, self._number_of(version))
            if progress:
                outputs = extras.with_bar(outputs, "predict", extras.count_of(loader))
            yield from _calmly(outputs)

    def generate(
        self,
        *args: Any,
        version: KeptVersion | None = None,
        beside: Iterable[Any] = (),
        **kwargs: Any,
    ) -> Any:
        """Generate tokens with a causal model of transformers, each stage with its own cache.

        It is the model's own ``generate``, greedy or by sampling, and draws from torch's generator
        in this process: with the same seed it gives the same tokens as the unsplit model.

        Args:
            *args: The positional arguments of the model's ``generate``: ids (B, T).
            version: The kept version whose weights are read; None for the current ones, with every
                update applied.
            beside: An iterable of which one item is drawn after each token, such as `train_epoch`:
                so training goes on meanwhile. It needs a ``version``.
            **kwargs: The keyword arguments of ``generate``, as ``max_new_tokens`` and
                ``do_sample``.

        Returns:
            What ``generate`` returns: ids (B, T + new tokens).

        Raises:
            ConfigError: The model is no causal one of transformers, or is asked for beams.
            StageFailed: A layer raised an error. The pipeline can still be used, and is as it was.
        """
        self._group.life.check()
        drawn = iter(beside)
        if version is None and beside != ():
            raise ConfigError(
                "while training goes on beside it, generate needs weights that stay: give "
                "version=pipe.keep_version()"
            )
        with ShorterTracebacks():
            number = self._number_of(version)
            model = self._job.model.whole
            return extras.generate(self._run.feeder, model, args, kwargs, number, drawn)

    def keep_version(self, *, ema: bool = False) -> KeptVersion:
        """Keep a copy of the current weights and buffers on the stages. Flushes the pipe.

        `generate`, `evaluate`, `predict`, `state_dict` and `module` can read it while training
        goes on::

            with pipe.keep_version() as version:
                pipe.generate(ids, version=version, beside=pipe.train_epoch(loader))

        Args:
            ema: Whether to keep the average of the weights (``Training(ema=...)``) instead of the
                weights.

        Raises:
            ConfigError: No average is made, or a layer changes weights when its mode is set.
        """
        if ema and not self._job.averages:
            raise ConfigError(
                "no average of the weights is made; give training=Training(ema=0.999)"
            )
        if self._job.changes_modes:
            raise ConfigError(
                "the model has a layer that does something when its mode is set, such as to merge "
                "an adapter into a weight, so no version of its weights can be kept and read"
            )
        return KeptVersion(self._group, self._run.feeder, average=ema)

    def _number_of(self, version: KeptVersion | None) -> int:
        """Return the number under which the stages have a kept version; 0 for None."""
        if version is None:
            return 0
        require_instance("version", version, KeptVersion)
        return version.number_for(self._group)

    def __call__(self, *args: Any, training: bool = False, **kwargs: Any) -> Any:
        """Run the model without gradient, with every update applied, in eval mode.

        Args:
            *args: The positional arguments of the model; for a sequence of layers the input of the
                first one. They are not cut into micro-batches.
            **kwargs: The keyword arguments of the model.
            training: True to leave every module in the mode that it has in training. Dropout then
                drops, and statistics of BatchNorm move, so this changes the run.

        Returns:
            The output of the model.

        Raises:
            StageFailed: A layer raised an error. The pipeline can still be used, and is as it was;
                with ``training``, but for what layers before have changed in their buffers.
        """
        with ShorterTracebacks():
            output = self._run.feeder.infer(Batch(args, kwargs, None), training=training)
            return refusing_backward(output, (args, kwargs)) if training else output

    def train(self, mode: bool = True) -> Pipeline:
        """Set the mode that every module has in training, as `nn.Module.train`. Flushes the pipe.

        `evaluate` and ``pipe(x)`` use eval mode by themselves, whatever is set here.

        Raises:
            ConfigError: The mode is neither true nor false, as a loader is.
        """
        if not isinstance(mode, bool | int):
            raise ConfigError(
                "train() sets the mode, as that of an nn.Module does; to train on a loader: "
                "for result in pipe.train_epoch(loader)"
            )
        self.flush()
        self._group.command(CommandName.TRAINING, (None, bool(mode)))
        return self

    def verify(
        self, loader: Iterable[Any], *, steps: int = 3, prepare: Prepare | None = None
    ) -> extras.Verification:
        """Train copies beside plain PyTorch, and say where they differ, if so. Flushes the pipe.

        A copy of the stages trains in this process, in a schedule without staleness. A copy of the
        unsplit model with its loss and its optimizer, which begins without state, trains in a plain
        loop. Both start from the current weights, on the same mini-batches, with the random numbers
        that each layer gets in the stages. Compared are the inputs and outputs of each layer, the
        losses, the gradients, and weights and buffers after each update; two micro-batches as one
        with each of them; and a loss that the workers compute. Nothing of the run changes: no
        weight, random number, item of the loader or state of the optimizer. It takes about five
        times the memory of the weights, which the log says before it starts.

        Args:
            loader: Yields what `train_epoch` takes, and can be iterated over again.
            steps: The number of mini-batches, at least 1.
            prepare: As in `train_epoch`.

        Returns:
            What was found: true if all is the same. Its text says how many values were compared, or
            which one is the first to differ, by how much, and the likeliest cause.

        Raises:
            ConfigError: Nothing can be trained, the loader yields nothing or each item once, or the
                script has no values of the weights.
        """
        require_count("steps", steps)
        with ShorterTracebacks():
            return extras.verified(self._job, self._run, loader, steps, prepare)

    # -- weights --------------------------------------------------------------------------------

    def state_dict(self, *, version: KeptVersion | None = None) -> dict[str, Tensor]:
        """Return weights and buffers under the keys of the unsplit model. Flushes the pipe.

        Args:
            version: The kept version to return; None for the current weights.
        """
        return self._run.run_state.state_dict(self._number_of(version))

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load weights and buffers, with the keys of the unsplit model. Flushes the pipe.

        Older weight versions are dropped: the next micro-batches read what was loaded. The
        optimizer state stays.

        Raises:
            ConfigError: A key is missing or unknown, or a shape differs.
        """
        self._run.run_state.load_state_dict(state_dict)

    def module(self, *, version: KeptVersion | None = None) -> nn.Module:
        """Return a copy of the unsplit model with the current weights. Flushes the pipe.

        Where the pipeline was given a list of modules, this is an ``nn.Sequential`` of them. What
        is done to the copy does not reach the stages: its gradients stay None, so clipping them
        does nothing, and an optimizer over it trains only the copy.

        Args:
            version: The kept version whose weights it gets; None for the current ones.

        Raises:
            ConfigError: The model cannot be copied.
        """
        return self._job.model.copy_with(self.state_dict(version=version))

    def loss_module(self) -> nn.Module:
        """Return a copy of the loss function with its current weights. Flushes the pipe.

        Raises:
            ConfigError: The loss function is no ``nn.Module``.
        """
        return self._run.run_state.loss_module()

    def fingerprint(self) -> Fingerprint:
        """Return a number for the whole state, and one for each stage and weight version.

        Two runs whose fingerprints have the same ``digest`` have the same weights, buffers and
        optimizer state, bit for bit. Flushes the pipe.
        """
        return self._run.run_state.fingerprint()

    # -- checkpoints ----------------------------------------------------------------------------

    def save(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        keep: int | None = None,
        extra: Any = None,
    ) -> Path:
        """Write a checkpoint, from which `load` goes on with the same bits. Flushes the pipe.

        The flush changes nothing else, so saving does not change the run. Each worker writes its
        own part, so all must share the folder. Other tools can read the weights: they are
        safetensors under the keys of the unsplit model, with a Hugging Face index.

        Args:
            folder: The folder of the run, in which a folder such as ``step-00000100`` is made.
                None for the folder given to the pipeline.
            keep: The number of newest checkpoints to keep; older ones are removed. None for all.
            extra: Data of your own: numbers, texts, lists, dicts.

        Returns:
            The folder of the checkpoint, which is complete. (A folder of that name is never half
            written.)

        Call it last in the body of a loop over `train_epoch`: a script that resumes from the
        checkpoint does not repeat what the body did after the call.

        Raises:
            CheckpointError: It cannot be written. The pipeline can still be used.
        """
        if keep is not None:
            require_count("keep", keep)
        root = None if folder is None else given_path(folder, "the folder to save in").absolute()
        saved = self._run.run_state.save(root, keep, extra)
        if self._publisher is not None:
            self._publisher.look()  # the next result may be far away, or never come
        return saved

    def keep_best(
        self, path: str | os.PathLike[str], value: float, *, highest: bool = False
    ) -> bool:
        """Write the current weights into one file if a value is the best so far. Flushes if so.

        For the weights that generalise best, and for early stopping::

            pipe.keep_best("best.safetensors", pipe.evaluate(validation))

        Args:
            path: A safetensors file, which is replaced. It has the keys of the unsplit model, and
                none of a loss with weights of its own. A run that goes on from a checkpoint goes on
                with the best value in it.
            value: A number, such as the loss of an evaluation. NaN is never the best.
            highest: Whether the highest value is the best, as of an accuracy.

        Returns:
            Whether it was the best, and the file was written.

        Raises:
            CheckpointError: It cannot be written, or the model has extra state, which is no tensor.
                The pipeline can still be used.
        """
        require_choice("highest", highest, (True, False))
        if not hasattr(value, "__float__"):
            raise ConfigError(
                f"value must be a number, such as pipe.evaluate(loader), not {value!r}"
            )
        file = given_path(path, "the file of the best weights").absolute()
        return self._run.run_state.keep_best(file, float(value), highest)

    def load(self, folder: str | os.PathLike[str], *, accept: Sequence[str] = ()) -> Manifest:
        """Go on from a checkpoint: weights, versions, optimizer state, its parameter groups, step.

        With the same schedule, slack and number of stages, the run has the bits of a run that never
        stopped. With another number of stages or another split that holds in schedules that flush;
        in asynchronous ones the first micro-batches then read the newest weights instead of older
        ones, and a warning says so.

        The plain values that the script changes while it trains (``loss.beta = 0.1``), the mode of
        `train` and the objects given to `attach` are as they were. The next `train_epoch`, or
        `outputs`, restores the random generators of this process, brings its loader to the place
        where it was (see `coordinator.feed.loading`), and first yields the results that the script
        had not seen. A loop of `forward` by hand finds its place itself, by `step`.

        Args:
            folder: The folder of a checkpoint; or of a run, whose newest complete checkpoint is
                loaded.
            accept: What may differ from the script that made the checkpoint; see `Checkpoints`.

        Returns:
            The manifest of the checkpoint; its ``extra`` is what `save` was given.

        Raises:
            CheckpointError: No checkpoint is complete, or it is of another model, or the script
                differs in something that ``accept`` does not name. Nothing was changed.
        """
        found = given_path(folder, "the folder to load from").absolute()
        return self._run.run_state.load(found, require_acceptable(accept))

    def attach(self, **stateful: Any) -> None:
        """Save objects of yours in checkpoints, and restore them with these.

        Call it before training. After a resume it restores each object at once, and the
        hyper-parameters of `optimizer` again, which schedulers change when they are made.

        Args:
            **stateful: Objects with ``state_dict`` and ``load_state_dict``, as learning-rate
                schedulers have them, each under a name of your choice.

        Raises:
            ConfigError: An object lacks these, or its state holds more than numbers, texts, bytes,
                tensors, lists and dicts.
        """
        self._run.run_state.attach(**stateful)

    @property
    def resumed(self) -> Manifest | None:
        """The manifest of the checkpoint from which the run goes on; None if there is none."""
        return self._run.run_state.resumed

    # -- optimizer ------------------------------------------------------------------------------

    @property
    def optimizer(self) -> DistributedOptimizer:
        """The optimizer; give its ``param_groups`` to a scheduler. Can be replaced.

        An optimizer that is assigned starts with empty state. Assigning flushes the pipe.

        Raises:
            ConfigError: The pipeline was made without one.
        """
        optimizer = self._run.feeder.optimizer
        if optimizer is None:
            raise ConfigError("this pipeline was made without an optimizer")
        return optimizer

    @optimizer.setter
    def optimizer(self, optimizer: DistributedOptimizer) -> None:
        """Let the stages step with another optimizer."""
        self._run.parameters.use(optimizer)

    def parameter_rrefs(self) -> list[Reference]:
        """Return RRefs to all trainable parameters, in the order of the unsplit model."""
        return [reference for reference, _ in self._run.parameters.of_parameters()]

    # -- inspection -----------------------------------------------------------------------------

    def statistics(self) -> list[dict[str, Any]]:
        """Return counters of every stage: updates, versions kept, parameters, busy time, memory.

        Each entry also names the stage's device, with the memory of an accelerator in its process.
        Where gradients are clipped by the norm of the model, the entry of the first stage has that
        norm before clipping, for each of the last updates, as ``grad_norms``. A stage with replicas
        has an entry for each. Does not flush.
        """
        statistics: list[dict[str, Any]] = self._group.command(CommandName.STATISTICS)
        return statistics

    def on_stages(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function with the module of every stage, on its worker. Flushes the pipe.

        Example::

            pipe.on_stages(lambda module: sum(p.norm() for p in module.parameters()).item())

        Args:
            function: Called as ``function(module, *args, **kwargs)``, without gradient. Names in
                the module are those of the unsplit model. Changes that the function makes to the
                module are repeated in a recovery, but are in no checkpoint.
            *args: Further arguments.
            **kwargs: Keyword arguments.

        Returns:
            What it has returned, by stage, and by replica of a stage: tensors, plain values, and
            containers of these.

        Raises:
            ConfigError: The function raised, returned something else, or changed weights of which
                there are older versions or copies. The pipeline can still be used.

        To see gradients or activations while the stages train, register hooks on the model's layers
        or parameters before it is given to `Pipeline`: they go along.
        """
        self.flush()
        try:
            data = dumps((function, args, kwargs))[0]
        except Exception as error:  # a foreign class may raise anything when pickled
            raise ConfigError(f"the function cannot be sent to the stages: {error}") from error
        found = self._group.command(CommandName.CALL, data)
        for address, (went_well, result) in zip(self.plan.addresses, found, strict=True):
            if not went_well:
                raise ConfigError(f"the function raised on {self.plan.title_of(address)}: {result}")
        return [result for _, result in found]

    def explain(self, *, program: bool = False) -> Explanation:
        """Describe the split, the versions and the memory, as a table of text, or of a notebook.

        Args:
            program: Whether to also show what the first recorded forward does between the layers,
                stage by stage. A sequence of layers has none.
        """
        forwards = self._run.feeder.forwards
        return explain(
            self.plan,
            self._group.cluster.names,
            self.statistics(),
            "\n".join(
                filter(
                    None,
                    (
                        self._job.chosen,
                        self._job.alternative,
                        forwards.how,
                        self._job.reading.split.how,
                        self._why,
                    ),
                )
            ),
            self._job.decisions.corrections,
            self._job.decisions.codecs.texts(),
            verified=extras.explained(self._job),
            places=self._group.cluster.host_ids,
            program=forwards.program() if program else "",
        )

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a report of the run so far, in HTML. Flushes an open pipe.

        It is one file that loads nothing from the network. The pipeline must have been asked to
        keep its contents: by `Observe`, its ``report``, ``record`` or ``to``.

        Args:
            path: The file, which is replaced if it is there.

        Returns:
            The file.

        Raises:
            ConfigError: Nothing was kept, or the file cannot be written. The pipeline can still be
                used.
        """
        if self._publisher is None:
            raise ConfigError(
                "nothing of this run was kept for a report: give Pipeline "
                "observe=Observe(report=FILE), or Observe(record=FOLDER)"
            )
        path = given_path(path, "the report")
        if not self._group.life.is_open:
            return extras.write_report(path, self._publisher.record)
        return extras.write_report(path, self._publisher.so_far(self.statistics(), self._traced()))

    def _traced(self) -> Trace | None:
        """Return the trace so far; None if none is recorded."""
        return self._run.trace.collect() if self._run.trace.is_recorded else None

    def trace(self) -> Trace:
        """Return the trace of what every stage did so far. Flushes the pipe.

        Raises:
            ConfigError: Nothing is recorded; see `Observe`.
        """
        return self._run.trace.collect()

    @property
    def restarts(self) -> tuple[Restart, ...]:
        """The restarts so far: recoveries from failed workers, and arrivals of others."""
        return tuple(self._group.recovery.restarts)

    @property
    def state(self) -> Life:
        """Where the pipeline stands in its life: open, closing, closed or failed."""
        return self._group.life.state

    def __repr__(self) -> str:
        """Return the schedule, the step and the state."""
        plan = self.plan
        return f"<Pipeline {plan.name}, {plan.in_words}, step {self.step}, {self.state.value}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: `explain` while the pipeline is open."""
        shown = self.explain() if self._group.life.is_open else Lines(repr(self))
        return shown._repr_html_()

    def __getattr__(self, name: str) -> Any:
        """Raise, with advice for names that people know from modules."""
        advice = f": {ADVICE[name]}" if name in ADVICE else ""
        raise AttributeError(f"a Pipeline has no attribute {name!r}{advice}", name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise ConfigError(
            "a pipeline is workers and connections, so it can be neither pickled nor copied: "
            "pipe.save(folder) writes all of its state, pipe.module() returns a copy of the model, "
            "and pipe.state_dict() its weights"
        )

    # -- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all workers. Idempotent. What is in flight is dropped; read `state_dict` before.

        If a trace is to be written, the pipe is flushed and the trace written first.

        Raises:
            TraceError: The trace cannot be written; everything has ended all the same.
        """
        self._close(well=True)

    def _close(self, *, well: bool) -> None:
        """End all workers; ``well`` says that the script has not raised."""
        life = self._group.life
        # Not after a failure, and not where a signal interrupted a wait.
        healthy = self._group.recovery.is_idle
        try:
            if self._watching is not None and healthy and life.is_open:
                self._watching.end()
            if healthy and life.is_open and (script := self._run.script_loss) is not None:
                script.abandon()
                if script.has_closed() and well:  # a checkpoint may be due
                    self._run.run_state.mini_batch_was_fed()
            if life.begin_closing() and healthy:
                if self._run.checkpointer.is_begun:
                    self.flush()
                    self._run.run_state.finish_checkpoint()
                path = self._job.options.observe.trace
                trace = self._traced() if self._publisher or isinstance(path, Path) else None
                if self._publisher is not None:
                    self._publisher.finish(self.statistics(), trace)
                if isinstance(path, Path) and trace is not None:
                    trace.save(path)
                self._run.feeder.script.close()
                # A `finally` closes too, on the way of an error through the script.
                well = well and sys.exc_info()[0] is None
                if well and self.seen and not self._run.run_state.is_read:
                    _log.warning(
                        "the trained weights were never read: the model in the script is as it was "
                        "at the start. Before the pipeline ends, call "
                        "model.load_state_dict(pipe.state_dict()), pipe.save(folder), or "
                        "pipe.module(), which returns a copy"
                    )
        finally:
            life.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *exception: Any) -> None:
        """Close the pipeline; after Ctrl-C and the like, without waiting for anything."""
        if exception_type is None:
            self.close()
            return
        shorten(exception[0])
        try:
            if issubclass(exception_type, KeyboardInterrupt):
                self._run.checkpointer.interrupted(self.step)
            self._run.checkpointer.abandon()
            if issubclass(exception_type, Exception):
                self._close(well=False)
        except PipelineError as error:  # the caller's own error is to be seen
            _log.warning("no trace is left: %s", error)
        finally:
            self._group.life.close()


def _publisher_of(options: Options) -> extras.EventPublisher | None:
    """Return what reports the run to observers; None if there are none."""
    return extras.publisher_of(options) if options.is_told else None


def _watching(job: Job, run: Run) -> extras.Watching | None:
    """Return what verifies the first mini-batches of a run; None if nothing does."""
    asked = count_of_environment(VERIFY, 0)
    return extras.watching(job, run, asked) if asked or job.options.training.verify else None


def _calmly(results: Generator[T, None, None]) -> Generator[T, None, None]:
    """Yield what a generator yields; in a notebook, raise Ctrl-C between two items only."""
    return results if shell() is None else extras.calmly(results)
