"""What leaves a device for the host: copies in flight, and the messages that wait for them.

The thread that computes begins the copies and goes on. The transport needs the bytes of a message,
so whoever hands it over waits for them: a thread of the device, or the script's thread where the
stages run in that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipedream_rt.devices.base import Late
from pipedream_rt.messages.message import Loss, Payload, Send
from pipedream_rt.threads import name_this_thread


@dataclass(frozen=True, slots=True)
class Leaving:
    """A message on its way out.

    Attributes:
        failed: Called with what the check of a late loss raises.
        to: The address of the receiver.
        index: See `Message`.
        payload: Its payload, whose loss may be `Late`.
        tensors: Copies of its tensors on the host; one more, the last, for a loss that is late.
        copied: The event after which the copies are there; None if there are none.
    """

    send: Send
    failed: Callable[[BaseException], object]
    to: int
    index: int
    payload: Payload
    tensors: tuple[Tensor, ...]
    copied: torch.Event | None

    def leave(self) -> None:
        """Wait for the copies, check a late loss, and hand the message over."""
        payload, tensors = self.payload, self.tensors
        if self.copied is not None:
            self.copied.synchronize()
        if isinstance(payload, Loss) and isinstance(payload.loss, Late):
            *rest, value = tensors
            number, tensors = float(value.item()), tuple(rest)
            payload.loss.check(number)
            payload = replace(payload, loss=number)
        self.send(self.to, self.index, payload, tensors)


class AtOnce:
    """Messages that leave at once, by the thread that sends them."""

    def put(self, leaving: Leaving) -> None:
        """Hand a message over, as soon as its tensors are there. Blocks until then."""
        leaving.leave()

    def close(self) -> None:
        """Do nothing: all have left."""


class ByThread:
    """Messages that leave by a thread of their own, in the order in which they were sent."""

    def __init__(self, name: str, begin: Callable[[], object] = lambda: None) -> None:
        self._begin = begin
        self._leaving: queue.SimpleQueue[Leaving | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, leaving: Leaving) -> None:
        """Let a message leave once its tensors are there. Never blocks."""
        self._leaving.put(leaving)

    def _run(self) -> None:
        """Hand messages over until `close`, or until an error, which ends the worker."""
        name_this_thread(self._thread.name)
        self._begin()
        while (leaving := self._leaving.get()) is not None:
            try:
                leaving.leave()
            except BaseException as error:  # the top of a thread: the stages report it
                leaving.failed(error)
                # What follows a loss that is not finite must not leave: a reply to the command to
                # save would make a checkpoint of it.
                return

    def close(self) -> None:
        """Wait until all messages have left. Idempotent."""
        self._leaving.put(None)
        self._thread.join()
