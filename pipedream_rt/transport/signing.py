"""Signatures: the proof that bytes come from one member, are for another, and come in their turn.

Every signature is made with a key that only the members of a group know. Bytes with a wrong
signature are not parsed. Proofs of the handshake are few, and use HMAC-SHA256. Messages are many,
and use keyed BLAKE2b (RFC 7693), which takes a quarter of the time.
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
    # Without the lengths, ("ab", "c") and ("a", "bc") would have the same proof.
    return b"".join([piece for part in parts for piece in (_LENGTH.pack(len(part)), part)])


class Signer:
    """Signs everything that one member sends to one other, or checks it at the other end.

    A signature covers the generation, the ranks of sender and recipient, and how many signatures
    came before it. So nothing can be repeated, left out, reordered, or shown to another member.
    None of these is sent: a connection keeps the order, so both ends count alike.
    """

    def __init__(self, key: bytes, generation: int, sender: int, recipient: int) -> None:
        # Each signature copies this state, which has taken in the key already.
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
        # After a wrong one none will be right: the two ends no longer count alike.
        if not hmac.compare_digest(self.sign(*parts), signature):
            generation, sender, recipient = self._between
            raise TransportError(
                f"what came from member {sender} for member {recipient} in generation {generation} "
                "is not signed with the key of this job, or does not come in its turn"
            )
