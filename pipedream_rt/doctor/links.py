"""The latency and bandwidth between two machines, measured over a connection of its own."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from contextlib import suppress

from pipedream_rt.cluster.keys import NONCE
from pipedream_rt.doctor.judgement import MeasuredLink
from pipedream_rt.transport.tcp import prepare

_TIMEOUT_S = 5.0
_INTRODUCED_S = 0.5
"""Seconds that a caller has to show the nonce; one of ours sends it at once."""

_TURNS = 20
_SIZES = (1 << 20, 1 << 24)
"""Bytes that are sent; the larger number only if the smaller one took no more than `_LONG_S`."""

_LONG_S = 0.5
_CHUNK = bytes(1 << 20)


class Echo:
    """Answers measurements on a thread, until it is closed.

    Attributes:
        nonce: What callers show first; the connection of whoever does not is closed.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self.nonce = secrets.token_bytes(NONCE)
        self._thread = threading.Thread(target=self._serve, name="echo")
        self._thread.start()

    def _serve(self) -> None:
        """Answer one caller after another."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # it was closed
            with connection, suppress(OSError):
                prepare(connection)
                connection.settimeout(_INTRODUCED_S)  # a stranger who is silent is soon gone
                if _exactly(connection, NONCE) != self.nonce:
                    continue
                connection.settimeout(_TIMEOUT_S)
                while True:
                    size = int.from_bytes(_exactly(connection, 8), "big")
                    if size > max(_SIZES):
                        break  # bounds what a caller can make this end read
                    _exactly(connection, size, keeps=False)
                    connection.sendall(b"k")

    def close(self) -> None:
        """Stop listening, and join the thread."""
        # To close a listener does not wake the thread that waits in `accept`; to shut it down does.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def measure(host: str, port: int, nonce: bytes) -> MeasuredLink:
    """Call an `Echo`, and return what the link to it is like."""
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
            prepare(connection)
            connection.sendall(nonce)
            trips = [_trip(connection, 0) for _ in range(_TURNS)]
            for size in _SIZES:
                took_s = _trip(connection, size)
                if took_s > _LONG_S:
                    break
            round_s = min(trips)  # the one that was disturbed the least
            return MeasuredLink(round_s / 2, size / max(took_s - round_s, 1e-9))
    except OSError as error:
        return MeasuredLink(None, 0.0, f"{host}:{port} cannot be reached: {error}")


def _trip(connection: socket.socket, size: int) -> float:
    """Send ``size`` bytes, and return the seconds until the other end has confirmed them."""
    began = time.perf_counter()
    connection.sendall(size.to_bytes(8, "big"))
    left = size
    while left:
        left -= connection.send(memoryview(_CHUNK)[: min(left, len(_CHUNK))])
    _exactly(connection, 1)
    return time.perf_counter() - began


def _exactly(connection: socket.socket, size: int, keeps: bool = True) -> bytes:
    """Receive ``size`` bytes; return them, or nothing unless ``keeps``."""
    data = bytearray()
    while size:
        came = connection.recv(min(size, 1 << 20))
        if not came:
            raise ConnectionError("the other end has closed the connection")
        size -= len(came)
        if keeps:
            data += came
    return bytes(data)
