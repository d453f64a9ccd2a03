"""The interface of a transport, and its contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pipedream_rt.errors import PipelineError
from pipedream_rt.messages.message import Message, Payload, Send

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
        """Begin to receive for an address of this process.

        Args:
            address: The address.
            receive: Called with each message to the address.
            lost: Called when a message from the address cannot be handed over.
        """

    def send(self, message: Message) -> None:
        """Hand a message over. Never blocks, even if the receiver is slow or dead."""

    def close(self) -> None:
        """Stop moving messages. Idempotent, from any thread; later calls of `send` do nothing."""


def sender(transport: Transport, address: int, generation: int) -> Send:
    """Return the function that an address sends with: it makes a message and hands it over."""

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
