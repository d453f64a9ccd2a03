"""Fingerprints: short numbers that two states share only if they are equal bit for bit.

The fingerprint of a set of named tensors is the sum, modulo 2^128, of a BLAKE2b digest of the name,
dtype, shape and bytes of each. So that of a model is the sum over its stages, whatever the split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

from torch import Tensor

from pipedream_rt.messages.state_keys import OF_OPTIMIZERS, SPLIT, StateKey, written
from pipedream_rt.messages.wire import elements_of

_BYTES = 16


def fingerprint(named: Mapping[str, Any]) -> str:
    """Return the fingerprint of named tensors, and values by their ``repr``, as 32 hex digits."""
    return total(_digest(name, value) for name, value in named.items())


def total(fingerprints: Iterable[str]) -> str:
    """Return the fingerprint of several sets together."""
    number = sum(int(each, 16) for each in fingerprints) % (1 << 8 * _BYTES)
    return number.to_bytes(_BYTES, "big").hex()


def _digest(name: str, value: Any) -> str:
    """Return the digest of one named value, as 32 hex digits."""
    digest = blake2b(digest_size=_BYTES)
    if isinstance(value, Tensor):
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        digest.update(elements_of(value))
    else:
        digest.update(f"{name}|{value!r}".encode())
    return digest.hexdigest()


def fingerprints_of(
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    steps: Mapping[StateKey, Any],
    older: Mapping[int, Mapping[str, Tensor]],
    version: int,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the fingerprints of a stage: frozen weights count, but not among older versions."""
    # What an optimizer keeps for all its parameters is usually the same on all stages, and counts
    # once for the model: these digests are listed, and leave out the number of the stage.
    own = {
        written(key.part, *key.path): value
        for key, value in steps.items()
        if key.part in OF_OPTIMIZERS and key.part != SPLIT
    }
    # A key without a name is of what all stages have agreed on; the first stage alone keeps it.
    state = {str(k): v for k, v in steps.items() if k.name and k.part not in OF_OPTIMIZERS}
    return {
        "version": version,
        "weights": fingerprint(parameters),
        "buffers": fingerprint(buffers),
        "optimizer": fingerprint(state),
        "rest": sorted(_digest(name, value) for name, value in {**own, **extra}.items()),
        "older": {str(v): fingerprint(named) for v, named in sorted(older.items())},
    }
