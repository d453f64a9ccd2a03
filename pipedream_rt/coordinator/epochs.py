"""The loop over a loader that keeps the pipe full, and the place of the script in it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

from pipedream_rt.checkpoint import Manifest
from pipedream_rt.coordinator.checkpointer import result_of
from pipedream_rt.coordinator.feeder import Feeder, pair_of
from pipedream_rt.coordinator.loading import Loading, begin_epoch_at, between_epochs
from pipedream_rt.coordinator.results import PendingStep, StepResult


class Epochs:
    """The epochs of a run: how many have ended, and the place in the loader of the present one.

    Args:
        feeder: Feeds the mini-batches.

    Attributes:
        number: Number of epochs that have ended.
    """

    def __init__(self, feeder: Feeder) -> None:
        """Begin with epoch 0."""
        self._feeder = feeder
        self.number = 0
        self._loading: Loading | None = None
        self._last_loader: Iterable[Any] | None = None
        self._resumed: Manifest | None = None

    def train(
        self, loader: Iterable[tuple[Any, Any]], injected: Callable[[], None]
    ) -> Generator[StepResult, None, None]:
        """Train on every mini-batch of a loader; see `Pipeline.train_epoch`.

        Args:
            loader: Yields pairs ``(x, y)``.
            injected: Called after each injection of a mini-batch.

        Yields:
            The result of each mini-batch, in order.

        Raises:
            ConfigError: An item of the loader is no pair, or cannot be split.
            Exception: What the loader raised, after the results of the items before it.
        """
        feeder = self._feeder
        self._loading = items = self._load_from(loader)
        try:
            while True:
                while len(items.pending) >= feeder.credits:
                    yield items.pending.popleft().result()
                if not items.fetched:
                    break
                items.pending.append(feeder.inject(*pair_of(items.fetched.pop())))
                injected()
                items.fetch()  # now, while the pipe computes, rather than after the result
            while items.pending:
                yield items.pending.popleft().result()
        finally:
            self._loading = None
            self.number += 1
        if items.error is not None:
            raise items.error

    def _load_from(self, loader: Iterable[Any]) -> Loading:
        """Begin an epoch over a loader, or go on at the place where a checkpoint was made."""
        resumed, place = self._resumed, None
        if resumed is not None and resumed.place is not None and resumed.step == self._feeder.step:
            place = resumed.place if resumed.place["epoch"] == self.number else None
        self._last_loader = loader
        if place is not None and place["drawn"] is None:
            begin_epoch_at(place, loader)
            place = None
        if place is None or resumed is None:
            return Loading(loader, self.number)
        unseen = [PendingStep.finished(self._feeder, result_of(r)) for r in resumed.results]
        return Loading(loader, self.number, place, unseen)

    def resume(self, manifest: Manifest) -> None:
        """Let the next epoch go on at the place where a checkpoint was made."""
        self._resumed = manifest
        if manifest.place is not None:
            self.number = manifest.place["epoch"]

    def place(self) -> dict[str, Any]:
        """Return the place of the script in its loader, for a checkpoint."""
        if self._loading is not None:
            return self._loading.place()
        return between_epochs(self.number, self._last_loader)

    def unseen(self) -> list[PendingStep]:
        """Return the mini-batches so far whose results the script has not seen."""
        return list(self._feeder.pending if self._loading is None else self._loading.pending)
