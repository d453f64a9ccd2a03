"""The options of `Pipeline`: frozen values, each of which checks itself.

What a beginner sets is flat. The rest is in four groups: how it trains (`Training`), how it is laid
out on workers (`Layout`), how failures are handled (`Recovery`), and what is recorded (`Observe`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from pipedream_rt.batches.items import Prepare
from pipedream_rt.batches.weighing import Weigh
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.codecs import CodecOption
from pipedream_rt.job.devices import Devices
from pipedream_rt.job.given_optimizer import OptimizerArgument
from pipedream_rt.job.identity import require_acceptable
from pipedream_rt.job.requirements import (
    know_options,
    option_group,
    require_choice,
    require_count,
    require_decay,
    require_instance,
    require_range,
    require_seed,
    require_time,
)
from pipedream_rt.job.splitting import Stages
from pipedream_rt.models import refuse_loss
from pipedream_rt.paths import given_path
from pipedream_rt.schedules.custom import WrittenSchedule
from pipedream_rt.schedules.recipes import ScheduleName, schedule_named
from pipedream_rt.stage.correction import Correction
from pipedream_rt.stage.rules.clipping import Clip
from pipedream_rt.stage.rules.scaling import LossScale
from pipedream_rt.stage.spec import LossFunction, OnNan
from pipedream_rt.tracing.events import Observer
from pipedream_rt.tracing.spans import SpanFolder

SPANS_KEPT = 1 << 17
"""How many of its last actions each process keeps for a trace, in 8 MiB."""

_FOLDER = "the folder of the checkpoints"

TraceOption: TypeAlias = str | os.PathLike[str] | bool | None
"""A file to write the trace to, or whether to record one; None follows the environment."""

Workers: TypeAlias = Literal["local", "serial", "ray"] | str | object | None
"""``"local"``, ``"serial"``, ``"ray"``, ``"HOST:PORT"``, None to follow the environment, an engine
as `RayWorkers`, or a function that makes a `Cluster` of another kind, called with a
`ClusterSpec`."""


@option_group
@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How the stages train.

    Attributes:
        clip: How gradients are clipped before each update; None for not at all.
        ema: The decay of an exponential moving average of the weights, as 0.999, which every stage
            makes of its own after each update; None for none. See `Pipeline.keep_version`.
        autocast: The dtype to which torch's autocast casts in forwards and in the loss, as
            ``torch.bfloat16``; None for none.
        loss_scale: How losses are scaled for gradients in float16, as by `torch.amp.GradScaler`.
            None for not at all, or, with ``autocast=torch.float16``, for ``LossScale()``. Only in
            schedules that flush, in ``2bw``, and with vertical sync.
        recompute: Whether stages compute their activations once more in the backward rather than
            keep them, or a list of the stages that do. Such a stage keeps the inputs of
            micro-batches in flight, and the activations of one. The bits are the same.
        compile: Whether each worker compiles its layers, one by one, with `torch.compile`; or a
            dict with its arguments.
        on_nan: What becomes of a training loss that is not finite: ``"raise"`` an error, or
            ``"ignore"`` it.
        weigh: A function that returns what a micro-batch weighs in its mini-batch, where the loss
            is no mean over samples, as ``lambda x, y: (y != -100).sum()``. It is called in the
            script with what the loader yields. None: the labels that count, if the model computes
            its loss itself and that is a cross entropy; else the samples. A model whose forward has
            an argument ``num_items_in_batch`` gets there what the mini-batch weighs.
        loss: Of what the last stage computes the loss: ``"whole"``, of all samples of a mini-batch
            at once, as plain PyTorch does. All outputs of a mini-batch must then come before its
            first backward, as in the schedule ``gpipe``, which is chosen. None: of each
            micro-batch, and these must make up that of the whole. If schedule and micro-batches are
            left out too, the first mini-batch of a loss that torch does not bring decides.
        check_loss: The number of mini-batches, from the first one on, whose loss is compared with
            the losses of its micro-batches, which must be its parts; 0 for none.
        verify: Whether the first mini-batch is computed in plain PyTorch too, in the script's
            process, where it can be (`Pipeline.explain` says so), and the losses, weights and
            buffers of the workers are compared with it. See `Pipeline.verify`.

    Raises:
        ConfigError: A value makes no sense.
    """

    clip: Clip | None = None
    ema: float | None = None
    autocast: torch.dtype | None = None
    loss_scale: LossScale | None = None
    recompute: bool | Sequence[int] = False
    compile: bool | dict[str, Any] = False
    on_nan: OnNan = "raise"
    weigh: Weigh | None = None
    loss: Literal["whole"] | None = None
    check_loss: int = 1
    verify: bool = True

    def __post_init__(self) -> None:
        if self.clip is not None:
            require_instance("clip", self.clip, Clip, str(self.clip))
        require_decay(self.ema)
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            half = "float16" if str(self.autocast) in ("fp16", "float16", "half") else "bfloat16"
            raise ConfigError(
                "autocast must be torch.bfloat16 or torch.float16, as "
                f"Training(autocast=torch.{half}), not {self.autocast!r}"
            )
        if self.loss_scale is not None:
            require_instance("loss_scale", self.loss_scale, LossScale, "")
        if not isinstance(self.compile, bool | dict):
            raise ConfigError(
                "compile must be True, False or a dict of arguments of torch.compile, not "
                f"{self.compile!r}"
            )
        require_choice("on_nan", self.on_nan, ("raise", "ignore"))
        if self.loss != "whole" and self.loss is not None:
            raise ConfigError(
                f'Training(loss=...) is "whole", or left out, not {self.loss!r}; the loss '
                "function itself is the argument loss_fn of Pipeline"
            )
        require_count("check_loss", self.check_loss, least=0)
        require_choice("verify", self.verify, (True, False))


@option_group
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How stages are laid out on workers, and micro-batches on the schedule.

    Attributes:
        replicas: The number of replicas of each stage, one number for all or one for each, in the
            schedules ``async-1f1b``, ``2bw``, ``1f1b`` and ``gpipe``. Each replica has a worker;
            micro-batch m goes to replica m mod r, and the gradients of an update are added up over
            the replicas in their order. One stage with r replicas is data parallelism. Each replica
            has buffers of its own; those of replica 0 are evaluated, and are in the state dict.
            With ``stages="auto"`` it may be ``"auto"``, which lets the planner choose.
        shard_optimizer: Whether the optimizer's state is divided among the replicas of a stage:
            each replica steps its part of the weights, and takes the rest from the others. The
            bits are the same for optimizers that step each parameter by itself.
        slack: Extra warm-up forwards before a hop between two stages, which hide its latency: one
            number for all hops, or one for each of the n-1. In schedules that flush it costs
            activations alone; in asynchronous ones it is staleness, so give it to slow links only.
        stages_per_worker: With ``interleaved-1f1b``, the number of stages on each worker; 2 if
            None.
        synchronous_updates: With ``async-1f1b`` and ``2bw``, the number of updates at the start of
            a run of which each flushes the pipe, as in ``1f1b``: no gradient is stale while weights
            move fast.
        credits: Number of mini-batches that are injected before the first result is awaited; None
            for what the schedule needs. It bounds the memory for inputs, and a learning rate that
            is set after result i applies from mini-batch i + credits on.
        codecs: What crosses between stages in fewer bytes: a codec of `pipedream_rt.codecs` for all
            edges, as ``Int8(feedback=True)``, or codecs by edge, as ``{(0, 1): BFloat16()}``. A
            list has one that autograd derives through and one that packs bytes. None for values
            and gradients as they are. A run with codecs computes something else than one without,
            the same bits in each run.
        weights: A folder from which each worker reads the weights of its stages, as
            ``save_pretrained`` and `Pipeline.save` write it. The model then needs none; see
            `without_values`. None for the weights that the model has.
        threads: The number of threads for torch's own parallel loops in each worker that is started
            here. Another number gives other bits.

    Raises:
        ConfigError: A value makes no sense by itself. What does not fit the schedule is found when
            the plan is made.
    """

    replicas: int | Sequence[int] | Literal["auto"] = ()
    shard_optimizer: bool = False
    slack: int | Sequence[int] = 0
    stages_per_worker: int | None = None
    synchronous_updates: int = 0
    credits: int | None = None
    codecs: CodecOption = None
    weights: str | os.PathLike[str] | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        """Check the values that a plan does not check."""
        require_count("threads", self.threads)
        if isinstance(self.weights, str | os.PathLike) and str(self.weights):
            given_path(self.weights, "the folder of the weights")
        require_choice("shard_optimizer", self.shard_optimizer, (True, False))
        if self.credits is not None:
            require_count("credits", self.credits)


@option_group
@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How failures are handled, and how long the coordinator waits before it counts one.

    Attributes:
        max_restarts: The number of failures of workers to recover from. After a failure other
            workers are started, which compute again what was fed since the last checkpoint (since
            the start, if there is none yet); the coordinator keeps that much of the input. None:
            what `pipedream-rt run --max-restarts` says, else 3 if checkpoints are made
            periodically and 0 if not.
        heartbeat: How long a worker process may be silent. Workers send four signs of life in that
            time, also while they compute.
        answer: How long to wait for a message that is sure to come.
        start: How long to wait for all workers to join.
        elastic: The fewest and the most worker processes, ``(2, 4)``: where fewer come than the
            plan has workers, some do the work of several, with the same bits. Those that come
            later get their part of it at a checkpoint. None: one process for each worker.
        elastic_wait: How long to wait, once the fewest have come, for another one to come; and
            then for the next.

    Raises:
        ConfigError: A time is no positive `timedelta`, or a number makes no sense.
    """

    max_restarts: int | None = None
    heartbeat: timedelta = timedelta(seconds=10)
    answer: timedelta = timedelta(minutes=5)
    start: timedelta = timedelta(minutes=2)
    elastic: tuple[int, int] | None = None
    elastic_wait: timedelta = timedelta(seconds=10)

    def __post_init__(self) -> None:
        if self.max_restarts is not None:
            require_count("max_restarts", self.max_restarts, least=0)
        if self.elastic is not None:
            require_range("elastic", self.elastic)
        for name in ("heartbeat", "answer", "start", "elastic_wait"):
            require_time(name, getattr(self, name))


@option_group
@dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """What is recorded of a run.

    Attributes:
        trace: A file to which `Pipeline.close` writes what every stage did when, or True to record
            it for `Pipeline.trace` alone. None: what `pipedream-rt run --trace` says, else False.
            Each worker keeps its last 131,072 actions.
        fingerprint_every: The number of mini-batches after which a result has a fingerprint of the
            weights and buffers behind it, so that two runs can be compared; None for never. It
            costs the time to read all weights once.
        record: A folder to which the run is written as it goes on, with a trace at its end, for
            `pipedream-rt report` and `pipedream-rt watch`. None: what `pipedream-rt run --record`
            says, else none.
        report: A file for a report of the run in HTML, written when the pipeline ends.
            `Pipeline.report` writes one before that.
        to: Observers, which are told of every result and of what else happens: `CSV`, `JSONLines`,
            `TensorBoard` and `Prometheus` of `pipedream_rt.observers`, or functions of your own.

    Raises:
        ConfigError: A value makes no sense.
    """

    trace: TraceOption = None
    fingerprint_every: int | None = None
    record: str | os.PathLike[str] | None = None
    report: str | os.PathLike[str] | None = None
    to: Sequence[Observer] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.trace, str | os.PathLike | bool | None):
            raise ConfigError(f"trace must be a file, True or False, not {self.trace!r}")
        if self.fingerprint_every is not None:
            require_count("fingerprint_every", self.fingerprint_every)
        if not isinstance(self.record, str | os.PathLike | None):
            raise ConfigError(f"record must be a folder, not {self.record!r}")
        if not isinstance(self.report, str | os.PathLike | None):
            raise ConfigError(f"report must be a file, not {self.report!r}")
        if not isinstance(self.to, list | tuple) or not all(map(callable, self.to)):
            raise ConfigError(
                f"to must be a list of observers, which are functions of an event, not {self.to!r}"
            )

    @property
    def shown(self) -> SpanFolder | None:
        """Where workers show their newest spans while a run is recorded; None for nowhere."""
        return SpanFolder.in_folder(self.record) if self.record and self.trace else None


@option_group
@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where checkpoints are kept, and when they are made.

    Attributes:
        folder: Folder of the run, which the coordinator and all workers must share.
        every: Number of mini-batches after which a checkpoint is made, without stopping the pipe;
            None if only `Pipeline.save` makes checkpoints.
        keep: Number of the newest checkpoints to keep; None to keep all.
        resume: Whether to go on from the newest whole checkpoint in the folder, if there is one.
            None: yes under `pipedream-rt run --resume`, and where torchrun starts a job again.
        accept: What may differ between the script that made the checkpoint and the one that goes
            on, of ``"seed"``, ``"optimizer"``, ``"groups"``, ``"loss"``, ``"hyper_parameters"``,
            ``"values"``, ``"schedule"``, ``"corrections"``, ``"codecs"``, ``"threads"`` and
            ``"torch"``. Another seed, optimizer or grouping is refused otherwise, and the others
            are logged with both values. With another optimizer accepted, its state starts empty;
            with other hyper-parameters, or plain values that the script changes while it trains,
            those of the script hold.
        attempts: Number of checkpoints in a row that may fail to be written; the last of them ends
            the loop with its `CheckpointError`. None to go on for ever.
        grace: With ``every``, how long SIGTERM waits for a checkpoint: the run makes one after the
            next mini-batch and ends with exit code 143, or ends without one after this time.

    Raises:
        ConfigError: The folder is no path, a number is below 1, or a name is unknown.
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    keep: int | None = 3
    resume: bool | None = None
    accept: Sequence[str] = ()
    attempts: int | None = 3
    grace: timedelta = timedelta(seconds=20)

    def __post_init__(self) -> None:
        require_acceptable(self.accept)
        require_time("the grace time of the checkpoints", self.grace)
        if not isinstance(self.folder, str | os.PathLike):
            raise ConfigError(f"the folder of the checkpoints must be a path, not {self.folder!r}")
        given_path(self.folder, _FOLDER)
        require_choice("resume, of the checkpoints,", self.resume, (True, False, None))
        for name in ("every", "keep", "attempts"):
            value = getattr(self, name)
            if value is not None:
                require_count(f"{name}, of the checkpoints,", value)

    @property
    def path(self) -> Path:
        """The folder as an absolute path."""
        return given_path(self.folder, _FOLDER).absolute()


CheckpointOption: TypeAlias = str | os.PathLike[str] | Checkpoints | None
"""The folder of the checkpoints, or `Checkpoints`; None for no checkpoints."""


def checkpoint_option(checkpoint: CheckpointOption) -> Checkpoints | None:
    """Return the option ``checkpoint`` of `Pipeline` as `Checkpoints`; a path is their folder."""
    if checkpoint is None or isinstance(checkpoint, Checkpoints):
        return checkpoint
    return Checkpoints(checkpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a `Pipeline`, whose docstring says what they are."""

    stages: Stages | Literal["auto"] = 1
    example: Any = None
    prepare: Prepare | None = None
    loss_fn: LossFunction | None = None
    optimizer: OptimizerArgument = None
    schedule: ScheduleName | WrittenSchedule | None = None
    micro_batches: int | None = None
    corrections: Sequence[Correction] | Literal["auto"] | None = None
    workers: Workers = None
    checkpoint: CheckpointOption = None
    devices: Devices = None
    seed: int = 0
    training: Training = field(default_factory=Training)
    layout: Layout = field(default_factory=Layout)
    recovery: Recovery = field(default_factory=Recovery)
    observe: Observe = field(default_factory=Observe)
    is_tried: bool = False
    """No option of `Pipeline`: the schedule is one that `run --compare-schedules` tries, and has
    the micro-batches that it would have if it were chosen."""

    def __post_init__(self) -> None:
        """Check what can be checked without the model."""
        for group in (Training, Layout, Recovery, Observe):
            name = group.__name__.lower()
            require_instance(name, getattr(self, name), group)
        require_seed(self.seed)
        refuse_loss(self.loss_fn)
        # The class is frozen, which allows no plain assignment.
        object.__setattr__(self, "checkpoint", checkpoint_option(self.checkpoint))
        if isinstance(self.schedule, str):
            object.__setattr__(self, "schedule", schedule_named(self.schedule))
        replicas = self.layout.replicas
        if replicas == "auto" and self.stages != "auto":
            raise ConfigError('replicas="auto" goes with stages="auto"; else give their numbers')
        if self.stages == "auto" and replicas not in ((), 1, "auto"):
            raise ConfigError(
                'with stages="auto" the number of stages is not known yet: replicas is "auto", '
                f"or left out, not {replicas!r}"
            )

    @property
    def kept(self) -> Checkpoints | None:
        """The checkpoints; None for none."""
        return checkpoint_option(self.checkpoint)

    @property
    def is_told(self) -> bool:
        """Whether anybody is told of the run."""
        return bool(self.observe.report or self.observe.record or self.observe.to)

    @property
    def makes_checkpoints(self) -> bool:
        """Whether checkpoints are made periodically."""
        return self.kept is not None and self.kept.every is not None


know_options("Pipeline", [each.name for each in fields(Options) if each.name != "is_tried"])
