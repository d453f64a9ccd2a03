"""The interface of a transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pipedream_rt.errors import PipelineError
from pipedream_rt.messages.message import Message, Payload, Send

Receive = Callable[[Message], object]
"""Takes a message that has arrived: an inbox's ``put``. Called from any thread; never blocks."""

Lost = Callable[[PipelineError], object]
"""Told that a message could not be handed over. Called from any thread; never blocks."""


class Transport(Protocol):
    """Moves messages between addresses: stage indices and `COORDINATOR`.

    Contract: a message that was sent to an open address is received once or more, in any order
    with others; its tensors are the receiver's own, in storage that holds nothing else; the sender
    may change its own tensors no earlier than it changes the version or generation they belong to.
    What cannot be handed over is told to the sender's ``lost``, not raised.
    """

    def open(self, address: int, receive: Receive, lost: Lost) -> None:
        """Start to receive for an address of this process."""

    def send(self, message: Message) -> None:
        """Hand a message over. Never blocks, whoever is slow or dead."""

    def close(self) -> None:
        """Stop. Idempotent, from any thread. Sends after it do nothing."""


def sender(transport: Transport, address: int, generation: int) -> Send:
    """Return what an address sends with: it makes the message and hands it to the transport."""

    def send(to: int, index: int, payload: Payload, tensors: tuple[Tensor, ...]) -> None:
        transport.send(
            Message(
                to=to,
                sender=address,
                index=index,
                generation=generation,
                payload=payload,
                tensors=tensors,
            )
        )

    return send
