"""Seeds of random numbers: a function of (seed, micro-batch, layer), not of time or place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

from pipedream_rt.devices.randomness import random_state, set_random_state


def layer_seed(seed: int, micro_batch: int | str, layer: str) -> int:
    """Return the seed of a layer for a micro-batch, as ``"evaluate 3"`` if it is not trained on."""
    digest = blake2b(f"{seed}/{micro_batch}/{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@contextmanager
def kept_generator_state() -> Iterator[None]:
    """Restore the states of torch's generators after a body that seeds or draws."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
