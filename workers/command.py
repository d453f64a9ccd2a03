"""The command of a worker process.

It imports torch only once a coordinator calls, so a worker that waits is small and starts at once.
"""

from __future__ import annotations

import ctypes
import hmac
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import click
from pipedream_rt.workers.forkserver import serve_forks

from pipedream_rt.cluster.addresses import boot_id, parse_address
from pipedream_rt.cluster.control import (
    EXIT_AGAIN,
    EXIT_COORDINATOR_LOST,
    EXIT_FAILED,
    VERSION,
    Control,
)
from pipedream_rt.cluster.environment import TLS, read_secret, secret_pipe, tls_of_environment
from pipedream_rt.cluster.keys import (
    COORDINATOR_END,
    NONCE,
    WORKER_END,
    Secret,
    Talk,
)
from pipedream_rt.cluster.records import Record, is_name
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import (
    ConfigError,
    MessageTimeout,
    PeerLost,
    PipelineError,
    TransportError,
)
from pipedream_rt.schema import printable
from pipedream_rt.software import processor, software
from pipedream_rt.transport.tcp import prepare
from pipedream_rt.transport.tls import HANDSHAKE_TIMEOUT_S, Tls, wrapped

_log = logging.getLogger("pipedream_rt.worker")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_OF_CONNECT_S = 0.1, 2.0
"""Seconds between the first two attempts, and between any two, to reach a coordinator that does not
listen yet. An attempt costs little, and a recovery waits for its workers."""

_ANSWER_TIMEOUT = timedelta(seconds=60)
"""For a coordinator to answer a hello, which it does at once."""

_CALL_TIMEOUT = timedelta(seconds=30)
"""For a coordinator to call a worker that has connected, which it does at once, though a handshake
may take 20 s."""

_SENT_TIMEOUT = timedelta(seconds=2)
"""For the last words of a worker to be sent, where they are encrypted."""

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl."""

_LONGEST_PAUSE_S = 30.0
"""Seconds between two attempts to join a coordinator that has no place for this worker."""


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
@click.option("--failures", default=0, type=int, hidden=True, help="Attempts that have failed.")
@click.option("--fork-server-fd", type=int, hidden=True, help="Inherited; see forkserver.py.")
@click.option("--no-imports", is_flag=True, hidden=True, help="See forkserver.py.")
def main(
    address: str | None,
    name: str | None,
    threads: int,
    timeout: float,
    persist: bool,
    bind: str | None,
    secret_stdin: bool,
    secret_fd: int | None,
    failures: int,
    fork_server_fd: int | None,
    no_imports: bool,
) -> None:
    """Start a worker process that joins the coordinator at HOST:PORT."""
    if fork_server_fd is not None:
        # torch reads it when imported; see `serve`.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        serve_forks(socket.socket(fileno=fork_server_fd), _run_forked, not no_imports)
        os._exit(0)
    name = name or f"{re.sub('[^A-Za-z0-9_-]', '-', socket.gethostname())[:80]}-{os.getpid()}"
    _set_up(name, "INFO")
    if address is None:
        raise click.UsageError("give the HOST:PORT of the coordinator")
    if not is_name(name):
        raise click.UsageError(f"--name {name!r}: use letters, digits, - and _, 100 at most")
    interfaces = [interface for _, interface in socket.if_nameindex()]
    if bind is not None and bind not in interfaces:
        known = ", ".join(interfaces)
        raise click.UsageError(f"--bind {bind!r}: this machine has the interfaces {known}")
    secret: Secret | None = None
    try:
        secret = read_secret(0 if secret_stdin else secret_fd)
        if secret is None:
            raise ConfigError(
                "this worker has not been given the secret of the job; set PIPEDREAM_RT_SECRET to "
                "the same text here and where the script runs, or write it to --secret-stdin"
            )
        worker = _Worker(name, threads, secret, bind, tls_of_environment())
        code = _serve_at(address, timeout, persist, worker, failures)
    except PipelineError as error:
        _log.error("%s", error)
        code = EXIT_FAILED
    if persist and code in _RETURNS:
        # A fresh process image: torch keeps RPC counters for the life of a process.
        again = _again(secret, failures + 1 if code == EXIT_AGAIN else 0)
        os.execv(sys.executable, [sys.executable, "-m", "pipedream_rt.workers", *again])
    logging.shutdown()
    # Not sys.exit: the destructors of torch's RPC threads may wait for peers that are gone.
    os._exit(EXIT_COORDINATOR_LOST if code == EXIT_AGAIN else code)


def _set_up(name: str, level: str) -> None:
    """Set up logging and signals; PIPEDREAM_RT_LOG, if set, overrides the level of the log."""
    wanted = os.environ.get("PIPEDREAM_RT_LOG", level).upper()
    known = isinstance(logging.getLevelName(wanted), int)
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


def _run_forked(fd: int, name: str, threads: int, address: str | None) -> int:
    """Be a worker, in a child of the fork server.

    Args:
        fd: The worker's end of the control connection; with an address, a pipe with the secret.
        name: Name of the worker.
        threads: Number of threads for torch's own parallel loops.
        address: Where to join one coordinator after another; None for the one connection.

    Returns:
        Exit code of the process.
    """
    _set_up(name, "WARNING")
    try:
        if address is not None:
            worker = _Worker(name, threads, read_secret(fd), tls=tls_of_environment())
            return _join_for_ever(address, worker)
        control = Control(socket.socket(fileno=fd), "the coordinator")
        code = serve(control, _Worker(name, threads))
        return EXIT_COORDINATOR_LOST if code == EXIT_AGAIN else code
    except PipelineError as error:
        _log.error("%s", error)
        return EXIT_FAILED
    finally:
        logging.shutdown()


_RETURNS = (0, EXIT_AGAIN, EXIT_COORDINATOR_LOST)
"""The exit codes after which a worker waits for the next coordinator."""

_JOIN_TIMEOUT_S = 5.0
"""For the coordinators of `pipedream-rt run` to listen: their socket does as long as the job lives.
The time is for strangers who fill the queue before it."""


def _join_for_ever(address: str, worker: _Worker) -> int:
    """Join one coordinator after another, each in a child of this process, which has torch.

    torch keeps RPC counters for the life of a process, so each job has a process of its own.

    Returns:
        Exit code of the first child that will not go on.
    """
    failures = 0
    while True:
        here, pid = os.getpid(), os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != here:  # it died before the line above
                os._exit(EXIT_COORDINATOR_LOST)
            os._exit(_serve_once(address, worker, failures))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in _RETURNS:
            return 128 - code if code < 0 else code
        failures = failures + 1 if code == EXIT_AGAIN else 0


def _serve_once(address: str, worker: _Worker, failures: int) -> int:
    """Be the worker for one job; return the exit code."""
    try:
        # Its script may open a pipeline at any time, and calls this worker then.
        return _serve_at(address, _JOIN_TIMEOUT_S, True, worker, failures, None)
    except PipelineError as error:
        _log.error("%s", error)
        return EXIT_FAILED
    except BaseException:  # the top of a process
        traceback.print_exc()
        return EXIT_FAILED
    finally:
        logging.shutdown()


def _again(secret: Secret | None, failures: int) -> list[str]:
    """Arguments of this command for a new process image, which gets the secret by a pipe.

    Args:
        secret: The secret of the job, which the environment of this process has no more.
        failures: Number of attempts to join a job in a row that have failed.
    """
    arguments, given = [], iter(sys.argv[1:])
    for argument in given:
        if argument in ("--secret-fd", "--failures"):
            next(given)
        elif argument != "--secret-stdin":
            arguments.append(argument)
    arguments += ["--failures", str(failures)]
    return arguments if secret is None else [*arguments, "--secret-fd", str(secret_pipe(secret))]


def _end_by_signal(number: int, frame: FrameType | None) -> None:
    """End the process on SIGINT or SIGTERM.

    A worker has nothing to save, and the coordinator notices at once that its connection ends.
    """
    _log.info("ended by %s", signal.Signals(number).name)
    logging.shutdown()
    os._exit(128 + number)


@dataclass(frozen=True, slots=True)
class _Worker:
    """What a worker is started with.

    Attributes:
        name: Name of the worker, unique in the job.
        threads: Number of threads for torch's own parallel loops.
        secret: The secret of the job; None over an inherited connection, whose call carries it.
        bind: Network interface to listen on for other workers; None for loopback.
        tls: Encrypts its connections; None to leave them.
    """

    name: str
    threads: int
    secret: Secret | None = None
    bind: str | None = None
    tls: Tls | None = None


def _serve_at(
    address: str,
    timeout_s: float,
    persist: bool,
    worker: _Worker,
    failures: int,
    call_timeout: timedelta | None = _CALL_TIMEOUT,
) -> int:
    """Join a coordinator, once it listens and has a place, and host stages until it says to end.

    Args:
        address: ``HOST:PORT`` of the coordinator.
        timeout_s: Seconds to wait for the coordinator to listen.
        persist: Whether to try again, waiting longer each time, where there is no place for this
            worker in the job.
        worker: The worker.
        failures: Number of attempts in a row that have failed before.
        call_timeout: For who listens there to say its first word; None to wait for ever.

    Returns:
        Exit code of the process.

    Raises:
        PipelineError: The coordinator refused the worker, or does not speak this protocol.
    """
    while True:
        if failures:
            _pause(min(_LONGEST_PAUSE_S, 2.0 ** (failures - 1)))
        connection = _connect(address, timeout_s)
        here = str(connection.getsockname()[0])
        try:
            waits = None if call_timeout is None else HANDSHAKE_TIMEOUT_S
            connection, channel = wrapped(worker.tls, connection, True, waits)
        except OSError as error:
            connection.close()
            raise PeerLost(
                f"the coordinator at {address} is gone: {error}", peer=address
            ) from error
        control = Control(connection, "the coordinator", here, channel)
        try:
            return serve(control, worker, call_timeout)
        except _NoPlace as problem:
            if not persist:
                raise
            if not failures:
                level = logging.WARNING if isinstance(problem, _Unproven) else logging.INFO
                _log.log(level, "%s; trying again, now and then", problem)
            failures += 1
        finally:
            control.close()
            if worker.tls is not None:
                worker.tls.finish(Deadline(_SENT_TIMEOUT))


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
    pause_s, before = _SHORTEST_PAUSE_S, ""
    _log.info("joining the coordinator at %s", address)
    while True:
        try:
            # At least a second, so that the last attempt ends with a reason too.
            connection = socket.create_connection(
                (host, port), timeout=max(1.0, deadline.remaining_s() or 0.0)
            )
            connection.settimeout(None)
            prepare(connection)
            return connection
        except socket.gaierror as error:
            raise ConfigError(f"{host!r} is no host: {error}") from error
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else "no answer"
            if deadline.expired():
                raise PeerLost(
                    f"no coordinator listened at {address} within {timeout_s:g} s: {reason}",
                    peer=address,
                ) from error
        if reason != before:
            _log.info("%s: %s; waiting for the coordinator", address, reason)
            before = reason
        left_s = deadline.remaining_s()
        _pause(pause_s if left_s is None else min(pause_s, left_s))
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_OF_CONNECT_S)


def _pause(seconds: float) -> None:
    """Wait; a signal ends the process meanwhile."""
    threading.Event().wait(seconds)


class _NoPlace(PipelineError):
    """The coordinator had no place for this worker now, or gave up before the job began."""


class _Unproven(_NoPlace):
    """Who listens there refused this worker, and may be anybody."""


def serve(control: Control, worker: _Worker, call_timeout: timedelta | None = None) -> int:
    """Answer the call of a coordinator, and host stages until it says to end.

    Args:
        control: The control connection.
        worker: The worker.
        call_timeout: For the coordinator to call; None for one that has started this worker, and
            will call it or end.

    Returns:
        Exit code of the process.

    Raises:
        PipelineError: The coordinator refused the worker, or does not speak this protocol.
    """
    key = _be_admitted(control, worker, call_timeout)
    # torch reads it when imported: a worker need not log that other processes end.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imported now, while the others join: it takes seconds, and a waiting worker stays small.
    from pipedream_rt.workers.process import host_stage

    try:
        control.send({"type": "ready", "processor": processor()})
        welcome = control.receive(Deadline(None))
    except PeerLost:
        _log.info("the job ended before it began")
        return EXIT_AGAIN
    except TransportError as error:
        raise _NoPlace(f"what listens there is no coordinator: {error}") from error
    if welcome["type"] in ("stop", "exit"):
        _log.info("the coordinator gave up before all workers had joined")
        return EXIT_AGAIN
    _expect(welcome, "welcome")
    try:
        code: int = host_stage(control, welcome, worker.threads, key, worker.bind, worker.tls)
        return code
    except PeerLost as error:
        _log.error("%s", error)
        return EXIT_COORDINATOR_LOST


def _be_admitted(control: Control, worker: _Worker, call_timeout: timedelta | None) -> bytes:
    """Answer the call of a coordinator, and become a member of its group.

    All further records of the connection are signed.

    Args:
        control: The control connection.
        worker: The worker.
        call_timeout: As in `serve`.

    Returns:
        The key of the job.

    Raises:
        _NoPlace: The coordinator has no place for the worker now, or has ended.
        PipelineError: The coordinator refused the worker, or does not speak this protocol.
    """
    try:
        call = _call_of(control, call_timeout)
        if control.is_local:
            key = call.get("key")
        else:
            key = None if worker.secret is None else worker.secret.key(call["salt"])
        if key is None:
            raise TransportError("the coordinator's call has no key")
        nonce = secrets.token_bytes(NONCE)
        hello = {
            "type": "hello",
            "name": worker.name,
            "pid": os.getpid(),
            "host": printable(socket.gethostname(), 200),
            "boot": boot_id(),
            "software": software(),
            "version": VERSION,
            "nonce": nonce,
        }
        talk = Talk(key, call["nonce"], nonce, control.channel)
        control.send({**hello, "proof": talk.prove(hello)})
        answer = control.receive(Deadline(_ANSWER_TIMEOUT))
        if answer["type"] == "refused":
            reason = printable(answer["reason"])
            right = talk.prove_refusal(answer)
            if not hmac.compare_digest(right, answer.get("proof") or b""):
                raise _Unproven(
                    "the coordinator refused this worker, and does not show that it knows the "
                    f"secret that the worker has: {reason}"
                )
            kind = _NoPlace if answer["passing"] else PipelineError
            raise kind(f"the coordinator refused this worker: {reason}")
        _expect(answer, "admitted")
        if not hmac.compare_digest(talk.prove_admission(), answer["proof"]):
            raise TransportError("it does not know the job's secret, or somebody is in between")
    except PeerLost as error:
        raise _NoPlace(f"the coordinator ended before it admitted this worker: {error}") from error
    except (TransportError, MessageTimeout) as error:  # somebody else may have the port now
        raise _NoPlace(f"what listens there is no coordinator: {error}") from error
    control.secure(talk.session_key(), WORKER_END, COORDINATOR_END)
    return bytes(key)


def _call_of(control: Control, timeout: timedelta | None) -> Record:
    """Wait for the call of a coordinator.

    Raises:
        TransportError: Something else comes, or the other end is gone.
        MessageTimeout: Nothing comes in time.
    """
    try:
        call = control.receive(Deadline(timeout))
    except MessageTimeout as error:
        assert timeout is not None
        raise MessageTimeout(
            f"it has taken the connection, and has said nothing for {timeout.total_seconds():g} s; "
            "it may be another program, or one end encrypts and the other does not: "
            f"{TLS} must be the same for the script and its workers"
        ) from error
    _expect(call, "call")
    return call


def _expect(record: Record, kind: str) -> None:
    """Check the type of a record.

    Raises:
        TransportError: The record is of another type.
    """
    if record["type"] != kind:
        raise TransportError(f"expected {kind!r} from the coordinator, got {record['type']!r}")
