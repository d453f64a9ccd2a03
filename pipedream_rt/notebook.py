"""Pipelines in notebooks: cells that run again, Ctrl-C, and how objects are shown.

Nothing here acts outside IPython.

- People run a cell again without closing the pipeline that it has opened, and its workers would
  stay. So a cell closes the pipelines of earlier cells.
- Ctrl-C in the middle of a mini-batch leaves it fed in part, and so ends a pipeline. In a notebook
  it is held back and raised between two mini-batches, so that the pipeline can be used afterwards.
  A second Ctrl-C is raised at once.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, Protocol, TypeVar

from pipedream_rt.telling import log_of, shell

_log = log_of(__name__)

T = TypeVar("T")


class Open(Protocol):
    """A pipeline, as far as it matters here."""

    def close(self) -> object:
        """End its workers."""


_opened: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""By pipeline, the number of the cell that opened it."""


def _cell_of(found: Any) -> int:
    """Return the number of the cell that runs, as it stands beside it."""
    # By `execution_count` newer versions of IPython mean the next one.
    number: int = found.displayhook.prompt_count
    return number


def close_earlier() -> None:
    """Close the open pipelines of earlier cells, with a warning."""
    found = shell()
    if found is None:
        return
    register(found)
    for pipeline, cell in list(_opened.items()):
        if cell != _cell_of(found) and pipeline.state.value == "open":
            _log.warning(
                "%r of cell %d is closed, as this cell opens another one; to have both, open both "
                "in one cell",
                pipeline,
                cell,
            )
            pipeline.close()


def remember(pipeline: Open) -> None:
    """Note that this cell has opened a pipeline."""
    found = shell()
    if found is not None:
        _opened[pipeline] = _cell_of(found)


# -- Ctrl-C -------------------------------------------------------------------------------------


class Interrupts:
    """Holds Ctrl-C back while something runs that must not be left in the middle."""

    def __init__(self) -> None:
        self.came = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note the first Ctrl-C; raise the second."""
        if self.came:
            raise KeyboardInterrupt
        self.came = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold Ctrl-C back while the body runs."""
        before = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def check(self) -> None:
        """Raise a Ctrl-C that was held back."""
        if self.came:
            self.came = False
            raise KeyboardInterrupt


def _may_hold() -> bool:
    """Whether this is a cell of a notebook, in the main thread, which alone may set handlers."""
    return shell() is not None and threading.current_thread() is threading.main_thread()


def calmly(results: Generator[T, None, None]) -> Generator[T, None, None]:
    """Yield what a generator yields; in a notebook, raise Ctrl-C between two items only."""
    return _held(results) if _may_hold() else results


def _held(results: Generator[T, None, None]) -> Generator[T, None, None]:
    interrupts = Interrupts()
    try:
        while True:
            with interrupts.held():
                item = next(results, _END)
            if item is _END:
                interrupts.check()
                return
            yield item
            interrupts.check()
    finally:
        results.close()


_END: Any = object()


def calm_call(call: Callable[[Iterable[Any]], T], loader: Iterable[Any]) -> T:
    """Make a call that draws from a loader; raise Ctrl-C only where it draws the next item."""
    if not _may_hold():
        return call(loader)
    interrupts = Interrupts()
    with interrupts.held():
        found = call(_Drawn(loader, interrupts))
    interrupts.check()
    return found


class _Drawn:
    """A loader that raises a held-back Ctrl-C before it yields the next item."""

    def __init__(self, loader: Iterable[Any], interrupts: Interrupts) -> None:
        self._loader = loader
        self._interrupts = interrupts

    def __iter__(self) -> Iterator[Any]:
        for item in self._loader:
            self._interrupts.check()
            yield item


# -- what is shown ------------------------------------------------------------------------------


_CELLS = "pipedream_rt.observers.page.cells"
_SHOWN = {
    ("pipedream_rt.schedules.plan", "Plan"): (_CELLS, "plan_html"),
    ("pipedream_rt.tracing.trace", "Trace"): (_CELLS, "trace_html"),
    ("pipedream_rt.coordinator.results", "StepResult"): (_CELLS, "result_html"),
    ("pipedream_rt.planning.partition", "Partition"): (
        "pipedream_rt.planning.alternatives",
        "partition_html",
    ),
}
"""By module and class of an object, the module and the function that render it."""


def register(found: Any) -> None:
    """Have a shell of IPython show plans, results and traces as HTML."""
    formatter = found.display_formatter.formatters["text/html"]
    for (module, name), function in _SHOWN.items():
        formatter.for_type_by_name(module, name, _Shows(*function))


class _Shows:
    """Renders an object by a function that is imported at first use."""

    def __init__(self, module: str, function: str) -> None:
        self._module, self._function = module, function

    def __call__(self, shown: Any) -> str:
        return str(getattr(import_module(self._module), self._function)(shown))
