"""Signatures: the proof that bytes come from a member of the group, and come for the first time.

A signature is the HMAC-SHA256 of everything behind it. Bytes whose signature is wrong are not
parsed any further.

    32 bytes   signature of all that follows
    16 bytes   generation, sender, number of the sender's message (see `_HEAD`)
    1 byte     kind
    ...        the bytes themselves
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
import threading
from typing import NamedTuple

from pipedream_rt.errors import TransportError

_HEAD = struct.Struct("!IIQB")
DIGEST = hashlib.sha256().digest_size
_WINDOW = 4096
"""How far a number may be below the newest of its sender, since messages overtake each other."""


def proof(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of several parts, each with its length in front of it."""
    text = b"".join(struct.pack("!I", len(part)) + part for part in parts)
    return hmac.digest(key, text, hashlib.sha256)


class Signed(NamedTuple):
    """Bytes whose signature is right.

    Attributes:
        sender: Number of the member that signed them.
        kind: The kind that the sender gave.
        data: The bytes without the signature.
    """

    sender: int
    kind: int
    data: bytes


class _Seen:
    """The numbers of one sender's messages that have come."""

    __slots__ = ("_newest", "_recent")

    def __init__(self) -> None:
        """Begin with no number."""
        self._newest = -1
        self._recent: set[int] = set()

    def is_new(self, number: int) -> bool:
        """Note a number; return False if it came before, or is too old to know."""
        if number in self._recent or number <= self._newest - _WINDOW:
            return False
        self._recent.add(number)
        if number > self._newest:
            self._newest = number
            if len(self._recent) > 2 * _WINDOW:
                self._recent = {n for n in self._recent if n > number - _WINDOW}
        return True


class Signer:
    """The signer of one member of a group, which also checks the signatures of the others.

    Args:
        key: The key of this generation of the group, which signs nothing else.
        generation: Number of the generation.
        sender: Number of this member.
    """

    def __init__(self, key: bytes, generation: int, sender: int) -> None:
        """Begin to count at 0."""
        self._key = key
        self._generation = generation & 0xFFFFFFFF
        self._sender = sender
        self._numbers = itertools.count()
        self._seen: dict[int, _Seen] = {}
        self._lock = threading.Lock()

    def sign(self, data: bytes, kind: int) -> bytes:
        """Return bytes with a signature in front of them. Any thread may call it."""
        head = _HEAD.pack(self._generation, self._sender, next(self._numbers), kind)
        return hmac.digest(self._key, head + data, hashlib.sha256) + head + data

    def open(self, signed: bytes) -> Signed:
        """Check the signature of bytes that have come. Any thread may call it.

        Raises:
            TransportError: The bytes are cut, not signed with the key, of another generation, or
                come a second time.
        """
        body = memoryview(signed)[DIGEST:]
        if len(body) < _HEAD.size:
            raise TransportError(f"{len(signed)} bytes are too few to be signed")
        expected = hmac.digest(self._key, body, hashlib.sha256)
        if not hmac.compare_digest(expected, signed[:DIGEST]):
            raise TransportError("a message is not signed with the key of this job")
        generation, sender, number, kind = _HEAD.unpack_from(body)
        if generation != self._generation:
            raise TransportError(f"a message of generation {generation}, not {self._generation}")
        with self._lock:
            if not self._seen.setdefault(sender, _Seen()).is_new(number):
                raise TransportError(f"message {number} of member {sender} has come before")
        return Signed(sender, kind, bytes(body[_HEAD.size :]))
