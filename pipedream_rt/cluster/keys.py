"""The keys that a job's secret makes, and the proofs that a process knows the secret.

Of the secret the key of the job is made, and neither is sent over a network. Every other key is an
HMAC-SHA256 with the key of the job over a purpose and the nonces of one connection or of one
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
    """The key of a job, as its coordinator has made it of the secret."""

    key: bytes
    salt: bytes

    @staticmethod
    def new() -> JobKey:
        """Return a key that is made of no secret; workers get it over what they inherit."""
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
        """Return the key of the job that a coordinator has made with a salt.

        A token is the key. Of another text it is made at a cost that makes guessing dear: 128 MiB
        and some 0.4 s for each guess, with a salt that every coordinator draws anew.
        """
        if _TOKEN.fullmatch(self.text):
            return bytes.fromhex(self.text)
        return _slowly(self.text, salt)

    def job_key(self) -> JobKey:
        """Return the key of this process's jobs, with the salt that it has drawn once."""
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


class Talk(NamedTuple):
    """What the two ends of a control connection know in common, of which proofs are made.

    Attributes:
        channel: The SHA-256 of the certificate with which the coordinator's end encrypts the
            connection; empty where nothing is encrypted. Somebody in between has another one.
    """

    key: bytes
    asked: bytes
    answer: bytes
    channel: bytes = b""

    def prove(self, hello: Mapping[str, Any]) -> bytes:
        """Return what a worker shows to prove that it knows the secret of the job."""
        names = ("name", "pid", "host", "boot", "software", "returns", "version")
        return self._proof(b"worker", msgpack.packb([hello.get(name) for name in names]))

    def prove_refusal(self, refused: Mapping[str, Any]) -> bytes:
        """Return what a coordinator shows with a refusal, to a worker that knows the secret."""
        return self._proof(b"refused", msgpack.packb([refused[n] for n in ("reason", "passing")]))

    def prove_admission(self) -> bytes:
        """Return what a coordinator shows to a worker that it admits."""
        return self._proof(b"admitted")

    def prove_over(self, code: int) -> bytes:
        """Return what shows a worker that the job is over, and how its script has ended."""
        return self._proof(b"over", code.to_bytes(1, "big"))

    def session_key(self) -> bytes:
        """Return the key that signs every record of the connection after the hello."""
        return self._proof(b"session")

    def _proof(self, what: bytes, *said: bytes) -> bytes:
        """Return a proof about this connection."""
        return proof(self.key, what, self.asked, self.answer, self.channel, *said)


def group_key(key: bytes, nonce: bytes) -> bytes:
    """Return the key that signs what members of one generation send each other."""
    return proof(key, b"group", nonce)
