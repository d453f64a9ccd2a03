"""`transformers.Trainer` over a pipeline.

The Trainer makes the data loader, the optimizer, the schedule of the learning rate, the logs and
the callbacks; the pipeline trains. One update takes ``per_device_train_batch_size x
gradient_accumulation_steps`` samples, which the loader yields as one mini-batch.

Results come some mini-batches after their injection. Callbacks are called as they come, each with
the learning rate of its own mini-batch. Before a step at which the arguments ask for an evaluation
or a checkpoint, nothing more is injected until its result has come, so both are of the weights of
exactly that step. If a callback of one's own asks for one, those that are on their way are awaited
first, and the step is then that of the last of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from pipedream_rt.checkpoint import newest_good
from pipedream_rt.coordinator.results import PendingStep
from pipedream_rt.errors import ConfigError
from pipedream_rt.hf.arguments import options_of, refuse
from pipedream_rt.models.undisturbed import kept_outside
from pipedream_rt.pipeline import Pipeline

_log = logging.getLogger(__name__)

STATE = "pipeline"
"""The folder, in a checkpoint of the Trainer, with the state of the pipeline."""


class PipelineTrainer(Trainer):
    """The Trainer of transformers, whose model is trained by a pipeline.

    A script changes two lines: the import, and the name of the class with ``pipeline=``::

        from pipedream_rt.hf import PipelineTrainer

        trainer = PipelineTrainer(model=model, args=args, train_dataset=data,
                                  pipeline={"stages": 4})
        trainer.train()

    After `train`, ``trainer.model`` has the weights. The workers stay for `evaluate` and `predict`
    until `close`, or the end of the script.

    Args:
        *args: As `transformers.Trainer` takes them.
        pipeline: Options of `Pipeline`: ``stages`` at least, and ``schedule``, ``micro_batches``,
            ``workers``, ``recovery``... What the training arguments say (``max_grad_norm``,
            ``bf16``, ``gradient_checkpointing``, ``seed``) need not be said again.
        **kwargs: As `transformers.Trainer` takes them.

    Raises:
        ConfigError: Something is asked for that a pipeline cannot do; nothing was started.
    """

    def __init__(
        self, *args: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._given = dict(pipeline or {})
        for name in ("optimizer", "example", "checkpoint"):
            if name in self._given:
                raise ConfigError(
                    f"{name} of the pipeline is what the Trainer makes: leave it out of pipeline="
                )
        if not isinstance(self._given.get("stages"), int | list | tuple | str):
            raise ConfigError('give PipelineTrainer the number of stages: pipeline={"stages": 4}')
        refuse(self, Trainer)
        self._pipe: Pipeline | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    # -- the pipeline ---------------------------------------------------------------------------

    @property
    def pipe(self) -> Pipeline:
        """The pipeline, which is started when it is first asked for."""
        if self._pipe is None or self._pipe.state.value != "open":
            if self.optimizer is None or not isinstance(self.optimizer, torch.optim.Optimizer):
                self.create_optimizer()
            self._pipe = Pipeline(
                self.model,
                example=self._example(),
                optimizer=self._unwrapped_optimizer(),
                **options_of(self.args, self._given, self._weight_of),
            )
            self._end = weakref.finalize(self, self._pipe.close)
            self.optimizer = self._pipe.optimizer
        return self._pipe

    def close(self) -> None:
        """End the workers. Idempotent; `train`, `evaluate` and `predict` start others."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
            self.optimizer = None

    def _unwrapped_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer without what accelerate has wrapped it in."""
        optimizer: Any = self.optimizer
        return optimizer.optimizer if hasattr(optimizer, "accelerator_state") else optimizer

    def _example(self) -> dict[str, Any]:
        """Return a mini-batch, and leave the generators and the loader as they were."""
        dataset = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        if dataset is None:
            raise ConfigError("the model is recorded on a mini-batch: give train_dataset")
        collate = self.data_collator
        if self.args.remove_unused_columns:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        with _generators_kept():
            try:
                count = min(self._samples(), len(dataset))
                items = [dataset[i] for i in range(count)]
            except TypeError:  # an iterable dataset
                items = [item for item, _ in zip(dataset, range(self._samples()), strict=False)]
            return dict(collate(items))

    def _samples(self) -> int:
        """Return the number of samples of a mini-batch."""
        return int(self._train_batch_size) * int(self.args.gradient_accumulation_steps)

    def _weight_of(self, batch: Mapping[str, Any]) -> Any:
        """Return what a micro-batch weighs: the labels that the Trainer counts."""
        found = self._get_num_items_in_batch([batch], torch.device("cpu"))
        return next(iter(batch.values())).shape[0] if found is None else found

    def _as_fed(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a mini-batch as the pipeline takes it.

        A model that takes ``num_items_in_batch`` gets what the Trainer counts; where a mini-batch
        is cut, the pipeline tells it the sum of what its micro-batches weigh.
        """
        fed = dict(inputs)
        if self.model_accepts_loss_kwargs and self.pipe.plan.per_update == 1:
            items = self._get_num_items_in_batch([fed], torch.device("cpu"))
            if items is not None:
                fed["num_items_in_batch"] = items
        return fed

    def _weights_back(self) -> None:
        """Give the model the weights that the stages have."""
        self.model.load_state_dict(self.pipe.state_dict())

    # -- training -------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the loader, which yields the samples of a whole update at a time."""
        size = self._train_batch_size
        self._train_batch_size = self._samples()
        try:
            return super().get_train_dataloader()
        finally:
            self._train_batch_size = size

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, with the Trainer's own state, callbacks and logs around the pipeline."""
        if trial is not None:
            raise ConfigError("PipelineTrainer cannot do hyperparameter_search: open one for each")
        loader = self.get_train_dataloader()
        accumulated = args.gradient_accumulation_steps
        args.gradient_accumulation_steps = 1  # a mini-batch of the loader has them all
        try:
            epochs, per_epoch, _, samples, _, in_epoch, most = self.set_initial_training_values(
                args, loader
            )
        finally:
            args.gradient_accumulation_steps = accumulated
        trained, skipped = self._init_training_state(
            most, per_epoch, epochs, resume_from_checkpoint, trial
        )
        skipped //= accumulated if resume_from_checkpoint is not None else 1
        self._begin_training(loader, most, resume_from_checkpoint)
        start = time.time()
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        run = _Run(self, start, in_epoch, ignore_keys_for_eval)
        if args.eval_on_start:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        for epoch in range(trained, epochs):
            self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
            first = epoch == trained and resume_from_checkpoint is not None
            run.epoch(epoch, loader, skipped if first else 0, resume_from_checkpoint)
            self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
            run.log_save_evaluate()
            if self.control.should_training_stop:
                break
        self._weights_back()
        return self._finalize_training(trial, samples, start)

    def _begin_training(self, loader: Any, most: int, resume: str | None) -> None:
        """Start the pipeline and the schedule of the learning rate, or go on from a checkpoint."""
        if self._created_lr_scheduler:
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        pipe = self.pipe
        self.create_scheduler(num_training_steps=most)
        if resume is not None:
            state = Path(resume) / STATE
            if state.is_dir():
                pipe.load(newest_good(state)[0])
            else:
                _log.warning("%s has no state of a pipeline: the weights alone are taken", resume)
                pipe.load_state_dict(dict(self.model.state_dict()))
            scheduler = Path(resume) / "scheduler.pt"
            if scheduler.is_file():
                self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self._tr_loss = torch.tensor(0.0)
        self._total_loss_scalar = 0.0

    # -- evaluation -----------------------------------------------------------------------------

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Run the stages on a batch of an evaluation or prediction."""
        del model  # the copy of this process, whose weights are old
        return super().prediction_step(self.pipe, inputs, prediction_loss_only, ignore_keys)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as the Trainer does, and tell the observers of the run."""
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        given = args[0] if args else kwargs.get("eval_dataset")
        several = isinstance(self.eval_dataset if given is None else given, dict)
        if self.pipe._telling is not None and not several:  # of several, each is told of
            self.pipe._telling.evaluated(
                self.pipe.step,
                {
                    name.removeprefix("eval_"): float(value)
                    for name, value in metrics.items()
                    if isinstance(value, int | float)
                },
            )
        return metrics

    # -- checkpoints ----------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model with the weights of now, for `from_pretrained`; of PEFT, the adapter."""
        if self._pipe is not None and self._pipe.state.value == "open":
            self._weights_back()
        super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state of the pipeline, from which it goes on with the same bits."""
        self.pipe.save(Path(output_dir) / STATE)
        torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_best_model(self) -> None:
        """Load the best checkpoint, into the stages too."""
        super()._load_best_model()
        self.pipe.load_state_dict(dict(self.model.state_dict()))


class _Run:
    """The loop over the data: injects mini-batches, and passes results on to the Trainer.

    Args:
        trainer: The trainer.
        start: When training began.
        in_epoch: The number of mini-batches in an epoch.
        ignored: See ``ignore_keys_for_eval`` of `Trainer.train`.
    """

    def __init__(
        self, trainer: PipelineTrainer, start: float, in_epoch: int, ignored: list[str] | None
    ) -> None:
        self._trainer = trainer
        self._start = start
        self._in_epoch = in_epoch
        self._ignored = ignored
        self._pending: deque[tuple[PendingStep, float, float, Mapping[str, Any]]] = deque()
        self._rate: float | None = None
        self._epoch = 0.0

    def epoch(self, number: int, loader: Any, skipped: int, resume: str | None) -> None:
        """Train on a loader once."""
        trainer = self._trainer
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(number)
        step = -1
        for step, inputs in enumerate(_after(loader, skipped), skipped):
            if step == skipped and resume is not None and (skipped or not number):
                trainer._load_rng_state(resume)
            self._inject(inputs, number + (step + 1) / self._in_epoch)
            if self._is_due(step + 1 == self._in_epoch):
                self._drain()
            while len(self._pending) >= trainer.pipe._feeder.credits:
                self._take()
            if self._stops or trainer.state.global_step + len(self._pending) >= self._most:
                break
        self._drain()
        if step < 0:
            _log.warning("epoch %d has no samples; training stops", number)
            trainer.control.should_training_stop = True

    @property
    def _most(self) -> int:
        """The number of updates after which training ends."""
        return int(self._trainer.state.max_steps)

    @property
    def _stops(self) -> bool:
        """Whether a callback has asked to stop."""
        control = self._trainer.control
        return bool(control.should_epoch_stop or control.should_training_stop)

    def _inject(self, inputs: Mapping[str, Any], epoch: float) -> None:
        """Inject a mini-batch, and go on in the schedule of the learning rate."""
        trainer = self._trainer
        args, handler = trainer.args, trainer.callback_handler
        trainer.control = handler.on_step_begin(args, trainer.state, trainer.control)
        rate = trainer._get_learning_rate()
        pending = trainer.pipe.submit(trainer._as_fed(inputs))
        self._pending.append((pending, rate, epoch, inputs))
        if not isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            trainer.lr_scheduler.step()

    def _is_due(self, last: bool) -> bool:
        """Whether the arguments ask for an evaluation or a checkpoint after what is injected."""
        trainer = self._trainer
        args, state = trainer.args, trainer.state
        step = state.global_step + len(self._pending)
        by_step = [
            (args.eval_strategy, state.eval_steps),
            (args.save_strategy, state.save_steps),
        ]
        due = any(
            strategy in (IntervalStrategy.STEPS, SaveStrategy.STEPS) and every and not step % every
            for strategy, every in by_step
        )
        return due or last or step >= self._most

    def _drain(self) -> None:
        """Take all results that are on their way."""
        while self._pending:
            self._take()

    def _take(self) -> None:
        """Wait for the oldest result, and tell the Trainer of it."""
        trainer = self._trainer
        args, handler = trainer.args, trainer.callback_handler
        pending, self._rate, self._epoch, inputs = self._pending.popleft()
        loss = torch.tensor(pending.result().loss)
        if args.logging_nan_inf_filter and not torch.isfinite(loss):
            since = 1 + trainer.state.global_step - trainer._globalstep_last_logged
            trainer._tr_loss += trainer._tr_loss / since
        else:
            trainer._tr_loss += loss
        trainer.current_flos += float(trainer.floating_point_ops(inputs))
        trainer._track_num_input_tokens(inputs)
        trainer.control = handler.on_pre_optimizer_step(args, trainer.state, trainer.control)
        trainer.control = handler.on_optimizer_step(args, trainer.state, trainer.control)
        trainer.state.global_step += 1
        trainer.state.epoch = self._epoch
        trainer.control = handler.on_step_end(args, trainer.state, trainer.control)
        if trainer.control.should_save or trainer.control.should_evaluate:
            wanted = trainer.control.should_save, trainer.control.should_evaluate
            trainer.control.should_save = trainer.control.should_evaluate = False
            self._drain()
            trainer.control.should_save |= wanted[0]
            trainer.control.should_evaluate |= wanted[1]
        self.log_save_evaluate()

    def log_save_evaluate(self) -> None:
        """Let the Trainer log, evaluate and save, if the control says so."""
        trainer = self._trainer
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            None,
            trainer.model,
            None,
            self._epoch,
            self._ignored,
            self._start,
            learning_rate=self._rate,
        )


def _after(loader: Any, skipped: int) -> Iterator[Any]:
    """Yield the mini-batches of a loader after some of them."""
    if not skipped:
        yield from loader
        return
    from accelerate import skip_first_batches

    yield from skip_first_batches(loader, skipped)


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave the random generators of this process as they are."""
    with kept_outside(), torch.random.fork_rng(devices=[]):
        yield
