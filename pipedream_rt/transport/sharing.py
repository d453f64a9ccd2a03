"""Shared memory of one end of a link: the slots that it sends with, and its view of the other's.

The descriptor of the slots travels with a frame of its own (``SCM_RIGHTS``), before the first frame
that has a tensor in a slot. The slots themselves are in `shared.py`.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any

from torch import Tensor

from pipedream_rt.errors import TransportError
from pipedream_rt.transport.shared import ReceiveBlock, SendBlock, close_all

_ROOM_FOR_A_DESCRIPTOR = socket.CMSG_SPACE(struct.calcsize("i"))


class SharedEnd:
    """Shared memory of one end of a link.

    One thread at a time calls the methods of the sender, and one thread at a time those of the
    receiver.

    Attributes:
        announcing: The frame that has yet to carry the descriptor of the slots, and the slots; None
            if no descriptor has to be sent.
    """

    def __init__(self, shares_memory: bool) -> None:
        self._shares_memory = shares_memory  # whether tensors go through slots of this end
        self._slots: SendBlock | None = None
        self.announcing: tuple[memoryview, SendBlock] | None = None
        self._descriptors: list[int] = []  # received, and not used yet
        self._views: ReceiveBlock | None = None

    # -- the sender -----------------------------------------------------------------------------

    def new_slots(self) -> SendBlock | None:
        """Make the slots, to be announced; None if they exist, or if none are to be had."""
        if self._slots is not None or not self._shares_memory:
            return None
        try:
            return SendBlock()
        except OSError:  # no memory to share: values go over the socket from now on
            self._shares_memory = False
            return None

    def announce(self, slots: SendBlock, frame: memoryview, frames: deque[memoryview]) -> None:
        """Use slots from now on; their descriptor goes with ``frame``, appended to ``frames``."""
        self.announcing = frame, slots
        self._slots = slots
        frames.append(frame)

    def take(self, size: int) -> tuple[SendBlock, int, int] | None:
        """Take a slot; return the slots, its number and its offset; None if none is free."""
        slots = self._slots
        at = None if slots is None else slots.take(size)
        return None if slots is None or at is None else (slots, *at)

    def send(self, connection: socket.socket, frames: deque[memoryview], most: int) -> int:
        """Write the frames before the announcing one, or that one with the descriptor."""
        assert self.announcing is not None
        frame, slots = self.announcing
        if frames[0] is not frame:  # alone, so that the descriptor comes with its own frame
            before = takewhile(lambda each: each is not frame, islice(frames, most))
            return connection.sendmsg(before, (), socket.MSG_DONTWAIT)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", slots.fd))]
        # The descriptor goes with the first byte that is taken, even if the rest has to wait.
        sent = connection.sendmsg([frame], rights, socket.MSG_DONTWAIT)
        self.announcing = None
        return sent

    # -- the receiver ---------------------------------------------------------------------------

    def receive(self, connection: socket.socket, room: memoryview) -> int:
        """Read; keep the descriptors that come along, and return the number of bytes."""
        count, others, _, _ = connection.recvmsg_into(
            [room], _ROOM_FOR_A_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in others:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
        return count

    def view(self) -> None:
        """Map the memory whose descriptor has come."""
        if not self._descriptors:  # the kernel drops a descriptor for which the process has no room
            raise TransportError(
                "the descriptor of the other end's shared memory has not come: probably this "
                "process can open no more files; raise its limit, as by `ulimit -n`"
            )
        try:
            self._views = ReceiveBlock(self._descriptors.pop(0))
        except OSError as error:
            raise TransportError(
                f"the other end's shared memory cannot be mapped: {error}; this process needs more "
                "memory or address space"
            ) from error

    def tensor(self, about: Sequence[Any]) -> Tensor:
        """Return the tensor in a slot of the other end, which ``about`` describes."""
        if self._views is None:
            raise TransportError(
                "a tensor lies in the other end's shared memory, whose descriptor has not come"
            )
        return self._views.tensor(about)

    # -- both -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all descriptors. The memory goes with the last tensor over it. Idempotent."""
        self._shares_memory = False
        close_all(self._descriptors)
        self._descriptors = []
        if self._views is not None:
            self._views.close()
            self._views = None
        if self._slots is not None:
            self._slots.close()
            self._slots = None
