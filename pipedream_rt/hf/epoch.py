"""The updates of an epoch of a Trainer, over a pipeline.

It is ``Trainer._run_epoch`` of transformers with one difference: an update is only injected here,
and its loss comes later. All else happens at the injection, in the Trainer's order. So callbacks
see the step, the rates and, if they look, the weights of that moment. A run that is stopped at a
step ends with that step. A log is written when its loss and its gradient norm have arrived. Before
an evaluation or a checkpoint everything is awaited; in schedules that flush also before a log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers.optimization
from accelerate import skip_first_batches
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl

from pipedream_rt.coordinator.results import PendingStep
from pipedream_rt.telling import log_of

_log = log_of(__name__)

_BEFORE_THE_STEP = ("on_substep_end", "on_pre_optimizer_step")
_WITH_GRADIENTS = (*_BEFORE_THE_STEP, "on_optimizer_step")
"""Events in which a plain Trainer has gradients; in the first two, weights before the step."""

EVENTS = {
    **dict.fromkeys(_BEFORE_THE_STEP, "reading gradients, and changing weights, is refused"),
    "on_optimizer_step": "reading gradients is refused",
    "on_log": "in asynchronous schedules some steps later, with `global_step` and `epoch` of the "
    "step of which it tells, as soon as loss and norm are there",
}
"""How events differ from those of a plain Trainer."""

_BY_METRICS = (
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    getattr(transformers.optimization, "GreedyLR", torch.optim.lr_scheduler.ReduceLROnPlateau),
)
"""Schedulers that are stepped by the metrics of evaluations, not after each update."""


@dataclass(slots=True)
class _Log:
    """A log that waits for its loss and its norm.

    Attributes:
        step: The Trainer's ``global_step`` that it is about.
        state: Values of the Trainer's state at that step.
        loss: The sum of the losses since the previous log, when they have arrived.
    """

    step: int
    state: dict[str, Any]
    rate: float
    loss: Tensor | None = None


@dataclass(slots=True)
class _Injected:
    """A mini-batch in flight.

    Attributes:
        pending: Its result to come; None where the script has computed the loss.
        factor: Divisor of the loss of each of its parts.
        since: The number of mini-batches since the last log, including this one.
        losses: The losses of its parts, where the script has computed them.
        log: The log that is due after it.
    """

    pending: PendingStep | None
    factor: int
    since: int
    losses: Sequence[Tensor] = ()
    log: _Log | None = None

    @property
    def has_come(self) -> bool:
        """Whether the losses are there."""
        return self.pending is None or self.pending.outcome is not None

    def summands(self) -> list[Tensor]:
        """Wait for the losses; return what the Trainer adds up."""
        if self.pending is None:
            return list(self.losses)
        losses, share = map(torch.tensor, self.pending.result().losses), 1 / self.factor
        shares = [each for each in self.pending.shares if each]
        # A division, as the Trainer has it, rounds differently from a multiplication.
        return [
            loss / self.factor if of_loss == share else loss * of_loss
            for loss, of_loss in zip(losses, shares, strict=True)
        ]


class Updates:
    """The updates of one call of ``train``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._on_way: deque[_Injected] = deque()
        self._logs: deque[_Log] = deque()  # they have their losses, and wait for their norms
        self._logged = trainer.state.global_step
        self._rate: float | None = None
        self._of_norm, self._norm = -1, None  # the step of a norm, and the norm
        # Whether a method that the Trainer calls at each step is overridden.
        names, cls = ("_maybe_log_save_evaluate", "_get_grad_norm"), type(trainer)
        self._watched = any(getattr(cls, name) is not getattr(Trainer, name) for name in names)

    def epoch(
        self,
        epoch: int,
        loader: Any,
        steps_in_epoch: int,
        updates: int,
        asked: Mapping[str, Any],
        resumed: str | None,
        skipped: int,
    ) -> None:
        """Train on a loader once.

        The loader yields parts of mini-batches: ``steps_in_epoch`` counts parts, ``updates`` counts
        mini-batches, and ``skipped`` parts were trained on before ``resumed``, the checkpoint.
        ``asked`` has what logs and evaluations need.
        """
        trainer, args = self._trainer, self._trainer.args
        each, step, first, states = args.gradient_accumulation_steps, -1, 0, False
        if resumed is not None:
            if skipped > 0 and not args.ignore_data_skip:
                loader = skip_first_batches(loader, skipped)
                step, first, states = skipped - 1, skipped // each, True
            elif skipped == 0:
                trainer._load_rng_state(resumed)
        _set_epoch(loader, epoch)
        items = iter(loader)
        rest = steps_in_epoch % each or each
        for update in range(first, updates):
            count = each if update != updates - 1 else rest
            parts, number = trainer.get_batch_samples(items, count, args.device)
            trainer.current_gradient_accumulation_steps = len(parts)
            if states:  # only now, since skipping parts draws random numbers too
                trainer._load_rng_state(resumed)
                states = False
            if not parts:
                continue
            step += len(parts)
            whole = (step + 1) % each == 0 or step + 1 == steps_in_epoch
            self._update(parts, number, whole, epoch + (step + 1) / steps_in_epoch, asked)
            if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                break
        if step < 0:
            _log.warning(
                "there was no sample in epoch %d, so training stops at step %d: the dataset has "
                "fewer than max_steps=%d updates need",
                epoch, trainer.state.global_step, trainer.state.max_steps,
            )  # fmt: skip
            trainer.control.should_training_stop = True
        self.await_all(asked)
        trainer.control = self._event("on_epoch_end")
        self._log_save_evaluate(asked)

    # -- injecting ------------------------------------------------------------------------------

    def _update(
        self, parts: Sequence[Any], number: Any, whole: bool, epoch: float, asked: Mapping[str, Any]
    ) -> None:
        """Inject a mini-batch, with the events in the Trainer's order."""
        trainer, state = self._trainer, self._trainer.state
        for i, inputs in enumerate(parts):
            if i == 0:
                trainer.control = self._event("on_step_begin")
            trainer.model.train()
            if callable(train := getattr(trainer.optimizer, "train", None)):
                train()
            trainer.current_flos += float(trainer.floating_point_ops(inputs))
            trainer._track_num_input_tokens(inputs)
            if i < len(parts) - 1 or not whole:
                trainer.control = self._event("on_substep_end")
                if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                    return
        if not whole:
            _log.warning(
                "the last %d of the samples of a stream are less than gradient_accumulation_steps="
                "%d mini-batches, so no update is made of them",
                len(parts), trainer.args.gradient_accumulation_steps,
            )  # fmt: skip
            return
        trainer.control = self._event("on_pre_optimizer_step")
        since = 1 + state.global_step - self._logged
        if trainer._in_script:
            injected = _Injected(None, 1, since, trainer._computed(parts, number))
        else:
            pending, factor = trainer._submitted(parts, number)
            injected = _Injected(pending, factor, since)
        self._on_way.append(injected)
        trainer.control = self._event("on_optimizer_step")
        self._rate = trainer._get_learning_rate()
        if not isinstance(trainer.lr_scheduler, _BY_METRICS):
            trainer.lr_scheduler.step()
        state.global_step += 1
        state.epoch = epoch
        trainer.control = self._event("on_step_end")
        self._come_or_wait(self._rate, asked)

    def _event(self, name: str) -> TrainerControl:
        """Call the callbacks for an event."""
        trainer, theirs = self._trainer, getattr(TrainerCallback, name)
        handler, live = trainer.callback_handler, trainer._live
        looks = name in _WITH_GRADIENTS and any(
            getattr(type(callback), name, theirs) is not theirs for callback in handler.callbacks
        )
        event = "" if name not in _BEFORE_THE_STEP else name
        with live.with_gradients(event) if looks else nullcontext():
            control: TrainerControl = getattr(handler, name)(
                trainer.args, trainer.state, trainer.control
            )
        return control

    # -- results --------------------------------------------------------------------------------

    def _come_or_wait(self, rate: float, asked: Mapping[str, Any]) -> None:
        """Take the results that have arrived; or await all, if an evaluation or a save is due."""
        trainer, control = self._trainer, self._trainer.control
        logs = control.should_log and trainer.state.global_step > self._logged
        waits = control.should_evaluate or control.should_save
        if waits or ((logs or self._watched) and trainer.pipe.plan.flushes):
            self.await_all(asked)
            self._log_save_evaluate(asked)
            return
        if logs:
            self._logged = trainer.state.global_step
            self._on_way[-1].log = _Log(self._logged, self._state(), rate)
        control.should_log = False
        while self._on_way and self._on_way[0].has_come:
            self._take()
        self._write(asked, wait=False)
        if self._watched:
            self._log_save_evaluate(asked)

    def await_all(self, asked: Mapping[str, Any]) -> None:
        """Wait for everything in flight, and write its logs."""
        while self._on_way:
            self._take()
        self._write(asked, wait=True)

    def _take(self) -> None:
        """Wait for the oldest result, and add up its losses as the Trainer does."""
        trainer, injected = self._trainer, self._on_way.popleft()
        with trainer._live.lock:
            values = injected.summands()
        for value in values:
            if trainer.args.logging_nan_inf_filter and not torch.isfinite(value):
                value = trainer._tr_loss / injected.since
            trainer._tr_loss += value
        if injected.log is not None:
            injected.log.loss = trainer._tr_loss.clone()
            trainer._tr_loss -= trainer._tr_loss
            self._logs.append(injected.log)

    def _write(self, asked: Mapping[str, Any], *, wait: bool) -> None:
        """Write the logs whose norms are known; all of them after a wait."""
        trainer = self._trainer
        if not self._logs:
            return
        norms = trainer._norms(flush=wait)
        while self._logs:
            log = self._logs[0]
            norm = norms.get(log.step)
            if norm is None and not wait:
                return
            self._logs.popleft()
            with self._as_of(log):
                self._say(log, norm, asked)

    def _say(self, log: _Log, norm: float | None, asked: Mapping[str, Any]) -> None:
        """Have the Trainer write one log, but neither evaluate nor save."""
        trainer, control = self._trainer, self._trainer.control
        others = control.should_evaluate, control.should_save
        control.should_log, control.should_evaluate, control.should_save = True, False, False
        self._let(log.loss, self._shown(norm), log.rate, asked)
        control = trainer.control
        control.should_evaluate |= others[0]
        control.should_save |= others[1]

    def _log_save_evaluate(self, asked: Mapping[str, Any]) -> None:
        """Have the Trainer log, evaluate and save as its control says."""
        trainer, step = self._trainer, self._trainer.state.global_step
        logs = trainer.control.should_log and step > self._logged
        if self._of_norm != step and (logs or (self._watched and trainer.pipe.plan.flushes)):
            norms = trainer._norms(flush=True)
            self._of_norm, self._norm = step, self._shown(norms.get(step))
        if logs:
            self._logged = step
        norm = self._norm if self._of_norm == step else None
        self._let(trainer._tr_loss, norm, self._rate, asked)

    def _let(self, loss: Any, norm: Any, rate: float | None, asked: Mapping[str, Any]) -> None:
        """Call the Trainer's method for logs, evaluations and checkpoints."""
        trainer = self._trainer
        trainer._maybe_log_save_evaluate(
            loss,
            norm,
            trainer.model,
            asked["trial"],
            trainer.state.epoch,
            asked["ignore"],
            asked["start"],
            learning_rate=rate,
        )

    def _shown(self, norm: float | None) -> Any:
        """Return a norm as the Trainer shows it; None if it is not known."""
        if norm is None:
            return None
        with self._trainer._live.with_gradients():
            return self._trainer._get_grad_norm(self._trainer.model, grad_norm=torch.tensor(norm))

    def _state(self) -> dict[str, Any]:
        """Return the values of the Trainer's state that go into a log."""
        state = self._trainer.state
        names = ("global_step", "epoch", "num_input_tokens_seen")
        return {name: getattr(state, name) for name in names}

    @contextmanager
    def _as_of(self, log: _Log) -> Iterator[None]:
        """Put the state of a log into the Trainer while the body runs."""
        state, now = self._trainer.state, self._state()
        for name, value in log.state.items():
            setattr(state, name, value)
        try:
            yield
        finally:
            for name, value in now.items():
                setattr(state, name, value)


def _set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader, and of the sampler inside accelerate's wrapper."""
    inner = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    for each in (loader, inner):
        if (set_in := getattr(each, "set_epoch", None)) is not None:
            set_in(epoch)
