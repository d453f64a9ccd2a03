"""Encryption of the connections between machines, for who asks for it.

The user gives all members the same folder with a certificate, or with their own certificates and
that of the authority which signed them; each end shows its own and checks the other's. `wrap` takes
a connection over and returns one end of a pair of sockets: a thread carries what passes through it,
encrypted, over the connection. So nothing else need know whether a connection is encrypted.
"""

from __future__ import annotations

import logging
import select
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakSet

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError
from pipedream_rt.lifecycle import close_in_forked_children

_log = logging.getLogger(__name__)

CERTIFICATE, KEY, AUTHORITY = "cert.pem", "key.pem", "ca.pem"
"""The files in the folder; without the last one, the certificate itself is what is trusted."""

_CHUNK = 1 << 16
_HANDSHAKE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Tls:
    """What a member needs to encrypt its connections.

    Attributes:
        server: For the end that was called.
        client: For the end that calls.
        threads: The threads that carry what passes.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    threads: WeakSet[threading.Thread] = field(default_factory=WeakSet)

    @staticmethod
    def of_folder(folder: Path) -> Tls:
        """Return what a folder of certificates offers.

        Raises:
            ConfigError: A file is missing, is no certificate or key, or others can read the key.
        """
        certificate, key, authority = (folder / n for n in (CERTIFICATE, KEY, AUTHORITY))
        trusted = authority if authority.exists() else certificate
        contexts = []
        try:
            if key.stat().st_mode & 0o077:
                raise ConfigError(f"others can read the key {key}; forbid it: chmod 600 {key}")
            for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
                context = ssl.SSLContext(protocol)
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.check_hostname = False  # a member is who has a certificate, wherever it is
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_cert_chain(certificate, key, password=_no_password)
                context.load_verify_locations(trusted)
                contexts.append(context)
            contexts[0].num_tickets = 0
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise ConfigError(
                f"the certificates in {folder} cannot be used: {error}; it must hold "
                f"{CERTIFICATE}, {KEY} and, if another has signed it, {AUTHORITY}; "
                f"`pipedream-rt certificate {folder}` makes the first two"
            ) from error
        return Tls(server=contexts[0], client=contexts[1])

    def wrap(self, connection: socket.socket, calls: bool) -> socket.socket:
        """Encrypt a connection.

        Args:
            connection: A connected TCP socket, which is taken over.
            calls: Whether this end has called.

        Returns:
            A socket to use in its place. When the other end has no right certificate, it ends.
        """
        ours, theirs = socket.socketpair()
        context = self.client if calls else self.server
        connection.setblocking(False)
        encrypted = context.wrap_socket(
            connection, server_side=not calls, do_handshake_on_connect=False
        )
        for end in (encrypted, theirs):
            close_in_forked_children(end)
        # A daemon: it ends when one of the ends is closed, at the latest with the process.
        thread = threading.Thread(target=_carry, args=(encrypted, theirs), name="tls", daemon=True)
        self.threads.add(thread)
        thread.start()
        return ours

    def finish(self, deadline: Deadline) -> None:
        """Wait until what was written into closed connections has been sent.

        Args:
            deadline: When to give up.
        """
        for thread in list(self.threads):
            thread.join(deadline.remaining_s())


def _no_password() -> str:
    """Refuse a key that needs a password, which nobody could type in on all machines.

    Raises:
        ValueError: Always.
    """
    raise ValueError("the key is protected by a password")


def _carry(encrypted: ssl.SSLSocket, plain: socket.socket) -> None:
    """Carry bytes both ways until one end is closed; a thread runs this."""
    plain.setblocking(False)
    try:
        _shake_hands(encrypted, plain)
        _Pump(encrypted, plain).run()
    except (OSError, ValueError) as error:  # also of a socket that was closed
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            _log.warning("an encrypted connection ended: %s", error.reason or error)
        elif isinstance(error, TimeoutError):
            _log.warning("an encrypted connection ended: %s; does the other end encrypt?", error)
    finally:
        for end in (encrypted, plain):
            with suppress(OSError):
                end.close()


def _shake_hands(encrypted: ssl.SSLSocket, plain: socket.socket) -> None:
    """Exchange certificates, unless the plain end is closed meanwhile.

    Raises:
        OSError: The other end has no right certificate, or does not answer in time.
    """
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
        poll.register(plain, select.POLLHUP)  # bytes to send may wait there; only its end counts
        events = poll.poll(1000 * _HANDSHAKE_TIMEOUT_S)
        if not events:
            raise TimeoutError("the other end does not answer")
        if any(fd == plain.fileno() for fd, _ in events):
            raise ConnectionError("this end was closed")


class _Pump:
    """Carries bytes between an encrypted and a plain socket.

    Args:
        encrypted: After the handshake.
        plain: This end.
    """

    def __init__(self, encrypted: ssl.SSLSocket, plain: socket.socket) -> None:
        """Begin with nothing under way."""
        self._encrypted = encrypted
        self._plain = plain
        self._out = b""  # read from the plain end, and not sent yet
        self._into = b""  # read from the encrypted end, and not handed over yet

    def run(self) -> None:
        """Carry until one end is closed.

        Raises:
            OSError: An end is gone.
        """
        while True:
            self._wait()
            if not self._out:
                with suppress(BlockingIOError):
                    self._out = self._plain.recv(_CHUNK)
                    if not self._out:
                        return
            if self._out:
                with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    self._out = self._out[self._encrypted.send(self._out) :]
            if not self._into:
                with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    self._into = self._encrypted.recv(_CHUNK)
                    if not self._into:
                        return
            if self._into:
                with suppress(BlockingIOError):
                    self._into = self._into[self._plain.send(self._into) :]

    def _wait(self) -> None:
        """Wait until something can be done."""
        if self._encrypted.pending() and not self._into:
            return
        poll = select.poll()
        wants = (0 if self._into else select.POLLIN) | (select.POLLOUT if self._out else 0)
        poll.register(self._encrypted, wants)
        wants = (0 if self._out else select.POLLIN) | (select.POLLOUT if self._into else 0)
        poll.register(self._plain, wants)
        poll.poll()  # no deadline: the kernel tells when an end is closed


def make_certificate(folder: Path, days: int) -> None:
    """Make a certificate for the members of a job, with a key, by the command ``openssl``.

    Args:
        folder: Where; made if it is not there. Nothing in it is replaced.
        days: For how long it is valid.

    Raises:
        ConfigError: There is one, it cannot be written, or there is no ``openssl``.
    """
    if shutil.which("openssl") is None:
        raise ConfigError(
            "the command openssl is missing (package openssl); or put your own certificate and key "
            f"into {folder}, as {CERTIFICATE} and {KEY}"
        )
    certificate, key = folder / CERTIFICATE, folder / KEY
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if certificate.exists() or key.exists():
            raise ConfigError(f"{folder} has a certificate or a key already; name another folder")
        done = subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
             "-nodes", "-days", str(days), "-subj", "/CN=pipedream-rt", "-keyout", str(key),
             "-out", str(certificate)],
            capture_output=True, text=True, timeout=60, umask=0o077, check=False,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"no certificate can be made in {folder}: {error}") from error
    if done.returncode:
        raise ConfigError(f"openssl made no certificate: {done.stderr.strip()}")
