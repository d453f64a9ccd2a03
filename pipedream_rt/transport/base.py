"""The interface of a transport, and its contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pipedream_rt.errors import PipelineError
from pipedream_rt.messages.message import Message, Payload

Receive = Callable[[Message], object]
"""``receive(message)`` takes a message that has arrived. Any thread calls it; it never blocks."""

Lost = Callable[[PipelineError], object]
"""``lost(error)`` is told of a message that cannot be handed over. Any thread; never blocks."""


class Transport(Protocol):
    """A mover of messages between addresses: indices of stages, and `COORDINATOR`.

    The contract:

    - A message that was sent to an open address is received once or several times, before or after
      any other message.
    - The receiver owns the tensors of a message, in storage that holds nothing else.
    - The sender does not change the tensors of a message any more.
    - When a message cannot be handed over, the transport calls the sender's ``lost`` and raises
      nothing.
    """

    def open(self, address: int, receive: Receive, lost: Lost) -> None:
        """Begin to receive for an address of this process."""

    def send(self, message: Message) -> None:
        """Hand a message over. Never blocks, even if the receiver is slow or dead."""

    def receiver(self, address: int) -> Receive | None:
        """Return what takes messages for an address of this process; None for one elsewhere."""

    def close(self) -> None:
        """Stop moving messages. Idempotent, from any thread; later calls of `send` do nothing."""


class Sender:
    """What an address sends with: it makes messages, and hands them to the transport."""

    __slots__ = ("_address", "_generation", "_transport")

    def __init__(self, transport: Transport, address: int, generation: int) -> None:
        self._transport, self._address, self._generation = transport, address, generation

    def __call__(self, to: int, index: int, payload: Payload, tensors: tuple[Tensor, ...]) -> None:
        self._transport.send(self._message(to, index, payload, tensors, None))

    def hand_over(
        self,
        to: int,
        index: int,
        payload: Payload,
        tensors: tuple[Tensor, ...],
        ready: Callable[[], torch.Event],
    ) -> bool:
        receive = self._transport.receiver(to)
        if receive is None:
            return False
        receive(self._message(to, index, payload, tensors, ready()))
        return True

    def _message(
        self,
        to: int,
        index: int,
        payload: Payload,
        tensors: tuple[Tensor, ...],
        ready: torch.Event | None,
    ) -> Message:
        """Return a message of the address."""
        return Message(
            to=to,
            sender=self._address,
            index=index,
            generation=self._generation,
            payload=payload,
            tensors=tensors,
            ready=ready,
        )
