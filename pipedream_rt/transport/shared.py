"""Memory that two processes of one machine share, for the large values that go over a link.

A value goes over a socket in two copies, through the kernel. Here the sender copies it once, into a
slot of a block of memory that both have; over the link goes the number of the slot. The receiver
computes on the slot itself, and gives it back when the last tensor over it is gone: for an
activation that is after its backward.

Each end of a link has a `Slots` of its own for what it sends, made when the first large value goes,
and the descriptor of its block goes over the link (``SCM_RIGHTS``). The block has no name, so
nothing is left of it when both processes have ended, however they did. It is as large as it may
become from the beginning, and takes memory only where a slot has been: slots that are free are
taken again before there are more.

Of each slot there is one byte at the beginning of the block, which the sender sets and the receiver
clears. Nobody waits for it: where no slot is free, as with a receiver that has stopped, or no
memory for another, the value goes over the socket. A sender that dies has announced no slot that it
has not filled; a receiver that dies gives nothing back, and the block ends with the link.

The block lies in one piece, so that it can be registered as pinned memory by a later transport for
accelerators.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipedream_rt.errors import TransportError
from pipedream_rt.messages.wire import dtype_of

SMALLEST = 1 << 17
"""The bytes of a value from which on it goes by a slot; for smaller ones the socket is as fast."""

_MOST_SLOTS = 1 << 12
_FIRST = _MOST_SLOTS  # where the first slot begins: behind the bytes that say which are taken
_PAGE = 1 << 12
_ROOM = 1 << 30
"""The bytes of all slots of one end of a link at the most."""

VARIABLE = "PIPEDREAM_RT_SHARED_MEMORY"
"""The environment variable that says ``off`` where values are to go over sockets alone."""


def is_wanted() -> bool:
    """Whether values may go through shared memory."""
    return hasattr(os, "memfd_create") and os.environ.get(VARIABLE, "") != "off"


def works() -> bool:
    """Whether values go through shared memory here: it is wanted, and the kernel gives some."""
    if not is_wanted():
        return False
    try:
        slots = Slots(SMALLEST)
    except (OSError, ValueError):
        return False
    found = slots.take(SMALLEST) is not None
    slots.close()
    return found


class Slots:
    """The block of an end that sends.

    Args:
        room: The bytes of all slots at the most.

    Attributes:
        fd: The descriptor of the block, for the other end.

    Raises:
        OSError: There is no memory that can be shared.
    """

    def __init__(self, room: int = _ROOM) -> None:
        """Make the block, without a slot yet."""
        self.fd = os.memfd_create("pipedream-rt", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, _FIRST + room)
            block = np.frombuffer(mmap.mmap(self.fd, _FIRST + room), np.uint8)
        except (OSError, ValueError):
            os.close(self.fd)
            raise
        self._taken, self._bytes = block[:_MOST_SLOTS], block
        self._end = _FIRST
        self._slots: list[tuple[int, int]] = []  # the beginning and the length of each
        self._close = weakref.finalize(self, os.close, self.fd)

    def take(self, size: int) -> tuple[int, int] | None:
        """Take a slot, which `fill` fills. One thread at a time.

        Returns:
            The number of the slot and where it begins; None where there is no room.
        """
        number = self._free_slot(size)
        if number is None:
            return None
        self._taken[number] = 1
        return number, self._slots[number][0]

    def fill(self, begin: int, value: memoryview) -> None:
        """Copy a value into the slot that begins there. Any thread; others run meanwhile."""
        np.copyto(self._bytes[begin : begin + value.nbytes], np.frombuffer(value, np.uint8))

    def _free_slot(self, size: int) -> int | None:
        """Return the number of a slot that is free and not much too large; None if none can be."""
        free = np.flatnonzero(self._taken[: len(self._slots)] == 0).tolist()
        fits = [(self._slots[n][1], n) for n in free if size <= self._slots[n][1] <= 2 * size]
        if fits:
            return min(fits)[1]
        if len(free) == len(self._slots):  # of sizes that are wanted no more
            self._slots, self._end = [], _FIRST
        length = -(-size // _PAGE) * _PAGE
        if len(self._slots) == _MOST_SLOTS or self._end + length > len(self._bytes):
            return None
        try:
            # What is not there is asked for now, so that no write can fail.
            os.posix_fallocate(self.fd, self._end, length)
        except OSError:
            return None
        self._slots.append((self._end, length))
        self._end += length
        return len(self._slots) - 1

    def close(self) -> None:
        """Close the descriptor. The memory goes with the last tensor over it. Idempotent."""
        self._close()


class _Slot(np.ndarray):
    """The bytes of a slot, of which a tensor keeps this object while it is there."""


class Views:
    """The block of the other end, in the end that receives.

    Args:
        fd: Its descriptor, taken over.

    Raises:
        OSError: It cannot be mapped.
    """

    def __init__(self, fd: int) -> None:
        """Map the block."""
        try:
            self._map = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        self._taken = np.frombuffer(self._map, np.uint8, _MOST_SLOTS)

    def tensor(self, about: Sequence[Any]) -> Tensor:
        """Return the tensor in a slot, which is given back when the last tensor over it is gone.

        Args:
            about: dtype, shape and strides, as `described` returns them; the number of the slot,
                and where it begins.

        Raises:
            TransportError: There is no such slot.
            ValueError: The description makes no sense.
            KeyError: The dtype is unknown to this version of torch.
        """
        name, shape, stride, number, begin = about
        dtype = dtype_of(name)
        size = dtype.itemsize * (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))
        if not (
            0 <= number < _MOST_SLOTS
            and _FIRST <= begin <= begin + size <= len(self._map)
            and begin % _PAGE == 0
            and min((1, *shape)) > 0
            and min((0, *stride)) >= 0
        ):
            raise TransportError(f"no slot of {size} bytes begins at {begin}")
        slot = np.frombuffer(self._map, np.uint8, size, begin).view(_Slot)
        weakref.finalize(slot, _give_back, self._taken, number, os.getpid()).atexit = False
        raw = torch.from_numpy(slot)
        return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape, stride)


def _give_back(taken: np.ndarray, number: int, process: int) -> None:
    """Say that a slot is free; only the process that received it does."""
    if os.getpid() == process:
        taken[number] = 0


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that came and are not wanted."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
