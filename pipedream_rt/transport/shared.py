"""Memory that two processes of one machine share, for the large values that go over a link.

Over a socket a value is copied twice, into the kernel and out of it. Here the sender copies it
once, into a slot of a block of memory that both processes map, and the link carries the number of
the slot. The receiver computes on the slot itself, and gives it back when the last tensor over it
is gone: for an activation, after its backward. (A child that the receiver has forked sees later
contents of the slot.)

Each end of a link has a `SendBlock` for what it sends, made with the first large value; the
descriptor of the block goes over the link (``SCM_RIGHTS``). The block has no name, so nothing is
left of it when both processes have ended, however they ended. It has its final size from the
beginning, and takes memory and addresses only where a slot is. A value reuses a free slot of at
most twice its size. Free slots are dropped when a new slot finds no room, or when they hold much.

The block begins with one byte for each slot, which the sender sets and the receiver clears. Nobody
waits for it: where no slot is free, as when the receiver is stopped, and there is no memory for
another, the value goes over the socket. A sender announces a slot only after it has filled it, so
its death leaves none half filled. A receiver that dies gives nothing back, and the block ends with
the link.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipedream_rt.errors import TransportError
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.messages.wire import dtype_of

SMALLEST = 1 << 17
"""Bytes from which a value goes by a slot. For smaller ones the socket is as fast."""

_MOST_SLOTS = 1 << 12
_PAGE = mmap.PAGESIZE
# The first slot begins at the first page behind the bytes that say which slots are taken.
_FIRST = -(-_MOST_SLOTS // _PAGE) * _PAGE
_ROOM = 1 << 30
"""Bytes of all slots of one end of a link at most."""

_MOST_FREE = 1 << 28
"""Bytes of free slots above which they are dropped before another one is made."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

Bytes = npt.NDArray[np.uint8]


# -- the kernel ---------------------------------------------------------------------------------


@cache
def _libc() -> Any:
    """Return the C library. Python's own `mmap` would keep a descriptor for each mapping."""
    libc = ctypes.CDLL(None, use_errno=True)
    size, offset, pointer, number = ctypes.c_size_t, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, offset]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    libc.fallocate.argtypes = [number, number, offset, offset]
    return libc


def _mapped(fd: int, begin: int, length: int, *, forks: bool) -> Bytes:
    """Map a part of a block for as long as the array, or a view of it, lives."""
    libc = _libc()
    both = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, length, both, mmap.MAP_SHARED, fd, begin)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "shared memory cannot be mapped")
    if not forks:
        libc.madvise(address, length, mmap.MADV_DONTFORK)
    room = (ctypes.c_uint8 * length).from_address(address)
    # Not at exit, when tensors may still lie over it; the process ends the mapping anyway.
    weakref.finalize(room, libc.munmap, address, length).atexit = False
    found: Bytes = np.frombuffer(memoryview(room).cast("B"), np.uint8)
    return found


def _give_up(fd: int, begin: int, length: int) -> None:
    """Give the memory of a part of a block back to the kernel."""
    keep_size, punch_hole = 1, 2
    _libc().fallocate(fd, keep_size | punch_hole, begin, length)


# -- the sender ---------------------------------------------------------------------------------


class SendBlock:
    """The block of an end that sends.

    Attributes:
        fd: The descriptor of the block, for the other end.
    """

    def __init__(self, room: int = _ROOM) -> None:
        self.fd = os.memfd_create("pipedream-rt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._room = room
        os.ftruncate(self.fd, _FIRST + room)
        # Sealed: reading memory of a block that the other end has shortened would be a SIGBUS.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._taken = _mapped(self.fd, 0, _FIRST, forks=False)
        self._slots: dict[int, tuple[int, Bytes]] = {}  # by number: offset in the block, memory
        close_in_forked_children(self)

    def take(self, size: int) -> tuple[int, int] | None:
        """Take a slot; return its number and offset, or None for no room. One thread at a time."""
        free = [n for n in self._slots if not self._taken[n]]
        fits = [(len(self._slots[n][1]), n) for n in free]
        number = min((pair for pair in fits if size <= pair[0] <= 2 * size), default=(0, None))[1]
        if number is None:
            number = self._another(-(-size // _PAGE) * _PAGE, free)
        if number is None:
            return None
        self._taken[number] = 1
        return number, self._slots[number][0]

    def fill(self, number: int, value: memoryview) -> None:
        """Copy a value into a slot that was taken. Any thread."""
        np.copyto(self._slots[number][1][: value.nbytes], np.frombuffer(value, np.uint8))

    def give_back(self, number: int) -> None:
        """Give back a slot that was not announced."""
        self._taken[number] = 0

    def _another(self, length: int, free: Sequence[int]) -> int | None:
        """Make a slot of ``length`` bytes; return its number, or None where there is no room."""
        begin = self._gap(length)
        if begin is None or sum(len(self._slots[n][1]) for n in free) > _MOST_FREE:
            self._drop(free)
            begin = self._gap(length)
        if begin is None or len(self._slots) == _MOST_SLOTS:
            return None
        try:
            # Memory is reserved now, since a write without memory would be a SIGBUS.
            os.posix_fallocate(self.fd, begin, length)
            memory = _mapped(self.fd, begin, length, forks=False)
        except OSError:
            return None
        number = next(n for n in range(_MOST_SLOTS) if n not in self._slots)
        self._slots[number] = begin, memory
        return number

    def _gap(self, length: int) -> int | None:
        """Return the offset of the first gap of ``length`` bytes between slots; None if none."""
        begin = _FIRST
        for start, memory in sorted(self._slots.values(), key=lambda slot: slot[0]):
            if start - begin >= length:
                return begin
            begin = start + len(memory)
        return begin if _FIRST + self._room - begin >= length else None

    def _drop(self, free: Sequence[int]) -> None:
        for number in free:
            begin, memory = self._slots.pop(number)
            _give_up(self.fd, begin, len(memory))

    def close(self) -> None:
        """Close the descriptor. The memory stays while a tensor lies over it. Idempotent."""
        self._close()


# -- the receiver -------------------------------------------------------------------------------


class _Slot(np.ndarray):
    """The bytes of a slot. Tensors over it keep this object alive; its end gives the slot back."""


class ReceiveBlock:
    """The block of the other end, in the end that receives."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        # A member that could shorten the block could end this process by a SIGBUS.
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise TransportError(
                "the memory that a member shares is not sealed at its final size, so it could "
                "shrink while it is read; do all processes run the same version of pipedream-rt?"
            )
        self._length = os.fstat(fd).st_size
        self._taken = _mapped(fd, 0, _FIRST, forks=True)
        self._memory: dict[int, Bytes] = {}  # by offset of a slot
        close_in_forked_children(self)

    def tensor(self, about: Sequence[Any]) -> Tensor:
        """Return the tensor in a slot, which is given back when the last tensor over it is gone.

        ``about`` has dtype, shape and strides, as `described` returns them, then the number of the
        slot and its offset.
        """
        name, shape, stride, number, begin = about
        dtype = dtype_of(name)
        size = dtype.itemsize * (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))
        if not (type(number) is type(begin) is type(size) is int):
            kinds = ", ".join(type(each).__name__ for each in (number, begin, size))
            problem = f"number, offset and size of a slot must be plain integers, not {kinds}"
        elif not 0 <= number < _MOST_SLOTS:
            problem = f"there is no slot {number}: slots have the numbers 0 to {_MOST_SLOTS - 1}"
        elif not _FIRST <= begin <= begin + size <= self._length:
            problem = (
                f"there is no slot of {size} bytes at {begin}: slots lie between {_FIRST} and the "
                f"end of the memory, {self._length}"
            )
        elif begin % _PAGE:
            problem = f"there is no slot at {begin}: slots begin at multiples of {_PAGE}, a page"
        elif min((1, *shape)) <= 0:
            problem = f"a tensor in a slot must have positive lengths, not the shape {shape}"
        elif min((0, *stride)) < 0:
            problem = f"a tensor in a slot must have no negative strides, as in {stride}"
        else:
            problem = ""
        if problem:
            raise TransportError(
                f"a frame describes the other end's shared memory wrongly: {problem}; do all "
                "processes run the same version of pipedream-rt?"
            )
        memory = self._memory.get(begin)
        if memory is None or len(memory) < size:
            length = -(-size // _PAGE) * _PAGE
            memory = self._memory[begin] = _mapped(self._fd, begin, length, forks=True)
        slot = memory[:size].view(_Slot)
        # A view of its own for each message: the mapping stays for the next one in the slot.
        weakref.finalize(slot, _give_back, self._taken, number, os.getpid()).atexit = False
        raw = torch.from_numpy(slot)
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        return tensor.set_(raw.untyped_storage(), 0, shape, stride)

    def close(self) -> None:
        """Close the descriptor. The memory stays while a tensor lies over it. Idempotent."""
        self._close()


def _give_back(taken: Bytes, number: int, process: int) -> None:
    """Mark a slot as free, but not from a forked child, whose parent may still use it."""
    if os.getpid() == process:
        taken[number] = 0


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that nobody has used."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
