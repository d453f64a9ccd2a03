"""What a training step gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What became of one mini-batch.

    Attributes:
        step: Number of the mini-batch, 0-based; its update makes version ``step + 1``.
        loss: Mean over its samples (each micro-batch weighs its share).
        losses: Of its micro-batches, in order.
        versions: Weight version that its last micro-batch read, by stage.
        staleness: Updates between the oldest of the versions read and the one that its gradient
            is applied to; 0 in schedules that flush.
        busy_s: Seconds that each stage has computed since its workers were started.
    """

    step: int
    loss: float
    losses: tuple[float, ...]
    versions: tuple[int, ...]
    staleness: int
    busy_s: tuple[float, ...]

    @property
    def version(self) -> int:
        """The oldest version read: the first stage's."""
        return min(self.versions)


class LossSource(Protocol):
    """What a pending step needs of its pipeline."""

    def collect_oldest(self) -> None:
        """Wait for the losses of the oldest mini-batch on its way and set its outcome."""

    def has_losses(self, pending: PendingStep) -> bool:
        """Whether the losses of a mini-batch have all arrived."""


class PendingStep:
    """A mini-batch on its way; `Pipeline.submit` returns it."""

    def __init__(self, source: LossSource, step: int, first: int, sizes: list[int]) -> None:
        """Args: source, step: Whose. first: Position of the first part. sizes: Of the parts."""
        self._source = source
        self.step = step
        self.first = first
        self.sizes = sizes
        self.outcome: StepResult | None = None

    def result(self) -> StepResult:
        """Wait for the losses of the mini-batch.

        Returns:
            The result.

        Raises:
            StageFailed: An action raised, at any stage.
            WorkerLost: A worker died.
            PipelineClosed: The pipeline was closed before.
        """
        while self.outcome is None:
            self._source.collect_oldest()
        return self.outcome

    @classmethod
    def finished(cls, source: LossSource, outcome: StepResult) -> PendingStep:
        """Return one whose result is known, as after a restart of the script."""
        pending = cls(source, outcome.step, 0, [])
        pending.outcome = outcome
        return pending

    def done(self) -> bool:
        """Whether `result` would return at once. Never blocks."""
        return self.outcome is not None or self._source.has_losses(self)
