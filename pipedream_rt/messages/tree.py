"""Values that cross stages: tensors inside tuples, lists, dicts, dataclasses and plain values.

`flatten` splits a value into its tensors, which travel beside the bytes of a message, and its
structure, which is plain data for msgpack. `unflatten` joins them on the other side.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
import torch
from torch import Tensor

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
    structure = _flatten(value, tensors, "value")
    return structure, [tensor for _, tensor in tensors.values()]


def _flatten(value: Any, tensors: dict[int, tuple[int, Tensor]], path: str) -> Structure:
    """Flatten one node of a value; ``path`` names it in errors."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise ConfigError(
                f"{path} is a tensor of layout {value.layout}, which cannot cross stages; send its "
                "parts, as indices and values, or a dense tensor"
            )
        if value.is_meta:
            raise ConfigError(f"{path} is a tensor on the device meta, which has no values")
        if value.is_quantized:
            raise ConfigError(
                f"{path} is a quantized tensor, which cannot cross stages; send its int_repr() and "
                "its scale"
            )
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise ConfigError(
                f"{path} is a {type(value).__qualname__}, a subclass of Tensor, which would arrive "
                "as a plain one; send what it holds, as a tuple or a dataclass"
            )
        # A tensor that occurs twice is sent once and is one tensor on the other side: there its
        # gradients are summed, in the order in which the unsplit model sums them.
        return ["T", tensors.setdefault(id(value), (len(tensors), value))[0]]
    cls: type = type(value)  # not isinstance: a subclass would arrive as its base
    if cls in _PLAIN:
        if cls is int and not -(2**63) <= value < 2**64:
            raise ConfigError(f"{path} is an integer of more than 64 bits")
        return ["P", value]
    if cls in _SEQUENCES:
        items = [_flatten(v, tensors, f"{path}[{i}]") for i, v in enumerate(value)]
        return [_SEQUENCES[cls], items]
    if cls in _MAPPINGS:
        pairs = [[_key(k, path), _flatten(v, tensors, f"{path}[{k!r}]")] for k, v in value.items()]
        return [_MAPPINGS[cls], pairs]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [_flatten(v, tensors, f"{path}.{f}") for f, v in zip(value._fields, value)]
        return ["n", _dump_class(cls), items]
    if dataclasses.is_dataclass(cls) and isinstance(value, dict):
        # Like the outputs of Hugging Face models: a dict of the fields that are not None.
        given = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(cls))
        fields = [[n, _flatten(v, tensors, f"{path}.{n}")] for n, v in given if v is not None]
        return ["m", _dump_class(cls), fields]
    if dataclasses.is_dataclass(cls) and not isinstance(value, list | tuple):
        fields = [
            [f.name, _flatten(getattr(value, f.name), tensors, f"{path}.{f.name}")]
            for f in dataclasses.fields(cls)
        ]
        return ["c", _dump_class(cls), fields]
    raise ConfigError(
        f"{path} is a {cls.__module__}.{cls.__qualname__}, which cannot cross stages; tensors, "
        "tuples, lists, dicts, dataclasses, None, bool, int, float, str and bytes can"
    )


_PLAIN = (type(None), bool, int, float, str, bytes)
_SEQUENCES: dict[type, str] = {tuple: "t", list: "l", torch.Size: "s"}
_MAPPINGS: dict[type, str] = {dict: "d", OrderedDict: "o"}
_BUILDERS: dict[str, Callable[[Any], Any]] = {
    tag: cls for cls, tag in (*_SEQUENCES.items(), *_MAPPINGS.items())
}


def _key(key: object, path: str) -> str | int:
    """Return the key of a dict, which must be a str or an int."""
    if isinstance(key, str | int) and not isinstance(key, bool):
        return key
    raise ConfigError(f"{path} has the key {key!r}; only str and int keys can cross stages")


def flat_copy(value: object) -> Value:
    """Flatten a value and copy its tensors to the host, so that the caller may change its own."""
    structure, tensors = flatten(value)
    return Value(structure, tuple(own(t, copy=True, clone=_on_host) for t in tensors))


NOTHING = flat_copy(None)
"""What a micro-batch without samples carries, and the target of one without a target."""


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
    if tag in _SEQUENCES.values():
        return _BUILDERS[tag]([unflatten(item, tensors) for item in structure[1]])
    if tag in _MAPPINGS.values():
        return _BUILDERS[tag]((key, unflatten(item, tensors)) for key, item in structure[1])
    cls = _load_class(structure[1])
    if tag == "n":
        return cls(*(unflatten(item, tensors) for item in structure[2]))
    if tag == "m":
        return cls(**{name: unflatten(item, tensors) for name, item in structure[2]})
    # As pickle does: a dataclass may have an `__init__` of its own, or be frozen.
    value: Any = object.__new__(cls)
    for name, item in structure[2]:
        object.__setattr__(value, name, unflatten(item, tensors))
    return value


def places(structure: Structure) -> dict[int, str]:
    """Return where each tensor stands in a value, as ``1.mask`` in ``(x, {"mask": y})``."""
    tag = structure[0]
    if tag == "T":
        return {structure[1]: ""}
    if tag == "P":
        return {}
    items = structure[1] if tag in (*_SEQUENCES.values(), *_MAPPINGS.values()) else structure[2]
    named = enumerate(items) if tag in (*_SEQUENCES.values(), "n") else items
    return {
        number: f"{key}.{rest}".rstrip(".")
        for key, item in named
        for number, rest in places(item).items()
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
