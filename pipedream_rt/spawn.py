"""Starts and ends worker processes. Imports no torch, for the command line uses it too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping

from pipedream_rt.deadline import Deadline

LISTEN_FD = "PIPEDREAM_RT_LISTEN_FD"
"""Environment variable of a script under `pipedream-rt run`: the socket its workers join at."""

NPROC = "PIPEDREAM_RT_NPROC"
"""Set with it: how many there are."""

TRACE = "PIPEDREAM_RT_TRACE"
"""Set with it, if asked for: the file that a trace is written to."""

RESUME = "PIPEDREAM_RT_RESUME"
"""Set with it, if asked for: go on from the last checkpoint."""

MAX_RESTARTS = "PIPEDREAM_RT_MAX_RESTARTS"
"""Set with it, if asked for: how many failures of workers to recover from."""


def start_worker(
    *address: str,
    name: str,
    threads: int,
    pass_fds: tuple[int, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a worker process with this Python.

    In a session of its own: Ctrl-C reaches the coordinator alone.

    Args:
        *address: How it finds its coordinator, and further options of its command.
        name: Of the worker.
        threads: For torch's own parallel loops.
        pass_fds: Files that it inherits.
        environment: Of the process; None for this one's.
    """
    command = [sys.executable, "-m", "pipedream_rt.workers", *address]
    return subprocess.Popen(
        [*command, "--name", name, "--threads", str(threads)],
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def end_processes(processes: Iterable[subprocess.Popen[bytes]], deadline: Deadline) -> None:
    """Wait for processes to end; kill those that are late, and all if interrupted."""
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
