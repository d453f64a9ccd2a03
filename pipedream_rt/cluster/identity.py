"""The identity of a job: its secret, and what is derived from it.

Every process that knows the secret derives the same key and the same certificate, shows that
certificate on each TCP connection, and trusts no other (mutual TLS 1.3). So a connection that
stands is one between two members of this job. Which member is at the other end, the first record
says: all have one identity.
"""

from __future__ import annotations

import datetime
import functools
import hmac
import os
import re
import secrets
import socket
import ssl
import struct
from dataclasses import dataclass, field

from pipedream_rt.errors import ConfigError

NONCE = 32
"""Bytes of a secret, of a nonce and of a key."""

MAKE_SECRET = "openssl rand -hex 32"
"""The command that prints a new secret."""

_TOKEN = re.compile(r"[0-9a-fA-F]{64}")

_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which `ssl` does not name."""


@dataclass(frozen=True, slots=True)
class Secret:
    """The secret of a job: 256 random bits, as 64 hexadecimal digits."""

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        # Whoever sees the certificate can test guesses of the secret, so it must be out of reach.
        if not _TOKEN.fullmatch(self.text):
            raise ConfigError(
                "the secret of a job must be 64 hexadecimal digits, found another text of "
                f"{len(self.text)} characters; make one with: {MAKE_SECRET}"
            )

    @staticmethod
    def generated() -> Secret:
        """Draw a secret for a job whose workers are handed it."""
        return Secret(secrets.token_hex(NONCE))

    def derived(self, purpose: bytes) -> bytes:
        """Return 32 bytes for a purpose, which reveal neither the secret nor another purpose."""
        return hmac.digest(bytes.fromhex(self.text), b"pipedream-rt " + purpose, "sha256")

    @property
    def job(self) -> str:
        """The public name of the job, which differs between two jobs of one user."""
        return self.derived(b"name").hex()[:32]

    def group_key(self, nonce: bytes) -> bytes:
        """Return the key of one generation, which signs the requests of torch RPC."""
        return self.derived(b"group " + nonce)

    def tls(self, called: bool) -> ssl.SSLContext:
        """Return the context of the end that is called, or of the end that calls."""
        return _contexts(self)[0 if called else 1]


@functools.lru_cache(maxsize=4)
def _contexts(secret: Secret) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of the end that is called and of the end that calls."""
    key, certificate = _made(secret)
    made = []
    fd = os.memfd_create("identity", os.MFD_CLOEXEC)  # `ssl` reads keys from files alone
    try:
        os.write(fd, key + certificate)
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # a member is who has the key, wherever it runs
            context.verify_mode = ssl.CERT_REQUIRED
            # Machines whose clock is years off take part too: the certificate ends with the secret.
            context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
            context.load_verify_locations(cadata=certificate.decode())
            made.append(context)
    finally:
        os.close(fd)
    made[0].num_tickets = 0  # no session is resumed: each connection proves the key itself
    return made[0], made[1]


def _made(secret: Secret) -> tuple[bytes, bytes]:
    """Return key and certificate of a job in PEM, the same bytes in every process."""
    # It takes 40 ms, and workers that the script starts on its own machine never encrypt.
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    # Ed25519 signs without random numbers, so all processes sign the certificate alike.
    key = Ed25519PrivateKey.from_private_bytes(secret.derived(b"identity 1"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pipedream-rt job")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))  # RFC 5280: no end
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)


def is_same_user(connection: socket.socket) -> bool:
    """Whether the other end of a Unix socket is of this user or root, as the kernel says."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    return struct.unpack("3i", credentials)[1] in (os.geteuid(), 0)
