"""Random numbers that depend on (seed, micro-batch, layer), never on timing or placement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch


def layer_seed(seed: int, micro_batch: int | str, layer: str) -> int:
    """The seed with which a layer runs a micro-batch.

    Args:
        seed: Of the pipeline.
        micro_batch: Number of the training micro-batch; another text outside of training.
        layer: Name of the layer in the unsplit model, as ``"3"``.

    Returns:
        First 8 bytes, big end first, of BLAKE2b of ``"seed/micro_batch/layer"``.
    """
    digest = blake2b(f"{seed}/{micro_batch}/{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@contextmanager
def kept_generator_state() -> Iterator[None]:
    """Leave torch's default generator as it was found: other code of this process draws from it."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
