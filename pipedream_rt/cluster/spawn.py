"""Starts and ends worker processes. Imports no torch, for the command line uses it too."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Protocol

from pipedream_rt.cluster.control import NONCE
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError

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


SECRET = "PIPEDREAM_RT_SECRET"
"""Environment variable with the secret of a job whose workers are started elsewhere."""

SECRET_FD = "PIPEDREAM_RT_SECRET_FD"
"""Set under `pipedream-rt run`: a pipe with the secret that it has made."""

SUPERVISOR_FD = "PIPEDREAM_RT_SUPERVISOR_FD"
"""Set with it: a socket over which the script has all workers replaced."""

_SHORTEST_SECRET = 16


def secret_pipe(secret: bytes) -> int:
    """Put a secret into a pipe that a child can inherit; it is gone once it is read.

    Returns:
        Descriptor to read from; to be closed here once the child has it.
    """
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as stream:
        stream.write(secret.hex().encode())
    os.set_inheritable(reading, True)
    return reading


def read_secret(fd: int | None) -> bytes | None:
    """Read the secret of the job from a descriptor, or else from the environment.

    Raises:
        ConfigError: It is too short to be one.
    """
    if fd is not None:
        with os.fdopen(fd, "rb", closefd=fd != 0) as stream:
            text = stream.read().decode("utf-8", "replace").strip()
        if len(text) == 2 * NONCE and fd != 0:
            return bytes.fromhex(text)  # of `secret_pipe`
    else:
        text = os.environ.get(SECRET, "")
        if not text:
            return None
    if len(text) < _SHORTEST_SECRET:
        raise ConfigError(
            f"the secret of the job has {len(text)} characters, at least {_SHORTEST_SECRET} are "
            'needed; make one with: python -c "import secrets; print(secrets.token_hex(32))"'
        )
    return hashlib.sha256(text.encode()).digest()


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


class Process(Protocol):
    """What of `subprocess.Popen` is used here."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises `subprocess.TimeoutExpired`."""


def end_processes(processes: Iterable[Process], deadline: Deadline) -> None:
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
