"""Pipelines in notebooks: cells that are run again, Ctrl-C, and what is shown of objects.

Nothing here acts outside IPython.

- A process has one pipeline on worker processes at a time, and a cell is run again without anybody
  having closed the pipeline that it opened before: so a cell closes that of an earlier one.
- Ctrl-C in the middle of a mini-batch would leave it fed in part, and so ends a pipeline. In a
  notebook it is noted, and raised between two mini-batches: the pipeline can be used afterwards. A
  second one is raised at once.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, Protocol, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Open(Protocol):
    """A pipeline, as far as it matters here."""

    def close(self) -> object:
        """End its workers."""


_opened: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""By pipeline, the number of the cell that has opened it."""


def shell() -> Any:
    """Return the running shell of IPython; None if there is none."""
    module = sys.modules.get("IPython")
    return None if module is None else getattr(module, "get_ipython", lambda: None)()


def close_earlier() -> None:
    """Close the pipelines of earlier cells, and say so."""
    found = shell()
    if found is None:
        return
    register(found)
    for pipeline, cell in list(_opened.items()):
        if cell != found.execution_count and pipeline.state.value == "open":
            _log.warning("%r of cell %d is closed, as this cell opens another one", pipeline, cell)
            pipeline.close()


def remember(pipeline: Open) -> None:
    """Note that this cell has opened a pipeline."""
    found = shell()
    if found is not None:
        _opened[pipeline] = found.execution_count


# -- Ctrl-C -------------------------------------------------------------------------------------


class Interrupts:
    """Ctrl-C, noted while something goes on that must not be left in the middle."""

    def __init__(self) -> None:
        self.came = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note the first; raise the second."""
        if self.came:
            raise KeyboardInterrupt
        self.came = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Note Ctrl-C while the body runs, rather than raise in the middle of it."""
        before = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def check(self) -> None:
        """Raise what was noted."""
        if self.came:
            self.came = False
            raise KeyboardInterrupt


def _may_hold() -> bool:
    """Whether Ctrl-C is that of a cell of a notebook, which runs in the main thread."""
    return shell() is not None and threading.current_thread() is threading.main_thread()


def calmly(results: Generator[T, None, None]) -> Generator[T, None, None]:
    """Yield what a generator yields, and let Ctrl-C end it between two items."""
    if not _may_hold():
        yield from results
        return
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
    """Call what draws from a loader, and let Ctrl-C end it where it draws the next item."""
    if not _may_hold():
        return call(loader)
    interrupts = Interrupts()
    with interrupts.held():
        found = call(_Drawn(loader, interrupts))
    interrupts.check()
    return found


class _Drawn:
    """A loader that raises Ctrl-C where the next item is drawn."""

    def __init__(self, loader: Iterable[Any], interrupts: Interrupts) -> None:
        self._loader = loader
        self._interrupts = interrupts

    def __iter__(self) -> Iterator[Any]:
        """Yield the items."""
        for item in self._loader:
            self._interrupts.check()
            yield item


# -- what is shown ------------------------------------------------------------------------------


_CELLS = "pipedream_rt.observers.page.cells"
_SHOWN = {
    ("pipedream_rt.schedules.plan", "Plan"): (_CELLS, "plan_html"),
    ("pipedream_rt.observe.trace", "Trace"): (_CELLS, "trace_html"),
    ("pipedream_rt.coordinator.results", "StepResult"): (_CELLS, "result_html"),
    ("pipedream_rt.planning.partition", "Partition"): (
        "pipedream_rt.planning.explanation",
        "partition_html",
    ),
}
"""By module and class, the module and the function that shows an object."""


def register(found: Any) -> None:
    """Let a shell of IPython show plans, results and traces as HTML."""
    formatter = found.display_formatter.formatters["text/html"]
    for (module, name), function in _SHOWN.items():
        formatter.for_type_by_name(module, name, _Shows(*function))


class _Shows:
    """Shows an object by a function that is imported when it is first needed."""

    def __init__(self, module: str, function: str) -> None:
        self._module, self._function = module, function

    def __call__(self, shown: Any) -> str:
        """Return the object as HTML."""
        return str(getattr(import_module(self._module), self._function)(shown))
