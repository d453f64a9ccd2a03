"""Records of one connection as bytes, whoever reads and writes its socket.

A thread reads the worker's end of a control connection (`control.py`), and an event loop all other
ends (`stream.py`). Both put the same bytes in, and get the same records and errors out.
"""

from __future__ import annotations

import ssl

from pipedream_rt.cluster.records import HEAD, Record, length_of, packed, unpacked
from pipedream_rt.errors import PeerLost, TransportError
from pipedream_rt.transport.tls import TlsEngine, problem_of_tls

CHUNK = 1 << 16
"""Bytes that are read at a time, where what is behind a record may be read with it."""


class Framing:
    """The codec of a connection. One thread at a time uses its engine, and one takes records.

    Attributes:
        peer: Name of the other end, for error messages.
        largest: Limit of a record in bytes.
        engine: Encrypts it; None if the connection stays within the machine.
    """

    def __init__(self, peer: str, largest: int) -> None:
        self.peer, self.largest = peer, largest
        self.engine: TlsEngine | None = None
        self._came = bytearray()  # what was read and, where that is needed, decrypted

    def sealed(self, record: Record) -> bytes:
        """Return the bytes of a record as they are sent; raise `ssl.SSLError` if TLS has ended."""
        data = packed(record)
        if self.engine is None:
            return data
        self.engine.write(data)
        return self.engine.sealed()

    def take(self, data: bytes) -> None:
        """Take bytes that were read from the socket; none are the end of the connection."""
        if not data:
            raise PeerLost(f"{self.peer} closed the connection", peer=self.peer)
        if self.engine is None:
            self._came += data
        else:
            self.engine.take(data)

    def open(self, most: int) -> bool:
        """Decrypt at most so many bytes of what was taken; return whether there were any."""
        if self.engine is None:
            return False
        room = memoryview(bytearray(most))
        try:
            count = self.engine.read_into(room)
        except ssl.SSLError as error:
            raise TransportError(
                f"{self.peer} has ended the encryption: {problem_of_tls(error)}"
            ) from error
        self._came += room[:count]
        return count > 0

    @property
    def has_begun(self) -> bool:
        """Whether a part of a record is here."""
        return bool(self._came)

    @property
    def lacking(self) -> int:
        """The bytes that its head lacks, or then the record; 0 once it is whole."""
        return max(0, self._end - len(self._came))

    def record(self) -> Record:
        """Return the record that is whole, checked."""
        end = self._end
        data = bytes(self._came[HEAD.size : end])
        del self._came[:end]
        return unpacked(data, self.peer)

    @property
    def _end(self) -> int:
        """Where the head ends, or the record once its head is here."""
        head = bytes(self._came[: HEAD.size])
        is_whole = len(head) == HEAD.size
        return HEAD.size + (length_of(head, self.largest, self.peer) if is_whole else 0)

    def gone(self, why: object) -> PeerLost:
        """Return the error with which a socket that fails ends the connection."""
        return PeerLost(f"{self.peer} is gone: {why}", peer=self.peer)
