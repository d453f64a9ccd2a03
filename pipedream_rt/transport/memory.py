"""The transports within one process, with a mode for tests that delivers at random."""

from __future__ import annotations

import dataclasses
import random
import threading

from pipedream_rt.errors import PeerLost
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.messages.message import Message
from pipedream_rt.messages.tree import own
from pipedream_rt.messages.wire import decode, encode
from pipedream_rt.transport.base import Lost, Receive


class MemoryTransport:
    """The transport within one process. Messages are encoded and decoded as on any other."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Receive, Lost]] = {}
        self._life = Lifecycle("the transport")

    def open(self, address: int, receive: Receive, lost: Lost) -> None:
        self._open[address] = (receive, lost)

    def send(self, message: Message) -> None:
        if not self._life.is_open:
            return
        if message.to not in self._open:
            error = PeerLost(f"{message}: no receiver is open there", peer=f"address {message.to}")
            self._open[message.sender][1](error)
            return
        self.deliver(self.copy_of(message))

    def copy_of(self, message: Message) -> Message:
        """Return what the receiver gets: the message as if it came from another process."""
        return decode(encode(message), [own(t, copy=True) for t in message.tensors])

    def receiver(self, address: int) -> Receive | None:
        """See `Transport.receiver`; all are in this process."""
        return self.deliver if address in self._open else None

    def deliver(self, message: Message) -> None:
        """Call the receiver with a message; a subclass may do so later."""
        self._open[message.to][0](message)

    def close(self) -> None:
        self._life.begin_closing()
        self._life.close()


class DirectTransport(MemoryTransport):
    """The transport within one thread, which copies tensors, and encodes nothing."""

    def copy_of(self, message: Message) -> Message:
        """Return the message with copies of its tensors."""
        return dataclasses.replace(
            message, tensors=tuple(own(t, copy=True) for t in message.tensors)
        )


class ShuffledTransport(MemoryTransport):
    """A transport for tests, on which messages arrive when and in the order that a seed says.

    Some arrive twice, as the contract of transports allows.
    """

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw = draw
        self._thread = threading.get_ident()
        self.pending: list[Message] = []

    def deliver(self, message: Message) -> None:
        """Keep a message until `deliver_one` takes it; not that of a checkpoint's own thread.

        Such a message comes when nobody may look for messages to deliver any more.
        """
        if threading.get_ident() == self._thread:
            self.pending.append(message)
        else:
            super().deliver(message)

    def deliver_one(self) -> None:
        """Deliver one of the messages that have not arrived, which may stay to arrive again."""
        number = self._draw.randrange(len(self.pending))
        twice = self._draw.random() < 0.1
        message = self.pending[number] if twice else self.pending.pop(number)
        super().deliver(message)
