"""Values that cross stages: tensors inside tuples, lists, dicts, dataclasses and plain values.

`flatten` splits a value into its tensors and its structure. Tensors travel beside the bytes of a
message; the structure is plain data for msgpack. `unflatten` joins them on the other side.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
import torch
from torch import Tensor

from pipedream_rt.containers import is_sparse, opened, parts_of_sparse, place_in, sparse_of
from pipedream_rt.errors import ConfigError

Structure: TypeAlias = list[Any]
"""Tagged plain data: ``["T", i]`` for tensor i, ``["P", value]`` for a plain value, and so on."""


class Value(NamedTuple):
    """A flattened value that crosses stages.

    Attributes:
        tensors: The tensors, in the order of their numbers in the structure.
        requires_grad: For each tensor, whether a gradient is expected back.
    """

    structure: Structure
    tensors: tuple[Tensor, ...]
    requires_grad: tuple[bool, ...] = ()


@functools.lru_cache(maxsize=256)
def _dump_class(cls: type) -> bytes:
    """Return a class as bytes: its name if it can be imported, else its code (``__main__``)."""
    data = bytes(cloudpickle.dumps(cls))
    _DUMPED[data] = cls
    return data


_DUMPED: dict[bytes, type] = {}
"""The classes of this process by their bytes. cloudpickle would load copies of them."""


@functools.lru_cache(maxsize=256)
def _load_class(data: bytes) -> type:
    """Return the class that `_dump_class` wrote. Equal bytes give the same class."""
    cls: type = _DUMPED.get(data) or cloudpickle.loads(data)
    return cls


def flatten(value: object) -> tuple[Structure, list[Tensor]]:
    """Split a value into its structure, and its tensors in the order of their numbers there."""
    tensors: dict[int, tuple[int, Tensor]] = {}
    structure = _flatten(value, tensors, ())
    return structure, [tensor for _, tensor in tensors.values()]


def _flatten(value: Any, tensors: dict[int, tuple[int, Tensor]], way: tuple[Any, ...]) -> Structure:
    """Flatten a node of a value; ``way`` leads to it: the way to its container, that, and a key."""
    if isinstance(value, Tensor):
        if is_sparse(value) and not value.requires_grad:
            kind, inner = parts_of_sparse(value)
            return ["S", [_flatten(part, tensors, way) for part in inner], kind]
        if value.layout is not torch.strided:
            asks = " that requires a gradient" if is_sparse(value) else ""
            raise ConfigError(
                f"{_place(way)} is a tensor of layout {value.layout}{asks}, which cannot cross "
                "stages; send its parts, as indices and values, or a dense tensor"
            )
        if value.is_meta:
            raise ConfigError(f"{_place(way)} is a tensor on the device meta, which has no values")
        if value.is_quantized:
            raise ConfigError(
                f"{_place(way)} is a quantized tensor, which cannot cross stages; send its "
                "int_repr() and its scale"
            )
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise ConfigError(
                f"{_place(way)} is a {type(value).__qualname__}, a subclass of Tensor, which would "
                "arrive as a plain one; send what it holds, as a tuple or a dataclass"
            )
        # A tensor that occurs twice is sent once and is one tensor on the other side: there its
        # gradients are summed, in the order in which the unsplit model sums them.
        return ["T", tensors.setdefault(id(value), (len(tensors), value))[0]]
    cls: type = type(value)
    if cls in _PLAIN:
        if cls is int and not -(2**63) <= value < 2**64:
            raise ConfigError(f"{_place(way)} is an integer of more than 64 bits")
        return ["P", value]
    tag = _TAGS.get(cls) or _own_class(value)  # not isinstance: a subclass would arrive as its base
    held = opened(value)
    if tag is None or held is None:
        if (number := plain_int(value)) is not value:
            return _flatten(number, tensors, way)
        raise ConfigError(
            f"{_place(way)} is a {cls.__module__}.{cls.__qualname__}, which cannot cross stages; "
            "tensors, tuples, lists, dicts, dataclasses, None, bool, int, float, str and bytes can"
        )
    keys, parts = held
    items = [_flatten(v, tensors, (way, value, k)) for k, v in zip(keys, parts)]
    if tag in _SEQUENCES:
        return [tag, items]
    if tag == "n":
        return [tag, items, _dump_class(cls)]
    if tag in _MAPPINGS:
        return [tag, items, [_key(key, way) for key in keys]]
    return [tag, items, keys, _dump_class(cls)]


def plain_int(value: Any) -> Any:
    """Return a number as a plain one, if it pickles as one (`Pipeline.step` does)."""
    if type(value) in (int, bool) or not isinstance(value, int) or isinstance(value, Enum):
        return value
    return int(value) if value.__reduce_ex__(2)[0] is int else value


_PLAIN = (type(None), bool, int, float, str, bytes)
_SEQUENCES: dict[str, type] = {"t": tuple, "l": list, "s": torch.Size}
_MAPPINGS: dict[str, type] = {"d": dict, "o": OrderedDict}
_TAGS = {cls: tag for tag, cls in (*_SEQUENCES.items(), *_MAPPINGS.items())}


def _own_class(value: Any) -> str | None:
    """Return the tag of a named tuple, a dict that is a dataclass, or another dataclass."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "n"
    if not dataclasses.is_dataclass(type(value)) or isinstance(value, list | tuple):
        return None
    return "m" if isinstance(value, dict) else "c"


def _place(way: tuple[Any, ...]) -> str:
    """Return the expression for a node of a value, as ``value[0].mask``."""
    return _place(way[0]) + place_in(way[1], way[2]) if way else "value"


def _key(key: object, way: tuple[Any, ...]) -> str | int:
    """Return the key of a dict, which must be a str or an int."""
    if isinstance(key, str | int) and not isinstance(key, bool):
        return key
    raise ConfigError(f"{_place(way)} has the key {key!r}; only str and int keys can cross stages")


def flat_copy(value: object) -> Value:
    """Flatten a value and copy its tensors to the host, so that the caller may change its own."""
    structure, tensors = flatten(value)
    return Value(structure, tuple(own(t, copy=True, clone=_on_host) for t in tensors))


NOTHING = flat_copy(None)
"""The content of a micro-batch without samples, or of a missing target."""


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in the memory of the host."""
    return tensor.clone() if tensor.is_cpu else tensor.cpu()


def unflatten(structure: Structure, tensors: Sequence[Tensor]) -> Any:
    """Join a structure, perhaps read by msgpack, and tensors into the value that was flattened."""
    tag = structure[0]
    if tag == "T":
        return tensors[structure[1]]
    if tag == "P":
        return structure[1]
    items = [unflatten(item, tensors) for item in structure[1]]
    if tag == "S":
        return sparse_of(structure[2], items)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](items)
    if tag in _MAPPINGS:
        return _MAPPINGS[tag](zip(structure[2], items))
    cls = _load_class(structure[-1])
    if tag == "n":
        return cls(*items)
    if tag == "m":
        return cls(**dict(zip(structure[2], items)))
    # As pickle does: a dataclass may have an `__init__` of its own, or be frozen.
    value: Any = object.__new__(cls)
    for name, item in zip(structure[2], items):
        object.__setattr__(value, name, item)
    return value


def places(structure: Structure) -> dict[int, str]:
    """Return where each tensor stands in a value, as ``1.mask`` in ``(x, {"mask": y})``."""
    tag, items, *rest = structure
    if tag == "T":
        return {items: ""}
    if tag == "P":
        return {}
    keys = range(len(items)) if tag in (*_SEQUENCES, "n", "S") else rest[0]
    return {
        number: f"{key}.{inner}".rstrip(".")
        for key, item in zip(keys, items)
        for number, inner in places(item).items()
    }


def own(
    tensor: Tensor, *, copy: bool = False, clone: Callable[[Tensor], Tensor] = torch.clone
) -> Tensor:
    """Return the tensor detached and resolved, in a storage with its elements and nothing else.

    ``copy``: whether the storage must be new. ``clone`` makes copies, with the strides that
    `torch.clone` gives. The strides of a dense tensor are kept (transposed, channels last), and so
    are expanded dimensions (the gradient of a sum): kernels round differently for another layout,
    so with contiguous copies the result would depend on where the model is cut.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        if not copy and tensor.untyped_storage().nbytes() == tensor.nbytes:
            return tensor
        return clone(tensor)  # the usual case; the rest is slower
    # A conjugate or negative view is marked by a flag, which does not travel.
    tensor = tensor.resolve_conj().resolve_neg()
    expanded = [n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    if any(expanded):
        once = tensor[tuple(slice(0, 1) if e else slice(None) for e in expanded)]
        return own(once, copy=True, clone=clone).expand(tensor.shape)
    return clone(tensor)
