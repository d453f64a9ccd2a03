"""Encryption of the connections between machines: TLS 1.3, unless the user wants none.

Every process makes a key and a certificate of its own when it first needs them, and nobody signs
them. What tells a member from somebody in between is the *channel*, the SHA-256 of the certificate
that the called end shows: both ends put it into what they prove to know the secret with. The user
may also give all members certificates, of one authority or one for all; each end then checks the
other's too.

`Tls.wrap` takes a connection over and returns one end of a pair of sockets: a thread carries what
passes through it, encrypted, over the connection. So nothing else need know whether a connection is
encrypted.
"""

from __future__ import annotations

import datetime
import errno
import functools
import hashlib
import ipaddress
import logging
import math
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.schema import open_file, printable

_log = logging.getLogger(__name__)

CERTIFICATE, KEY, AUTHORITY = "cert.pem", "key.pem", "ca.pem"
"""The files in the folder; without the last one, the certificate itself is what is trusted."""

_CHUNK = 1 << 18
HANDSHAKE_TIMEOUT_S = 20.0
"""Seconds for the two ends to agree on how to encrypt."""

_DAYS = 3650
"""For how long the certificate of a process is valid, which ends with the process; its beginning
lies a day back, as the clocks of machines differ."""


class Wrapped(NamedTuple):
    """A connection that may be encrypted.

    Attributes:
        channel: What the two ends, and nobody in between, have in common: the SHA-256 of the
            certificate of the end that was called, known once something has come; empty where
            nothing is encrypted.
    """

    socket: socket.socket
    channel: Future[bytes]


def wrapped(
    tls: Tls | None,
    connection: socket.socket,
    calls: bool,
    timeout_s: float | None = HANDSHAKE_TIMEOUT_S,
) -> Wrapped:
    """Return a connection, encrypted if there is something that encrypts it; see `Tls.wrap`."""
    return _plain(connection) if tls is None else tls.wrap(connection, calls, timeout_s)


def _plain(connection: socket.socket) -> Wrapped:
    """Return a connection that is not encrypted."""
    channel: Future[bytes] = Future()
    channel.set_result(b"")
    return Wrapped(connection, channel)


class Material(NamedTuple):
    """What a member encrypts with."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    own: bytes


@dataclass(frozen=True, slots=True)
class Tls:
    """Encrypts the connections of a member.

    Attributes:
        material: Returns what it encrypts with, which may be made only then.
    """

    material: Callable[[], Material]
    always: bool = True
    threads: WeakSet[threading.Thread] = field(default_factory=WeakSet)

    @staticmethod
    def of_folder(folder: Path) -> Tls:
        """Return what a folder of certificates offers."""
        certificate, key, authority = (folder / n for n in (CERTIFICATE, KEY, AUTHORITY))
        try:
            trusted = authority if authority.exists() else certificate
            for each in (certificate, key, trusted):
                open_file(each).close()  # ssl would wait for the other end of a pipe
            if key.stat().st_mode & 0o077:
                raise ConfigError(f"others can read the key {key}; forbid it: chmod 600 {key}")
            material = _material(str(certificate), str(key), certificate.read_text())
            for context in (material.server, material.client):
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(trusted)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            named = printable(str(folder))
            reason = getattr(error, "strerror", None) or printable(str(error))
            raise ConfigError(
                f"the certificates in {named} cannot be used: {reason}; it must hold "
                f"{CERTIFICATE}, {KEY} and, if another has signed it, {AUTHORITY}; "
                f"`pipedream-rt certificate {named}` makes the first two"
            ) from error
        return Tls(lambda: material)

    @staticmethod
    def of_process(always: bool = False) -> Tls:
        """Return what encrypts with the certificate of this process, which nobody has signed."""
        return Tls(lambda: _of_process(os.getpid()), always)

    def wrap(
        self,
        connection: socket.socket,
        calls: bool,
        timeout_s: float | None = HANDSHAKE_TIMEOUT_S,
    ) -> Wrapped:
        """Encrypt a connection, unless it stays on this machine and need not be."""
        if not self.always and _stays_here(connection):
            return _plain(connection)
        server, client, own = self.material()
        with ExitStack() as undo:
            ours, theirs = map(undo.enter_context, socket.socketpair())
            context = client if calls else server
            connection.setblocking(False)
            encrypted = undo.enter_context(
                context.wrap_socket(
                    connection, server_side=not calls, do_handshake_on_connect=False
                )
            )
            for end in (encrypted, theirs):
                close_in_forked_children(end)
            channel: Future[bytes] = Future()
            if not calls:
                channel.set_result(own)
            # A daemon: it ends when one of the ends is closed, at the latest with the process.
            thread = threading.Thread(
                target=_carry, args=(encrypted, theirs, channel, timeout_s), name="tls", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # there can be no more threads
                raise OSError(errno.EAGAIN, str(error)) from error
            self.threads.add(thread)
            undo.pop_all()
        return Wrapped(ours, channel)

    def finish(self, deadline: Deadline) -> None:
        """Wait until what was written into closed connections has been sent."""
        for thread in list(self.threads):
            thread.join(deadline.remaining_s())


def _stays_here(connection: socket.socket) -> bool:
    """Whether a connection is one of this machine with itself, over loopback."""
    here, there = connection.getsockname()[0], connection.getpeername()[0]
    return all(ipaddress.ip_address(each).is_loopback for each in (here, there))


def _material(certificate: str, key: str, text: str) -> Material:
    """Return what a member encrypts with that asks for no certificate of the other end."""
    server, client = (
        ssl.SSLContext(protocol) for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # a member is who knows the secret, wherever it is
        context.verify_mode = ssl.CERT_NONE
        context.load_cert_chain(certificate, key, password=_no_password)
    server.num_tickets = 0
    begins, ends = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    first = text[text.index(begins) : text.index(ends)] + ends
    return Material(server, client, hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).digest())


@functools.cache
def _of_process(pid: int) -> Material:
    """Make the key and the certificate of this process.

    Python's ``ssl`` takes them from files alone: here from files that are in memory only.
    """
    certificate, key = _made(f"pipedream-rt process {pid}", _DAYS)
    with ExitStack() as opened:
        paths = []
        for data in (certificate, key):
            file = opened.enter_context(os.fdopen(os.memfd_create("tls"), "wb"))
            file.write(data)
            file.flush()
            paths.append(f"/proc/self/fd/{file.fileno()}")
        return _material(paths[0], paths[1], certificate.decode())


def _made(name: str, days: int) -> tuple[bytes, bytes]:
    """Make a key (ECDSA over P-256) and a certificate that it signs itself, both in PEM."""
    # Imported here: most processes never encrypt.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


def _no_password() -> str:
    """Refuse a key that needs a password, which nobody could type in on all machines."""
    raise ValueError("the key is protected by a password")


def _carry(
    encrypted: ssl.SSLSocket, plain: socket.socket, channel: Future[bytes], timeout_s: float | None
) -> None:
    """Carry bytes both ways until one end is closed; a thread runs this."""
    plain.setblocking(False)
    try:
        _shake_hands(encrypted, plain, timeout_s)
        if not channel.done():
            shown = encrypted.getpeercert(binary_form=True) or b""
            channel.set_result(hashlib.sha256(shown).digest())
        _Pump(encrypted, plain).run()
    except (OSError, ValueError) as error:  # also of a socket that was closed
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
    """Let this end read what came before the other one ended, and write to nobody until it closes.

    So it is with a connection that is not encrypted, too: whoever answers a last word does not fail
    before he has read it.
    """
    plain.shutdown(socket.SHUT_WR)
    plain.setblocking(True)  # no deadline: this end closes it, at the latest with the process
    while plain.recv(_CHUNK):
        pass


_told_s = [-math.inf]
"""When something was told last, of which strangers could have more told than anybody can read."""


def _tell(text: str, *arguments: object) -> None:
    """Log what has ended a connection, once a second at most."""
    now = time.monotonic()
    if now - _told_s[0] >= 1.0:
        _told_s[0] = now
        _log.warning(text, *arguments)


def _shake_hands(encrypted: ssl.SSLSocket, plain: socket.socket, timeout_s: float | None) -> None:
    """Exchange certificates, unless the plain end is closed meanwhile."""
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
        poll.register(plain, select.POLLHUP)  # bytes to send may wait there; only its end counts
        events = poll.poll(deadline.remaining_ms())
        if not events:
            raise TimeoutError("the other end does not answer")
        if any(fd == plain.fileno() for fd, _ in events):
            raise ConnectionError("this end was closed")


class _Pump:
    """Carries bytes between an encrypted and a plain socket.

    OpenSSL hands over 16 KiB at a time at most; several of these go on together, since each call
    and each wait costs as much as to decrypt some of them.
    """

    def __init__(self, encrypted: ssl.SSLSocket, plain: socket.socket) -> None:
        self._encrypted = encrypted
        self._plain = plain
        self._rooms = memoryview(bytearray(_CHUNK)), memoryview(bytearray(_CHUNK))
        self._out = self._into = self._rooms[0][:0]  # what was read from an end, and not sent yet
        self._closed = False  # this end: what it has written before still goes out
        self._blocked = False  # OpenSSL has to write before it can read
        self._poll = select.poll()

    def run(self) -> None:
        """Carry until one end is closed, and all that it has written before is handed over."""
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
        """Read what this end has written."""
        try:
            count = self._plain.recv_into(self._rooms[0])
        except BlockingIOError:
            return
        except OSError:  # it was closed before it had read everything
            count = 0
        self._closed = not count
        self._out = self._rooms[0][:count]

    def _hand_over(self) -> None:
        """Hand over what was decrypted, as much as goes now; to nobody, once this end is closed."""
        try:
            while self._into:
                self._into = self._into[self._plain.send(self._into) :]
        except BlockingIOError:
            pass
        except OSError:
            self._into = self._into[:0]

    def _encrypt(self) -> None:
        """Send what was read from the plain end, as much as goes now."""
        try:
            while self._out:
                self._out = self._out[self._encrypted.send(self._out) :]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:  # the other end takes nothing more, but may have sent something before
            self._out = self._out[:0]

    def _decrypt(self) -> bool:
        """Read what has come encrypted; return whether the other end has closed, and no more."""
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
        return not more and not count  # else it is found again, after what it has sent before

    def _wait(self) -> None:
        """Wait until something can be done."""
        if self._encrypted.pending() and not self._into:
            return
        writes = bool(self._out) or self._blocked
        reads = not self._into and not self._blocked
        self._want(self._encrypted, reads, writes)
        self._want(self._plain, not self._out and not self._closed, bool(self._into))
        self._poll.poll()  # no deadline: the kernel tells when an end is closed

    def _want(self, end: socket.socket, reads: bool, writes: bool) -> None:
        """Wait for an end to be readable or writable; for nothing, if neither is wanted.

        The kernel tells of the end of a connection that is only waited at for nothing, again and
        again.
        """
        wants = (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0)
        if wants:
            self._poll.register(end, wants)
        else:
            with suppress(KeyError):
                self._poll.unregister(end)


def make_certificate(folder: Path, days: int) -> None:
    """Make a certificate for the members of a job, with a key."""
    certificate, key = folder / CERTIFICATE, folder / KEY
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if certificate.exists() or key.exists():
            raise ConfigError(f"{folder} has a certificate or a key already; name another folder")
        made = _made("pipedream-rt", days)
        for path, data in zip((certificate, key), made, strict=True):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
    except OSError as error:
        raise ConfigError(f"no certificate can be made in {folder}: {error}") from error
