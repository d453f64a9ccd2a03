"""Ends worker processes. Imports no torch: the command line uses this module too."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from typing import Protocol

from pipedream_rt.deadline import Deadline


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
