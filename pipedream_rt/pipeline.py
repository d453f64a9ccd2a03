"""The face of the runtime: a pipeline over the stages of a model.

Each method says what it does; the objects in ``coordinator/`` do it, one job each. One thread uses
a pipeline at a time, the one that calls its methods.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor, nn

from pipedream_rt.checkpoint import Manifest
from pipedream_rt.cluster.base import Cluster, Fail, Reference
from pipedream_rt.cluster.fork_server import ForkServer, fork_server, installed_modules
from pipedream_rt.cluster.launch import (
    Workers,
    cores_for,
    leave_to_rank_0,
    numbers_of_workers,
    start_cluster,
    starts_here,
)
from pipedream_rt.coordinator.balance import Balance
from pipedream_rt.coordinator.checkpointer import Checkpointer
from pipedream_rt.coordinator.distributed_optimizer import DistributedOptimizer
from pipedream_rt.coordinator.epochs import Epochs
from pipedream_rt.coordinator.explanation import explain
from pipedream_rt.coordinator.familiar import ADVICE, copies_of, require_cpu
from pipedream_rt.coordinator.feeder import Feeder
from pipedream_rt.coordinator.fingerprints import Fingerprint
from pipedream_rt.coordinator.generation import generate
from pipedream_rt.coordinator.group import WorkerGroup
from pipedream_rt.coordinator.kept import KeptVersion
from pipedream_rt.coordinator.lease import Lease
from pipedream_rt.coordinator.preemption import Preemption
from pipedream_rt.coordinator.recovery import Failures, Restart
from pipedream_rt.coordinator.references import References
from pipedream_rt.coordinator.results import PendingStep, StepResult
from pipedream_rt.coordinator.run_state import RunState
from pipedream_rt.coordinator.surroundings import (
    profile_option,
    require_folder,
    restart_option,
    resume_option,
    trace_option,
)
from pipedream_rt.coordinator.trace_collection import SPANS_KEPT, TraceCollection
from pipedream_rt.coordinator.tracebacks import shorten, shorter_tracebacks
from pipedream_rt.corrections import Correction
from pipedream_rt.dynamo import dynamo_spared
from pipedream_rt.errors import ConfigError, PipelineError
from pipedream_rt.job.batches import Batch, Prepare, batch_of
from pipedream_rt.job.given_optimizer import (
    GivenOptimizer,
    OptimizerArgument,
    grouped_names,
    state_by_name,
)
from pipedream_rt.job.identity import (
    Identity,
    name_of_class,
    name_of_loss,
    names_of,
    require_acceptable,
)
from pipedream_rt.job.notices import (
    LeftOut,
    about_cores,
    about_micro_batches,
    about_plan,
)
from pipedream_rt.job.options import (
    CheckpointOption,
    ScheduleOptions,
    Timeouts,
    TraceOption,
    checkpoint_option,
)
from pipedream_rt.job.requirements import (
    require_choice,
    require_count,
    require_decay,
    require_instance,
    require_seed,
)
from pipedream_rt.job.specs import (
    compiling,
    correcting,
    may_replicate,
    pickled_specs,
    recomputing,
    refuse_autocast,
    refuse_sharding,
    rule_options,
    scaling,
    with_norms,
)
from pipedream_rt.job.splitting import ForwardOptions, Split, Stages, split_model
from pipedream_rt.job.unsplit_model import UnsplitModel, parameter_names
from pipedream_rt.job.weighing import Weigh, Weighing, samples_of
from pipedream_rt.lifecycle import Life
from pipedream_rt.messages.message import CommandName
from pipedream_rt.models import dumps, refuse_loss, refuse_unfit_plan, ties_of
from pipedream_rt.observe.spans import Recorder
from pipedream_rt.observe.trace import Trace
from pipedream_rt.planning.auto_split import choose_stages
from pipedream_rt.planning.profiling import profile_and_end
from pipedream_rt.schedules import Plan, plan_for
from pipedream_rt.schedules.checker import prove
from pipedream_rt.schedules.edges import name_of
from pipedream_rt.schedules.recipes import ScheduleName
from pipedream_rt.schedules.written import WrittenSchedule
from pipedream_rt.stage.evaluation import Metric, changes_modes
from pipedream_rt.stage.rules.clipping import Clip
from pipedream_rt.stage.rules.scaling import LossScale
from pipedream_rt.stage.spec import LossFunction, OnNan, own_loss
from pipedream_rt.transport.base import Receive

_log = logging.getLogger(__name__)


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
        stages: The number of stages, which are then balanced by parameter count; or a list with the
            first layer, by index or name, of every stage but the first. ``"auto"`` measures the
            layers on the example, and chooses stages and slack for the workers of this machine;
            with ``checkpoint``, the choice is kept in its folder for a run that resumes.
        example: A mini-batch as the loader yields it, the input alone, or a ``DataLoader``, whose
            first item is taken: a model that is no sequence of layers is run on it once, to find
            out what passes between its layers. Later mini-batches may have other shapes.
        weights: A folder from which each worker reads the weights of its stages, as
            ``save_pretrained`` and `save` write it. The model then needs none; see
            `without_values`. None for the weights that the model has.
        loss_fn: A function ``(output, target) -> scalar tensor`` that returns a mean over samples,
            or over what ``weigh`` counts; it runs on the last stage. If it is an ``nn.Module``, its
            parameters are trained with the model's, see `loss_module`. None for inference alone, or
            if the model computes its loss itself and returns it as ``loss``.
        optimizer: A pair ``(class, dict of arguments)``; the same with rules for parameter groups,
            ``(class, dict, [("*.bias", {"weight_decay": 0.0})])``, of which each has a pattern of
            names, or a function of name and parameter; or an optimizer over the model's parameters,
            whose groups and state are kept. None for inference alone.
        schedule: A name (``pipedream-rt schedule help`` lists them), or an object with a method
            ``order`` (see `WrittenSchedule`), which is checked before anything starts.
        micro_batches: The number of micro-batches that a mini-batch is cut into; the model is
            updated once for all of them. None: in ``async-1f1b`` and ``2bw`` as many as make no
            gradient more than one update stale, which is the number of stages (and more with slack
            or replicas); in schedules that flush 1, and the bits are then those of plain PyTorch.
        weigh: A function that returns what a micro-batch weighs in its mini-batch, where the loss
            is no mean over samples, as ``lambda x, y: (y != -100).sum()``. It is called in the
            script with what the loader yields. None: the labels that count, if the model computes
            its loss itself and that is a cross entropy; else the samples. A model whose forward has
            an argument ``num_items_in_batch`` gets there what the mini-batch weighs.
        check_loss: In how many mini-batches, from the first one on, the loss of the whole is
            compared with the losses of its micro-batches, which must be its parts; 0 for none.
        slack: Extra warm-up forwards before a hop between two stages, which hide its latency: one
            number for all hops, or one for each of the n-1. In schedules that flush it costs
            activations alone; in asynchronous ones it is staleness, so give it to slow links only.
        replicas: The number of replicas of each stage, one number for all or one for each, in the
            schedules ``async-1f1b``, ``2bw``, ``1f1b`` and ``gpipe``. Each replica has a worker;
            micro-batch m goes to replica m mod r, and the gradients of an update are added up over
            the replicas in their order. One stage with r replicas is data parallelism. Each replica
            has buffers of its own; those of replica 0 are evaluated, and are in the state dict.
            With ``stages="auto"`` it may be ``"auto"``, which lets the planner choose.
        shard_optimizer: Whether the optimizer's state is divided among the replicas of a stage:
            each replica steps its part of the weights, and takes the rest from the others. The
            bits are the same for optimizers that step each parameter by itself.
        schedule_options: The options that only some schedules have.
        workers: ``"local"`` starts worker processes; ``"serial"`` does everything in the thread of
            the script; ``"HOST:PORT"`` listens there for `pipedream-rt worker`. None: what the
            environment says (`pipedream-rt run`, torchrun), else ``"local"``.
        seed: The seed of all random numbers that layers draw, an integer.
        threads: The number of threads for torch's own parallel loops in each worker that is started
            here. Another number gives other bits.
        clip: How gradients are clipped before each update; None for not at all.
        ema: The decay of an exponential moving average of the weights, as 0.999, which every stage
            makes of its own after each update; None for none. See `keep_version`.
        corrections: What every stage does about stale gradients, in the order in which it is done:
            objects of `pipedream_rt.corrections`, or of classes of your own (`Correction`).
            ``"auto"``: those that were measured to be the best for the optimizer and the staleness
            (`pipedream_rt.corrections.advice`). None: the same, where nothing speaks against it.
            ``()``: none.
        autocast: The dtype to which torch's autocast casts in forwards and in the loss, as
            ``torch.bfloat16``; None for none.
        loss_scale: How losses are scaled for gradients in float16, as by `torch.amp.GradScaler`.
            None for not at all, or, with ``autocast=torch.float16``, for `LossScale` as it is. In
            schedules that flush, ``2bw``, and with vertical sync.
        recompute: Whether stages compute their activations once more in the backward rather than
            keep them, or a list of those that do. Such a stage keeps the inputs of micro-batches in
            flight, and the activations of one. The bits are the same.
        compile: Whether each worker compiles its layers, one by one, with `torch.compile`; or a
            dict with the arguments of it.
        on_nan: What becomes of a training loss that is not finite: ``"raise"`` an error, or
            ``"ignore"`` it.
        checkpoint: The folder for checkpoints, or `Checkpoints`, which also says when to make them.
        max_restarts: The number of failures of workers to recover from. After a failure other
            workers are started, which compute again what was fed since the last checkpoint (since
            the start, if there is none yet); the coordinator keeps that much of the input. None:
            what `pipedream-rt run --max-restarts` says, else 3 if checkpoints are made by
            themselves and 0 if not.
        trace: A file to which `close` writes what every stage did when, or True to record it for
            `trace` alone. None: what `pipedream-rt run --trace` says, else False. Each worker
            keeps its last 131,072 actions.
        fingerprint_every: The number of mini-batches after which a result has a fingerprint of the
            weights and buffers behind it, so that two runs can be compared; None for never. It
            costs the time to read all weights once.
        timeouts: How long to wait for signs of life, for answers, and for workers that join.

    Raises:
        ConfigError: The arguments cannot work; nothing was started.
        ScheduleError: A schedule that a user wrote breaks a rule; nothing was started.
        RendezvousTimeout: Some workers did not join in time; all were ended.
    """

    @dynamo_spared()
    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        *,
        stages: Stages | Literal["auto"] = 1,
        example: Any = None,
        weights: str | os.PathLike[str] | None = None,
        loss_fn: LossFunction | None = None,
        weigh: Weigh | None = None,
        check_loss: int = 1,
        optimizer: OptimizerArgument = None,
        schedule: ScheduleName | WrittenSchedule = "async-1f1b",
        micro_batches: int | None = None,
        slack: int | Sequence[int] = 0,
        replicas: int | Sequence[int] | Literal["auto"] = (),
        shard_optimizer: bool = False,
        schedule_options: ScheduleOptions = ScheduleOptions(),  # noqa: B008 - frozen
        workers: Workers = None,
        seed: int = 0,
        threads: int = 1,
        clip: Clip | None = None,
        ema: float | None = None,
        corrections: Sequence[Correction] | Literal["auto"] | None = None,
        autocast: torch.dtype | None = None,
        loss_scale: LossScale | None = None,
        recompute: bool | Sequence[int] = False,
        compile: bool | dict[str, Any] = False,
        on_nan: OnNan = "raise",
        checkpoint: CheckpointOption = None,
        max_restarts: int | None = None,
        trace: TraceOption = None,
        fingerprint_every: int | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
    ) -> None:
        """Check everything, then start the workers."""
        # Nothing starts before all of this was found to make sense.
        require_instance("schedule_options", schedule_options, ScheduleOptions)
        require_instance("timeouts", timeouts, Timeouts)
        require_count("threads", threads)
        require_choice("shard_optimizer", shard_optimizer, (True, False))
        require_seed(seed)
        if fingerprint_every is not None:
            require_count("fingerprint_every", fingerprint_every)
        require_choice("on_nan", on_nan, ("raise", "ignore"))
        refuse_loss(loss_fn)
        weighing = Weighing(weigh, loss_fn)
        require_count("check_loss", check_loss, least=0)
        if clip is not None:
            require_instance("clip", clip, Clip)
        require_decay(ema)
        refuse_autocast(autocast)
        if isinstance(model, Iterable) and not isinstance(model, nn.Module):
            model = list(model)  # it may be read more than once
        self._model = UnsplitModel(model, loss_fn)
        pretrained = self._model.pretrained(weights)
        own = loss_fn is None and optimizer is not None and self._model.sequence is None
        loss_fn = own_loss if own else loss_fn
        forward = ForwardOptions(own_loss=own, trains=loss_fn is not None, autocast=autocast)
        kept = checkpoint_option(checkpoint)
        self._why = ""
        counts: int | Sequence[int] = () if replicas == "auto" else replicas
        if replicas == "auto" and stages != "auto":
            raise ConfigError('replicas="auto" goes with stages="auto"; else give their numbers')
        if stages == "auto":
            if replicas not in ((), 1, "auto"):
                raise ConfigError(
                    'with stages="auto" the number of stages is not known yet: replicas is "auto", '
                    f"or left out, not {replicas!r}"
                )
            leave_to_rank_0(workers, threads)
            chosen = choose_stages(
                model,
                example,
                loss_fn=loss_fn,
                optimizer=optimizer,
                autocast=autocast,
                schedule=schedule,
                micro_batches=micro_batches,
                threads=threads,
                workers=numbers_of_workers(workers),
                replicas=replicas == "auto"
                and may_replicate(self._model.whole, schedule, clip, loss_scale, corrections),
                folder=None if kept is None else kept.path,
            )
            stages, slack, self._why = chosen.stages, slack or chosen.slack, chosen.why
            counts = chosen.replicas
        forks = fork_server()
        if starts_here(workers):  # it imports while the model is recorded and pickled
            objects = [*self._model.whole.modules(), loss_fn]
            forks.prepare(installed_modules(objects, compiles=bool(compile)))
        split = split_model(self._model, stages, example, forward)
        self.plan = _plan_of(
            self._model,
            split,
            schedule,
            micro_batches,
            slack,
            counts,
            shard_optimizer,
            schedule_options,
        )
        parts = [self._model.part(names) for names in self.plan.layers]
        self.plan = dataclasses.replace(self.plan, ties=ties_of(parts, self._model.names))
        again = recomputing(recompute, self.plan)
        compiled = compiling(compile, self._model.modules.values())
        scale = scaling(loss_scale, autocast, self.plan, self._model.parameters.values())
        self.plan = with_norms(self.plan, clip, scale)
        prove(self.plan, schedule, schedule_options.credits)
        grouped = grouped_names(optimizer, self._model.names, self._model.parameters)
        refuse_sharding(self.plan, corrections, ema)
        self._corrections = correcting(corrections, self.plan, grouped, clip, scale)
        given = GivenOptimizer(optimizer)
        require_folder(kept)
        makes_checkpoints = kept is not None and kept.every is not None
        failures = Failures(
            restart_option(max_restarts, default=3 if makes_checkpoints else 0),
            self.plan.per_update,
        )
        resume = resume_option(kept)
        traced, self._trace_path = trace_option(trace)
        left_out = LeftOut(micro_batches=micro_batches is None, corrections=corrections is None)
        trains = loss_fn is not None and grouped is not None
        said = about_plan(self.plan, self._corrections, left_out) if trains else []
        if (cores := cores_for(workers)) > 0:
            said += about_cores(self.plan.workers, threads, cores)
        first: Callable[[Batch], object] = functools.partial(
            _say_of_first, modules=self._model.modules, plan=self.plan
        )
        if (profiled := profile_option()) is not None:  # nothing will be trained
            said = []
            workers = "serial"
            first = functools.partial(
                profile_and_end,
                path=profiled,
                model=model,
                loss_fn=loss_fn,
                optimizer=optimizer,
                autocast=autocast,
                count=self.plan.per_update,
                threads=threads,
            )
        spans = SPANS_KEPT if traced else 0
        specs = pickled_specs(
            self._model,
            self.plan,
            parts,
            loss_fn=loss_fn,
            seed=seed,
            on_nan=on_nan,
            trace_spans=spans,
            autocast=autocast,
            recompute=again,
            compile=compiled,
            rules=rule_options(scale, clip, self._corrections, ema),
            pretrained=pretrained,
            programs=[split.programs(stage) for stage in range(self.plan.num_stages)],
            modes=split.modes,
            compared=workers != "serial",
        )
        for text in said:
            _log.warning("%s", text)
        # From here on there are workers, which an error ends.
        start = functools.partial(
            _start, workers=workers, plan=self.plan, timeouts=timeouts, threads=threads, forks=forks
        )
        self._group = WorkerGroup(
            self.plan, start, specs, split.forwards, timeouts.answer, failures
        )
        self._lease = Lease(self._group)
        with self._group.life.guard():
            recorder = Recorder(spans) if traced else None
            credits = schedule_options.credits or self.plan.credits()
            has_loss = loss_fn is not None
            self._feeder = Feeder(
                self._lease,
                forwards=split.forwards,
                credits=credits,
                has_loss=has_loss,
                weighing=weighing,
                check_loss=check_loss,
                recorder=recorder,
                fingerprint_every=fingerprint_every,
                refuse=given.refuse_changes,
                first=first,
                watch=Balance(self.plan, functools.partial(_log.warning, "%s")),
            )
            self._epochs = Epochs(self._feeder)
            names = parameter_names(self._model, parts)
            self._references = References(self._lease, self._feeder, self._model, names)
            self._averages = ema is not None and grouped is not None
            self._changes_modes = any(map(changes_modes, parts))
            self._checkpointer = Checkpointer(self._group, kept)
            preemption = Preemption(kept.grace) if kept is not None and makes_checkpoints else None
            self._run_state = RunState(
                self._lease,
                self._feeder,
                self._epochs,
                self._model,
                self._checkpointer,
                functools.partial(
                    _identity,
                    self._feeder,
                    schedule=self.plan.title,
                    seed=seed,
                    threads=threads,
                    loss=name_of_loss(loss_fn),
                    corrections=names_of(self._corrections),
                ),
                preemption,
            )
            if preemption is not None:
                self._group.at_end.append(preemption.close)
                preemption.watch()
            self._trace = TraceCollection(self._lease, self._feeder, recorder)
            self.stages = self._references.handles()
            if grouped is not None:
                self.optimizer = self._references.build_optimizer(*grouped)
                brought = state_by_name(optimizer, self._model.names)
                self._references.scatter_optimizer_state(brought)
            if resume and kept is not None:
                self._run_state.resume(require_acceptable(kept.accept))

    # -- training -------------------------------------------------------------------------------

    def train_epoch(
        self, loader: Iterable[Any], *, prepare: Prepare | None = None
    ) -> Generator[StepResult, None, None]:
        """Train on every mini-batch of a loader, keeping the pipe full.

        In asynchronous schedules the pipe is not drained at the end; the next epoch follows on.

        Results come some mini-batches after their injection. After a ``break``, the mini-batches
        from `seen` up to `step` are trained on all the same, and their results are not handed out.

        Args:
            loader: An iterable of pairs ``(x, y)``: the model is called with x, the loss with its
                output and y; or of dicts: the entries are the model's keyword arguments, and the
                loss gets the dict in the place of y; or of ``(args, kwargs, y)``. The pipeline
                draws from it always one item ahead of what is injected, neither more nor less, so
                that random numbers drawn by the loader and by the body of the loop do not depend
                on timing.
            prepare: A function that makes one of these of an item, where the loader yields
                something else.

        Yields:
            The result of each mini-batch, in order; all of them before the iteration ends.

        Raises:
            ConfigError: Another epoch is under way, or what the script does around the loop would
                not reach the stages: autocast, other settings of torch, a changed optimizer.
            StageFailed: An action raised.
            WorkerLost: A worker died.
            CheckpointError: Too many checkpoints in a row could not be written.
            Exception: The loader raised it; the results of the mini-batches before came first.
        """
        self._group.life.check()
        with shorter_tracebacks():
            yield from self._epochs.train(loader, self._run_state.mini_batch_was_fed, prepare)

    def submit(self, *item: Any) -> PendingStep:
        """Inject one mini-batch with the hyper-parameters that are set now.

        When as many mini-batches are on their way as there are credits, this waits for the losses
        of the oldest one first.

        Args:
            *item: An item as `train_epoch` takes it from a loader, in its parts: x and y; or a
                dict; or args, kwargs and y. Tensors are (B, ...), in any nesting of tuples, lists,
                dicts and dataclasses.

        Returns:
            A handle; its ``result()`` waits for the losses.

        Raises:
            ConfigError: No loss or optimizer was given, or the mini-batch cannot be split.
        """
        pending = self._feeder.inject(batch_of(item[0] if len(item) == 1 else item))
        self._run_state.mini_batch_was_fed()
        return pending

    def flush(self) -> None:
        """Wait until nothing is in flight on any stage, and every update is applied.

        It changes nothing else: which version a later micro-batch reads depends on its number
        alone, so a run with a flush in it gives the same bits as one without.
        """
        self._feeder.flush()

    @property
    def step(self) -> int:
        """The number of mini-batches injected so far."""
        return self._feeder.step

    @property
    def seen(self) -> int:
        """The number of mini-batches, of all that were injected, up to the last result seen.

        It is behind `step` while results are on their way, and stays behind after a ``break``.
        """
        return self._epochs.seen

    @property
    def epoch(self) -> int:
        """The number of the epoch under way: how many calls of `train_epoch` have ended.

        ``for epoch in range(pipe.epoch, epochs)`` goes on in the right one after a resume.
        """
        return self._epochs.number

    # -- evaluation and inference ---------------------------------------------------------------

    @overload
    def evaluate(
        self,
        loader: Iterable[Any],
        *,
        prepare: Prepare | None = ...,
        version: KeptVersion | None = ...,
        metrics: None = ...,
        keep_buffers: bool = ...,
    ) -> float: ...

    @overload
    def evaluate(
        self,
        loader: Iterable[Any],
        *,
        prepare: Prepare | None = ...,
        version: KeptVersion | None = ...,
        metrics: Mapping[str, Metric],
        keep_buffers: bool = ...,
    ) -> dict[str, float]: ...

    def evaluate(
        self,
        loader: Iterable[Any],
        *,
        prepare: Prepare | None = None,
        version: KeptVersion | None = None,
        metrics: Mapping[str, Metric] | None = None,
        keep_buffers: bool = False,
    ) -> float | dict[str, float]:
        """Return the mean loss over a loader, in eval mode, with every update applied.

        The model gets each mini-batch whole, as in plain PyTorch, and its buffers go on from one to
        the next. Then every module, the loss too, gets its mode, weights and buffers back.

        Args:
            loader: Yields what `train_epoch` takes. Nothing is trained on it.
            prepare: As in `train_epoch`.
            version: The kept version whose weights are read; None for those of now.
            metrics: Functions of output and target that return a number, by name, as
                ``{"accuracy": lambda output, y: (output.argmax(-1) == y).float().mean()}``. They
                are computed where the loss is, on the last stage.
            keep_buffers: Whether buffers stay as the evaluation leaves them.

        Returns:
            The mean of ``loss_fn``, in which each mini-batch weighs as much as it has samples, or
            what ``weigh`` returns for it. With ``metrics``, a dict: the loss under ``"loss"``, and
            the means of the metrics, weighed likewise, under their names.

        Raises:
            ConfigError: No loss was given, the loader is empty, or a metric gave no number; the
                pipeline goes on.
        """
        if version is not None and keep_buffers:
            raise ConfigError("keep_buffers changes the newest buffers, and version reads others")
        require_choice("keep_buffers", keep_buffers, (True, False))
        with shorter_tracebacks():
            found = self._feeder.evaluate(
                loader,
                prepare,
                self._number_of(version),
                metrics=metrics,
                keep_buffers=keep_buffers,
            )
        return found["loss"] if metrics is None else found

    def predict(
        self,
        loader: Iterable[Any],
        *,
        prepare: Prepare | None = None,
        version: KeptVersion | None = None,
    ) -> Generator[Any, None, None]:
        """Run the model on every item of a loader, several at a time, in eval mode.

        Args:
            loader: Yields what `train_epoch` takes, whose targets are not used; or the input of the
                model alone, a tensor.
            prepare: As in `train_epoch`.
            version: The kept version whose weights are read; None for those of now.

        Yields:
            The output of the model for each item, in order. It is what ``pipe(...)`` returns.
        """
        with shorter_tracebacks():
            yield from self._feeder.predict(loader, prepare, self._number_of(version))

    def generate(
        self,
        *args: Any,
        version: KeptVersion | None = None,
        beside: Iterable[Any] = (),
        **kwargs: Any,
    ) -> Any:
        """Generate tokens with a causal model of transformers, each stage with its own cache.

        It is the model's own ``generate``, greedy or by sampling, and draws from torch's generator
        in this process: with the same seed it gives the tokens that the unsplit model gives.

        Args:
            *args: The positional arguments of the model's ``generate``: ids (B, T).
            version: The kept version whose weights are read; None for those of now, with every
                update applied.
            beside: What one item is drawn of after each token, such as `train_epoch`: so training
                goes on meanwhile. Give a ``version`` with it.
            **kwargs: The keyword arguments of ``generate``, as ``max_new_tokens`` and
                ``do_sample``.

        Returns:
            What ``generate`` returns: ids (B, T + new tokens).

        Raises:
            ConfigError: The model is no causal one of transformers, or is asked for beams.
        """
        self._group.life.check()
        drawn = iter(beside)
        if version is None and beside != ():
            raise ConfigError(
                "while training goes on beside it, generate needs weights that stay: give "
                "version=pipe.keep_version()"
            )
        with shorter_tracebacks():
            number = self._number_of(version)
            return generate(self._feeder, self._model.whole, args, kwargs, number, drawn)

    def keep_version(self, *, ema: bool = False) -> KeptVersion:
        """Keep a copy of the weights and buffers of now on the stages. Flushes the pipe.

        `generate`, `evaluate`, `predict`, `state_dict` and `module` can read it while training
        goes on::

            with pipe.keep_version() as version:
                pipe.generate(ids, version=version, beside=pipe.train_epoch(loader))

        Args:
            ema: Whether to keep the average of the weights, which the argument of `Pipeline` of
                this name asks for, in the place of the weights.

        Raises:
            ConfigError: No average is made, or a layer changes weights when its mode is set.
        """
        if ema and not self._averages:
            raise ConfigError("no average of the weights is made; give Pipeline ema=0.999")
        if self._changes_modes:
            raise ConfigError(
                "the model has a layer that does something when its mode is set, such as to merge "
                "an adapter into a weight, so no version of its weights can be kept and read"
            )
        return KeptVersion(self._lease, self._feeder, average=ema)

    def _number_of(self, version: KeptVersion | None) -> int:
        """Return the number under which the stages have a kept version; 0 for None."""
        if version is None:
            return 0
        require_instance("version", version, KeptVersion)
        return version.number_for(self._lease)

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
        """
        with shorter_tracebacks():
            return self._feeder.infer(Batch(args, kwargs, None), training=training)

    def train(self, mode: bool = True) -> Pipeline:
        """Set the mode that every module has in training, as `nn.Module.train`. Flushes the pipe.

        `evaluate` and ``pipe(x)`` use eval mode by themselves, whatever is set here.
        """
        self.flush()
        self._group.command(CommandName.TRAINING, (None, bool(mode)))
        return self

    def eval(self) -> Pipeline:
        """Train in eval mode from now on, as after `nn.Module.eval`. Flushes the pipe."""
        return self.train(False)

    # -- weights --------------------------------------------------------------------------------

    def state_dict(self, *, version: KeptVersion | None = None) -> dict[str, Tensor]:
        """Return weights and buffers under the keys of the unsplit model. Flushes the pipe.

        Args:
            version: The kept version to return; None for the weights of now.
        """
        return self._run_state.state_dict(self._number_of(version))

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load weights and buffers, with the keys of the unsplit model. Flushes the pipe.

        Older weight versions are forgotten: the next micro-batches read what was loaded. The
        optimizer state stays.

        Raises:
            ConfigError: Keys are missing or too many, or a shape differs.
        """
        self._run_state.load_state_dict(state_dict)

    def module(self, *, version: KeptVersion | None = None) -> nn.Module:
        """Return a copy of the unsplit model with the weights of now. Flushes the pipe.

        Where the pipeline was given a list of modules, this is an ``nn.Sequential`` of them. What
        is done to the copy does not reach the stages: its gradients stay None, so to clip them does
        nothing, and an optimizer over it trains the copy alone.

        Args:
            version: The kept version to take the weights of; None for those of now.

        Raises:
            ConfigError: The model can be copied in no way.
        """
        return self._model.copy_with(self.state_dict(version=version))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield copies of all parameters, as `nn.Module.parameters` does. Flushes the pipe.

        They are there to be looked at: what is done to them does not reach the stages.
        """
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names of all parameters and copies of them; see `parameters`."""
        return copies_of(self._model.whole, self.state_dict())

    def to(self, *args: Any, **kwargs: Any) -> Pipeline:
        """Return the pipeline, whose stages compute on CPUs, if asked for one on the CPU.

        Raises:
            ConfigError: Another device or dtype is asked for.
        """
        require_cpu(*args, **kwargs)
        return self

    def cpu(self) -> Pipeline:
        """Return the pipeline, whose stages compute on CPUs."""
        return self

    def loss_module(self) -> nn.Module:
        """Return a copy of the loss function with the weights of now. Flushes the pipe.

        Raises:
            ConfigError: The loss function is no ``nn.Module``.
        """
        return self._run_state.loss_module()

    def fingerprint(self) -> Fingerprint:
        """Return a number for the whole state, and one for each stage and weight version.

        Two runs whose fingerprints have the same ``digest`` have the same weights, buffers and
        optimizer state, bit for bit. Flushes the pipe.
        """
        return self._run_state.fingerprint()

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
            folder: The folder of the run, in which a folder such as ``step-00000100`` is made.
                None for the folder that the pipeline was given.
            keep: The number of newest checkpoints to keep; older ones are removed. None for all.
            extra: Data of your own: numbers, texts, lists, dicts.

        Returns:
            The folder of the checkpoint, which is whole. (A folder of that name is never half
            written.)

        Call it last in the body of a loop over `train_epoch`: a script that resumes from the
        checkpoint does not do again what the body did after the call.

        Raises:
            CheckpointError: It cannot be written. The pipeline goes on.
        """
        if keep is not None:
            require_count("keep", keep)
        root = None if folder is None else Path(folder).absolute()
        return self._run_state.save(root, keep, extra)

    def load(self, folder: str | os.PathLike[str], *, accept: Sequence[str] = ()) -> Manifest:
        """Go on from a checkpoint: weights, versions, optimizer state, its parameter groups, step.

        With the same schedule, slack and number of stages the run that follows gives the bits of a
        run that never stopped; with another number of stages or another split too, in schedules
        that flush. In asynchronous ones the first micro-batches then read the newest weights in the
        place of older ones, and a warning says so.

        What was given to `attach` gets its state of then. The next `train_epoch` gives the random
        generators of this process theirs, brings its loader to the place where it was (see
        `coordinator.loading`), and yields the results that the script had not seen first.

        Args:
            folder: The folder of a checkpoint, or of a run, whose newest whole checkpoint is then
                loaded.
            accept: What may differ from the script that made the checkpoint; see `Checkpoints`.

        Returns:
            What the checkpoint says of itself; ``extra`` in it is what `save` was given.

        Raises:
            CheckpointError: No checkpoint is whole, or it is of another model, or the script
                differs in what was not accepted; nothing was changed.
        """
        return self._run_state.load(Path(folder).absolute(), require_acceptable(accept))

    def attach(self, **stateful: Any) -> None:
        """Let objects of yours go into checkpoints and come back with them.

        Call it before training. After a resume it gives each its state at once, and
        `optimizer` its hyper-parameters again, which schedulers change when they are made.

        Args:
            **stateful: Objects with ``state_dict`` and ``load_state_dict``, as learning-rate
                schedulers have them, each under a name of your choice.

        Raises:
            ConfigError: An object lacks these, or its state holds more than numbers, texts, bytes,
                lists and dicts.
        """
        self._run_state.attach(**stateful)

    @property
    def resumed(self) -> Manifest | None:
        """What the checkpoint says of itself from which the run goes on; None if from none."""
        return self._run_state.resumed

    # -- optimizer ------------------------------------------------------------------------------

    @property
    def optimizer(self) -> DistributedOptimizer:
        """The optimizer; give its ``param_groups`` to a scheduler. Can be replaced.

        An optimizer that is assigned starts with empty state; assigning flushes the pipe.

        Raises:
            ConfigError: The pipeline was made without one.
        """
        optimizer = self._feeder.optimizer
        if optimizer is None:
            raise ConfigError("this pipeline was made without an optimizer")
        return optimizer

    @optimizer.setter
    def optimizer(self, optimizer: DistributedOptimizer) -> None:
        """Let the stages step with another optimizer."""
        self._references.use(optimizer)

    def parameter_rrefs(self) -> list[Reference]:
        """Return RRefs to all trainable parameters, in the order of the unsplit model."""
        return [reference for reference, _ in self._references.of_parameters()]

    # -- inspection -----------------------------------------------------------------------------

    def statistics(self) -> list[dict[str, int]]:
        """Return counters of every stage: updates, versions kept, parameters, busy time, memory.

        Of a stage with replicas, there is an entry for each. Does not flush.
        """
        statistics: list[dict[str, int]] = self._group.command(CommandName.STATISTICS)
        return statistics

    def on_stages(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function with the module of every stage, on its worker. Flushes the pipe.

        To look at gradients or activations while the stages train, register hooks on the model's
        layers or parameters before it is given to `Pipeline`; they go along::

            pipe.on_stages(lambda module: sum(p.norm() for p in module.parameters()).item())

        Args:
            function: Called as ``function(module, *args, **kwargs)``, without gradient. In the
                module everything has the name that it has in the unsplit model. What the function
                does to the module is done again in a recovery, but is in no checkpoint.
            *args: Further arguments.
            **kwargs: Keyword arguments.

        Returns:
            What it has returned, by stage, and by replica of a stage: tensors, plain values, and
            containers of these.

        Raises:
            ConfigError: The function raised, returned something else, or changed weights of which
                there are older versions or copies. The pipeline goes on.
        """
        self.flush()
        try:
            data = dumps((function, args, kwargs))[0]
        except Exception as error:  # a foreign class may raise anything when pickled
            raise ConfigError(f"the function cannot be sent to the stages: {error}") from error
        found = self._group.command(CommandName.CALL, data)
        for address, (went_well, result) in zip(self.plan.addresses, found, strict=True):
            if not went_well:
                raise ConfigError(f"the function raised on {name_of(address)}: {result}")
        return [result for _, result in found]

    def explain(self, *, program: bool = False) -> str:
        """Describe the split, the versions and the memory, as a table of text.

        Args:
            program: Whether to show also what the first recorded forward does between the layers,
                stage by stage; a sequence of layers has none.
        """
        forwards = self._feeder.forwards
        text = explain(
            self.plan,
            self._group.cluster.names,
            self.statistics(),
            forwards.how + (f"\n{self._why}" if self._why else ""),
            self._corrections,
        )
        return f"{text}\n{forwards.program()}" if program else text

    def trace(self) -> Trace:
        """Return what every stage did so far. Flushes the pipe.

        Raises:
            ConfigError: Nothing is recorded; give Pipeline ``trace=True`` or a file.
        """
        return self._trace.collect()

    @property
    def restarts(self) -> tuple[Restart, ...]:
        """The recoveries from failed workers so far."""
        return tuple(self._group.restarts)

    @property
    def state(self) -> Life:
        """Where the pipeline stands in its life: open, closing, closed or failed."""
        return self._group.life.state

    def __repr__(self) -> str:
        """Return what runs, how far it has come, and whether it is open."""
        plan = self.plan
        return f"<Pipeline {plan.name}, {plan.in_words}, step {self.step}, {self.state.value}>"

    def __getattr__(self, name: str) -> Any:
        """Say what to do instead, for what people look for on a module.

        Raises:
            AttributeError: Always.
        """
        advice = f": {ADVICE[name]}" if name in ADVICE else ""
        raise AttributeError(f"a Pipeline has no attribute {name!r}{advice}", name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "a pipeline is workers and connections, so it can be neither pickled nor copied: "
            "pipe.save(folder) writes all of its state, pipe.module() returns a copy of the model, "
            "and pipe.state_dict() its weights"
        )

    def __dir__(self) -> list[str]:
        """Return the public names alone, for people who look around."""
        return [name for name in super().__dir__() if not name.startswith("_")]

    # -- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all workers. Idempotent. What is in flight is dropped; read `state_dict` before.

        With a trace to write, the pipe is flushed and the trace written first.

        Raises:
            TraceError: It cannot be written; everything has ended all the same.
        """
        life = self._group.life
        # Not after a failure, and not where a signal interrupted a wait.
        healthy = self._group.is_idle
        try:
            if life.begin_closing() and healthy:
                if self._checkpointer.is_begun:
                    self.flush()
                    self._run_state.finish_checkpoint()
                if self._trace_path is not None:
                    self.trace().save(self._trace_path)
        finally:
            life.close()

    def __enter__(self) -> Pipeline:
        """Return the pipeline."""
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *exception: Any) -> None:
        """Close it; after Ctrl-C and the like without waiting for anything."""
        if exception_type is None:
            self.close()
            return
        shorten(exception[0])
        try:
            self._checkpointer.abandon()
            if issubclass(exception_type, Exception):
                self.close()
        except PipelineError as error:  # the caller's own error is the one to be seen
            _log.warning("no trace is left: %s", error)
        finally:
            self._group.life.close()


def _identity(feeder: Feeder, **given: Any) -> Identity:
    """Return what the script has given, with the optimizer of now."""
    optimizer = feeder.optimizer
    if optimizer is None:
        return Identity(**given)
    return Identity(
        optimizer=name_of_class(optimizer.optimizer_class),
        groups=optimizer.names(),
        hyper_parameters=optimizer.given,
        **given,
    )


def _plan_of(
    model: UnsplitModel,
    split: Split,
    schedule: ScheduleName | WrittenSchedule,
    micro_batches: int | None,
    slack: int | Sequence[int],
    replicas: int | Sequence[int],
    shard_optimizer: bool,
    options: ScheduleOptions,
) -> Plan:
    """Make the plan of the stages of a model."""
    plan = plan_for(
        schedule,
        num_stages=len(split.layers),
        per_update=micro_batches,
        stages_per_worker=options.stages_per_worker,
        vertical_sync=options.vertical_sync,
        synchronous=options.synchronous_updates,
        slack=slack,
        replicas=replicas,
        shard_optimizer=shard_optimizer,
        credits=options.credits,
        proved=False,  # it is once ties and norms are in it
    )
    refuse_unfit_plan(model.modules, plan)
    links = plan.links if split.links is None else split.links
    return dataclasses.replace(plan, layers=split.layers, links=links, entries=split.entries)


def _say_of_first(batch: Batch, modules: Mapping[str, nn.Module], plan: Plan) -> None:
    """Say what the user should know of the first mini-batch."""
    samples = samples_of(batch)
    for text in about_micro_batches(modules, samples, plan.per_update) if samples else ():
        _log.warning("%s", text)


def _start(
    receive: Receive,
    fail: Fail,
    generation: int,
    *,
    workers: Workers,
    plan: Plan,
    timeouts: Timeouts,
    threads: int,
    forks: ForkServer,
) -> Cluster:
    """Start the workers of a generation."""
    return start_cluster(
        workers,
        plan=plan,
        receive=receive,
        fail=fail,
        generation=generation,
        timeout=timeouts.answer,
        start_timeout=timeouts.start,
        threads=threads,
        heartbeat=timeouts.heartbeat,
        forks=forks,
    )
