"""Encryption of the connections between machines: TLS 1.3, unless the user wants none.

Every process makes a self-signed certificate when it first needs one. Against somebody in between
stands the *channel*, the SHA-256 of the server's certificate: both ends put it into their proof of
the secret (channel binding). The user may also give the members certificates, one for all or of one
authority; then each end checks the other's too.

`Tls.wrap` takes a connection over and returns one end of a socket pair. A thread carries what
passes through the pair over the connection, encrypted. So no other code needs to know whether a
connection is encrypted.
"""

from __future__ import annotations

import datetime
import errno
import functools
import hashlib
import ipaddress
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.schema import open_file, printable
from pipedream_rt.transport.tls_relay import _carry

_log = logging.getLogger(__name__)

CERTIFICATE, KEY, AUTHORITY = "cert.pem", "key.pem", "ca.pem"
"""The files in the folder. Without the last one, only the certificate itself is trusted."""

HANDSHAKE_TIMEOUT_S = 20.0
"""Seconds for the TLS handshake."""

_DAYS = 3650
"""Days for which the certificate of a process is valid. It ends with the process anyway."""


class Wrapped(NamedTuple):
    """A connection that may be encrypted.

    Attributes:
        socket: What to use in place of the connection.
        channel: The SHA-256 of the server's certificate (DER), known after the handshake. The two
            ends see the same one only if nobody is in between. Empty where nothing is encrypted.
    """

    socket: socket.socket
    channel: Future[bytes]


def wrapped(
    tls: Tls | None,
    connection: socket.socket,
    calls: bool,
    timeout_s: float | None = HANDSHAKE_TIMEOUT_S,
) -> Wrapped:
    """Return a connection, encrypted if ``tls`` is there."""
    return _plain(connection) if tls is None else tls.wrap(connection, calls, timeout_s)


def _plain(connection: socket.socket) -> Wrapped:
    channel: Future[bytes] = Future()
    channel.set_result(b"")
    return Wrapped(connection, channel)


class Material(NamedTuple):
    """What a member encrypts with.

    Attributes:
        server: For the end that was called.
        client: For the end that calls.
        own: The SHA-256 of this member's certificate (DER).
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    own: bytes


@dataclass(frozen=True, slots=True)
class Tls:
    """Encrypts the connections of a member.

    Attributes:
        material: Returns what it encrypts with, made at the first call where nobody has given it.
        always: Whether connections over loopback are encrypted too.
        threads: The threads of open connections (see `finish`).
    """

    material: Callable[[], Material]
    always: bool = True
    threads: WeakSet[threading.Thread] = field(default_factory=WeakSet)

    @staticmethod
    def of_folder(folder: Path) -> Tls:
        """Encrypt with the certificates in a folder, and check those of other members."""
        certificate, key, authority = (folder / n for n in (CERTIFICATE, KEY, AUTHORITY))
        try:
            trusted = authority if authority.exists() else certificate
            for each in (certificate, key, trusted):
                open_file(each).close()  # refuses a pipe, at which ssl would block
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
        """Encrypt with a self-signed certificate of this process."""
        return Tls(lambda: _of_process(os.getpid()), always)

    def wrap(
        self,
        connection: socket.socket,
        calls: bool,
        timeout_s: float | None = HANDSHAKE_TIMEOUT_S,
    ) -> Wrapped:
        """Take a connected TCP socket over, and encrypt it unless loopback may stay plain.

        ``calls``: whether this end has called, so is the client. ``timeout_s``: for the handshake;
        None where the other end may take its time. If the other end has no right certificate, the
        returned socket ends.
        """
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
            # A daemon: it ends when one of the two ends is closed, at the latest with the process.
            thread = threading.Thread(
                target=_carry, args=(encrypted, theirs, channel, timeout_s), name="tls", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: callers expect an OSError
                raise OSError(errno.EAGAIN, str(error)) from error
            self.threads.add(thread)
            undo.pop_all()
        return Wrapped(ours, channel)

    def finish(self, deadline: Deadline) -> None:
        """Wait until what was written into closed connections has been sent."""
        for thread in list(self.threads):
            thread.join(deadline.remaining_s())


def _stays_here(connection: socket.socket) -> bool:
    """Whether both ends of a connection have loopback addresses."""
    here, there = connection.getsockname()[0], connection.getpeername()[0]
    return all(ipaddress.ip_address(each).is_loopback for each in (here, there))


def _material(certificate: str, key: str, text: str) -> Material:
    """Make contexts for a certificate that do not check the other end's.

    ``certificate`` and ``key`` are paths, ``text`` is the certificate in PEM.
    """
    server, client = (
        ssl.SSLContext(protocol) for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # a member is who knows the secret, wherever it is
        context.verify_mode = ssl.CERT_NONE
        context.load_cert_chain(certificate, key, password=_no_password)
    server.num_tickets = 0  # nobody resumes a session
    begins, ends = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    first = text[text.index(begins) : text.index(ends)] + ends
    return Material(server, client, hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).digest())


@functools.cache
def _of_process(pid: int) -> Material:
    """Make the key and the certificate of this process. A forked child makes its own."""
    # Python's `ssl` reads them from files only: here from memfds, which never touch a disk.
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
    """Make a self-signed certificate and its key (ECDSA over P-256), both in PEM."""
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
        # From yesterday on, since the clocks of machines differ.
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
    """Refuse a key with a password, which nobody could type in on all machines."""
    raise ValueError("the key is protected by a password")


def make_certificate(folder: Path, days: int) -> None:
    """Make a self-signed certificate and its key for the members of a job. Replaces no file."""
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
