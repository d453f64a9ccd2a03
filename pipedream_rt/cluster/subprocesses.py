"""Ends worker processes. Imports no torch: the command line uses this module too."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from pipedream_rt.deadline import Deadline

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl."""


class Process(Protocol):
    """The part of `subprocess.Popen` that a worker process of any kind offers."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; raises `subprocess.TimeoutExpired`."""


def end_processes(processes: Iterable[Process], deadline: Deadline) -> None:
    """Wait for processes to end, and kill those that are late, also if Ctrl-C ends the wait."""
    processes = list(processes)
    try:
        for process in processes:
            try:
                process.wait(timeout=deadline.remaining_s())
            except subprocess.TimeoutExpired:
                pass
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


_QUICK_S, _LONGEST_PAUSE_S = 10.0, 30.0
"""In seconds: what lives for less is started again after a pause, and the longest pause."""


class Backoff:
    """Pauses before what has ended is started again.

    None, unless it ended soon after its start more than once in a row: then 1, 3, 7 ... seconds.
    """

    def __init__(self) -> None:
        self._quick: Counter[str] = Counter()

    def after(self, name: str, lived_s: float) -> float:
        """The pause in seconds before a new start of what has lived for ``lived_s``."""
        quick = self._quick[name] = self._quick[name] + 1 if lived_s < _QUICK_S else 0
        return min(2.0 ** max(quick - 1, 0) - 1, _LONGEST_PAUSE_S)


def dies_with_parent(number: int) -> Callable[[], object]:
    """Return a ``preexec_fn``: a child of this process gets a signal when its parent is gone.

    The thread that has started the child counts. Where that is gone already, so is the child.
    """
    prctl = ctypes.CDLL(None).prctl  # looked up here: a forked child had better load nothing
    parent = os.getpid()

    def ask() -> None:
        prctl(_SET_DEATH_SIGNAL, number)
        if os.getppid() != parent:  # it died before the line above, and no signal comes for that
            os.kill(os.getpid(), number)

    return ask
