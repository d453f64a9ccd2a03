"""Shorter tracebacks for errors whose cause is not in the frames of this package.

A worker's error tells where it happened by itself, and Ctrl-C happens wherever the script waits.
The frames of the package between the script and the wait say nothing about either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from pipedream_rt.errors import PipelineError

P = ParamSpec("P")
T = TypeVar("T")

_PACKAGE = str(Path(__file__).resolve().parents[2])


def shorten(error: BaseException | None) -> None:
    """Cut the frames of this package out of the tracebacks of an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # Other errors may be bugs of this package, and keep its frames.
        if isinstance(error, PipelineError | KeyboardInterrupt | SystemExit):
            error.__traceback__ = _without_ours(error.__traceback__)
        error = error.__cause__


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback that ends before the first frame of this package."""
    kept: list[TracebackType] = []
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            break
        kept.append(traceback)
        traceback = traceback.tb_next
    following: TracebackType | None = None
    for each in reversed(kept):
        following = TracebackType(following, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return following


class ShorterTracebacks:
    """Shortens the traceback of an error that leaves the body.

    A class, since `contextlib.contextmanager` would set the traceback back as it was.
    """

    def __enter__(self) -> None:
        """Do nothing yet."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        shorten(error)


def with_shorter_tracebacks(call: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose errors leave without the frames of this package."""

    @functools.wraps(call)
    def shorter(*args: P.args, **kwargs: P.kwargs) -> T:
        with ShorterTracebacks():
            return call(*args, **kwargs)

    return shorter
