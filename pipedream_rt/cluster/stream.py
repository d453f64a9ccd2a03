"""Records over a socket in an event loop.

They are those of control connections at the coordinator's end, and the first ones of a link.
asyncio's own TLS streams do not serve here. Their handshakes can be neither counted nor dropped,
and their sockets cannot be given to the transport afterwards.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

from pipedream_rt.cluster.framing import CHUNK, Framing
from pipedream_rt.cluster.records import LARGEST, LARGEST_AT_FIRST, Record
from pipedream_rt.errors import TransportError
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.transport.tls import TlsEngine, problem_of_tls


class Stream:
    """Records over a socket of any kind. One event loop owns it, and one coroutine reads it.

    Attributes:
        peer: Name of the other end, for error messages.
        engine: Encrypts it; None if the connection stays within the machine.
        local_host: Numeric address of this end; empty if the connection stays within the machine.
        remote_host: Numeric address of the other end, as this end sees it; empty as above.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        close_in_forked_children(connection)
        self._socket = connection
        self._framing = Framing(peer, LARGEST_AT_FIRST)
        self.local_host = self.remote_host = ""
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._writing: asyncio.Future[None] | None = None  # while the socket takes no more
        self._reading: asyncio.Future[None] | None = None  # while nothing has come

    @property
    def socket(self) -> socket.socket:
        return self._socket

    @property
    def is_sending(self) -> bool:
        """Whether records have not left yet."""
        return self._writing is not None

    @property
    def engine(self) -> TlsEngine | None:
        return self._framing.engine

    @property
    def peer(self) -> str:
        return self._framing.peer

    @peer.setter
    def peer(self, name: str) -> None:
        self._framing.peer = name

    @property
    def is_over(self) -> bool:
        """Whether the other end has closed the connection, and nothing is left to read."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def lost_by(self, error: Exception) -> TransportError:
        """Return the error with which the connection ends, of one that came of what it brought."""
        if isinstance(error, TransportError):
            return error
        return TransportError(f"what {self.peer} sent cannot be read: {error!r}")

    def admit(self, peer: str) -> None:
        """Note who is at the other end, which may send large records from now on."""
        self._framing.peer, self._framing.largest = peer, LARGEST

    async def encrypt(self, context: ssl.SSLContext, called: bool) -> None:
        """Shake hands; afterwards both ends have proved that they know the job's secret."""
        engine = self._framing.engine = TlsEngine(context, called)
        try:
            if self._socket.family != socket.AF_UNIX:
                self.local_host = str(self._socket.getsockname()[0])
                self.remote_host = str(self._socket.getpeername()[0])
            while not engine.shake_hands():
                await self._write(engine.sealed())
                self._framing.take(await self._some(CHUNK))
            await self._write(engine.sealed())
        except ssl.SSLError as error:
            # What ends the connection is told to the other end (TLS alert), as far as it listens.
            self._unsent += engine.sealed()
            self._flush()
            raise TransportError(
                f"the TLS handshake with {self.peer} failed: {problem_of_tls(error)}"
            ) from error

    async def read(self) -> Record:
        """Wait for a record."""
        framing = self._framing
        while lacking := framing.lacking:
            if not framing.open(lacking):
                # No more than the record lacks: what is behind it may be for the transport.
                framing.take(await self._some(lacking if framing.engine is None else CHUNK))
        return framing.record()

    def send(self, record: Record) -> None:
        """Send a record, or as much of it as the socket takes now; the rest follows by itself."""
        try:
            self._unsent += self._framing.sealed(record)
        except ssl.SSLError:  # it has ended, which whoever reads the connection meets too
            return
        if self._writing is None:
            self._flush()

    async def sent(self) -> None:
        """Wait until all records have left, or the connection is gone."""
        while self._writing is not None:
            await asyncio.shield(self._writing)

    def _flush(self) -> None:
        """Write what is left to send; go on when the socket takes more."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            if self._writing is None:
                self._writing = self._loop.create_future()
                self._loop.add_writer(self._socket.fileno(), self._flush)
            return
        except OSError:  # whoever reads the connection meets it too
            self._unsent.clear()
        self._stop_writing()

    def _stop_writing(self) -> None:
        """Forget what was to be sent, and wake whoever waits for it."""
        if self._writing is not None:
            self._loop.remove_writer(self._socket.fileno())
            if not self._writing.done():
                self._writing.set_result(None)
            self._writing = None

    async def _write(self, data: bytes) -> None:
        """Write bytes as they are, and wait until they have left."""
        self._unsent += data
        self._flush()
        await self.sent()

    async def _some(self, most: int) -> bytes:
        """Wait for bytes, and read at most so many; none at the end of the connection."""
        while True:
            try:
                return self._socket.recv(most)
            except BlockingIOError:
                await self._readable()
            except OSError as error:
                raise self._framing.gone(error) from error

    async def _readable(self) -> None:
        """Wait until the socket can be read, or is closed here."""
        came = self._reading = self._loop.create_future()
        fd = self._socket.fileno()
        self._loop.add_reader(fd, self._wake_reader)
        try:
            await came
        finally:
            self._reading = None
            if self._socket.fileno() == fd:
                self._loop.remove_reader(fd)

    def _wake_reader(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._socket.fileno() >= 0:
            # Before it is closed, which unregisters nothing while a forked child has it too.
            self._loop.remove_reader(self._socket.fileno())
            self._stop_writing()
            self._socket.close()
            self._wake_reader()  # it finds the socket closed
