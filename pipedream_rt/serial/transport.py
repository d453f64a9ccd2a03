"""Transports within one process, one of them for tests, which delivers in random order."""

from __future__ import annotations

import dataclasses
import random
import threading

from pipedream_rt.errors import PeerLost
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.messages.message import Message
from pipedream_rt.messages.tree import own
from pipedream_rt.messages.wire import decode, encode
from pipedream_rt.transport.interface import Lost, Receive


class MemoryTransport:
    """The transport within one process. Messages are encoded, as between processes."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Receive, Lost]] = {}
        self._life = Lifecycle("the transport")

    def open(self, address: int, receive: Receive, lost: Lost) -> None:
        self._open[address] = (receive, lost)

    def send(self, message: Message) -> None:
        if not self._life.is_open:
            return
        _, sender, to = message.key.edge
        if to not in self._open:
            error = PeerLost(
                f"{message}: no receiver is registered at address {to}", peer=f"address {to}"
            )
            self._open[sender][1](error)
            return
        self.deliver(self.copy_of(message))

    def copy_of(self, message: Message) -> Message:
        """Return what the receiver gets: the message as if it came from another process."""
        return decode(encode(message), [own(t, copy=True) for t in message.tensors])

    def receiver(self, address: int) -> Receive | None:
        # All addresses are in this process. Through `deliver`, which a subclass may delay.
        return self.deliver if address in self._open else None

    def deliver(self, message: Message) -> None:
        """Give a message to its receiver; a subclass may do so later."""
        self._open[message.key.edge.target][0](message)

    def close(self) -> None:
        self._life.begin_closing()
        self._life.close()


class DirectTransport(MemoryTransport):
    """The transport within one thread. It copies tensors, and encodes nothing."""

    def copy_of(self, message: Message) -> Message:
        """Return the message with copies of its tensors."""
        return dataclasses.replace(
            message, tensors=tuple(own(t, copy=True) for t in message.tensors)
        )


class ShuffledTransport(MemoryTransport):
    """A transport for tests: a seed decides when and in which order messages arrive.

    Some arrive twice, as the contract of transports allows.

    Attributes:
        pending: The messages that were sent and have not arrived.
    """

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw = draw
        self._thread = threading.get_ident()
        self.pending: list[Message] = []

    def deliver(self, message: Message) -> None:
        """Keep a message until `deliver_one` takes it."""
        # The thread that writes a checkpoint may send when nobody calls `deliver_one` any more, so
        # its messages arrive at once.
        if threading.get_ident() == self._thread:
            self.pending.append(message)
        else:
            super().deliver(message)

    def deliver_one(self) -> None:
        """Deliver one pending message, which may stay pending to arrive again."""
        number = self._draw.randrange(len(self.pending))
        twice = self._draw.random() < 0.1
        message = self.pending[number] if twice else self.pending.pop(number)
        super().deliver(message)
