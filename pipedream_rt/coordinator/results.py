"""Mini-batches on their way through the pipe, and their results."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.message import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of training on one mini-batch.

    Attributes:
        step: Number of the mini-batch, 0-based; its update makes weight version ``step + 1``.
        loss: Mean loss over the mini-batch's samples, or over what else its micro-batches weigh;
            NaN where the script computes it.
        losses: Loss of each micro-batch, in order, without those that weigh nothing.
        metrics: By name, what the metrics of `Pipeline.train_epoch` say, and the parts of a loss
            that is a dict: means over the micro-batches, weighed as their losses are. NaN for a
            metric that gave no number.
        versions: Weight version that the last micro-batch read, by stage.
        staleness: Number of updates between the oldest weight version that was read and the one
            that the gradient is applied to; 0 in schedules that flush.
        busy_s: Seconds that each stage has computed since its worker was started.
        processor_s: How many of them its thread had a core; fewer where others use the cores too.
        process_s: Seconds that the process of each stage has had of all cores, messages and its
            start included.
        fingerprint: A number, in hex, for the weights that the last micro-batch read and the
            buffers behind it, on all stages; None where the pipeline was not asked for one. Equal
            runs have equal ones.
    """

    step: int
    loss: float
    losses: tuple[float, ...]
    versions: tuple[int, ...]
    staleness: int
    busy_s: tuple[float, ...]
    processor_s: tuple[float, ...] = ()
    process_s: tuple[float, ...] = ()
    fingerprint: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """The oldest weight version that the last micro-batch read: that of the first stage."""
        return min(self.versions)


class Steps(int):
    """The number of mini-batches so far; called, it closes an update, as an optimizer's step."""

    _close: weakref.WeakMethod[Callable[[bool], None]]

    @classmethod
    def of(cls, number: int, close: Callable[[bool], None]) -> Steps:
        """Return a number that calls a method where it is called, and keeps no object alive."""
        made = cls(number)
        made._close = weakref.WeakMethod(close)
        return made

    def __call__(self, *args: Any, update: bool = True) -> None:
        """Close the update of the forwards since the last call; see `Pipeline.step`."""
        if args and not (len(args) == 1 and isinstance(args[0], bool)):
            raise ConfigError(
                "step() closes an update of forwards by hand, and takes no mini-batch and no loss: "
                "to train on one, call pipe.submit(x, y).result(), or iterate over "
                "pipe.train_epoch(loader)"
            )
        if (close := self._close()) is not None:
            close(*args or (update,))

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """Pickle, and copy, the number alone."""
        return int, (int(self),)


class LossSource(Protocol):
    """The part of a pipeline that a pending step uses."""

    def collect_oldest(self) -> None:
        """Wait for the losses of the oldest mini-batch on its way, and set its outcome."""

    def has_losses(self, pending: PendingStep) -> bool:
        """Whether the losses of a mini-batch have all arrived."""


class PendingStep:
    """A mini-batch on its way; `Pipeline.submit` returns it.

    Args:
        source: The pipeline, which takes the losses.
        step: Number of the mini-batch, 0-based.
        first: Position of its first micro-batch.
        shares: What each of its micro-batches weighs, with the mini-batch as 1.
        samples: The number of samples of each of its micro-batches.

    Attributes:
        step: Number of the mini-batch, 0-based.
        first: Position of its first micro-batch.
        shares: What each of its micro-batches weighs, with the mini-batch as 1.
        samples: The number of samples of each of its micro-batches.
        outcome: The result; None until the losses were taken.
        taken: The messages of its micro-batches that were taken, until the last one is.
    """

    def __init__(
        self,
        source: LossSource,
        step: int,
        first: int,
        shares: list[float],
        samples: Sequence[int] = (),
    ) -> None:
        self._source = source
        self.step = step
        self.first = first
        self.shares, self.samples = shares, samples
        self.outcome: StepResult | None = None
        self.taken: list[Message] = []

    def __repr__(self) -> str:
        return f"<PendingStep {self.step}, {'on its way' if self.outcome is None else 'ended'}>"

    def result(self) -> StepResult:
        """Wait for the losses of the mini-batch.

        Returns:
            The result.

        Raises:
            StageFailed: An action raised an error on a stage.
            WorkerLost: A worker died, and the run did not recover from it.
            PoisonedMicroBatch: The same action failed too often.
            MessageTimeout: The losses did not come in time.
            PipelineClosed: The pipeline was closed before.
        """
        while self.outcome is None:
            self._source.collect_oldest()
        return self.outcome

    @classmethod
    def finished(cls, source: LossSource, outcome: StepResult) -> PendingStep:
        """Return a pending step whose result is known, as after a restart of the script."""
        pending = cls(source, outcome.step, 0, [])
        pending.outcome = outcome
        return pending

    def done(self) -> bool:
        """Whether `result` would return at once. Never blocks."""
        return self.outcome is not None or self._source.has_losses(self)
