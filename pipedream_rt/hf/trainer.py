"""`transformers.Trainer` over a pipeline.

The Trainer of transformers still makes the loader, the optimizer, the learning-rate schedule, the
logs and the checkpoints, and calls callbacks and overridden methods. Only the computing differs:
the updates of an epoch (`epoch.py`), a step of an evaluation, and the weights and optimizer in a
checkpoint. ``trainer.model`` has old weights while the stages train, and fetches the new ones when
somebody reads them (`live.py`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import convert_to_fp32, send_to_device
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import BatchEncoding, Trainer, TrainingArguments

from pipedream_rt.batches.cutting import samples_in
from pipedream_rt.batches.forwards import TOTAL
from pipedream_rt.batches.items import Accumulated, ScriptCall, batch_of
from pipedream_rt.batches.looking import looking
from pipedream_rt.checkpoint import newest_good
from pipedream_rt.cluster.forked_workers import prepare
from pipedream_rt.coordinator.results import PendingStep
from pipedream_rt.errors import CheckpointError, ConfigError, PipelineError
from pipedream_rt.hf.arguments import asked_of, options_of, refuse_arguments
from pipedream_rt.hf.calls import answered
from pipedream_rt.hf.epoch import Updates
from pipedream_rt.hf.live import LiveModel
from pipedream_rt.hf.other_trainers import Understood, understood
from pipedream_rt.hf.overrides import owns_loss, problems_of
from pipedream_rt.job.given_optimizer import refuse_patched_step
from pipedream_rt.models.preserving_state import kept_outside
from pipedream_rt.pipeline import Pipeline
from pipedream_rt.schema import read_file

STATE = "pipeline"
"""The folder with the state of the pipeline, in a checkpoint of the Trainer."""

GROUPS = "pipeline_groups.pt"
"""The file beside it with the optimizer's hyper-parameters, since callbacks read them at once."""

_LARGEST = 1 << 26
"""Bytes that it may have, and those of a scheduler."""


class _Resume(NamedTuple):
    """A saved state that the next pipeline will load.

    Attributes:
        weights: Digest of the script's model when the resume was asked for.
        groups: Whether the optimizer has its hyper-parameters already.
    """

    folder: Path
    weights: str
    groups: bool


class PipelineMixin(Trainer):
    """Makes a Trainer class train by a pipeline.

    It comes before a Trainer that somebody else has written::

        class PipelineSeq2SeqTrainer(PipelineMixin, Seq2SeqTrainer): ...

    `PipelineTrainer` is this over `transformers.Trainer` itself, and documents the arguments.
    """

    def __init__(
        self, *args: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._pipeline_options = dict(pipeline or {})
        for name in ("optimizer", "example", "checkpoint"):
            if name in self._pipeline_options:
                raise ConfigError(
                    f"{name} of the pipeline is what the Trainer makes: leave it out of pipeline="
                )
        if not isinstance(self._pipeline_options.get("stages"), int | list | tuple | str):
            raise ConfigError('give PipelineTrainer the number of stages: pipeline={"stages": 4}')
        arguments = [
            each for each in (*args, *kwargs.values()) if isinstance(each, TrainingArguments)
        ]
        for each in arguments:  # first, since transformers has errors of its own for some
            refuse_arguments(each, self._pipeline_options)
        self._refuse_methods()
        prepare()  # workers import torch and transformers while the script loads its data
        self._pipe: Pipeline | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        # The optimizer that the Trainer has made, whose groups are those of `Pipeline.optimizer`
        # while there is a pipeline; and its groups as they were.
        self._made: torch.optim.Optimizer | None = None
        self._made_groups: list[dict[str, Any]] = []
        self._made_for: list[Any] = []
        self._made_names: dict[int, str] = {}
        self._steps, self._looks = 0, True
        self._wrapped_module: tuple[Any, Any, torch.nn.Module] | None = None
        self._resume: _Resume | None = None
        self._made_by: tuple[Any, ...] = ()
        self._updates: Updates | None = None
        super().__init__(*args, **kwargs)
        self._refuse()
        self._live = LiveModel(self._trained(), self._fetched)

    def _refuse_methods(self) -> None:
        """Refuse overridden methods that a pipeline cannot take into account."""
        for name, reason in problems_of(type(self), PipelineMixin, vars(self)):
            raise ConfigError(f"PipelineTrainer cannot do {name}: {reason}")

    def _refuse(self) -> None:
        """Refuse arguments, methods and models that a pipeline cannot do, by name."""
        refuse_arguments(self.args, self._pipeline_options)
        self._refuse_methods()
        for each in self._others:
            if reason := each.unless(self):
                raise ConfigError(f"{type(self).__name__} cannot do {reason}")
        if self._in_script and "loss_fn" in self._pipeline_options:
            raise ConfigError(
                "pipeline={'loss_fn': f} computes the loss on the last stage, and an own "
                "compute_loss, compute_loss_func or label_smoothing_factor in the script: leave "
                "one of them out"
            )
        if getattr(self, "is_model_parallel", False):
            raise ConfigError(
                "PipelineTrainer cannot do a model on several devices (device_map): give the "
                "pipeline devices= instead"
            )

    # -- the pipeline ---------------------------------------------------------------------------

    @property
    def pipe(self) -> Pipeline:
        """The pipeline. It starts with the first mini-batch, or when this is read before.

        Raises:
            ConfigError: It has not started, and the dataset is a stream, which would lose the
                sample that the start needs; or what the model gets is known to an own loss alone.
        """
        if self._pipe is not None and self._is_open:
            return self._pipe
        stream = isinstance(self.train_dataset, IterableDataset)
        if self.train_dataset is None or stream or self._in_script:
            raise ConfigError("the pipeline starts with the first mini-batch: train or evaluate")
        with _generators_kept():
            first = self._fed(looking(self.get_train_dataloader(), 1)[0], None)
            return self._settled(first)

    @property
    def _is_open(self) -> bool:
        return self._pipe is not None and self._pipe.state.value == "open"

    def close(self) -> None:
        """End the workers. Idempotent; `train`, `evaluate` and `predict` start new ones.

        The model and the optimizer get the state of the stages, and training can go on from there.
        """
        with self._live.lock:
            self._close()

    def _close(self) -> None:
        """End the workers. The caller holds the lock."""
        self._live.refresh()
        pipe, made, self._pipe = self._pipe, self._made, None
        if pipe is None:
            return
        if made is not None:
            found = _state_of(pipe) if pipe.state.value == "open" else {}
            pairs = zip(made.param_groups, self._made_groups, strict=True)
            made.param_groups = [{**now, "params": then["params"]} for now, then in pairs]
            _give_state(made, self._made_names, found)
            if self.optimizer is pipe.optimizer:
                self.optimizer = self.callback_handler.optimizer = made
        self._steps += pipe.step
        pipe.close()
        if self._end is not None:
            self._end.detach()  # else it would keep a pipeline that has ended

    def _trained(self) -> torch.nn.Module:
        """Return the module to train: the model, or another library's module around it."""
        if self._in_script:
            return self.model
        model, loss, wrapped = self.model, getattr(self, "loss", None), self._wrapped_module
        if wrapped is None or wrapped[0] is not model or wrapped[1] is not loss:
            made = [each.module for each in self._others if each.module is not None]
            self._wrapped_module = wrapped = (model, loss, made[0](self) if made else model)
        return wrapped[2]

    @property
    def _others(self) -> list[Understood]:
        """The facts about this class's bases from other libraries."""
        return [each for each in map(understood, type(self).__mro__) if each is not None]

    @property
    def _in_script(self) -> bool:
        """Whether the Trainer's own methods compute the loss in the script."""
        return (
            self.compute_loss_func is not None
            or self.label_smoother is not None
            or owns_loss(type(self), PipelineMixin, vars(self))
            or any(each.in_script(self) for each in self._others)
        )

    @property
    def _owns_optimizer(self) -> bool:
        """Whether the Trainer's optimizer is the pipeline's, or the one it was made from."""
        ours = None if self._pipe is None or self._made is None else self._pipe.optimizer
        return self.optimizer is not None and self.optimizer in (ours, self._made)

    def _fetched(self) -> Mapping[str, Tensor] | None:
        """Return the current weights; None if the workers have ended."""
        return self._pipe.state_dict() if self._pipe is not None and self._is_open else None

    def _settled(self, example: Any, looks: bool = True, trains: bool = False) -> Pipeline:
        """Return a pipeline whose stages agree with the script's model and optimizer.

        ``looks``: whether the script may have changed something since the last call. ``trains``:
        whether the pipeline trains next, so that the model becomes old.
        """
        live, resume = self._live, self._resume
        is_ours = self._is_open and live.model is self._trained()
        is_ours = is_ours and (self.optimizer is None or self._owns_optimizer)
        is_ours = is_ours and self._made_by == self._asked() and not live.has_other_layers()
        changed = live.changed() if is_ours and looks else set()
        if is_ours and looks and not live.is_stale:
            is_ours = live.signature() == self._made_for
        # Non-persistent buffers are in no state dict: only a new pipeline takes them along.
        if not is_ours or (changed and not changed <= live.model.state_dict().keys()):
            self._open(example, trains)
        elif changed and resume is None:
            self._push()
        if resume is not None and (trains or self._made is not None):
            self._load(resume)
        if looks and not trains:
            self._live.note()
        assert self._pipe is not None
        return self._pipe

    def _load(self, resume: _Resume) -> None:
        """Load the state of a pipeline, but keep what the script has changed since then."""
        pipe, live = self._pipe, self._live
        assert pipe is not None
        self._resume = None
        before = [{**group} for group in pipe.optimizer.param_groups]
        try:
            pipe.load(newest_good(resume.folder)[0])
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} (The number of micro-batches follows from gradient_accumulation_steps, "
                "unless pipeline= says micro_batches.)"
            ) from error
        for group, saved in zip(pipe.optimizer.param_groups, before, strict=True):
            group.update(saved if resume.groups else {})
        if resume.weights != live.digest():
            self._push()
        else:
            live.mark_stale()

    def _push(self) -> None:
        """Give the stages the weights of the script's model."""
        assert self._pipe is not None
        self._pipe.load_state_dict(dict(self._live.model.state_dict()))

    def _open(self, example: Any, trains: bool) -> None:
        """Start a pipeline with the present model and optimizer."""
        self.close()
        if self._live.model is not self._trained() and self.optimizer is self._made:
            self.optimizer = None  # it is over the parameters of the other model
        self._made = None
        optimizer: Any = self.optimizer
        optimizer = getattr(optimizer, "optimizer", optimizer)  # out of accelerate's wrapper
        self._live = live = LiveModel(self._trained(), self._fetched)
        learns = any(p.requires_grad for p in live.model.parameters())
        if not trains and not learns:
            optimizer = None
        ahead = not trains and learns and optimizer is None and self._will_train_on(example)
        if ahead:
            self.create_optimizer()
            optimizer, self.optimizer = self.optimizer, None
        translated = options_of(
            self.args, self._pipeline_options, None if self._in_script else self._weight_of
        )
        # A later pipeline must not repeat the random numbers of the first.
        options = {"seed": self.args.seed + self._steps, **translated}
        modes = [(module, module.training) for module in live.model.modules()]
        live.model.train()  # an evaluation may have left eval mode
        try:
            try:
                pipe = Pipeline(live.model, example=example, optimizer=optimizer, **options)
            except ConfigError:
                if not ahead:
                    raise
                optimizer = None  # what cannot be trained is told when it is to be
                pipe = Pipeline(live.model, example=example, optimizer=None, **options)
        finally:
            for module, mode in modes:
                module.training = mode
        pipe._run.feeder.script.own.watches = False  # what callbacks change is brought to it
        self._pipe, self._end = pipe, weakref.finalize(self, pipe.close)
        self._made_for, self._made_by = live.signature(), self._asked()
        self._made_names = {id(p): name for name, p in live.model.named_parameters()}
        if optimizer is not None:
            self._made, self._made_groups = optimizer, optimizer.param_groups
            for group, mine in zip(pipe.optimizer.param_groups, self._made_groups, strict=True):
                named = [p for p in mine["params"] if p.requires_grad]
                group["params"] = named if len(named) == len(group["params"]) else group["params"]
            optimizer.param_groups = pipe.optimizer.param_groups
            optimizer._opt_called = True  # else schedulers warn that they step before it
            if not ahead:
                self.optimizer = self.callback_handler.optimizer = pipe.optimizer

    def _will_train_on(self, example: Any) -> bool:
        """Whether a pipeline for an evaluation could train later, by the Trainer's own optimizer.

        Then it begins with that one, so that the workers need not start again.
        """
        if (
            self.train_dataset is None
            or type(self).create_optimizer is not Trainer.create_optimizer
        ):
            return False
        names = self.label_names or [""]
        return self._in_script or all(example.get(name) is not None for name in names)

    def _is_ahead(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the pipeline has begun, for an evaluation, with an optimizer like this one."""
        made, groups = self._made, self._made_groups
        if made is None or not self._is_open or type(optimizer) is not type(made):
            return False
        return list(map(_plain, optimizer.param_groups)) == list(map(_plain, groups))

    def _asked(self) -> tuple[Any, ...]:
        """Return the values that a pipeline is made from, to see whether they have changed."""
        return *asked_of(self.args), self._in_script

    def _weight_of(self, batch: Mapping[str, Any]) -> Any:
        """Return the weight of a micro-batch: the number of labels that the Trainer counts."""
        found = self._get_num_items_in_batch([batch], torch.device("cpu"))
        return samples_in(batch) if found is None else found

    def _fed(self, inputs: Mapping[str, Any], number: Any) -> dict[str, Any]:
        """Return a part of a mini-batch for the stages; ``number`` is the weight of the whole."""
        own = type(self)._prepare_inputs, type(self)._prepare_input
        if own != (Trainer._prepare_inputs, Trainer._prepare_input):
            inputs = self._prepare_inputs(dict(inputs))
        for each in self._others:
            inputs = {**inputs, **each.tells}
        if (
            number is None
            or not self.model_accepts_loss_kwargs
            or "loss_fn" in self._pipeline_options
        ):
            return dict(inputs)
        return {**inputs, TOTAL: torch.as_tensor(number)}

    # -- training -------------------------------------------------------------------------------

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """Make optimizer and schedule, and note the checkpoint to go on from."""
        self._refuse()
        if self._live.model is not self._trained() and self._owns_optimizer:
            self.close()
            self.optimizer = None
        if self._created_lr_scheduler:
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        if self._owns_optimizer:
            self.optimizer = self._made
        optimizer: Any = self.optimizer
        self._resume = None if optimizer is None else self._resume  # that of another optimizer
        had_none = optimizer is None
        self.create_optimizer()
        if had_none and self._is_ahead(self.optimizer):
            self.optimizer = self._made
        optimizer = self.optimizer
        refuse_patched_step(optimizer)  # first, since torch's scheduler would fail obscurely
        self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            self._go_on_from(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        # As accelerate's prepare() does. Else evaluations move the model, which reads its weights.
        self.accelerator._models.append(self.model)
        self._updates = Updates(self)
        return self.model, train_dataloader

    def _go_on_from(self, checkpoint: str) -> None:
        """Go on from a checkpoint of this class or of a plain Trainer."""
        state = Path(checkpoint) / STATE
        if not state.is_dir():
            self.close()
            self._load_optimizer_and_scheduler(checkpoint)
            return
        groups = (Path(checkpoint) / GROUPS).is_file()
        self._resume = _Resume(state, self._live.digest(), groups)
        for name, load in (
            ("scheduler.pt", self.lr_scheduler.load_state_dict),
            (GROUPS, self._load_groups),
        ):
            if (saved := Path(checkpoint) / name).is_file():
                load(torch.load(BytesIO(read_file(saved, _LARGEST)), weights_only=True))

    def _load_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Give the groups of the optimizer the hyper-parameters of a checkpoint."""
        assert self.optimizer is not None
        for group, values in zip(self.optimizer.param_groups, saved, strict=False):
            group.update(values)

    def _run_epoch(
        self,
        model: Any,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
    ) -> None:
        """Train on a loader once."""
        assert self._updates is not None
        self._updates.epoch(
            epoch,
            train_dataloader,
            steps_in_epoch,
            num_update_steps_per_epoch,
            {"trial": trial, "ignore": ignore_keys_for_eval, "start": start_time},
            resume_from_checkpoint if epoch == epochs_trained else None,
            steps_trained_in_current_epoch,
        )

    def _submitted(self, parts: Sequence[Any], number: Any) -> tuple[PendingStep, int]:
        """Inject a mini-batch; return its result to come, and the divisor of its parts' losses."""
        self._refuse_unready()
        fed = [self._fed(part, number) for part in parts]
        pipe = self._settled(fed[0], trains=True)
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        scaled = TOTAL in fed[0] if scaled is None else scaled
        factor = 1 if scaled else len(parts)
        count = max(len(parts), self.args.gradient_accumulation_steps)
        with self._live.unread(), self._live.lock:
            pending = pipe.submit(Accumulated(tuple(map(batch_of, fed)), count, 1 / factor))
            self._live.mark_stale()
        return pending, factor

    def _refuse_unready(self) -> None:
        """Refuse to train another model or optimizer, or with gradients of the script."""
        if self.optimizer is None:
            raise ConfigError(
                "trainer.model or trainer.optimizer was replaced in the middle of a training, "
                "where a plain Trainer would train the one of before; do it between two trainings"
            )
        if name := self._live.gradient():
            raise ConfigError(
                f"{name} has a gradient in the script, which does not reach the stages: they begin "
                "each update without; a hook that a parameter has before training does"
            )

    def _computed(self, parts: Sequence[Any], number: Any) -> list[Tensor]:
        """Make an update with a loss in the script; return the losses of its parts."""
        self._refuse_unready()
        update, model, losses = _Update(self), self.model, []
        try:
            with answered(model, update.forward):
                for i, part in enumerate(parts):
                    self.accelerator.gradient_state._set_sync_gradients(i == len(parts) - 1)
                    update.begin_part()
                    losses.append(self.training_step(model, part, number))
                    self._refuse_unready()
                    update.end_part()
        except BaseException:
            update.end(applies=False)
            raise
        update.end(applies=True)
        return losses

    def _norms(self, flush: bool) -> dict[int, float]:
        """Return the gradient norms of the last updates, by the Trainer's step."""
        assert self._pipe is not None
        with self._live.lock:
            if flush:
                self._pipe.flush()
            first = self._pipe.statistics()[0].get("grad_norms", ())
        ahead = self.state.global_step - self._pipe.step
        return {number + 1 + ahead: norm for number, norm in first}

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        """End the training, with the newest weights in the model."""
        self._live.refresh()
        return super()._finalize_training(trial, num_train_samples, start_time)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse it.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "PipelineTrainer cannot do hyperparameter_search: make a PipelineTrainer for each trial"
        )

    # -- evaluation -----------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict, with the weights that the script's model has now."""
        self._looks = True
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Run the stages on a batch of an evaluation or prediction."""
        del model  # that of this process, whose weights may be old
        if self._in_script:
            with answered(self.model, partial(self._inferred, _flags_of(self.model))):
                return super().prediction_step(
                    self.model, inputs, prediction_loss_only, ignore_keys, **kwargs
                )
        with self._live.lock:
            pipe, self._looks = self._settled(dict(inputs), self._looks), False
        live = self._live

        def stages(*args: Any, **kwargs: Any) -> Any:
            with live.lock, live.unread():
                return pipe(*args, **kwargs)

        return super().prediction_step(stages, inputs, prediction_loss_only, ignore_keys, **kwargs)

    def _inferred(self, flags: Sequence[bool], *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the model in an evaluation; ``flags`` are those of its parameters."""
        _refuse_other(flags, self.model)
        with self._live.lock:
            call = _call_of(args, kwargs)
            with _as_outside():
                pipe = self._settled(call, self._looks)
            self._looks = False
            with self._live.unread():
                return self._as_of_model(pipe(*call.args, **call.kwargs))

    def _as_of_model(self, output: Any) -> Any:
        """Return an output of the stages as accelerate's model gives it: device and dtype."""
        output = convert_to_fp32(output) if self.accelerator.native_amp else output
        device = self.args.device
        return output if device.type == "cpu" else send_to_device(output, device)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as the Trainer does, and tell the observers of the run."""
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        dataset = args[0] if args else kwargs.get("eval_dataset")
        several = isinstance(self.eval_dataset if dataset is None else dataset, dict)
        publisher = None if self._pipe is None else self._pipe._publisher
        # Of several datasets, the Trainer calls this method for each.
        if publisher is not None and self._pipe is not None and not several:
            publisher.evaluated(
                self._pipe.step,
                {
                    name.removeprefix("eval_"): float(value)
                    for name, value in metrics.items()
                    if isinstance(value, int | float)
                },
            )
        return metrics

    # -- checkpoints ----------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state of the pipeline, from which it goes on with the same bits."""
        if not self._is_open or not self._owns_optimizer:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        assert self._pipe is not None
        with self._live.lock:
            self._pipe.save(Path(output_dir) / STATE)
        torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self._pipe.optimizer.param_groups
        ]
        torch.save(groups, os.path.join(output_dir, GROUPS))


class PipelineTrainer(PipelineMixin):
    """The Trainer of transformers, whose model is trained by a pipeline.

    A script changes two lines: the import, and the name of the class with ``pipeline=``::

        from pipedream_rt.hf import PipelineTrainer

        trainer = PipelineTrainer(model=model, args=args, train_dataset=data,
                                  pipeline={"stages": 4})
        trainer.train()

    ``trainer.model`` has the current weights whenever it is read, and changes to it go to the
    stages before the next mini-batch. The workers stay for `evaluate` and `predict` until `close`,
    or the end of the script.

    Args:
        *args: As `transformers.Trainer` takes them.
        pipeline: Options of `Pipeline`: ``stages`` at least, and ``schedule``, ``micro_batches``,
            ``workers``, ``recovery``... What the training arguments say (``max_grad_norm``,
            ``bf16``, ``gradient_checkpointing``, ``seed``) need not be repeated.
        **kwargs: As `transformers.Trainer` takes them.

    Raises:
        ConfigError: A pipeline cannot do what is asked for; nothing was started.
    """


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, and its parameters by ``id``."""
    return {**group, "params": list(map(id, group["params"]))}


class _Update:
    """An update whose loss the script computes."""

    def __init__(self, trainer: PipelineMixin) -> None:
        self._trainer = trainer
        self._pipe: Pipeline | None = None
        self._parts = trainer.args.gradient_accumulation_steps
        self._is_called, self._flags = False, _flags_of(trainer.model)

    def begin_part(self) -> None:
        """Let the model be called once more."""
        self._is_called = False

    def end_part(self) -> None:
        """Refuse a part of which no gradient comes."""
        if not self._is_called:
            raise ConfigError(
                "training_step has not called the model with gradients, so nothing can be trained: "
                "leave such batches out of the loader"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the model, by the stages."""
        trainer, call = self._trainer, _call_of(args, kwargs)
        _refuse_other(self._flags, trainer.model)
        if torch.is_grad_enabled():
            self._refuse()
        with _as_outside():
            self._pipe = pipe = self._pipe or trainer._settled(call, trains=True)
        live = trainer._live
        with live.lock, live.unread(), _without_autocast():
            if not trainer.model.training:
                return trainer._as_of_model(pipe(*call.args, **call.kwargs))
            # A loss that the model returns too is of a whole batch.
            whole = (
                "micro_batches" not in trainer._pipeline_options
                and pipe._run.feeder.forwards.returns_loss
            )
            count = 1 if whole else pipe.plan.per_update // self._parts
            return trainer._as_of_model(pipe._forward(call, count))

    def _refuse(self) -> None:
        """Refuse a call with gradients that the update has no place for."""
        if not self._trainer.model.training:
            raise ConfigError(
                "the model is in eval mode, and was called with gradients: the stages compute "
                "these in training mode alone; call it under torch.no_grad(), or model.train()"
            )
        if self._is_called:
            raise ConfigError(
                "the model was called a second time with gradients for one batch, and the stages "
                "compute one forward for each: put what it gets into one call, as by torch.cat, or "
                "call it under torch.no_grad()"
            )
        self._is_called = True

    def end(self, applies: bool) -> None:
        """Apply the update, or drop it after an error."""
        pipe, live = self._pipe, self._trainer._live
        if pipe is None or pipe.state.value != "open":
            return
        with live.lock:
            if applies:
                pipe.step()
            else:
                with suppress(PipelineError):  # the error is to be seen, or nothing was called
                    pipe.step(update=False)
            live.mark_stale()


def _flags_of(model: torch.nn.Module) -> list[bool]:
    """Return which parameters of a model require gradients."""
    return [p.requires_grad for p in model.parameters()]


def _refuse_other(flags: Sequence[bool], model: torch.nn.Module) -> None:
    """Refuse a call of a model of which a loss has frozen parts, as by leaving an adapter out."""
    if flags != _flags_of(model):
        raise ConfigError(
            "the loss changes the model for one of its calls: which adapter is active, or which "
            "parameters require gradients. The stages have the model as it is outside of the loss: "
            "call a copy of it that is the loss's own, or compute such outputs before training"
        )


def _call_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ScriptCall:
    """Return a call of the model; what a tokenizer gives is a dict to the stages."""
    values = [dict(each) if isinstance(each, BatchEncoding) else each for each in args]
    return ScriptCall(tuple(values), dict(kwargs), None)


def _without_autocast() -> AbstractContextManager[Any]:
    """Leave the autocast around a loss, which the stages have for themselves."""
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return torch.autocast(device, enabled=False)


@contextmanager
def _as_outside() -> Iterator[None]:
    """Leave the contexts around a loss, as a pipeline that starts needs."""
    with _without_autocast(), torch.enable_grad():
        yield


def _state_of(pipe: Pipeline) -> dict[str, Any]:
    """Return the optimizer state of each parameter of a pipeline, by name."""
    names = [name for group in pipe.optimizer.names() for name in group]
    return {names[i]: state for i, state in pipe.optimizer.state_dict()["state"].items()}


def _give_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], found: Mapping[str, Any]
) -> None:
    """Load state into an optimizer: ``names`` by ``id`` of a parameter, ``found`` by name."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    packed = optimizer.state_dict()
    packed["state"] |= {
        i: found[names[id(p)]] for i, p in enumerate(parameters) if names.get(id(p)) in found
    }
    optimizer.load_state_dict(packed)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave the random generators of this process as they are."""
    with kept_outside(), torch.random.fork_rng(devices=[]):
        yield
