"""Records over a socket in an event loop.

They are those of control connections at the coordinator's end, and the first ones of a link.
asyncio's own TLS streams do not serve here. Their handshakes can be neither counted nor dropped,
and their sockets cannot be given to the transport afterwards.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

from pipedream_rt.cluster.records import (
    HEAD,
    LARGEST,
    LARGEST_AT_FIRST,
    Record,
    length_of,
    packed,
    unpacked,
)
from pipedream_rt.errors import PeerLost, TransportError
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.transport.tls import TlsEngine, problem_of_tls

_CHUNK = 1 << 16
"""Bytes that are read at a time of an encrypted connection."""


class Stream:
    """Records over a socket of any kind. One event loop owns it, and one coroutine reads it.

    Attributes:
        peer: Name of the other end, for error messages.
        engine: Encrypts it; None if the connection stays within the machine.
        local_host: Numeric address of this end; empty if the connection stays within the machine.
        remote_host: Numeric address of the other end, as this end sees it; empty as above.
        largest: Limit of a record in bytes, which is small until the peer is admitted.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        close_in_forked_children(connection)
        self._socket = connection
        self.peer = peer
        self.engine: TlsEngine | None = None
        self.local_host = self.remote_host = ""
        self.largest = LARGEST_AT_FIRST
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._writing: asyncio.Future[None] | None = None  # while the socket takes no more
        self._reading: asyncio.Future[None] | None = None  # while nothing has come

    @property
    def socket(self) -> socket.socket:
        return self._socket

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
        self.peer, self.largest = peer, LARGEST

    async def encrypt(self, context: ssl.SSLContext, called: bool) -> None:
        """Shake hands; afterwards both ends have proved that they know the job's secret."""
        engine = self.engine = TlsEngine(context, called)
        try:
            if self._socket.family != socket.AF_UNIX:
                self.local_host = str(self._socket.getsockname()[0])
                self.remote_host = str(self._socket.getpeername()[0])
            while not engine.shake_hands():
                await self._write(engine.sealed())
                engine.take(await self._some(_CHUNK))
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
        length = length_of(await self._exactly(HEAD.size), self.largest, self.peer)
        return unpacked(await self._exactly(length), self.peer)

    def send(self, record: Record) -> None:
        """Send a record, or as much of it as the socket takes now; the rest follows by itself."""
        data = packed(record)
        if self.engine is not None:
            try:
                self.engine.write(data)
            except ssl.SSLError:  # it has ended, which whoever reads the connection meets too
                return
            data = self.engine.sealed()
        self._unsent += data
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

    async def _exactly(self, count: int) -> bytes:
        """Read so many bytes and no more: what is behind them may be for the transport."""
        got = bytearray()
        while len(got) < count:
            if self.engine is None:
                got += await self._some(count - len(got))
                continue
            room = memoryview(bytearray(count - len(got)))
            try:
                came = self.engine.read_into(room)
                if not came:
                    self.engine.take(await self._some(_CHUNK))
            except ssl.SSLError as error:
                raise TransportError(
                    f"{self.peer} has ended the encryption: {problem_of_tls(error)}"
                ) from error
            got += room[:came]
        return bytes(got)

    async def _some(self, most: int) -> bytes:
        """Wait for bytes, and read at most so many."""
        while True:
            try:
                data = self._socket.recv(most)
            except BlockingIOError:
                await self._readable()
                continue
            except OSError as error:
                raise PeerLost(f"{self.peer} is gone: {error}", peer=self.peer) from error
            if not data:
                raise PeerLost(f"{self.peer} closed the connection", peer=self.peer)
            return data

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
