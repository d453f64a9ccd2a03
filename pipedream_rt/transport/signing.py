"""Proof that bytes come from somebody who knows a key, and come for the first time.

HMAC-SHA256 over generation, sender, a number that counts up and the bytes. Nothing that fails here
is parsed any further.

    32 bytes   signature of all that follows
    16 bytes   generation, sender, number (see `_HEAD`)
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
"""How far behind the newest number of a sender an older one may come: messages overtake others."""


def proof(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of parts that cannot run into each other."""
    text = b"".join(struct.pack("!I", len(part)) + part for part in parts)
    return hmac.digest(key, text, hashlib.sha256)


class Signed(NamedTuple):
    """What `Signer.open` found: who sent it, of which kind it is, and the bytes."""

    sender: int
    kind: int
    data: bytes


class _Seen:
    """Numbers of one sender that have come."""

    __slots__ = ("_newest", "_recent")

    def __init__(self) -> None:
        """None has."""
        self._newest = -1
        self._recent: set[int] = set()

    def is_new(self, number: int) -> bool:
        """Note a number; False if it has come before, or is too old to say."""
        if number in self._recent or number <= self._newest - _WINDOW:
            return False
        self._recent.add(number)
        if number > self._newest:
            self._newest = number
            if len(self._recent) > 2 * _WINDOW:
                self._recent = {n for n in self._recent if n > number - _WINDOW}
        return True


class Signer:
    """Signs what one member of a group sends, and opens what the others have sent.

    Args:
        key: Of this generation of the group, and of nothing else.
        generation: Number.
        sender: Of this member.
    """

    def __init__(self, key: bytes, generation: int, sender: int) -> None:
        """Nothing was sent."""
        self._key = key
        self._generation = generation & 0xFFFFFFFF
        self._sender = sender
        self._numbers = itertools.count()
        self._seen: dict[int, _Seen] = {}
        self._lock = threading.Lock()

    def sign(self, data: bytes, kind: int) -> bytes:
        """Put a signature in front of bytes. From any thread."""
        head = _HEAD.pack(self._generation, self._sender, next(self._numbers), kind)
        return hmac.digest(self._key, head + data, hashlib.sha256) + head + data

    def open(self, signed: bytes) -> Signed:
        """Check bytes that have come. From any thread.

        Raises:
            TransportError: They are cut, not signed with the key, of another generation, or come a
                second time.
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
