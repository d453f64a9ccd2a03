"""Ends worker processes. Imports no torch: the command line uses this module too."""

from __future__ import annotations

import ctypes
import subprocess
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

    Args:
        processes: The processes, each of which was told to end.
        deadline: When a process that still runs is late; one deadline for all of them.
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


def shell_code(code: int) -> int:
    """Return the exit code of a process as a shell has it: 128 and the signal that ended it.

    Args:
        code: As `subprocess.Popen` has it, negative for a signal.
    """
    return 128 - code if code < 0 else code


def dies_with_parent(number: int) -> Callable[[], object]:
    """Return what a child calls before its program starts, as ``preexec_fn`` of `subprocess.Popen`.

    The kernel sends it a signal then when the thread that has started it is gone.

    Args:
        number: The signal.
    """
    prctl = ctypes.CDLL(None).prctl  # looked up here: a forked child had better load nothing
    return lambda: prctl(_SET_DEATH_SIGNAL, number)
