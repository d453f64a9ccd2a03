"""A progress bar for loops over items: how many have come, how long they took, and the loss."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from importlib import import_module
from typing import Any, TypeVar

from rich import console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pipedream_rt.observers.page.charts import number_text
from pipedream_rt.telling import harmless, is_notebook, log_of

_log = log_of(__name__)

T = TypeVar("T")

_EVERY_S = 0.1
"""Seconds between two drawings."""


def with_bar(
    items: Iterable[T],
    what: str,
    total: int | None,
    words: Callable[[T], str] | None = None,
    passed: int = 0,
) -> Generator[T, None, None]:
    """Yield items, and show on standard error, or in the notebook, how many have come.

    ``total`` is None if their number is not known; ``words`` says something of the last item;
    ``passed`` of them came in a run from which this one goes on.
    """
    bar = _Bar(what, total, words, passed)
    with closing(bar), closing(_as_generator(items)) as drawn:
        for item in drawn:
            bar.advance(item)
            yield item


class Console(console.Console):
    """Where bars are drawn."""

    def on_broken_pipe(self) -> None:
        """Raise the error: rich ends the program, and takes its standard output away."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class _Bar:
    """A bar that is drawn by the thread that calls; after an error it is drawn no more."""

    def __init__(
        self, what: str, total: int | None, words: Callable[[Any], str] | None, passed: int
    ) -> None:
        self._what = what
        self._words = words
        self._drawn_at = 0.0
        self._progress: Progress | None = None
        self._shown: Any = None  # in a notebook, where the bar is
        columns = (
            TextColumn("{task.description}"),
            BarColumn() if total is not None else SpinnerColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            *([TimeRemainingColumn()] if total is not None else []),
        )
        with harmless(self._give_up):
            # rich's own thread would outlive the bar for a moment.
            made = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
            self._progress = made
            self._task = made.add_task(what, total=total, completed=passed, words="")
            if is_notebook():
                # rich alone would need ipywidgets there.
                self._shown = import_module("IPython.display").display(made, display_id=True)
            else:
                made.start()

    def advance(self, item: Any) -> None:
        """Count an item, and draw the bar if it is time."""
        if self._progress is None:
            return
        with harmless(self._give_up):
            words = "" if self._words is None else self._words(item)
            self._progress.update(self._task, advance=1, words=words)
            if time.monotonic() - self._drawn_at >= _EVERY_S:
                self._draw(self._progress)
                self._drawn_at = time.monotonic()

    def close(self) -> None:
        """Draw the bar for the last time. Idempotent."""
        if self._progress is not None:
            with harmless(self._give_up):
                if self._shown is None:
                    self._progress.stop()
                else:
                    self._draw(self._progress)

    def _draw(self, progress: Progress) -> None:
        """Show how far it is."""
        if self._shown is None:
            progress.refresh()
        else:
            self._shown.update(progress)

    def _give_up(self, error: BaseException) -> None:
        """Say why there is no bar from now on."""
        progress, self._progress = self._progress, None
        if progress is not None:
            with harmless():
                progress.stop()  # gives standard output back, which it has taken
        _log.warning(
            "the bar %r is drawn no more (%s: %s), and the run goes on",
            self._what, type(error).__name__, error,
        )  # fmt: skip


def _as_generator(items: Iterable[T]) -> Generator[T, None, None]:
    """Return items as a generator. If they are one, it is that one: it is closed with the bar."""
    if isinstance(items, Generator):
        return items
    return (item for item in items)


def count_of(items: Any) -> int | None:
    """Return how many items a loader has; None if it does not say."""
    try:
        return len(items)
    except TypeError:
        return None


def loss_words(result: Any) -> str:
    return f"loss {number_text(result.loss)}"


class Barred:
    """A loader with a bar that counts its items as they are drawn."""

    def __init__(self, loader: Iterable[Any], what: str) -> None:
        self._loader = loader
        self._what = what

    def __iter__(self) -> Generator[Any, None, None]:
        return with_bar(self._loader, self._what, count_of(self._loader))
