"""The transport between threads of one process, with a mode for tests that delivers at random."""

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
    """The transport within one process. Messages are encoded and decoded as on any other.

    Args:
        shuffle_seed: If given, a thread of the transport delivers the messages in random order,
            after random pauses, and some of them twice, as the contract allows. For tests.
    """

    def __init__(self, shuffle_seed: int | None = None) -> None:
        """Start the delivering thread, if a seed is given."""
        self._open: dict[int, tuple[Receive, Lost]] = {}
        self._life = Lifecycle("the transport")
        self._pending: list[Message] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if shuffle_seed is not None:
            self._random = random.Random(shuffle_seed)
            self._thread = threading.Thread(
                target=self._deliver_shuffled, name="shuffled-delivery", daemon=True
            )
            self._thread.start()

    def open(self, address: int, receive: Receive, lost: Lost) -> None:
        """See `Transport.open`."""
        self._open[address] = (receive, lost)

    def send(self, message: Message) -> None:
        """See `Transport.send`."""
        if not self._life.is_open:
            return
        if message.to not in self._open:
            error = PeerLost(f"{message}: no receiver is open there", peer=f"stage {message.to}")
            self._open[message.sender][1](error)
            return
        copy = self.copy_of(message)
        if self._thread is None:
            self.deliver(copy)
            return
        with self._changed:
            self._pending.append(copy)
            self._changed.notify_all()

    def copy_of(self, message: Message) -> Message:
        """Return what the receiver gets: the message as if it came from another process."""
        return decode(encode(message), [own(t, copy=True) for t in message.tensors])

    def deliver(self, message: Message) -> None:
        """Call the receiver with a message; a subclass may do so later."""
        self._open[message.to][0](message)

    def close(self) -> None:
        """See `Transport.close`."""
        with self._changed:
            self._life.begin_closing()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._life.close()

    def _deliver_shuffled(self) -> None:
        """Deliver messages in random order, and before each wait a random time for others."""
        while True:
            with self._changed:
                while not self._pending and self._life.is_open:
                    self._changed.wait()
                if not self._life.is_open:
                    return
                self._changed.wait(self._random.choice((0.0, 0.0, 0.0002, 0.002)))
                number = self._random.randrange(len(self._pending))
                twice = self._random.random() < 0.1
                message = self._pending[number] if twice else self._pending.pop(number)
            self.deliver(message)


class DirectTransport(MemoryTransport):
    """The transport within one thread, which copies tensors, and encodes nothing."""

    def copy_of(self, message: Message) -> Message:
        """Return the message with copies of its tensors."""
        return dataclasses.replace(
            message, tensors=tuple(own(t, copy=True) for t in message.tensors)
        )
