"""The keys derived from a job's secret, and the proofs that a process knows the secret.

The key of the job is derived from the secret, and neither is sent over a network. Every other key
is an HMAC-SHA256 with the key of the job over a purpose and the nonces of one connection or
generation, so one that leaks opens nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from pipedream_rt.errors import ConfigError
from pipedream_rt.transport.signing import proof

NONCE = 32
"""Bytes of a nonce, of a secret that a launcher makes, and of a key."""

COORDINATOR_END, WORKER_END = b"coordinator", b"worker"
"""Names of the two ends of a control connection, for `Control.secure`."""


class JobKey(NamedTuple):
    """The key of a job, and the salt with which it was derived, which the call tells workers."""

    key: bytes
    salt: bytes

    @staticmethod
    def new() -> JobKey:
        """Return a random key of no secret, for workers that get it over inherited connections."""
        return JobKey(secrets.token_bytes(NONCE), bytes(NONCE))


@dataclass(frozen=True, slots=True)
class Secret:
    """The secret of a job: a generated token of 64 hexadecimal digits, or another text."""

    text: str

    @staticmethod
    def generated() -> Secret:
        """Return a new token."""
        return Secret(secrets.token_hex(NONCE))

    def key(self, salt: bytes) -> bytes:
        """Return the key of the job; a token of 64 hexadecimal digits is the key itself."""
        # Another text may be guessed: scrypt costs 128 MiB and some 0.4 s for each guess, and the
        # salt, which each coordinator draws anew, makes guesses for one job useless for another.
        if _TOKEN.fullmatch(self.text):
            return bytes.fromhex(self.text)
        return _slowly(self.text, salt)

    def job_key(self) -> JobKey:
        """Return the key of this process's jobs; its salt is drawn once, as scrypt is slow."""
        return JobKey(self.key(_salt()), _salt())


_TOKEN = re.compile(r"[0-9a-fA-F]{64}")

_salt = functools.cache(lambda: secrets.token_bytes(NONCE))


@functools.cache
def _slowly(text: str, salt: bytes) -> bytes:
    """Return scrypt of a text (RFC 7914), with N = 2^17, r = 8 and p = 1."""
    data = text.encode("utf-8", "surrogateescape")
    try:
        return hashlib.scrypt(data, salt=salt, n=1 << 17, r=8, p=1, maxmem=1 << 28, dklen=NONCE)
    except (ValueError, MemoryError) as error:
        raise ConfigError(
            f"the key of the job cannot be made of its secret, which takes 128 MiB: {error}; a "
            "secret of 64 hexadecimal digits needs none"
        ) from error


class Handshake(NamedTuple):
    """What both ends of a control connection know, over which proofs are made.

    Attributes:
        key: The key of the job.
        asked: The nonce of the coordinator's call.
        answer: The nonce of the worker's hello.
        channel: SHA-256 of the certificate with which the coordinator's end encrypts; empty where
            nothing is encrypted. Somebody in between has another one, so his proofs are wrong.
    """

    key: bytes
    asked: bytes
    answer: bytes
    channel: bytes = b""

    def prove(self, hello: Mapping[str, Any]) -> bytes:
        """Return the worker's proof that it knows the job's secret, over its hello."""
        names = ("name", "pid", "host", "boot", "software", "returns", "version")
        return self._proof(b"worker", msgpack.packb([hello.get(name) for name in names]))

    def prove_refusal(self, refused: Mapping[str, Any]) -> bytes:
        """Return the coordinator's proof with a refusal of a worker that has proved the secret."""
        return self._proof(b"refused", msgpack.packb([refused[n] for n in ("reason", "passing")]))

    def prove_admission(self) -> bytes:
        """Return the coordinator's proof for a worker that it admits."""
        return self._proof(b"admitted")

    def prove_over(self, code: int) -> bytes:
        """Return the proof that the job is over, with the exit code of its script."""
        return self._proof(b"over", code.to_bytes(1, "big"))

    def session_key(self) -> bytes:
        """Return the key that signs every record of the connection after the hello."""
        return self._proof(b"session")

    def _proof(self, what: bytes, *said: bytes) -> bytes:
        """Return the HMAC of a purpose and a statement on this connection."""
        return proof(self.key, what, self.asked, self.answer, self.channel, *said)


def group_key(key: bytes, nonce: bytes) -> bytes:
    """Return the key that signs what members of one generation send each other."""
    return proof(key, b"group", nonce)
