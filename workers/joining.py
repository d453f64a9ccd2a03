"""How a worker finds its coordinator, proves what it knows, and becomes a member of a group.

Imports torch only once a coordinator has admitted it, so a worker that waits is small.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from pipedream_rt.cluster.addresses import boot_id, parse_address
from pipedream_rt.cluster.control import (
    EXIT_AGAIN,
    EXIT_COORDINATOR_LOST,
    VERSION,
    Control,
)
from pipedream_rt.cluster.environment import TLS
from pipedream_rt.cluster.keys import (
    COORDINATOR_END,
    NONCE,
    WORKER_END,
    Secret,
    Talk,
)
from pipedream_rt.cluster.records import Record
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

_ATTEMPT_S = 1.0
"""Seconds for an attempt to connect. The kernel would try again by itself only after 1, 2, 4, 8 ...
seconds, so a worker would notice late that a cable is in again."""

_ANSWER_TIMEOUT = timedelta(seconds=60)
"""For a coordinator to answer a hello, which it does at once."""

CALL_TIMEOUT = timedelta(seconds=30)
"""For a coordinator to call a worker that has connected, which it does at once, though a handshake
may take 20 s."""

_SENT_TIMEOUT = timedelta(seconds=2)
"""For the last words of a worker to be sent, where they are encrypted."""

_LONGEST_PAUSE_S = 30.0
"""Seconds between two attempts to join a coordinator that has no place for this worker."""

_EAGER_S = 120.0
"""Seconds for which a worker that has lost its group tries often: the group waits for it."""

_LONGEST_PAUSE_OF_EAGER_S = 0.5


class JobOver(PipelineError):
    """The job has ended, and nobody will call this worker again.

    Args:
        code: The exit code of its script.
    """

    def __init__(self, code: int) -> None:
        """Say how the script has ended."""
        super().__init__(f"the job is over: its script has ended with exit code {code}")
        self.code = code


class _NoPlace(PipelineError):
    """The coordinator had no place for this worker now, or gave up before the job began."""


class _Unproven(_NoPlace):
    """Who listens there refused this worker, and may be anybody."""


@dataclass(frozen=True, slots=True)
class Worker:
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


@dataclass(frozen=True, slots=True)
class Tries:
    """How often a worker has tried to join in vain, and whether a group waits for it.

    Attributes:
        failures: Number of attempts in a row that have failed.
        lost: When the worker lost its last group, in seconds of the monotonic clock of this
            machine; None if it never was in one.
    """

    failures: int = 0
    lost: float | None = None

    def failed(self) -> Tries:
        """Return what is known after one more attempt in vain."""
        return replace(self, failures=self.failures + 1)

    def after(self, code: int, now: float) -> Tries:
        """Return what is known after a life in a group, or before one, that ended with a code."""
        if code == EXIT_AGAIN:
            return self.failed()
        return Tries(lost=now if code == EXIT_COORDINATOR_LOST else None)

    def is_awaited(self, now: float) -> bool:
        """Whether the worker has lost its group a short while ago, so that a recovery awaits it."""
        return self.lost is not None and now - self.lost < _EAGER_S

    def pause_s(self, now: float) -> float:
        """Return the seconds to wait before the next attempt.

        A worker of a group that was lost comes back at once and tries often, since a recovery waits
        for it. Any other waits longer each time.
        """
        if not self.failures:
            return 0.0
        first, factor, longest = (
            (_SHORTEST_PAUSE_S, 1.5, _LONGEST_PAUSE_OF_EAGER_S)
            if self.is_awaited(now)
            else (1.0, 2.0, _LONGEST_PAUSE_S)
        )
        return float(min(longest, first * factor ** min(self.failures - 1, 60)))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker finds its coordinators, and how long it waits there.

    Attributes:
        address: ``HOST:PORT`` of the coordinator.
        timeout_s: Seconds to wait for a coordinator to listen.
        persist: Whether to try again where there is no place for the worker in the job.
        call_timeout: For who listens there to say its first word; None to wait for ever.
        known: Whether the host is known to exist, though its name may lead nowhere for a while.
    """

    address: str
    timeout_s: float
    persist: bool = True
    call_timeout: timedelta | None = CALL_TIMEOUT
    known: bool = False


def serve_at(place: Place, worker: Worker, tries: Tries) -> int:
    """Join a coordinator, once it listens and has a place, and host stages until it says to end.

    Args:
        place: Where the coordinator is.
        worker: The worker.
        tries: What the attempts before this one have come to.

    Returns:
        Exit code of the process.

    Raises:
        JobOver: Nobody will call this worker again.
        PipelineError: The coordinator refused the worker, or does not speak this protocol.
    """
    said = tries.failures > 0
    if tries.is_awaited(time.monotonic()):
        _import_torch()  # while the coordinator is out of reach, perhaps
    while True:
        _pause(tries.pause_s(time.monotonic()))
        connection = _connect(place)
        here = str(connection.getsockname()[0])
        below = connection.dup()
        try:
            waits = None if place.call_timeout is None else HANDSHAKE_TIMEOUT_S
            connection, channel = wrapped(worker.tls, connection, True, waits)
        except OSError as error:
            connection.close()
            below.close()
            raise PeerLost(
                f"the coordinator at {place.address} is gone: {error}", peer=place.address
            ) from error
        control = Control(connection, "the coordinator", here, channel, below)
        try:
            return serve(control, worker, place.call_timeout)
        except _NoPlace as problem:
            if not place.persist:
                raise
            if not said:
                level = logging.WARNING if isinstance(problem, _Unproven) else logging.INFO
                _log.log(level, "%s; trying again, now and then", problem)
                said = True
            tries = tries.failed()
        finally:
            control.close()
            if worker.tls is not None:
                worker.tls.finish(Deadline(_SENT_TIMEOUT))


def _connect(place: Place) -> socket.socket:
    """Connect to a coordinator that may not listen yet.

    Raises:
        ConfigError: The address is none, or its host is unknown.
        PeerLost: No coordinator listened in time.
    """
    address = place.address
    host, port = parse_address(address)
    deadline = Deadline(timedelta(seconds=place.timeout_s))
    pause_s, before = _SHORTEST_PAUSE_S, ""
    _log.info("joining the coordinator at %s", address)
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=_ATTEMPT_S)
            connection.settimeout(None)
            prepare(connection)
            return connection
        except OSError as error:
            if isinstance(error, socket.gaierror):
                if not place.known:
                    raise ConfigError(f"{host!r} is no host: {error}") from error
                reason = f"{host!r} is no host now"
            else:
                reason = os.strerror(error.errno).lower() if error.errno else "no answer"
            if deadline.expired():
                raise PeerLost(
                    f"no coordinator listened at {address} within {place.timeout_s:g} s: {reason}",
                    peer=address,
                ) from error
        if reason != before:
            _log.info("%s: %s; waiting for the coordinator", address, reason)
            before = reason
        left_s = deadline.remaining_s()
        _pause(pause_s if left_s is None else min(pause_s, left_s))
        if reason != "no answer":  # which took its time already
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_OF_CONNECT_S)


def _pause(seconds: float) -> None:
    """Wait; a signal ends the process meanwhile."""
    threading.Event().wait(seconds)


def serve(control: Control, worker: Worker, call_timeout: timedelta | None = None) -> int:
    """Answer the call of a coordinator, and host stages until it says to end.

    Args:
        control: The control connection.
        worker: The worker.
        call_timeout: For the coordinator to call; None for one that has started this worker, and
            will call it or end.

    Returns:
        Exit code of the process.

    Raises:
        JobOver: Nobody will call this worker again.
        PipelineError: The coordinator refused the worker, or does not speak this protocol.
    """
    key = _be_admitted(control, worker, call_timeout)
    host_stage = _import_torch()  # now, while the others join: a waiting worker stays small
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
        return host_stage(control, welcome, worker.threads, key, worker.bind, worker.tls)
    except PeerLost as error:
        _log.error("%s", error)
        return EXIT_COORDINATOR_LOST


def _import_torch() -> Callable[..., int]:
    """Import torch, which takes seconds, and return the life of a worker in a group."""
    # torch reads it when imported: a worker need not log that other processes end.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from pipedream_rt.workers.process import host_stage

    life: Callable[..., int] = host_stage
    return life


def _be_admitted(control: Control, worker: Worker, call_timeout: timedelta | None) -> bytes:
    """Answer the call of a coordinator, and become a member of its group.

    All further records of the connection are signed.

    Args:
        control: The control connection.
        worker: The worker.
        call_timeout: As in `serve`.

    Returns:
        The key of the job.

    Raises:
        JobOver: Nobody will call this worker again.
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
        if answer["type"] == "over":
            if not hmac.compare_digest(talk.prove_over(answer["code"]), answer["proof"]):
                raise TransportError("it says that the job is over, and does not know its secret")
            raise JobOver(answer["code"])
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
