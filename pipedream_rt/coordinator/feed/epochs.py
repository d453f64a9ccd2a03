"""The loop over a loader that keeps the pipe full, and the script's place in the loader."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from pipedream_rt.batches.items import Prepare, require_loader
from pipedream_rt.checkpoint import Manifest
from pipedream_rt.coordinator.checkpointing.checkpointer import result_of
from pipedream_rt.coordinator.feed.feeder import Feeder
from pipedream_rt.coordinator.feed.loading import Loading, begin_epoch_at, between_epochs
from pipedream_rt.coordinator.results import PendingStep, StepResult
from pipedream_rt.errors import ConfigError, NonFiniteLoss
from pipedream_rt.stage.evaluation import Metric
from pipedream_rt.telling import log_of

T = TypeVar("T")

_log = log_of(__name__)


class Script(Protocol):
    """The part of `ScriptLoss` that an iteration over outputs uses."""

    def take(self) -> Any:
        """Wait for the output of the oldest mini-batch on its way."""

    def answer(self) -> int:
        """Give the gradients that lie on it; return the number of the mini-batch."""

    def leave(self) -> None:
        """Skip the updates of the mini-batches on their way."""

    def require_closed(self, what: str) -> None:
        """Refuse something while an update of forwards is open."""


class State(Protocol):
    """The part of `RunState` that an iteration over outputs uses."""

    def rest_is_due(self) -> bool:
        """Whether a checkpoint waits until nothing is on its way."""

    def mini_batch_was_fed(self) -> None:
        """Make the checkpoint."""


def _say_if_not_drawn(what: str, begun: list[bool]) -> None:
    """Warn if a script has begun an epoch and drawn nothing; ``begun`` is then empty."""
    if not begun:
        _log.warning(
            "%s was called, and nothing was trained: it trains while one iterates over it, as in "
            "`for result in pipe.%s(loader): ...`",
            what, what,
        )  # fmt: skip


class Epoch(Generator[T, None, None]):
    """The iteration over an epoch; its length is that of its loader."""

    def __init__(self, what: str, results: Generator[T, None, None], loader: object) -> None:
        self._results, self._loader = results, loader
        self._begun: list[bool] = []
        weakref.finalize(self, _say_if_not_drawn, what, self._begun).atexit = False

    def __len__(self) -> int:
        """Return the length of the loader; TypeError if it has none."""
        length: int = len(self._loader)  # type: ignore[arg-type]
        return length

    def __bool__(self) -> bool:
        return True  # as any generator; by default `bool` would ask `__len__`, which may raise

    def __next__(self) -> T:
        # That of the base is a frame of the standard library, which a short traceback would keep.
        return self.send(None)

    def send(self, value: None) -> T:
        if not self._begun:
            self._begun.append(True)
        return self._results.send(value)

    def throw(self, *error: Any) -> T:
        return self._results.throw(*error)

    def close(self) -> None:
        """Leave the epoch; injected mini-batches are trained on all the same."""
        self._results.close()


class Epochs:
    """The epochs of a run, and the script's place in the loader of the present one.

    Attributes:
        number: Number of epochs that have ended.
        seen: Number of the run's mini-batches whose results the script was given; `Feeder.step`
            counts those that were injected.
    """

    def __init__(self, feeder: Feeder) -> None:
        self._feeder = feeder
        self.number = self.seen = 0
        self._loading: Loading | None = None
        self._last_loader: Iterable[Any] | None = None
        self._resumed: Manifest | None = None

    def train(
        self,
        loader: Iterable[Any],
        injected: Callable[[], None],
        prepare: Prepare | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> Generator[StepResult, None, None]:
        """Train on every mini-batch of a loader; see `Pipeline.train_epoch`."""
        feeder, packed = self._feeder, self._feeder.packed(metrics)
        with self._under_way(loader, "train_epoch") as items:
            try:
                while True:
                    while len(items.pending) >= feeder.credits:
                        yield self._next(items)
                    if not items.fetched:
                        break
                    batch = feeder.items.batch(items.fetched.pop(), prepare)
                    items.pending.append(feeder.inject(batch, packed))
                    injected()
                    items.fetch()  # now, while the pipe computes, rather than after the result
                while items.pending:
                    yield self._next(items)
            except BaseException as error:
                if items.pending and feeder.is_open:
                    left = isinstance(error, GeneratorExit)  # as by a break
                    _log.log(
                        logging.INFO if left else logging.WARNING,
                        "epoch %d was %s after result %d: the mini-batches up to %d are trained "
                        "on, and their results are not handed out",
                        self.number, "left" if left else f"ended by {type(error).__name__}",
                        self.seen - 1, feeder.step - 1,
                    )  # fmt: skip
                raise

    def outputs(
        self,
        loader: Iterable[Any],
        script: Script,
        state: State,
        prepare: Prepare | None = None,
    ) -> Generator[tuple[Any, Any], None, None]:
        """Hand out the output of every mini-batch of a loader; see `Pipeline.outputs`."""
        feeder, on_way, rests = self._feeder, deque[Any](), False
        failed: Exception | None = None
        with self._under_way(loader, "outputs") as items:
            try:
                while True:
                    # A checkpoint is of a moment at which the script owes no gradient: what it
                    # keeps itself is then as old as the stages are.
                    while (
                        items.fetched
                        and not rests
                        and failed is None
                        and len(feeder.pending) < feeder.credits
                    ):
                        script.require_closed("the next mini-batch")
                        given = items.fetched.pop()
                        try:
                            batch = feeder.items.inputs(given, prepare)
                            feeder.inject(batch._replace(target=None))
                        except Exception as error:  # the mini-batches before come first
                            failed = error
                            break
                        on_way.append(given)
                        rests = state.rest_is_due()
                        items.fetch()
                    if feeder.pending:
                        yield script.take(), on_way.popleft()
                        self.seen = script.answer() + 1
                    elif failed is not None:
                        raise failed
                    elif rests:
                        rests = False
                        state.mini_batch_was_fed()
                    else:
                        break
            except GeneratorExit:
                try:
                    self.seen = script.answer() + 1
                except NonFiniteLoss as error:  # nobody would see it
                    _log.error("%s", error)
                raise
            finally:
                script.leave()

    @contextmanager
    def _under_way(self, loader: Iterable[Any], what: str) -> Iterator[Loading]:
        """Begin an epoch over a loader, which ends with the body."""
        require_loader(loader, what)
        if self._loading is not None:
            raise ConfigError(
                f"epoch {self.number} is under way: an iteration over {what} has not ended. "
                "Two at a time (nested, or in zip) would mix their mini-batches; end the first "
                f"one, or close it: epoch = pipe.{what}(...), then epoch.close()"
            )
        self._loading = items = self._load_from(loader)
        try:
            yield items
            self._feeder.script.end()
        finally:
            self._loading = None
            self.number += 1
        if items.is_empty:
            _log.warning(
                "the loader of epoch %d yielded nothing. A generator or an iterator can be used "
                "once: give %s something that begins anew, as a list or a DataLoader",
                self.number - 1, what,
            )  # fmt: skip
        if items.error is not None:
            raise items.error

    def _next(self, items: Loading) -> StepResult:
        """Wait for the next result, and count it, as the script is given it."""
        result = items.pending[0].result()
        items.pending.popleft()  # now: a wait that a signal handler has ended leaves it pending
        self.seen = result.step + 1
        return result

    def _load_from(self, loader: Iterable[Any]) -> Loading:
        """Begin an epoch over a loader, or go on at the place where a checkpoint was made."""
        resumed, place = self._resumed, self._place_of_resume()
        self._last_loader = loader
        if place is not None and place["drawn"] is None:  # it stood between two epochs
            begin_epoch_at(place, loader)
            place = None
        if place is None or resumed is None:
            return Loading(loader, self.number)
        unseen = [PendingStep.finished(self._feeder, result_of(r)) for r in resumed.results]
        return Loading(loader, self.number, place, unseen)

    def _place_of_resume(self) -> dict[str, Any] | None:
        """Return the place in its loader at which the next epoch goes on; None if it begins."""
        resumed = self._resumed
        if resumed is None or resumed.place is None or resumed.step != self._feeder.step:
            return None
        return resumed.place if resumed.place["epoch"] == self.number else None

    @property
    def passed(self) -> int:
        """The number of results of the next epoch that came before the run was resumed."""
        place = self._place_of_resume()
        if place is None or place["drawn"] is None or self._resumed is None:
            return 0
        drawn: int = place["drawn"]
        return drawn - len(self._resumed.results)

    def resume(self, manifest: Manifest) -> None:
        """Let the next epoch go on at the place where a checkpoint was made."""
        self._resumed = manifest
        self.seen = manifest.step - len(manifest.results)
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
