"""What one end of a link does with shared memory: its own slots, and those of the other end.

The descriptor of an end's slots goes along with a frame of its own (``SCM_RIGHTS``), before the
first frame that has a tensor in a slot. See `shared.py` for the slots themselves.
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
from pipedream_rt.transport.shared import Slots, Views, close_all

_ROOM_FOR_A_DESCRIPTOR = socket.CMSG_SPACE(struct.calcsize("i"))


class Sharing:
    """One end's part in the memory that both ends of a link share.

    One thread at a time calls the methods of the sender, and one thread at a time those of the
    receiver.

    Attributes:
        announcing: The frame with which the descriptor of the slots has to go, and the slots; None
            if there is none to be sent.
    """

    def __init__(self, gives: bool) -> None:
        self._gives = gives
        self._slots: Slots | None = None
        self.announcing: tuple[memoryview, Slots] | None = None
        self._came: list[int] = []  # descriptors
        self._views: Views | None = None

    # -- the sender -----------------------------------------------------------------------------

    def new_slots(self) -> Slots | None:
        """Make the slots, of which `announce` tells the other end."""
        if self._slots is not None or not self._gives:
            return None
        try:
            return Slots()
        except OSError:
            self._gives = False
            return None

    def announce(self, slots: Slots, frame: memoryview, frames: deque[memoryview]) -> None:
        """Use slots from now on, whose descriptor goes with a frame that is sent next."""
        self.announcing = frame, slots
        self._slots = slots
        frames.append(frame)

    def take(self, size: int) -> tuple[Slots, int, int] | None:
        """Take a slot for a tensor."""
        slots = self._slots
        at = None if slots is None else slots.take(size)
        return None if slots is None or at is None else (slots, *at)

    def send(self, connection: socket.socket, frames: deque[memoryview], most: int) -> int:
        """Write what goes before the descriptor, or that with its frame, while it is announced."""
        assert self.announcing is not None
        frame, slots = self.announcing
        if frames[0] is not frame:
            before = takewhile(lambda each: each is not frame, islice(frames, most))
            return connection.sendmsg(before, (), socket.MSG_DONTWAIT)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", slots.fd))]
        sent = connection.sendmsg([frame], rights, socket.MSG_DONTWAIT)
        self.announcing = None
        return sent

    # -- the receiver ---------------------------------------------------------------------------

    def receive(self, connection: socket.socket, room: memoryview) -> int:
        """Read into some room, and keep the descriptors that come along; return the bytes."""
        count, others, _, _ = connection.recvmsg_into(
            [room], _ROOM_FOR_A_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in others:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._came += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
        return count

    def view(self) -> None:
        """Map the memory of which the descriptor has come."""
        if not self._came:
            raise TransportError(
                "the descriptor of shared memory has not come; may this process open no more files?"
            )
        try:
            self._views = Views(self._came.pop(0))
        except OSError as error:
            raise TransportError(f"shared memory cannot be mapped: {error}") from error

    def tensor(self, about: Sequence[Any]) -> Tensor:
        """Return the tensor in a slot of the other end; see `Views.tensor`."""
        if self._views is None:
            raise TransportError("a tensor lies in memory that is not shared")
        return self._views.tensor(about)

    # -- both -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all descriptors. The memory goes with the last tensor over it. Idempotent."""
        self._gives = False
        close_all(self._came)
        self._came = []
        if self._views is not None:
            self._views.close()
            self._views = None
        if self._slots is not None:
            self._slots.close()
            self._slots = None
