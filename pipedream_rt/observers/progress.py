"""A progress bar for loops over items: how many have come, how long they took, and the loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import Any, TypeVar

from rich.console import Console
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

T = TypeVar("T")

_EVERY_S = 0.1
"""Seconds between two drawings."""


def with_bar(
    items: Iterable[T], what: str, total: int | None, words: Callable[[T], str] | None = None
) -> Generator[T, None, None]:
    """Yield items, and show on standard error, or in the notebook, how many have come.

    ``total`` is None if their number is not known; ``words`` says something of the last item.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn() if total is not None else SpinnerColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
        *([TimeRemainingColumn()] if total is not None else []),
    )
    # Drawn by this thread alone: rich's own thread would outlive the bar for a moment.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task, drawn_at = bar.add_task(what, total=total, words=""), 0.0
        with closing(_as_generator(items)) as drawn:
            for item in drawn:
                bar.update(task, advance=1, words="" if words is None else words(item))
                if time.monotonic() - drawn_at >= _EVERY_S:
                    bar.refresh()
                    drawn_at = time.monotonic()
                yield item


def _as_generator(items: Iterable[T]) -> Generator[T, None, None]:
    """Return items as a generator: the one that they are, so that it is closed with the bar."""
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
    """Return the loss of a result in words."""
    return f"loss {number_text(result.loss)}"


class Barred:
    """A loader with a bar that counts its items as they are drawn."""

    def __init__(self, loader: Iterable[Any], what: str) -> None:
        self._loader = loader
        self._what = what

    def __iter__(self) -> Generator[Any, None, None]:
        return with_bar(self._loader, self._what, count_of(self._loader))
