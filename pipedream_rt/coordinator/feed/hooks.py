"""What a run is told of the mini-batches that are fed."""

from __future__ import annotations

from pipedream_rt.batches.items import Batch
from pipedream_rt.batches.micro_batches import CutBatch
from pipedream_rt.coordinator.distributed_optimizer import DistributedOptimizer
from pipedream_rt.coordinator.results import StepResult


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
