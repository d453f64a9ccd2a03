"""The command of a worker process.

It imports torch only once a coordinator calls, so a worker that waits is small and starts at once.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
from datetime import timedelta
from types import FrameType

import click
from pipedream_rt.workers.forkserver import serve_forks

from pipedream_rt.cluster.addresses import boot_id, parse_address
from pipedream_rt.cluster.control import (
    EXIT_COORDINATOR_LOST,
    EXIT_FAILED,
    VERSION,
    Control,
    Record,
)
from pipedream_rt.cluster.environment import read_secret, secret_pipe
from pipedream_rt.cluster.keys import COORDINATOR_END, NONCE, WORKER_END, prove, session_key
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, PeerLost, PipelineError

_log = logging.getLogger("pipedream_rt.worker")

_RETRY_S = 0.2
"""Seconds between two attempts to reach a coordinator that does not listen yet."""


@click.command(name="worker", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("address", metavar="[HOST:PORT]", required=False)
@click.option("--name", default=None, help="Unique in the job; stages go to the names in order.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1),
              help="Threads for torch's own parallel loops.")  # fmt: skip
@click.option("--timeout", default=300.0, show_default=True, type=click.FloatRange(min=0.1),
              help="Seconds to wait for the coordinator to listen.")  # fmt: skip
@click.option("--persist", is_flag=True, help="After a job, wait for the next coordinator.")
@click.option("--bind", metavar="INTERFACE",
              help="Network interface to listen on for other workers; else loopback.")  # fmt: skip
@click.option("--secret-stdin", is_flag=True,
              help="Read the secret from standard input, not PIPEDREAM_RT_SECRET.")  # fmt: skip
@click.option("--secret-fd", type=int, hidden=True, help="Inherited pipe to read it from.")
@click.option("--fork-server-fd", type=int, hidden=True, help="Inherited; see forkserver.py.")
def main(
    address: str | None,
    name: str | None,
    threads: int,
    timeout: float,
    persist: bool,
    bind: str | None,
    secret_stdin: bool,
    secret_fd: int | None,
    fork_server_fd: int | None,
) -> None:
    """Start a worker process that joins the coordinator at HOST:PORT."""
    if fork_server_fd is not None:
        # torch reads it when imported; see `serve`.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        serve_forks(socket.socket(fileno=fork_server_fd), _run_forked)
        os._exit(0)
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    _set_up(name, "INFO")
    if address is None:
        raise click.UsageError("give the HOST:PORT of the coordinator")
    if not name.replace("-", "").replace("_", "").isalnum() or len(name) > 100:
        raise click.UsageError(f"--name {name!r}: use letters, digits, - and _, 100 at most")
    try:
        secret = read_secret(0 if secret_stdin else secret_fd)
        control = Control(_connect(address, timeout), "the coordinator")
        code = serve(control, name, threads, secret, bind)
    except PipelineError as error:
        _log.error("%s", error)
        code = EXIT_FAILED
    if persist and code in (0, EXIT_COORDINATOR_LOST):
        # A fresh process image: torch keeps RPC counters for the life of a process.
        os.execv(sys.executable, [sys.executable, "-m", "pipedream_rt.workers", *_again(secret)])
    logging.shutdown()
    # Not sys.exit: the destructors of torch's RPC threads may wait for peers that are gone.
    os._exit(code)


def _set_up(name: str, level: str) -> None:
    """Set up logging and signals; PIPEDREAM_RT_LOG, if set, overrides the level of the log."""
    logging.basicConfig(
        format=f"[{name}] %(levelname)s %(message)s",
        level=os.environ.get("PIPEDREAM_RT_LOG", level),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_by_signal)


def _run_forked(control: socket.socket, name: str, threads: int) -> int:
    """Be a worker, in a child of the fork server.

    Args:
        control: The worker's end of the control connection.
        name: Name of the worker.
        threads: Number of threads for torch's own parallel loops.

    Returns:
        Exit code of the process.
    """
    _set_up(name, "WARNING")
    try:
        return serve(Control(control, "the coordinator"), name, threads, None, None)
    except PipelineError as error:
        _log.error("%s", error)
        return EXIT_FAILED
    finally:
        logging.shutdown()


def _again(secret: bytes | None) -> list[str]:
    """Arguments of this command for a new process image, which gets the secret by a pipe.

    Args:
        secret: The secret of the job; None to leave it to the environment.
    """
    arguments, given = [], iter(sys.argv[1:])
    for argument in given:
        if argument == "--secret-fd":
            next(given)
        elif argument != "--secret-stdin":
            arguments.append(argument)
    return arguments if secret is None else [*arguments, "--secret-fd", str(secret_pipe(secret))]


def _end_by_signal(number: int, frame: FrameType | None) -> None:
    """End the process on SIGINT or SIGTERM.

    A worker has nothing to save, and the coordinator notices at once that its connection ends.
    """
    _log.info("ended by %s", signal.Signals(number).name)
    logging.shutdown()
    os._exit(128 + number)


def _connect(address: str, timeout_s: float) -> socket.socket:
    """Connect to a coordinator that may not listen yet.

    Args:
        address: ``HOST:PORT`` of the coordinator.
        timeout_s: Seconds after which to give up.

    Raises:
        ConfigError: The address is none, or its host is unknown.
        PeerLost: No coordinator listened in time.
    """
    host, port = parse_address(address)
    deadline = Deadline(timedelta(seconds=timeout_s))
    pause = threading.Event()
    _log.info("joining the coordinator at %s", address)
    while True:
        try:
            return socket.create_connection((host, port), timeout=deadline.remaining_s())
        except socket.gaierror as error:
            raise ConfigError(f"{host!r} is no host: {error}") from error
        except OSError as error:
            if deadline.expired():
                raise PeerLost(
                    f"no coordinator listened at {address} within {timeout_s:g} s: {error}",
                    peer=address,
                ) from error
        pause.wait(_RETRY_S)


def serve(control: Control, name: str, threads: int, secret: bytes | None, bind: str | None) -> int:
    """Answer the call of a coordinator, and host stages until it says to end.

    Args:
        control: The control connection.
        name: Name of this worker.
        threads: Number of threads for torch's own parallel loops.
        secret: The secret of the job; None over an inherited connection, whose call carries it.
        bind: Network interface to listen on for other workers; None for loopback.

    Returns:
        Exit code of the process.

    Raises:
        ConfigError: The worker has no secret.
        PipelineError: The coordinator refused the worker, or does not speak this protocol.
    """
    try:
        # No deadline: a worker waits for its coordinator's call for as long as that lives.
        call = control.receive(Deadline(None))
        _expect(call, "call")
        secret = call.get("secret") if control.is_local else secret
        if secret is None:
            raise ConfigError(
                "this worker has not been given the secret of the job; set PIPEDREAM_RT_SECRET to "
                "the same text here and where the script runs, or write it to --secret-stdin"
            )
        nonce = secrets.token_bytes(NONCE)
        hello = {
            "type": "hello",
            "name": name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot": boot_id(),
            "version": VERSION,
            "nonce": nonce,
        }
        control.send({**hello, "proof": prove(secret, call["nonce"], nonce, hello)})
        key = session_key(secret, call["nonce"], nonce)
        control.secure(key, WORKER_END, COORDINATOR_END)
        # torch reads it when imported: a worker need not log that other processes end.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # Imported now, while the others join: it takes seconds, and a waiting worker stays small.
        from pipedream_rt.workers.process import host_stage

        control.send({"type": "ready"})
        welcome = control.receive(Deadline(None))
        _expect(welcome, "welcome")
        code: int = host_stage(control, welcome, threads, secret, bind)
        return code
    except PeerLost as error:
        _log.error("%s", error)
        return EXIT_COORDINATOR_LOST


def _expect(record: Record, kind: str) -> None:
    """Check the type of a record.

    Raises:
        PeerLost: The coordinator has told the worker to end.
        PipelineError: The record is of another type.
    """
    if record["type"] in ("stop", "exit"):
        raise PeerLost("the coordinator gave up before all workers had joined", peer="coordinator")
    if record["type"] != kind:
        raise PipelineError(f"expected {kind!r} from the coordinator, got {record['type']!r}")
