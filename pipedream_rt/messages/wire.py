"""The bytes of a message: everything but its tensors, as msgpack."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgpack
from torch import Tensor

from pipedream_rt.errors import TransportError
from pipedream_rt.messages.message import (
    Command,
    CommandName,
    Failed,
    Gradient,
    Loss,
    Message,
    MicroBatch,
    Mode,
    Payload,
    Ready,
    Reply,
    Saved,
    Start,
    Target,
)

FORMAT = 3
"""The first element of every message, by which a peer with another format is refused."""

_PAYLOADS: tuple[type[Payload], ...] = (
    Start, Ready, MicroBatch, Command, Target, Gradient, Loss, Reply, Saved, Failed,
)  # fmt: skip
_NUMBERS = {cls: number for number, cls in enumerate(_PAYLOADS)}
_ENUMS: dict[tuple[type[Any], str], type[Enum]] = {
    (MicroBatch, "mode"): Mode,
    (Command, "name"): CommandName,
}
_FIELDS = {cls: tuple(f.name for f in dataclasses.fields(cls)) for cls in _PAYLOADS}


def encode(message: Message) -> bytes:
    """Return the bytes of a message without its tensors.

    Raises:
        TransportError: A value has no msgpack form, as an integer of more than 64 bits.
    """
    payload = message.payload
    cls = type(payload)
    values = [getattr(payload, name) for name in _FIELDS[cls]]
    values = [v.value if isinstance(v, Enum) else v for v in values]
    head = [FORMAT, message.to, message.sender, message.index, message.generation, _NUMBERS[cls]]
    try:
        return bytes(msgpack.packb([*head, values], unicode_errors="surrogatepass"))
    except (TypeError, ValueError, OverflowError) as error:
        raise TransportError(f"{message} cannot be written: {error}") from error


def decode(data: bytes, tensors: Sequence[Tensor]) -> Message:
    """Return the message of which `encode` returned the bytes.

    Args:
        data: The bytes of the message.
        tensors: The tensors that came with them.

    Returns:
        The message.

    Raises:
        TransportError: The bytes are no message of this format.
    """
    try:
        found, to, sender, index, generation, number, values = msgpack.unpackb(
            data, strict_map_key=False, unicode_errors="surrogatepass"
        )
        if found != FORMAT:
            raise TransportError(
                f"a message has format {found}, but this version of pipedream-rt reads format "
                f"{FORMAT}; install the same version on all machines"
            )
        cls = _PAYLOADS[number]
        fields = dict(zip(_FIELDS[cls], values, strict=True))
        for name, value in fields.items():
            if (cls, name) in _ENUMS:
                fields[name] = _ENUMS[cls, name](value)
        payload = cls(**fields)
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
