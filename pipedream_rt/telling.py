"""Telling people of a run: an error there is said once, if it can be, and the run goes on.

A terminal goes away, a disk fills up, a library ends the program: whatever shows a run to somebody
runs in `harmless`. Log lines do (`log_of`), and what is printed (`say`).

What nobody has asked for is a line at a terminal and in a notebook (`note`), and goes elsewhere to
who listens at the level INFO. In a notebook lines stand in the output of the cell: what is on
standard error is red there, and advice is no error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pipedream_rt.lifecycle import is_of_a_handler


def _nothing(error: BaseException) -> None:
    """Leave an error unsaid."""


@contextmanager
def harmless(failed: Callable[[BaseException], object] = _nothing) -> Iterator[None]:
    """Keep the errors of the body from the run; ``failed`` is called with one.

    So with `SystemExit`, by which libraries end a program whose terminal is gone. Ctrl-C is raised,
    and so is what the handler of a signal raises, such as ``sys.exit`` at SIGTERM.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if is_of_a_handler(error):  # which runs wherever the main thread is
            raise
        failed(error)


def shell() -> Any:
    """Return the running shell of IPython; None if there is none."""
    # Without importing IPython, which a script need not have.
    module = sys.modules.get("IPython")
    return None if module is None else getattr(module, "get_ipython", lambda: None)()


def is_notebook() -> bool:
    """Whether this is a notebook, and not a terminal with IPython."""
    return hasattr(shell(), "kernel")


class _Log(logging.Logger):
    """A logger whose handlers may fail, as one whose stream is closed."""

    def handle(self, record: logging.LogRecord) -> None:
        with harmless():
            super().handle(record)

    def callHandlers(self, record: logging.LogRecord) -> None:  # noqa: N802 - that of `Logger`
        if self.hasHandlers():
            super().callHandlers(record)
        else:
            handle_alone(record)


def handle_alone(record: logging.LogRecord) -> None:
    """Print a record for which there is no handler, if it is a warning at least."""
    last = logging.lastResort
    if last is None or record.levelno < last.level:
        return
    if record.levelno < logging.ERROR and is_notebook():
        say(record.getMessage())
    else:
        last.handle(record)


def log_of(module: str) -> logging.Logger:
    """Return the logger of a module of this package."""
    log = logging.getLogger(module)
    log.__class__ = _Log  # it may be there already: scripts set levels before they import a module
    return log


def say(text: str) -> None:
    """Print a line on standard error, apart from what the script prints; in a notebook below it."""
    stream = sys.stdout if is_notebook() else sys.stderr
    if stream is not None:  # else `print` would take standard output
        with harmless():
            stream.write(f"{text}\n")  # one write: `print` makes two if unbuffered, and lines mix
            stream.flush()


def note(log: logging.Logger, text: str) -> None:
    """Tell in a line what is good to know: to who listens at INFO, else to who looks on.

    That is somebody at a terminal or in a notebook, unless they have set a level that is above.
    """
    log.info("%s", text, stacklevel=2)
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        return
    with harmless():
        if not _is_hushed(log) and (is_notebook() or sys.stderr.isatty()):
            say(text)


def _is_hushed(log: logging.Logger) -> bool:
    """Whether somebody has set a level for this package, or one that leaves warnings out."""
    own = logging.getLogger(__package__).level > logging.INFO
    return own or not log.isEnabledFor(logging.WARNING)
