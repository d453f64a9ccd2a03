"""Seeds of random numbers: a function of (seed, micro-batch, layer), not of time or place."""

from __future__ import annotations

from hashlib import blake2b


def layer_seed(seed: int, micro_batch: int | str, layer: str) -> int:
    """Return the seed of a layer for a micro-batch, as ``"evaluate 3"`` if it is not trained on."""
    digest = blake2b(f"{seed}/{micro_batch}/{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
