"""Containers in values: taken apart and put together, for all that walks through values.

Whoever walks decides what to do with what is no container; which containers there are, and how one
is made again, is decided here alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

_PLAIN = {type(None), bool, int, float, str, bytes, complex}
"""The classes of what is never a container, which is asked first since it is the most frequent."""

Held = tuple[Sequence[Any], Sequence[Any]]
"""The keys of a container (indices, names of fields, or keys), and its parts."""


def opened(value: Any) -> Held | None:
    """Take a container apart; None for what is none.

    Tuples, lists, dicts, slices and dataclasses are containers, and dicts that are dataclasses,
    such as the outputs of Hugging Face models, of which only fields count that are not None.
    """
    cls = type(value)
    if cls in _PLAIN:
        return None
    if isinstance(value, tuple | list):
        return range(len(value)), value
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls) if hasattr(value, field.name)]
        if isinstance(value, dict):
            names = [name for name in names if getattr(value, name) is not None]
        return names, [getattr(value, name) for name in names]
    if isinstance(value, dict):
        return list(value), list(value.values())
    if cls is slice:
        return ("start", "stop", "step"), (value.start, value.stop, value.step)
    return None


def put_together(like: Any, keys: Sequence[Any], parts: Sequence[Any]) -> Any:
    """Make a container of the class of another, with the same keys and other parts."""
    cls = type(like)
    if cls is torch.Size:  # which has numbers alone
        return tuple(parts)
    if isinstance(like, tuple | list):
        # The own constructor of a named tuple may expect tensors.
        return cls._make(parts) if hasattr(cls, "_make") else cls(parts)
    if cls is slice:
        return slice(*parts)
    entries = dict(zip(keys, parts, strict=True))
    if cls is dict:
        return entries
    if isinstance(like, dict):
        if dataclasses.is_dataclass(cls):
            return cls(**entries)
        same = copy.copy(like)
        same.update(entries)
        return same
    same = copy.copy(like)
    for name, part in entries.items():
        object.__setattr__(same, name, part)  # it may be frozen
    return same


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds the places of its values beside them, as an adjacency may."""
    return tensor.layout in _PARTS


def parts_of_sparse(tensor: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
    """Return what a sparse tensor is beside its parts, as plain data, and its dense parts."""
    coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
    parts = [getattr(tensor.detach(), name)() for name in _PARTS[tensor.layout]]
    return [str(tensor.layout), list(tensor.shape), coalesced], parts


def sparse_of(kind: Sequence[Any], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sparse tensor of which `parts_of_sparse` has returned the parts."""
    name, shape, coalesced = kind
    if name == str(torch.sparse_coo):
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, tuple(shape), is_coalesced=coalesced or None, check_invariants=False
        )
    makes: dict[str, Any] = {
        str(torch.sparse_csr): torch.sparse_csr_tensor,
        str(torch.sparse_csc): torch.sparse_csc_tensor,
        str(torch.sparse_bsr): torch.sparse_bsr_tensor,
        str(torch.sparse_bsc): torch.sparse_bsc_tensor,
    }
    made: torch.Tensor = makes[name](*parts, size=tuple(shape), check_invariants=False)
    return made


_BY_ROWS = ("crow_indices", "col_indices", "values")
_BY_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
}


def place_in(container: Any, key: Any) -> str:
    """Return the expression for a part of a container, as ``[0]``, ``['mask']`` or ``.mask``."""
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return f".{container._fields[key]}"
    return f".{key}" if dataclasses.is_dataclass(container) else f"[{key!r}]"
