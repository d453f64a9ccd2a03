"""Seeds of random numbers: a function of (seed, micro-batch, layer), not of time or place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

from pipedream_rt.devices.randomness import random_state, set_random_state


def layer_seed(seed: int, micro_batch: int | str, layer: str) -> int:
    """Return the seed with which a layer runs a micro-batch."""
    digest = blake2b(f"{seed}/{micro_batch}/{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@contextmanager
def kept_generator_state() -> Iterator[None]:
    """Give torch's generators their states back, for other code that draws from them."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
