"""The environment variables of a job, and how its secret reaches a process.

Imports no torch: the command line and a waiting worker use this module too.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipedream_rt.cluster.identity import MAKE_SECRET, Secret
from pipedream_rt.errors import ConfigError
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.paths import given_path
from pipedream_rt.schema import is_count, open_file, printable
from pipedream_rt.transport.fence import Wish

LISTEN_FD = "PIPEDREAM_RT_LISTEN_FD"
"""`pipedream-rt run` sets it for the script: descriptor of the socket at which its workers join."""

NPROC = "PIPEDREAM_RT_NPROC"
"""`pipedream-rt run` sets it for the script: number of workers, in a job of nodes that of all."""

THREADS = "PIPEDREAM_RT_THREADS"
"""`pipedream-rt run` sets it for the script beside `NPROC`: threads of each worker."""

PREPARE = "PIPEDREAM_RT_PREPARE"
"""`pipedream-rt run` sets it for the script, which calls `pipedream_rt.prepare` then when it
imports the package."""

NPROC_HERE = "PIPEDREAM_RT_NPROC_HERE"
"""`pipedream-rt run` sets it in a job of several nodes: how many workers the script starts."""

ENGINE = "PIPEDREAM_RT_ENGINE"
"""`pipedream-rt run` sets it in a job of several nodes: the title of the job, for messages."""

TRACE = "PIPEDREAM_RT_TRACE"
"""`pipedream-rt run --trace` sets it: the file that the script's pipeline writes a trace to."""

RECORD = "PIPEDREAM_RT_RECORD"
"""`pipedream-rt run --record` sets it: the folder in which the script's pipeline is recorded."""

PROFILE = "PIPEDREAM_RT_PROFILE"
"""`pipedream-rt profile` sets it: the file that the script's pipeline writes a profile to, before
the script ends."""

LOG_DIR = "PIPEDREAM_RT_LOG_DIR"
"""`pipedream-rt run --log-dir` sets it: the folder with a file for the output of each worker."""

RESUME = "PIPEDREAM_RT_RESUME"
"""`pipedream-rt run --resume` sets it: the pipeline goes on from the last checkpoint."""

SCHEDULE = "PIPEDREAM_RT_SCHEDULE"
"""`pipedream-rt run --compare-schedules` sets it beside `RECORD`: the schedule of the pipeline,
whatever the script says. It writes neither report nor trace, and checkpoints beside the record."""

VERIFY = "PIPEDREAM_RT_VERIFY"
"""`pipedream-rt run --verify` sets it: how many mini-batches to compare with plain PyTorch."""

MAX_RESTARTS = "PIPEDREAM_RT_MAX_RESTARTS"
"""`pipedream-rt run --max-restarts` sets it: the number of failures to recover from."""

SECRET = "PIPEDREAM_RT_SECRET"
"""The user sets it for the script and for the workers that are started elsewhere: their secret."""

SECRET_FILE = "PIPEDREAM_RT_SECRET_FILE"
"""The user may set it in place of `SECRET`: the file with the secret, as engines mount it."""

SECRET_FD = "PIPEDREAM_RT_SECRET_FD"
"""`pipedream-rt run` sets it for the script: descriptor of a pipe that holds the secret."""

DEVICE = "PIPEDREAM_RT_DEVICE"
"""`pipedream-rt worker --device` or the user sets it: what this worker computes on, whatever the
script says."""

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")
"""Variables with the number of a process on its machine; we and torchrun set the first."""

RPC = "PIPEDREAM_RT_RPC"
"""The user sets it for the script: ``off`` to leave torch RPC out, ``on`` to use it even where it
cannot be fenced off."""


def own_device() -> tuple[str | None, int]:
    """The device of this process, None for the script's choice, and its number on the machine."""
    ranks = [os.environ.get(name, "") for name in LOCAL_RANKS]
    number = next((int(rank) for rank in ranks if rank.isdecimal()), 0)
    return os.environ.get(DEVICE) or None, number


def private_folder() -> Path:
    """Return the folder of this user's local sockets; make it if it is not there."""
    path = Path(tempfile.gettempdir()) / f"pipedream-rt-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    check_private(path, path.lstat())  # others may have made it first, in the common /tmp
    return path


def check_private(path: Path, about: os.stat_result) -> None:
    """Refuse a file or folder that is not this user's alone; by ``lstat`` a link never is."""
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        named = printable(str(path))
        raise PermissionError(f"{named} belongs to another user, or is open to others")


def count_of_environment(name: str, default: int | None = None) -> int:
    """Return the count in an environment variable; a missing one needs a default."""
    text = os.environ.get(name, "" if default is None else str(default)).strip()
    if not is_count(text):
        raise ConfigError(f"{name} must be an integer of at least 0, not {text!r}")
    return int(text)


def left_over(*names: str) -> str:
    """The variables that are set, and what to do if they are of another job, for messages."""
    there = [name for name in names if os.environ.get(name)]
    listed = ", ".join(f"{name}={printable(os.environ[name], 60)}" for name in there)
    return (
        f"the environment says so: {listed}. If another job has left that behind, type: "
        f"unset {' '.join(there)}"
    )


@contextmanager
def socket_of_environment(name: str) -> Iterator[socket.socket]:
    """Yield a duplicate of the socket whose descriptor an environment variable names."""
    fd = count_of_environment(name)
    try:
        kept = _of_run.get(fd) or socket.socket(fileno=fd)
        opened = kept.dup()
    except OSError as error:
        raise ConfigError(_not_of_run(name, fd, error)) from error
    _of_run[fd] = kept
    # A child of the script, as a worker of a data loader, may outlive it for seconds. With the
    # socket open it would keep the job's port from the next life of the script.
    close_in_forked_children(kept)
    close_in_forked_children(opened)
    with opened:
        yield opened


_of_run: dict[int, socket.socket] = {}
"""Sockets that `pipedream-rt run` has opened for this process, by descriptor; they stay open."""


def _not_of_run(name: str, fd: int, error: Exception) -> str:
    """The error of a descriptor that `pipedream-rt run` has not opened."""
    return (
        f"{name} is {fd}, which `pipedream-rt run` has not opened for this process: {error}; it "
        f"sets the variable for the script that it starts, so unset {name} elsewhere"
    )


def secret_pipe(secret: Secret) -> int:
    """Put a secret into a pipe that a child can inherit: it can be read only once."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as stream:
        stream.write(secret.text.encode("utf-8", "surrogateescape"))
    os.set_inheritable(reading, True)
    return reading


_taken: list[str] = []
"""The secret that was in the environment of this process, for its later pipelines."""


def read_secret(fd: int | None) -> Secret | None:
    """Read the secret of the job from a descriptor, or else from the environment."""
    if fd is not None:
        try:
            # Closed standard input would be given to the next file that is opened.
            with os.fdopen(fd, "rb", closefd=fd != 0) as stream:
                text = stream.read().decode("utf-8", "surrogateescape").strip()
        except OSError as error:
            raise ConfigError(_not_of_run(SECRET_FD, fd, error)) from error
    else:
        text = os.environ.get(SECRET, "").strip() or (_taken[0] if _taken else "")
        if not text:
            path = os.environ.get(SECRET_FILE, "")
            return secret_of_file(given_path(path, SECRET_FILE)) if path else None
    return _checked(text, keeps=fd is None)


def secret_of_file(path: Path, *, private: bool = False) -> Secret:
    """Read the secret of the job from a file; a private one is this user's alone, and no link."""
    try:
        with open_file(path, follow=not private) as stream:
            about = os.fstat(stream.fileno())  # of what was opened: the name may change meanwhile
            if private:
                check_private(path, about)
            text = stream.read(4096).decode("ascii", "replace").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"the secret of the job cannot be read from {printable(str(path))}: {reason}"
        ) from error
    if about.st_mode & 0o007:
        named = printable(str(path))
        raise ConfigError(f"everybody on this machine can read the secret: chmod 600 {named}")
    return _checked(text, keeps=False)


def _checked(text: str, *, keeps: bool) -> Secret:
    """Check a secret; with ``keeps`` take it out of the environment."""
    secret = Secret(text)
    if keeps:
        _taken[:] = [text]
        # No child inherits it then.
        os.environ.pop(SECRET, None)
    return secret


def rpc_of_environment() -> Wish:
    """Whether the user wants the workers to be endpoints of torch RPC."""
    match value := os.environ.get(RPC, "").lower():
        case "on" | "off":
            return value
        case "":
            return "auto"
        case _:
            raise ConfigError(f"{RPC} must be on or off, not {value!r}")


def secret_of_environment() -> Secret:
    """Read the secret that the user has set for the script and for the workers."""
    secret = read_secret(None)
    if secret is None:
        raise ConfigError(
            f"workers that are started elsewhere must know the job's secret: set {SECRET} to the "
            f"same 64 hexadecimal digits here and for them. Make them with: {MAKE_SECRET}"
        )
    return secret


SHARED_MEMORY = "PIPEDREAM_RT_SHARED_MEMORY"
"""The user sets it: ``off`` to send large values between workers of one machine over sockets."""


def memory_is_shared() -> bool:
    """Whether large values may go through memory that two workers share."""
    return hasattr(os, "memfd_create") and os.environ.get(SHARED_MEMORY, "") != "off"
