"""The command of a worker process.

It imports torch only when a coordinator has admitted it, so a waiting worker is small and starts
at once.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from types import FrameType
from typing import Any

import click

from pipedream_rt.cluster.addresses import UNIX
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.dial import DialOptions, JobOver
from pipedream_rt.cluster.environment import (
    DEVICE,
    LOG_DIR,
    read_secret,
    secret_pipe,
)
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.records import is_name
from pipedream_rt.cluster.subprocesses import dies_with_parent
from pipedream_rt.cluster.worker.fork_server import end_orphans, serve_forks
from pipedream_rt.cluster.worker.joining import JoinAttempts, WorkerSettings, serve, serve_at
from pipedream_rt.cluster.worker.role import become_worker
from pipedream_rt.cluster.worker_life import (
    Starter,
    WorkerEnd,
    is_started_again,
    outward,
    shell_code,
)
from pipedream_rt.errors import ConfigError, PeerLost, PipelineError
from pipedream_rt.paths import given_path
from pipedream_rt.schema import open_to_append
from pipedream_rt.telling import log_of

_log = log_of("pipedream_rt.worker")


@click.command(name="worker", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("address", metavar="[HOST:PORT]", required=False)
@click.option("--name", default=None, help="Unique in the job; stages go to the names in order.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1),
              help="Threads for torch's own parallel loops.")  # fmt: skip
@click.option("--timeout", default=300.0, show_default=True, type=click.FloatRange(min=0.1),
              help="Seconds to wait for the coordinator to listen.")  # fmt: skip
@click.option("--persist", is_flag=True, help="After a job, wait for the next coordinator.")
@click.option("--spare", is_flag=True,
              help="Wait with torch in memory for a job that has its workers, to be there at once "
              "when it needs one; with --persist in it.")  # fmt: skip
@click.option("--bind", metavar="INTERFACE",
              help="Network interface to listen on for other workers; else loopback.")  # fmt: skip
@click.option("--device", metavar="DEVICE",
              help="What it computes on, as cuda:1, whatever the script says.")  # fmt: skip
@click.option("--secret-stdin", is_flag=True,
              help="Read the secret from standard input, not PIPEDREAM_RT_SECRET.")  # fmt: skip
@click.option("--secret-fd", type=int, hidden=True, help="Inherited pipe to read it from.")
@click.option("--failures", default=0, type=int, hidden=True, help="Attempts that have failed.")
@click.option("--lost", type=float, hidden=True, help="When it lost its last group.")
@click.option("--fork-server-fd", type=int, hidden=True, help="Inherited; see fork_server.py.")
@click.option("--no-imports", is_flag=True, hidden=True, help="See fork_server.py.")
def main(
    address: str | None,
    name: str | None,
    threads: int,
    timeout: float,
    persist: bool,
    spare: bool,
    bind: str | None,
    device: str | None,
    secret_stdin: bool,
    secret_fd: int | None,
    failures: int,
    lost: float | None,
    fork_server_fd: int | None,
    no_imports: bool,
) -> None:
    """Start a worker process that joins the coordinator at HOST:PORT."""
    if fork_server_fd is not None:
        # torch reads it when imported. A worker need not log that other processes end.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        connection = socket.socket(fileno=fork_server_fd)
        if not serve_forks(connection, _run_forked, not no_imports):
            end_orphans()  # the parent is dead: one that wants no more workers kills this process
        os._exit(0)  # as at the end of this function
    name = name or f"{re.sub('[^A-Za-z0-9_-]', '-', socket.gethostname())[:80]}-{os.getpid()}"
    _set_up(name, "INFO")
    if address is None:
        raise click.UsageError("give the HOST:PORT of the coordinator")
    if not is_name(name):
        raise click.UsageError(f"--name {name!r}: use letters, digits, - and _, 100 at most")
    interfaces = [interface for _, interface in socket.if_nameindex()]
    if device is not None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*(:[0-9]+)?", device):
            raise click.UsageError(f"--device {device!r}: give the name of a device, as cuda:1")
        os.environ[DEVICE] = device
    if bind is not None and bind not in interfaces:
        known = ", ".join(interfaces)
        raise click.UsageError(f"--bind {bind!r}: this machine has the interfaces {known}")
    become_worker(name)
    secret: Secret | None = None
    try:
        secret = read_secret(0 if secret_stdin else secret_fd)
        if secret is None and not address.startswith(UNIX):
            raise ConfigError(
                "this worker has not been given the secret of the job; set PIPEDREAM_RT_SECRET to "
                "the same text here and where the script runs, or write it to --secret-stdin"
            )
        # The name of a coordinator's Unix socket ends with that of the job.
        job = address.rpartition("-")[2] if address.startswith(UNIX) else ""
        settings = WorkerSettings(name, threads, secret, bind, job)
        persist = persist or spare
        options = DialOptions(address, timeout, persist)
        if spare:
            options = replace(options, warm=True, call_timeout=None, longest_pause_s=_SPARE_PAUSE_S)
        code = serve_at(options, settings, tries := JoinAttempts(failures, lost))
    except JobOver as over:
        _log.info("%s", over)
        code, persist = over.code, False
    except PeerLost as error:
        _log.error("%s", error)
        code, persist = WorkerEnd.COORDINATOR_LOST, False
    except PipelineError as error:
        _log.error("%s", error)
        code = WorkerEnd.FAILED
    if persist and is_started_again(Starter.PERSIST, code):
        # A fresh process image, since torch keeps RPC counters for the life of a process.
        again = _again(secret, tries.after(code, time.monotonic()))
        os.execv(sys.executable, [sys.executable, "-m", "pipedream_rt.workers", *again])
    logging.shutdown()
    # Not sys.exit: the destructors of torch's RPC threads may wait for peers that are gone.
    os._exit(outward(code))


_SPARE_PAUSE_S = 0.5
"""Longest pause between two attempts of a spare worker. When it is needed, a recovery waits."""


def _set_up(name: str, level: str) -> None:
    """Set up logging and signals. PIPEDREAM_RT_LOG, if set, overrides the level."""
    wanted = os.environ.get("PIPEDREAM_RT_LOG", level).upper()
    known = isinstance(logging.getLevelName(wanted), int)
    if (folder := os.environ.get(LOG_DIR)) and is_name(name):
        _write_into(folder, f"{name}.log")
    logging.basicConfig(
        format=f"[{name}] %(levelname)s %(message)s",
        level=wanted if known else level,
    )
    if not known:
        _log.warning(
            "PIPEDREAM_RT_LOG is %r, which is no level: DEBUG, INFO, WARNING, ERROR", wanted
        )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_by_signal)


def _write_into(folder: str, name: str) -> None:
    """Append all that this process writes to a file, if possible: no log is no reason to end."""
    try:
        path = given_path(folder, LOG_DIR) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0, opener=open_to_append) as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
    except (OSError, ConfigError) as error:
        reason = getattr(error, "strerror", None) or error
        _log.warning("no log can be written to %s: %s", folder, reason)


def _run_forked(fd: int, name: str, threads: int, join: dict[str, Any] | None) -> int:
    """Be a worker, in a child of the fork server. ``fd`` is as `RunWorker` says."""
    _set_up(name, "WARNING")
    become_worker(name)
    try:
        if join is not None:
            # An engine that ends a job sends SIGTERM to all processes, and the script needs its
            # workers for the checkpoint that it makes then.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            settings = WorkerSettings(name, threads, read_secret(fd), join["bind"])
            # No deadline: the script may open a pipeline at any time, and calls this worker then.
            options = DialOptions(
                join["address"], join["timeout_s"], call_timeout=None, known=True,
                longest_pause_s=_LONGEST_PAUSE_S,
            )  # fmt: skip
            return _join_for_ever(options, settings)
        control = Control(socket.socket(fileno=fd), "the coordinator", inherited=True)
        code = serve(control, WorkerSettings(name, threads))
        return outward(code)
    except PipelineError as error:
        _log.error("%s", error)
        return WorkerEnd.FAILED
    finally:
        logging.shutdown()


def _join_for_ever(options: DialOptions, settings: WorkerSettings) -> int:
    """Join one coordinator after another, each in a forked child, which has torch already."""
    # A process for each job, since torch keeps RPC counters for the life of a process.
    tries, die_with_this = JoinAttempts(), dies_with_parent(signal.SIGKILL)
    while True:
        pid = os.fork()
        if pid == 0:
            die_with_this()
            os._exit(_serve_once(options, settings, tries))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        match code:
            case _ if is_started_again(Starter.FORKED, code):
                tries = tries.after(code, time.monotonic())
            case _ if code == WorkerEnd.OVER:
                return 0
            case _ if code == WorkerEnd.UNREACHED:
                return WorkerEnd.COORDINATOR_LOST
            case _:
                return shell_code(code)


_LONGEST_PAUSE_S = 5.0
"""Longest pause between two attempts of a worker that `pipedream-rt run` has started. At the end of
a job the first node waits three times as long for all workers to hear of it."""


def _serve_once(options: DialOptions, settings: WorkerSettings, tries: JoinAttempts) -> int:
    """Be the worker for one job; return its exit code."""
    try:
        code: int = serve_at(options, settings, tries)
        return code
    except JobOver as over:
        _log.info("%s", over)
        return WorkerEnd.FAILED if over.code else WorkerEnd.OVER
    except PeerLost as error:
        _log.error("%s", error)
        return WorkerEnd.UNREACHED
    except PipelineError as error:
        _log.error("%s", error)
        return WorkerEnd.FAILED
    except BaseException:  # the top of a process
        traceback.print_exc()
        return WorkerEnd.AGAIN  # tried again in a new child, after a pause
    finally:
        logging.shutdown()


def _again(secret: Secret | None, tries: JoinAttempts) -> list[str]:
    """Return this command's arguments for a new process image, which gets the secret by a pipe."""
    arguments, words = [], iter(sys.argv[1:])
    for argument in words:
        if argument in ("--secret-fd", "--failures", "--lost"):
            next(words)
        elif argument != "--secret-stdin":
            arguments.append(argument)
    arguments += ["--failures", str(tries.failures)]
    if tries.lost is not None:
        arguments += ["--lost", repr(tries.lost)]
    return arguments if secret is None else [*arguments, "--secret-fd", str(secret_pipe(secret))]


def _end_by_signal(number: int, frame: FrameType | None) -> None:
    # A worker has nothing to save, and the coordinator sees at once that the connection ends.
    _log.info("ended by %s", signal.Signals(number).name)
    os._exit(128 + number)
