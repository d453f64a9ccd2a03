"""The worker's side of a coordinator's door: connect to it, and prove the secret of the job."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta

from pipedream_rt.cluster.addresses import boot_id, parse_address
from pipedream_rt.cluster.control import VERSION, Control
from pipedream_rt.cluster.control_records import Record
from pipedream_rt.cluster.environment import TLS
from pipedream_rt.cluster.keys import COORDINATOR_END, NONCE, WORKER_END, Handshake, Secret
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import (
    ConfigError,
    MessageTimeout,
    PeerLost,
    PipelineError,
    TransportError,
)
from pipedream_rt.schema import printable
from pipedream_rt.software import software
from pipedream_rt.transport.tcp import prepare
from pipedream_rt.transport.tls import HANDSHAKE_TIMEOUT_S, Tls, wrapped

_log = logging.getLogger("pipedream_rt.worker")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_OF_CONNECT_S = 0.1, 2.0
"""Backoff while a coordinator does not listen yet, in seconds: first pause, and longest.
Short, since an attempt costs little and a recovery waits for its workers."""

_ATTEMPT_S = 1.0
"""Seconds for one attempt to connect. The kernel itself sends its SYN again after 1, 2, 4, 8 ...
seconds, so a worker would notice late that the network is back."""

_ANSWER_TIMEOUT = timedelta(seconds=60)
"""For a coordinator to answer a hello, which it does at once."""

CALL_TIMEOUT = timedelta(seconds=30)
"""For a coordinator to call a worker that has connected: at once, but for a TLS handshake of up to
20 s."""


class JobOver(PipelineError):
    """The job has ended, and nobody will call this worker again."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the job is over: its script has ended with exit code {code}")
        self.code = code


class NoPlace(PipelineError):
    """The coordinator had no place for this worker now, or gave up before the job began."""


class Unproven(NoPlace):
    """Refused by somebody who did not prove the secret, so perhaps by no coordinator."""


@dataclass(frozen=True, slots=True)
class DialOptions:
    """Where a worker finds its coordinators, and how long it waits there.

    Attributes:
        address: ``HOST:PORT`` of the coordinator.
        timeout_s: Seconds to wait for a coordinator to listen.
        persist: Whether to try again where the job has no place for the worker.
        call_timeout: For whoever listens there to call; None to wait for ever.
        known: Whether the host is known to exist, though its name may not resolve for a while.
        longest_pause_s: Limit of the backoff in seconds. It is short where somebody may be waiting
            to say that the job is over.
        warm: Whether to import torch before anybody calls.
    """

    address: str
    timeout_s: float
    persist: bool = True
    call_timeout: timedelta | None = CALL_TIMEOUT
    known: bool = False
    longest_pause_s: float = 30.0
    warm: bool = False


def connect(place: DialOptions) -> socket.socket:
    """Connect to a coordinator that may not listen yet, with backoff until the time is over."""
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
                    f"no coordinator listened at {address} within {place.timeout_s:g} s: {reason}; "
                    "is the script running, and is this its address?",
                    peer=address,
                ) from error
        if reason != before:
            _log.info("%s: %s; waiting for the coordinator", address, reason)
            before = reason
        left_s = deadline.remaining_s()
        pause(pause_s if left_s is None else min(pause_s, left_s))
        if reason != "no answer":  # that attempt has lasted `_ATTEMPT_S` already
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_OF_CONNECT_S)


def reached(place: DialOptions, who: str, tls: Tls | None) -> Control:
    """Connect as `connect` does, and return the control connection."""
    connection = connect(place)
    here = str(connection.getsockname()[0])
    below = connection.dup()
    try:
        # Who waits for hours for a call also waits as long for the handshake before it.
        waits = None if place.call_timeout is None else HANDSHAKE_TIMEOUT_S
        connection, channel = wrapped(tls, connection, True, waits)
    except OSError as error:
        connection.close()
        below.close()
        raise PeerLost(f"{who} at {place.address} is gone: {error}", peer=place.address) from error
    return Control(connection, who, here, channel, below)


def pause(seconds: float) -> None:
    """Sleep for some seconds; a signal may end the process meanwhile."""
    threading.Event().wait(seconds)


def ask_to_join(
    control: Control,
    name: str,
    secret: Secret | None,
    call_timeout: timedelta | None,
    returns: bool = False,
) -> bytes:
    """Answer a coordinator's call, become a member of its group, and return the key of the job."""
    try:
        call = _call_of(control, call_timeout)
        # Nobody else can read an inherited connection, so the call itself brings the key.
        if control.is_local:
            key = call.get("key")
        else:
            key = None if secret is None else secret.key(call["salt"])
        if key is None and control.is_local:
            raise TransportError("the call over an inherited connection has brought no key")
        if key is None:
            raise TransportError(
                "this worker has not been given the secret of the job; set PIPEDREAM_RT_SECRET to "
                "the same text here and where the script runs"
            )
        nonce = secrets.token_bytes(NONCE)
        hello = {
            "type": "hello",
            "name": name,
            "pid": os.getpid(),
            "host": printable(socket.gethostname(), 200),
            "boot": boot_id(),
            "software": software(),
            "returns": returns,
            "version": VERSION,
            "nonce": nonce,
        }
        talk = Handshake(key, call["nonce"], nonce, control.channel)
        control.send({**hello, "proof": talk.prove(hello)})
        answer = control.receive(Deadline(_ANSWER_TIMEOUT))
        if answer["type"] == "over":
            if not hmac.compare_digest(talk.prove_over(answer["code"]), answer["proof"]):
                raise TransportError(
                    "it says that the job is over, and does not know the secret that this worker "
                    "has; is PIPEDREAM_RT_SECRET the same on both sides?"
                )
            raise JobOver(answer["code"])
        if answer["type"] == "refused":
            reason = printable(answer["reason"])
            right = talk.prove_refusal(answer)
            if not hmac.compare_digest(right, answer.get("proof") or b""):
                raise Unproven(
                    "the coordinator refused this worker, and does not show that it knows the "
                    f"secret that the worker has: {reason}"
                )
            # Final only with a proof: else whoever has the port could send a worker away for good.
            kind = NoPlace if answer["passing"] else PipelineError
            raise kind(f"the coordinator refused this worker: {reason}")
        expect(answer, "admitted")
        if not hmac.compare_digest(talk.prove_admission(), answer["proof"]):
            raise TransportError(
                "its proof at the admission is wrong: it does not know the job's secret, or "
                "somebody is in between"
            )
    except PeerLost as error:
        raise NoPlace(f"the coordinator ended before it admitted this worker: {error}") from error
    except (TransportError, MessageTimeout) as error:  # somebody else may have the port now
        raise NoPlace(f"the handshake with {control.peer} failed: {error}") from error
    control.secure(talk.session_key(), WORKER_END, COORDINATOR_END)
    return bytes(key)


def _call_of(control: Control, timeout: timedelta | None) -> Record:
    """Wait for the call of a coordinator."""
    try:
        call = control.receive(Deadline(timeout))
    except MessageTimeout as error:
        assert timeout is not None
        raise MessageTimeout(
            f"it has taken the connection, and has said nothing for {timeout.total_seconds():g} s; "
            "it may be another program, or one end encrypts and the other does not: "
            f"{TLS} must be the same for the script and its workers"
        ) from error
    expect(call, "call")
    return call


def expect(record: Record, kind: str) -> None:
    """Check the type of a record."""
    if record["type"] != kind:
        raise TransportError(
            f"expected {kind!r} from the coordinator, got {record['type']!r}; is it pipedream-rt "
            "of the same version?"
        )
