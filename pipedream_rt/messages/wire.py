"""The bytes of a message: msgpack for everything but its tensors, and the tensors' own bytes."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

import msgpack
import torch
from torch import Tensor

from pipedream_rt.errors import TransportError
from pipedream_rt.messages.message import PAYLOADS, Message, Payload
from pipedream_rt.messages.pages import LARGE, want_large_pages
from pipedream_rt.messages.tree import own

FORMAT = 11
"""The first element of every message, by which a peer with another format is refused."""

_NUMBERS = {cls: number for number, cls in enumerate(PAYLOADS)}
_FIELDS = {cls: tuple(f.name for f in dataclasses.fields(cls)) for cls in PAYLOADS}  # type: ignore[arg-type]
_ENUM_PLACES: dict[type[Payload], dict[int, type[Enum]]] = {
    cls: {
        names.index(name): hint
        for name, hint in get_type_hints(cls).items()
        if isinstance(hint, type) and issubclass(hint, Enum)
    }
    for cls, names in _FIELDS.items()
}
"""Which fields are of an enum, whose values travel."""


def _values(cls: type[Payload]) -> Callable[[Payload], tuple[Any, ...]]:
    """Return a function that returns the values of all fields of a payload, in their order."""
    names = _FIELDS[cls]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda payload: tuple(getattr(payload, name) for name in names)


_VALUES = {cls: _values(cls) for cls in PAYLOADS}


def encode(message: Message) -> bytes:
    """Return the bytes of a message without its tensors."""
    payload = message.payload
    cls = type(payload)
    values = list(_VALUES[cls](payload))
    for place in _ENUM_PLACES[cls]:
        values[place] = values[place].value
    head = [FORMAT, message.to, message.sender, message.index, message.generation, _NUMBERS[cls]]
    try:
        return bytes(msgpack.packb([*head, values], unicode_errors="surrogatepass"))
    except (TypeError, ValueError, OverflowError) as error:
        raise TransportError(f"{message} cannot be written: {error}") from error


def decode(data: bytes, tensors: Sequence[Tensor]) -> Message:
    """Return the message of which `encode` returned the bytes."""
    try:
        found, to, sender, index, generation, number, values = msgpack.unpackb(
            data, strict_map_key=False, unicode_errors="surrogatepass"
        )
        if found != FORMAT:
            raise TransportError(
                f"a message has format {found}, but this version of pipedream-rt reads format "
                f"{FORMAT}; install the same version on all machines"
            )
        cls = PAYLOADS[number]
        for place, enum in _ENUM_PLACES[cls].items():
            values[place] = enum(values[place])
        payload = cls(**dict(zip(_FIELDS[cls], values, strict=True)))
    except (ValueError, TypeError, IndexError, KeyError, msgpack.UnpackException) as error:
        raise TransportError(f"{len(data)} bytes are no message: {error!r}") from error
    return Message(
        to=to,
        sender=sender,
        index=index,
        generation=generation,
        payload=payload,
        tensors=tuple(tensors),
    )


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name."""
    return _DTYPES[name]


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as ``"float32"``; `dtype_of` is the inverse."""
    return _NAMES[dtype]


class Place(NamedTuple):
    """A tensor whose bytes have not come yet.

    Attributes:
        room: The memory that its bytes go into.
        tensor: The tensor, which owns that memory.
    """

    room: memoryview
    tensor: Tensor


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first one of a strided tensor to its last one, both counted."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def sendable(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or a copy if its bytes in memory are not what it means."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach()  # most tensors
    sparse = _span(tensor.shape, tensor.stride()) > 2 * max(1, tensor.numel())
    return own(tensor) if sparse or tensor.is_conj() or tensor.is_neg() else tensor.detach()


def described(tensor: Tensor) -> list[Any]:
    """Return dtype, shape and strides of a tensor as plain data, for `place_for`."""
    return [name_of_dtype(tensor.dtype), tensor.shape, tensor.stride()]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor from its first element to its last, which stays its own."""
    size = _span(tensor.shape, tensor.stride()) * tensor.element_size()
    # Not by numpy(), after which torch refuses to resize the storage: a layer may want to.
    if not size:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.owner = tensor  # the memory lives as long as somebody looks at it
    return memoryview(memory).cast("B")


def elements_of(tensor: Tensor) -> memoryview:
    """Return the bytes of the elements of a tensor in their order, whatever its strides."""
    return bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())


def place_for(description: Sequence[Any]) -> Place:
    """Make room for a tensor that `described` described."""
    name, shape, stride = description
    if len(shape) != len(stride) or min((0, *shape, *stride)) < 0:
        raise ValueError(f"no tensor has the shape {shape} and the strides {stride}")
    dtype = dtype_of(name)
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    room = bytes_of(tensor)
    if room.nbytes >= LARGE:
        want_large_pages(tensor.data_ptr(), room.nbytes)
    return Place(room, tensor)
