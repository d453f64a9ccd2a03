"""TLS 1.3 without a socket: it decrypts what has come, and makes what is to be sent.

Whoever owns the socket reads and writes it as a plain one, so it can be polled, and closed, as any
other. An `ssl.SSLSocket` cannot serve here: one thread reads a connection while others write to it,
which OpenSSL forbids, and which breaks with every version of Python.
"""

from __future__ import annotations

import ssl


class TlsEngine:
    """One end of an encrypted connection. One thread at a time, for which its owner has a lock."""

    def __init__(self, context: ssl.SSLContext, called: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=called)

    def shake_hands(self) -> bool:
        """Go on with the handshake; return whether it is done, so that nothing more has to come."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def take(self, data: bytes | memoryview) -> None:
        """Take encrypted bytes that have come."""
        self._incoming.write(data)

    def read_into(self, room: memoryview) -> int:
        """Decrypt into a buffer; return the number of bytes, 0 where more has to come first.

        Read until it is 0: bytes that are decrypted and not read make no socket readable.
        """
        try:
            return int(self._tls.read(len(room), room))
        except ssl.SSLWantReadError:
            return 0

    def write(self, data: bytes | memoryview) -> None:
        self._tls.write(data)

    def sealed(self) -> bytes:
        """Return all encrypted bytes that are to be sent, and that were not returned before."""
        return self._outgoing.read()


_STRANGERS = ("VERIFY_FAILED", "UNKNOWN_CA", "NOT_RETURN_A_CERTIFICATE", "CERTIFICATE_REQUIRED")
"""In the reasons of OpenSSL, at either end, where one end has not the key of the job."""

_NO_TLS = ("WRONG_VERSION", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL", "PROTOCOL_VERSION", "NOT_SSL")
"""In its reasons where one end does not speak TLS 1.3."""


def problem_of_tls(error: ssl.SSLError) -> str:
    """The meaning of an error of a connection, for messages."""
    reason = error.reason or str(error)
    if any(part in reason for part in _STRANGERS):
        return (
            "one end does not know the secret that the other has; is PIPEDREAM_RT_SECRET the same "
            "for all processes of the job?"
        )
    if any(part in reason for part in _NO_TLS):
        return "the other end does not speak TLS 1.3; is it another program?"
    if isinstance(error, ssl.SSLEOFError):
        return "the other end closed the connection"
    return reason.lower().replace("_", " ")
