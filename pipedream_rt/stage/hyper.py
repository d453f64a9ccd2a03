"""Hyper-parameters as plain values: of parameter groups, in messages and in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.tree import plain_int

Hyper = dict[str, Any]
"""The hyper-parameters of one parameter group: ``lr``, ``betas``, ``weight_decay`` and so on."""


def pack_hyper(value: Any, name: str) -> Any:
    """Pack the value of a hyper-parameter into plain data that gives the very same value again."""
    # Kinds are kept by tags, as arithmetic on tensors and NumPy's numbers rounds otherwise than on
    # Python's.
    if type(value) in _PLAIN and not (type(value) is int and not -(2**63) <= value < 2**64):
        return value
    if isinstance(value, Tensor) and not value.requires_grad:
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ["T", str(value.dtype).removeprefix("torch."), list(value.shape), data]
    if isinstance(value, np.generic) and value.dtype.kind in "bifc":
        return ["N", value.dtype.str, value.tobytes()]
    if type(value) in (list, tuple):
        return ["l" if type(value) is list else "t", [pack_hyper(v, name) for v in value]]
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return ["d", {key: pack_hyper(v, name) for key, v in value.items()}]
    if (number := plain_int(value)) is not value:
        return pack_hyper(number, name)
    raise ConfigError(
        f"the hyper-parameter {name!r} is {value!r}, a {type(value).__name__}, which cannot be "
        "sent to the stages; give it as a number, a text, a tensor, or a list or dict of these"
    )


def unpack_hyper(packed: Any) -> Any:
    """Return the value that `pack_hyper` has packed."""
    if not isinstance(packed, list):
        return packed
    tag, *rest = packed
    match tag:
        case "T":
            dtype, shape, data = rest
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return flat.view(getattr(torch, dtype)).reshape(shape)
        case "N":
            return np.frombuffer(rest[1], dtype=np.dtype(rest[0]))[0]
        case "d":
            return {key: unpack_hyper(value) for key, value in rest[0].items()}
        case _:
            values = [unpack_hyper(value) for value in rest[0]]
            return tuple(values) if tag == "t" else values


def pack_values(values: Mapping[str, Any]) -> Hyper:
    """Pack values by name; ConfigError for one that cannot be sent to the stages."""
    return {name: pack_hyper(value, name) for name, value in values.items()}


def packed_extra(state: Mapping[str, Any]) -> Hyper:
    """Return the entries of a state dict that are not tensors, packed."""
    return pack_values({k: v for k, v in state.items() if not isinstance(v, Tensor)})


_PLAIN = (type(None), bool, int, float, str)


def pack_group(group: Hyper) -> Hyper:
    """Pack the hyper-parameters of a group, but for ``params`` and what cannot be packed."""
    # The rest is not lost: an optimizer on a stage keeps it as it was built.
    packed = {}
    for name, value in group.items():
        if name != "params":
            with suppress(ConfigError):
                packed[name] = pack_hyper(value, name)
    return packed


def set_hyper(group: Hyper, packed: Hyper) -> None:
    """Set the packed hyper-parameters of a group; the others stay."""
    group.update((name, unpack_hyper(value)) for name, value in packed.items())
