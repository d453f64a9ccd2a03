"""The relay of a TLS connection: bytes go between a plain socket and TLS in both directions."""

from __future__ import annotations

import datetime
import hashlib
import logging
import math
import select
import socket
import ssl
import time
from concurrent.futures import Future
from contextlib import suppress

from pipedream_rt.deadline import Deadline

_log = logging.getLogger(__name__)


_CHUNK = 1 << 18


def _carry(
    encrypted: ssl.SSLSocket, plain: socket.socket, channel: Future[bytes], timeout_s: float | None
) -> None:
    """Shake hands, then carry bytes both ways until one end is closed. A thread runs this."""
    plain.setblocking(False)
    try:
        _shake_hands(encrypted, plain, timeout_s)
        if not channel.done():
            shown = encrypted.getpeercert(binary_form=True) or b""
            channel.set_result(hashlib.sha256(shown).digest())
        _Pump(encrypted, plain).run()
    except (OSError, ValueError) as error:  # ValueError: of a socket that was closed meanwhile
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            _tell("an encrypted connection ended: %s", error.reason or error)
        elif isinstance(error, TimeoutError):
            _tell("an encrypted connection ended: %s; does the other end encrypt?", error)
    finally:
        with suppress(OSError):
            encrypted.close()
        with plain, suppress(OSError, ValueError):
            _swallow(plain)


def _swallow(plain: socket.socket) -> None:
    """Half-close: let this end drain what is buffered, and discard its writes until it closes."""
    # As over plain TCP: an end that writes to a peer that is gone can still read its last words.
    plain.shutdown(socket.SHUT_WR)
    plain.setblocking(True)  # no deadline: this end closes it, at the latest with the process
    while plain.recv(_CHUNK):
        pass


_told_s = [-math.inf]
"""Monotonic time of the last warning. Without a limit strangers could flood the log."""


def _tell(text: str, *arguments: object) -> None:
    """Log why a connection has ended, at most once a second."""
    now = time.monotonic()
    if now - _told_s[0] >= 1.0:
        _told_s[0] = now
        _log.warning(text, *arguments)


def _shake_hands(encrypted: ssl.SSLSocket, plain: socket.socket, timeout_s: float | None) -> None:
    """Do the TLS handshake, unless the plain end is closed meanwhile."""
    deadline = Deadline(None if timeout_s is None else datetime.timedelta(seconds=timeout_s))
    while True:
        try:
            encrypted.do_handshake()
            return
        except ssl.SSLWantReadError:
            wanted = select.POLLIN
        except ssl.SSLWantWriteError:
            wanted = select.POLLOUT
        poll = select.poll()
        poll.register(encrypted, wanted)
        poll.register(plain, select.POLLHUP)  # its end only: bytes to send may wait there already
        events = poll.poll(deadline.remaining_ms())
        if not events:
            raise TimeoutError("the other end does not answer")
        if any(fd == plain.fileno() for fd, _ in events):
            raise ConnectionError("this end was closed")


class _Pump:
    """Carries bytes between an encrypted and a plain socket. One thread, as OpenSSL demands."""

    # OpenSSL decrypts at most 16 KiB a call. Several are collected before they go on, since each
    # call and each wait costs as much as to decrypt some of them.

    def __init__(self, encrypted: ssl.SSLSocket, plain: socket.socket) -> None:
        self._encrypted = encrypted
        self._plain = plain
        self._rooms = memoryview(bytearray(_CHUNK)), memoryview(bytearray(_CHUNK))
        # Read from the plain end and not encrypted yet; decrypted and not handed over yet.
        self._out = self._into = self._rooms[0][:0]
        self._closed = False  # the plain end; what it has written before still goes out
        self._blocked = False  # OpenSSL has to write before it can read
        self._poll = select.poll()

    def run(self) -> None:
        """Carry until one end is closed and everything that it wrote before is handed over."""
        while True:
            self._wait()
            if not self._out and not self._closed:
                self._read_plain()
            self._encrypt()
            if self._closed and not self._out:
                return
            if not self._into and self._decrypt():
                return
            self._hand_over()

    def _read_plain(self) -> None:
        """Read what the plain end has written."""
        try:
            count = self._plain.recv_into(self._rooms[0])
        except BlockingIOError:
            return
        except OSError:  # closed with bytes unread, which is a reset
            count = 0
        self._closed = not count
        self._out = self._rooms[0][:count]

    def _hand_over(self) -> None:
        """Write what was decrypted to the plain end, as far as it takes it; drop it if closed."""
        try:
            while self._into:
                self._into = self._into[self._plain.send(self._into) :]
        except BlockingIOError:
            pass
        except OSError:
            self._into = self._into[:0]

    def _encrypt(self) -> None:
        """Send what was read from the plain end, as far as the socket takes it."""
        try:
            while self._out:
                self._out = self._out[self._encrypted.send(self._out) :]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:  # the other end is gone, but what it sent before can still be read
            self._out = self._out[:0]

    def _decrypt(self) -> bool:
        """Decrypt what has come; return whether the other end has closed and nothing is left."""
        room, count, more = self._rooms[1], 0, 1
        self._blocked = False
        try:
            while more and count < len(room):
                more = self._encrypted.recv_into(room[count:])
                count += more
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            self._blocked = True
        except OSError:
            if not count:
                raise
        self._into = room[:count]
        return not more and not count  # with bytes before it, the end is found at the next read

    def _wait(self) -> None:
        """Wait until an end can be read or written."""
        # Bytes that OpenSSL has decrypted already make no socket readable.
        if self._encrypted.pending() and not self._into:
            return
        writes = bool(self._out) or self._blocked
        reads = not self._into and not self._blocked
        self._want(self._encrypted, reads, writes)
        self._want(self._plain, not self._out and not self._closed, bool(self._into))
        self._poll.poll()  # no deadline: the end of either socket wakes it

    def _want(self, end: socket.socket, reads: bool, writes: bool) -> None:
        """Poll an end for being readable or writable; leave it out if neither is wanted."""
        # With an empty mask poll() would still report POLLHUP, again and again: a busy loop.
        wants = (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0)
        if wants:
            self._poll.register(end, wants)
        else:
            with suppress(KeyError):
                self._poll.unregister(end)
