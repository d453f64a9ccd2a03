"""The interface of a transport, and the contract that stages rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pipedream_rt.errors import PipelineError
from pipedream_rt.messages.message import Key, Message, Payload

Receive = Callable[[Message], object]
"""Takes a message that has arrived. Any thread calls it; it never blocks."""

Lost = Callable[[PipelineError], object]
"""Takes the error of a message that could not be delivered. Any thread; never blocks."""


class Transport(Protocol):
    """Moves messages between addresses: indices of stages, and `COORDINATOR`.

    The contract:

    - A message to an open address is received at least once, in any order with other messages.
    - The receiver owns the tensors of a message, in storage that holds nothing else.
    - The sender does not change the tensors of a message after it has sent it.
    - When a message cannot be delivered, the transport calls the sender's ``lost`` and raises
      nothing.
    """

    def open(self, address: int, receive: Receive, lost: Lost) -> None:
        """Begin to receive for an address of this process; ``lost`` gets errors of delivery."""

    def send(self, message: Message) -> None:
        """Hand a message over. Never blocks, even if the receiver is slow or dead."""

    def receiver(self, address: int) -> Receive | None:
        """Return the receiver of an address of this process; None for an address elsewhere."""

    def close(self) -> None:
        """Stop moving messages. Idempotent, from any thread; later calls of `send` do nothing."""


class Streams(Protocol):
    """Streams of bytes that members exchange beside messages, over the same links."""

    def receive(self, rank: int, data: bytes) -> None:
        """Take a part of a stream that has come from a member. Any thread; never blocks."""

    def end(self, rank: int) -> None:
        """Close the streams to a member that is gone. Any thread; never blocks."""

    def close(self) -> None:
        """Close everything. Idempotent."""


class StreamTransport(Protocol):
    """A transport that carries streams too.

    Attributes:
        streams: Who takes their parts; None for nobody, set before anything is received.
    """

    streams: Streams | None

    def send_stream(self, rank: int, data: bytes) -> None:
        """Send a part of a stream to a member. Never blocks."""


class GenerationSender:
    """Makes the messages of a generation, and hands them to the transport."""

    __slots__ = ("_generation", "_transport")

    def __init__(self, transport: Transport, generation: int) -> None:
        self._transport, self._generation = transport, generation

    def __call__(self, key: Key, payload: Payload, tensors: tuple[Tensor, ...]) -> None:
        self._transport.send(self._message(key, payload, tensors, None))

    def hand_over(
        self,
        key: Key,
        payload: Payload,
        tensors: tuple[Tensor, ...],
        ready: Callable[[], torch.Event],
    ) -> bool:
        receive = self._transport.receiver(key.edge.target)
        if receive is None:
            return False
        # Past the transport, which would encode the message and copy its tensors.
        receive(self._message(key, payload, tensors, ready()))
        return True

    def _message(
        self, key: Key, payload: Payload, tensors: tuple[Tensor, ...], ready: torch.Event | None
    ) -> Message:
        return Message(
            key=key, generation=self._generation, payload=payload, tensors=tensors, ready=ready
        )
