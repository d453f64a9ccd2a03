"""The worker's end of its control connection; `records.py` has what is said on it."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from contextlib import nullcontext
from datetime import timedelta

from pipedream_rt.cluster.framing import CHUNK, Framing
from pipedream_rt.cluster.records import LARGEST, Record
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.transport.tcp import set_timeout
from pipedream_rt.transport.tls import TlsEngine, problem_of_tls

_SEND_TIMEOUT = timedelta(seconds=10)
"""After which an end that reads nothing counts as gone."""


class Control:
    """The worker's end of a control connection. Any thread may send, and one may receive.

    Attributes:
        peer: Name of the other end, for error messages.
        inherited: Whether it is a socket pair, which the process that started this one has made.
        local_host: Numeric address of this end; empty if the connection stays within the machine.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        *,
        inherited: bool = False,
        local_host: str = "",
    ) -> None:
        connection.setblocking(False)
        close_in_forked_children(connection)
        self.inherited = inherited
        self.local_host = local_host
        self._socket = connection
        self._framing = Framing(peer, LARGEST)
        self._lock = threading.Lock()  # of what is sent, and of the engine

    @property
    def peer(self) -> str:
        return self._framing.peer

    def fileno(self) -> int:
        """Descriptor of the socket, for selectors."""
        return self._socket.fileno()

    def encrypt(self, context: ssl.SSLContext, deadline: Deadline) -> None:
        """Encrypt the connection as the end that calls; the other end knows the secret then."""
        # Refused by the other end, this one hears of it at its first read only (TLS 1.3).
        engine = self._framing.engine = TlsEngine(context, called=False)
        while not self._shakes_hands(engine):
            if not self._wait(select.POLLIN, deadline):
                raise MessageTimeout(
                    f"{self.peer} has taken the connection, and has said nothing for "
                    f"{deadline.timeout and deadline.timeout.total_seconds():g} s; it may be "
                    "another program, or stopped"
                )
            self._framing.take(self._socket.recv(CHUNK))

    def _shakes_hands(self, engine: TlsEngine) -> bool:
        """Go on with the handshake; return whether it is done."""
        try:
            return engine.shake_hands()
        finally:
            self._write(engine.sealed(), Deadline(_SEND_TIMEOUT))  # also why it has failed

    def notice_within(self, seconds: float) -> None:
        """Have the kernel end the connection if the other machine confirms nothing for so long."""
        # It counts what was sent and not acknowledged. The kernel of a stopped process still
        # acknowledges; such a process is noticed by the heartbeat.
        if self._framing.engine is not None:
            set_timeout(self._socket, seconds)

    def send(self, record: Record) -> None:
        """Send a record."""
        deadline = Deadline(_SEND_TIMEOUT)
        with self._lock:
            try:
                data = self._framing.sealed(record)
            except ssl.SSLError as error:
                raise self._framing.gone(problem_of_tls(error)) from error
            self._write(data, deadline)

    def _write(self, data: bytes, deadline: Deadline) -> None:
        """Write all of it, unless the other end reads nothing until the deadline."""
        left = memoryview(data)
        try:
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    if not self._wait(select.POLLOUT, deadline):
                        text = f"it read nothing for {_SEND_TIMEOUT.seconds} s"
                        raise TimeoutError(text) from None
        except (OSError, ValueError) as error:
            raise self._framing.gone(error) from error

    def receive(self, deadline: Deadline) -> Record:
        """Wait for a record."""
        try:
            while self._framing.lacking:
                if not self._wait(select.POLLIN, deadline):
                    raise MessageTimeout(f"nothing came from {self.peer} in time")
                self._read()
        except (OSError, ValueError) as error:
            raise self._framing.gone(error) from error
        return self._framing.record()

    def _read(self) -> None:
        """Read what has come, and decrypt all of it, so that `has_come` knows of it."""
        try:
            data = self._socket.recv(CHUNK)
        except BlockingIOError:
            return
        # A sender holds the lock while it waits, and the other end may wait for this one to read.
        with self._lock if data and self._framing.engine is not None else nullcontext():
            self._framing.take(data)
            while self._framing.open(CHUNK):
                pass

    def _wait(self, event: int, deadline: Deadline) -> bool:
        """Wait until the socket is ready; return whether it is in time."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(deadline.remaining_ms()))

    def has_come(self) -> bool:
        """Whether there is anything to receive, if only the end of the connection."""
        return self._framing.has_begun or self._wait(select.POLLIN, Deadline(timedelta(0)))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()
