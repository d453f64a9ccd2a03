"""The bytes of a message: msgpack for all but its tensors, which go as they lie in memory."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgpack
import torch
from torch import Tensor

from pipedream_rt.errors import TransportError
from pipedream_rt.messages.message import PAYLOADS, Key, Message
from pipedream_rt.messages.tree import own
from pipedream_rt.packing import packb, unpackb
from pipedream_rt.schedules.edges import Edge, EdgeKind

FORMAT = 17
"""Version of this format, the first element of every message. A peer with another is refused."""


class _Form(NamedTuple):
    """How an object of a frozen class travels: as the list of its values.

    Attributes:
        values: Returns the values of the fields of an object, in order.
        write: By index of a field, how it travels where it is an enum or another such object.
        read: The inverse of ``write``.
    """

    cls: type
    names: tuple[str, ...]
    values: Callable[[Any], tuple[Any, ...]]
    write: dict[int, Callable[[Any], Any]]
    read: dict[int, Callable[[Any], Any]]


def _form_of(cls: type) -> _Form:
    names = tuple(f.name for f in dataclasses.fields(cls))
    values: Callable[[Any], tuple[Any, ...]] = attrgetter(*names) if names else lambda _: ()
    if len(names) == 1:  # of a single name, attrgetter returns the value itself
        values = lambda each: (getattr(each, names[0]),)  # noqa: E731
    form = _Form(cls, names, values, {}, {})
    hints = get_type_hints(cls)
    for place, hint in enumerate(hints[name] for name in names):
        each = get_args(hint)[0] if type(None) in get_args(hint) else hint
        if isinstance(hint, type) and issubclass(hint, Enum):
            form.write[place], form.read[place] = attrgetter("value"), hint
        elif dataclasses.is_dataclass(each):
            inner = _form_of(each)  # type: ignore[arg-type]
            form.write[place], form.read[place] = partial(_written, inner), partial(_read, inner)
        elif _is_record(each):  # msgpack writes it as the tuple that it is
            form.read[place] = partial(_read_record, each)
        elif get_origin(each) is list and _is_record(get_args(each)[0]):
            form.read[place] = partial(_read_records, get_args(each)[0])
    return form


def _is_record(hint: Any) -> bool:
    """Whether a type is a NamedTuple, all of whose values are plain."""
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_make")


def _read_record(cls: Any, values: list[Any] | None) -> Any:
    """Return a record of its values; None for None, where a field may be that."""
    return None if values is None else cls._make(values)


def _read_records(cls: Any, each: list[list[Any]]) -> list[Any]:
    return list(map(cls._make, each))


def _written(form: _Form, value: Any) -> list[Any] | None:
    """Return an object as plain values; None for None, where a field may be that."""
    if value is None:
        return None
    values = list(form.values(value))
    for place, write in form.write.items():
        values[place] = write(values[place])
    return values


def _read(form: _Form, values: list[Any] | None) -> Any:
    """Return the object of which `_written` returned the values."""
    if values is None:
        return None
    for place, read in form.read.items():
        values[place] = read(values[place])
    return form.cls(**dict(zip(form.names, values, strict=True)))


_KINDS = tuple(EdgeKind)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_FORMS = [_form_of(PAYLOADS[kind]) for kind in _KINDS]


def encode(message: Message) -> bytes:
    """Return the bytes of a message without its tensors."""
    edge, number, restores = message.key
    kind = _NUMBERS[edge.kind]
    head = [FORMAT, edge.target, edge.source, number, restores, message.generation, kind]
    try:
        values = _written(_FORMS[kind], message.payload)
        return bytes(packb([*head, values]))
    except (TypeError, ValueError, OverflowError) as error:
        raise TransportError(f"{message} cannot be written: {error}") from error


def decode(data: bytes, tensors: Sequence[Tensor]) -> Message:
    """Return the message of which `encode` returned the bytes."""
    try:
        found, to, sender, number, restores, generation, kind, values = unpackb(
            data, strict_map_key=False
        )
        if found != FORMAT:
            raise TransportError(
                f"a message has format {found}, but this version of pipedream-rt reads format "
                f"{FORMAT}; install the same version on all machines"
            )
        payload = _read(_FORMS[kind], values)
    except (ValueError, TypeError, IndexError, KeyError, msgpack.UnpackException) as error:
        raise TransportError(f"{len(data)} bytes are no message: {error!r}") from error
    return Message(
        key=Key(Edge(_KINDS[kind], sender, to), number, restores),
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
    """Return the dtype of a name, as ``"float32"``; KeyError if this torch does not know it."""
    return _DTYPES[name]


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as ``"float32"``; `dtype_of` is the inverse."""
    return _NAMES[dtype]


class TensorSlot(NamedTuple):
    """A tensor whose bytes have not come yet.

    Attributes:
        room: The memory that its bytes go into.
        tensor: The tensor, which owns that memory.
    """

    room: memoryview
    tensor: Tensor


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements in memory from the first of a strided tensor to its last, inclusive."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def sendable(tensor: Tensor) -> Tensor:
    """Return the tensor detached, or a copy if its memory cannot be sent as it is."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach()  # the usual case
    # Over a span of more than twice its elements, mostly bytes of others would be sent.
    sparse = _span(tensor.shape, tensor.stride()) > 2 * max(1, tensor.numel())
    return own(tensor) if sparse or tensor.is_conj() or tensor.is_neg() else tensor.detach()


def described(tensor: Tensor) -> list[Any]:
    """Return dtype, shape and strides of a tensor as plain data, for `place_for`."""
    return [name_of_dtype(tensor.dtype), tensor.shape, tensor.stride()]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of the memory of a tensor, from its first element to its last."""
    size = _span(tensor.shape, tensor.stride()) * tensor.element_size()
    # Not numpy(), after which torch refuses to resize the storage, which a layer may do.
    if not size:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.owner = tensor  # keeps the memory alive as long as the view
    return memoryview(memory).cast("B")


def elements_of(tensor: Tensor) -> memoryview:
    """Return the bytes of the elements of a dense tensor in their order, whatever its strides."""
    return bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())


def place_for(description: Sequence[Any]) -> TensorSlot:
    """Allocate a tensor that `described` has described; ValueError or KeyError if none can be."""
    name, shape, stride = description
    if len(shape) != len(stride) or min((0, *shape, *stride)) < 0:
        raise ValueError(f"no tensor has the shape {shape} and the strides {stride}")
    dtype = dtype_of(name)
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    room = bytes_of(tensor)
    if room.nbytes >= LARGE:
        want_large_pages(tensor.data_ptr(), room.nbytes)
    return TensorSlot(room, tensor)


LARGE = 1 << 22
"""Bytes from which a block has a whole page of 2 MiB in it, wherever it begins."""


def want_large_pages(address: int, size: int) -> None:
    """Ask the kernel for large pages in a block of ``size`` bytes, where it has any."""
    madvise = _madvise()
    if madvise is None:
        return
    # Only whole pages: madvise refuses an address that begins none.
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (address + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    """Return madvise of the C library; None where it, or large pages, are missing."""
    return getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
