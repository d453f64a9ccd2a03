"""Signatures: the proof that bytes come from one member, for another one, and come in their turn.

Every signature is made with a key that only the members of a group know. Bytes whose signature is
wrong are not parsed any further. Proofs, of which there are few, are HMAC-SHA256. Messages, of
which there are many, are signed by BLAKE2b with a key (RFC 7693), in a quarter of the time.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence

from pipedream_rt.errors import TransportError

DIGEST = hashlib.sha256().digest_size
"""Bytes of a signature."""

_TURN = struct.Struct("!IIIQ")
_LENGTH = struct.Struct("!I")


def proof(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of several parts, each with its length in front of it."""
    return hmac.digest(key, _framed(parts), hashlib.sha256)


def _framed(parts: Sequence[bytes]) -> bytes:
    """Return several parts, each with its length in front of it."""
    return b"".join([piece for part in parts for piece in (_LENGTH.pack(len(part)), part)])


class Signer:
    """The signer of everything that one member sends to one other, or the checker of it.

    A signature covers the generation, the sender, the recipient and how many signatures came before
    it. So nothing can be repeated, left out, put in another order, or shown to another member. Both
    ends count for themselves, because a connection keeps the order; so nothing of it is sent.
    """

    def __init__(self, key: bytes, generation: int, sender: int, recipient: int) -> None:
        # A copy of what has taken in the key spares the time for the key.
        self._keyed = hashlib.blake2b(key=key, digest_size=DIGEST)
        self._between = (generation & 0xFFFFFFFF, sender, recipient)
        self._number = 0

    def sign(self, *parts: bytes) -> bytes:
        """Return the signature of what is sent next. One thread at a time."""
        signed = self._keyed.copy()
        signed.update(_TURN.pack(*self._between, self._number))
        self._number += 1
        for part in parts:
            signed.update(_LENGTH.pack(len(part)))
            signed.update(part)
        return signed.digest()

    def check(self, signature: bytes, *parts: bytes) -> None:
        """Check the signature of what has come next. One thread at a time."""
        if not hmac.compare_digest(self.sign(*parts), signature):
            generation, sender, recipient = self._between
            raise TransportError(
                f"what came from member {sender} for member {recipient} in generation {generation} "
                "is not signed with the key of this job, or does not come in its turn"
            )
