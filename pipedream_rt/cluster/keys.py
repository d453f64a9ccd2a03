"""The keys that a job's secret makes, and the proof that a worker knows the secret.

The secret itself is never sent over a network. Every key is an HMAC-SHA256 of the secret over a
purpose and the nonces of one connection or of one generation, so a key that leaks opens nothing
else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from pipedream_rt.transport.signing import proof

NONCE = 32
"""Bytes of a nonce, of a secret that a launcher makes, and of a key."""

COORDINATOR_END, WORKER_END = b"coordinator", b"worker"
"""Names of the two ends of a control connection, for `Control.secure`."""


def prove(secret: bytes, asked: bytes, answer: bytes, hello: Mapping[str, Any]) -> bytes:
    """Return what a worker shows to prove that it knows the secret of the job.

    Args:
        secret: The secret of the job.
        asked: The nonce of the coordinator's call.
        answer: The nonce of the worker's hello.
        hello: The worker's hello, whose proof, if it has one, is left out.
    """
    said = [hello.get(name) for name in ("name", "pid", "host", "boot", "software", "version")]
    return proof(secret, b"worker", asked, answer, msgpack.packb(said))


def prove_refusal(secret: bytes, asked: bytes, answer: bytes, refused: Mapping[str, Any]) -> bytes:
    """Return what a coordinator shows with a refusal, to prove that it knows the secret.

    Args:
        secret: The secret of the job.
        asked: The nonce of the coordinator's call.
        answer: The nonce of the worker's hello.
        refused: The refusal, whose proof, if it has one, is left out.
    """
    said = [refused.get(name) for name in ("reason", "passing")]
    return proof(secret, b"refused", asked, answer, msgpack.packb(said))


def session_key(secret: bytes, asked: bytes, answer: bytes) -> bytes:
    """Return the key that signs every record of a control connection after the hello.

    Args:
        secret: The secret of the job.
        asked: The nonce of the coordinator's call.
        answer: The nonce of the worker's hello.
    """
    return proof(secret, b"session", asked, answer)


def group_key(secret: bytes, nonce: bytes) -> bytes:
    """Return the key that signs the RPCs of one generation.

    Args:
        secret: The secret of the job.
        nonce: The nonce that the coordinator drew for this generation.
    """
    return proof(secret, b"group", nonce)
