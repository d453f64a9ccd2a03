"""Ends worker processes. Imports no torch: the command line uses this module too."""

from __future__ import annotations

import ctypes
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
    """Wait for processes to end, and kill those that are late.

    All that still run are also killed when the wait is interrupted, as by Ctrl-C.
    """
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
"""What ends sooner than that is started again after a pause, which grows up to the other number."""


class Pauses:
    """How long to wait before something that has ended is started again.

    At once, unless it ended soon after its start, and more than once: then it waits 1, 3, 7 ...
    seconds.
    """

    def __init__(self) -> None:
        self._quick: Counter[str] = Counter()

    def after(self, name: str, lived_s: float) -> float:
        """Return the seconds to wait."""
        quick = self._quick[name] = self._quick[name] + 1 if lived_s < _QUICK_S else 0
        return min(2.0 ** max(quick - 1, 0) - 1, _LONGEST_PAUSE_S)


def shell_code(code: int) -> int:
    """Return the exit code of a process as a shell has it: 128 and the signal that ended it."""
    return 128 - code if code < 0 else code


def dies_with_parent(number: int) -> Callable[[], object]:
    """Return what a child calls before its program starts, as ``preexec_fn`` of `subprocess.Popen`.

    The kernel sends it a signal then when the thread that has started it is gone.
    """
    prctl = ctypes.CDLL(None).prctl  # looked up here: a forked child had better load nothing
    return lambda: prctl(_SET_DEATH_SIGNAL, number)
