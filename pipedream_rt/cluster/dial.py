"""The worker's side of joining: connect to a coordinator, and become a member of its group."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from dataclasses import dataclass
from datetime import timedelta

from pipedream_rt.cluster.addresses import UNIX, boot_id, parse_address
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.identity import Secret, is_same_user
from pipedream_rt.cluster.records import VERSION, Record
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
from pipedream_rt.telling import log_of
from pipedream_rt.transport.tcp import prepare
from pipedream_rt.transport.tls import problem_of_tls

_log = log_of("pipedream_rt.worker")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_OF_CONNECT_S = 0.1, 2.0
"""Backoff while a coordinator does not listen yet, in seconds: first pause, and longest.
Short, since an attempt costs little and a recovery waits for its workers."""

_ATTEMPT_S = 1.0
"""Seconds for one attempt to connect. The kernel itself sends its SYN again after 1, 2, 4, 8 ...
seconds, so a worker would notice late that the network is back."""

_ANSWER_TIMEOUT = timedelta(seconds=60)
"""For a coordinator to answer a hello, which it does at once."""

CALL_TIMEOUT = timedelta(seconds=30)
"""For a coordinator to shake hands with a worker that has connected."""


class JobOver(PipelineError):
    """The job has ended, and nobody will call this worker again."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the job is over: its script has ended with exit code {code}")
        self.code = code


class NotAdmitted(PipelineError):
    """The coordinator has not admitted this worker for now, or gave up before the job began."""


class NotOfThisJob(NotAdmitted):
    """The process that listens at the address does not know the secret of this worker."""


@dataclass(frozen=True, slots=True)
class DialOptions:
    """Where a worker finds its coordinators, and how long it waits there.

    Attributes:
        address: ``HOST:PORT`` of the coordinator, or ``unix:`` and the path of its Unix socket.
        timeout_s: Seconds to wait for a coordinator to listen.
        persist: Whether to try again where the job does not admit the worker.
        call_timeout: For whoever listens there to shake hands; None to wait for ever.
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


def connect(options: DialOptions) -> socket.socket:
    """Connect to a coordinator that may not listen yet, with backoff until the time is over."""
    address = options.address
    path = address.removeprefix(UNIX) if address.startswith(UNIX) else ""
    host, port = ("", 0) if path else parse_address(address)
    deadline = Deadline(timedelta(seconds=options.timeout_s))
    pause_s, before = _SHORTEST_PAUSE_S, ""
    _log.info("joining the coordinator at %s", address)
    while True:
        try:
            return _connected_at(path) if path else _connected_to(host, port)
        except OSError as error:
            if isinstance(error, socket.gaierror):
                if not options.known:
                    raise ConfigError(f"{host!r} is no host: {error}") from error
                reason = f"{host!r} is no host now"
            else:
                reason = os.strerror(error.errno).lower() if error.errno else "no answer"
            if deadline.expired():
                raise PeerLost(
                    f"no coordinator listened at {address} within {options.timeout_s:g} s: "
                    f"{reason}; is the script running, and is this its address?",
                    peer=address,
                ) from error
        if reason != before:
            _log.info("%s: %s; waiting for the coordinator", address, reason)
            before = reason
        left_s = deadline.remaining_s()
        pause(pause_s if left_s is None else min(pause_s, left_s))
        if reason != "no answer":  # that attempt has lasted `_ATTEMPT_S` already
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_OF_CONNECT_S)


def _connected_to(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_ATTEMPT_S)
    try:
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _connected_at(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_ATTEMPT_S)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def reached(options: DialOptions, who: str, secret: Secret | None) -> Control:
    """Connect to a coordinator of this job, and return the control connection."""
    connection = connect(options)
    # Who waits for hours for a coordinator to attend also waits as long for the handshake.
    deadline = Deadline(options.call_timeout)
    if connection.family == socket.AF_UNIX:
        if not is_same_user(connection):
            connection.close()
            raise ConfigError(f"{options.address} is the socket of another user")
        return Control(connection, who)
    assert secret is not None  # whoever dials a port has one
    control = Control(connection, who, local_host=str(connection.getsockname()[0]))
    try:
        control.encrypt(secret.tls(called=False), deadline)
    except ssl.SSLError as error:
        control.close()
        raise NotOfThisJob(
            f"the TLS handshake with {who} at {options.address} failed: {problem_of_tls(error)}"
        ) from error
    except MessageTimeout as error:
        control.close()
        raise NotAdmitted(f"the handshake with {who} failed: {error}") from error
    except (OSError, PeerLost) as error:
        control.close()
        raise NotAdmitted(
            f"{who} at {options.address} ended before it shook hands: {error}"
        ) from error
    return control


def pause(seconds: float) -> None:
    """Sleep for some seconds; a signal may end the process meanwhile."""
    threading.Event().wait(seconds)


def ask_to_join(
    control: Control, name: str, secret: Secret | None, returns: bool = False, job: str = ""
) -> Secret:
    """Become a member of a coordinator's group, and return the secret of the job.

    It comes with the admission where the connection does not leave the machine; ``secret`` is the
    one that this worker has already, None for none.
    """
    hello = {
        "type": "hello",
        "job": job if secret is None else secret.job,
        "name": name,
        "pid": os.getpid(),
        "host": printable(socket.gethostname(), 200),
        "boot": boot_id(),
        "software": software(),
        "returns": returns,
        "version": VERSION,
    }
    try:
        control.send(hello)
        answer = control.receive(Deadline(_ANSWER_TIMEOUT))
        if answer["type"] == "over":
            raise JobOver(answer["code"])
        if answer["type"] == "refused":
            kind = NotAdmitted if answer["passing"] else PipelineError
            raise kind(f"the coordinator refused this worker: {printable(answer['reason'])}")
        expect(answer, "admitted")
        if secret is None and not answer.get("secret"):
            raise TransportError("the admission has brought no secret")
    except PeerLost as error:
        raise NotAdmitted(
            f"the coordinator ended before it admitted this worker: {error}"
        ) from error
    except (TransportError, MessageTimeout) as error:  # somebody else may have the port now
        raise NotAdmitted(f"the handshake with {control.peer} failed: {error}") from error
    return secret or Secret(answer["secret"])


def expect(record: Record, kind: str) -> None:
    """Refuse a record of another type."""
    if record["type"] != kind:
        raise TransportError(
            f"expected {kind!r} from the coordinator, got {record['type']!r}; is it pipedream-rt "
            "of the same version?"
        )
