"""The life of anything that is opened once and closed once: an enum and a table of legal moves.

::

    OPEN ──────► CLOSING ──────► CLOSED
      │             │
      └─────────────┴──────────► FAILED

OPEN can be used. CLOSING takes nothing new, and finishes. FAILED was ended by an error, which is
kept as the reason.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from pipedream_rt.errors import PipelineClosed, PipelineError


class Life(Enum):
    """A state of life."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED = "failed"


MOVES: dict[Life, frozenset[Life]] = {
    Life.OPEN: frozenset({Life.CLOSING, Life.FAILED}),
    Life.CLOSING: frozenset({Life.CLOSED, Life.FAILED}),
    Life.CLOSED: frozenset(),
    Life.FAILED: frozenset(),
}
"""The legal moves; there are no others."""


class Lifecycle:
    """The life of one thing. Safe from any thread.

    Attributes:
        reason: The error that it failed with; None if it has not failed.
    """

    def __init__(self, what: str, end: Callable[[], object] = lambda: None) -> None:
        self._what = what
        self._end = end
        self._lock = threading.RLock()  # a signal handler may close while its thread closes
        self._ending = False
        self._pid = os.getpid()
        self.state = Life.OPEN
        self.reason: BaseException | None = None
        self._why = ""  # in words; not empty either where an interruption has closed it

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self.state is Life.OPEN

    @property
    def is_over(self) -> bool:
        """Whether it is closed or has failed; its ``end`` may still run."""
        return self.state in (Life.CLOSED, Life.FAILED)

    def check(self) -> None:
        """Refuse use after the end, and in a forked child."""
        if os.getpid() != self._pid:
            raise PipelineClosed(
                f"{self._what} belongs to process {self._pid}; this one, {os.getpid()}, was forked "
                "from it and cannot use it"
            )
        if self.state is Life.FAILED:
            raise PipelineClosed(f"{self._what} has failed: {self._why}") from self.reason
        if self.state is Life.CLOSED:
            raise PipelineClosed(f"{self._what} is closed" + f": {self._why}" * bool(self._why))

    def move(self, to: Life, reason: BaseException | None = None, why: str = "") -> None:
        with self._lock:
            if to not in MOVES[self.state]:
                raise PipelineError(f"{self._what} is {self.state.value} and cannot be {to.value}")
            self.state, self.reason = to, reason
            self._why = why or self._why

    def begin_closing(self) -> bool:
        """Move to CLOSING if it is open; return whether it was."""
        with self._lock:
            if self.state is not Life.OPEN:
                return False
            self.move(Life.CLOSING)
            return True

    def close(self, why: str = "") -> None:
        """Move to CLOSED, and call ``end``; ``why`` is told to later users. Idempotent."""
        self.begin_closing()
        self._finish(Life.CLOSED, None, why)

    def fail(self, reason: BaseException, doing: str = "") -> None:
        """Move to FAILED, and call ``end``; ``doing`` says what went on. The first reason stays."""
        self._finish(Life.FAILED, reason, _told(reason, doing))

    def _finish(self, to: Life, reason: BaseException | None, why: str) -> None:
        """Make the last move, and call ``end`` if nobody has."""
        with self._lock:
            if to in MOVES[self.state]:
                self.move(to, reason, why)
            if self._ending:
                return
            self._ending = True
        self._end()  # without the lock: it may take long, and calls other code

    @contextmanager
    def guard(self, doing: str, spare: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Fail if the body raises, unless ``spare`` says that this has left nothing undone.

        ``doing`` says what goes on meanwhile, for the reason.
        """
        try:
            yield
        except Exception as error:
            if not spare():
                self.fail(error, doing)
            raise
        except BaseException as error:  # Ctrl-C and the like: nothing has failed
            self.close(_told(error, doing))
            raise


def _told(error: BaseException, doing: str) -> str:
    """Return in words why something has ended; never empty."""
    try:
        text = str(error)
    except Exception:  # the `__str__` of a class of the user's may raise
        text = ""
    if text and isinstance(error, PipelineError):  # it says itself what, where and when
        return text
    name = type(error).__name__
    return (f"{name}: {text}" if text else name) + f", which came while {doing}" * bool(doing)


class Closable(Protocol):
    def close(self) -> object: ...


_ends: WeakSet[Closable] = WeakSet()
"""Connections and locks whose closing tells others that this process is dead."""


def close_in_forked_children(end: Closable) -> None:
    """Have a connection or a lock closed in every forked child, such as those of a data loader."""
    # A child that kept it open would make a dead parent look alive.
    _ends.add(end)


def _close_ends() -> None:
    """Close the connections and locks. Runs in a forked child."""
    for end in list(_ends):
        end.close()


os.register_at_fork(after_in_child=_close_ends)


def name_this_thread(name: str) -> None:
    """Name the calling thread in Python and in the kernel (15 bytes), as ``top -H`` shows it."""
    threading.current_thread().name = name
    with suppress(OSError):  # where /proc is not mounted
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_bytes(name.encode()[:15])


def is_of_a_handler(error: BaseException) -> bool:
    """Whether a signal handler of the script raised an error while the library was at work."""
    if threading.current_thread() is not threading.main_thread():
        return False
    codes = {_code_of(handler) for handler in map(signal.getsignal, signal.valid_signals())}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: object) -> object:
    """Return the code that a signal handler runs; None if it has none, as `signal.SIG_DFL`."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return None
    handler = getattr(handler, "__func__", handler)
    called = handler if hasattr(handler, "__code__") else type(handler).__call__
    return getattr(called, "__code__", None)
