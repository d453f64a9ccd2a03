"""A link: one connection between two members, with its frames, encryption and shared memory.

A frame on a link is

    1 byte     kind
    4 bytes    length of meta
    8 bytes    length of the body
    ...        meta: plain data, with the dtype and the shape of every tensor in the body
    ...        body: the bytes of the tensors

For a tensor in memory that both ends share (`shared.py`), meta has its slot and body has nothing.

A link within a machine is a Unix socket, and what passes over it is plain. A link by TCP is
encrypted (`tls.py`), so whatever comes is from the member at its other end, whole and in its turn.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgpack
from torch import Tensor

from pipedream_rt.errors import TransportError
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.messages.wire import TensorSlot, bytes_of, described, place_for
from pipedream_rt.packing import packb, unpackb
from pipedream_rt.transport.shared import SMALLEST
from pipedream_rt.transport.sharing import SharedEnd
from pipedream_rt.transport.tls import TlsEngine

_HEAD = struct.Struct("!BIQ")


_LARGEST_META = 1 << 28
"""Bytes that meta may have. Tensors are in the body."""


_SHARES = 254
"""The kind of a frame that comes with the descriptor of shared memory."""


_CHUNK = 1 << 16
"""Bytes that are read at a time, unless they go straight into a tensor."""


_MALFORMED = (
    ValueError, TypeError, KeyError, OverflowError, RecursionError, msgpack.UnpackException,
)  # fmt: skip
"""Errors of unpacking a malformed meta."""


_AT_ONCE = 64
"""Buffers that the kernel gets in one call."""


_ENCRYPTED_AT_ONCE = 1 << 18
"""Bytes that are encrypted before they are sent, or read before they are decrypted."""


_TLS_RECORD = 1 << 14
"""Bytes of a full record of TLS: buffers that are smaller share one."""


class Connection(NamedTuple):
    """The socket of a link, and what encrypts it.

    Attributes:
        engine: Encrypts it; None for a Unix socket.
        carries_descriptors: Whether it is a Unix socket between two processes, over which they can
            share memory.
    """

    socket: socket.socket
    engine: TlsEngine | None = None
    carries_descriptors: bool = False


class Frame(NamedTuple):
    """A frame that was received.

    Attributes:
        tensors: The tensors, each in a storage of its own.
    """

    kind: int
    data: bytes
    tensors: list[Tensor]


class Link:
    """One end of a link. Any thread sends; one thread at a time receives. Nothing blocks.

    Attributes:
        reading: Lock to hold while receiving, flushing or closing.
    """

    def __init__(self, connection: Connection, sharing: SharedEnd | None = None) -> None:
        connection.socket.setblocking(False)
        close_in_forked_children(connection.socket)
        self._socket = connection.socket
        self._engine = connection.engine
        self._sealed = memoryview(b"")  # encrypted, and not sent yet
        self.reading = threading.Lock()
        self._lock = threading.Lock()
        self._queue: deque[memoryview] = deque()
        self._chunk = memoryview(bytearray(_CHUNK))
        self._buffer = bytearray()
        self._coming: Frame | None = None  # its body has not come yet
        self._room: deque[memoryview] = deque()  # memory for the rest of the body, in order
        self._sharing = sharing

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(
        self, kind: int, data: bytes, tensors: Sequence[Tensor], passing: bool = False
    ) -> bool:
        """Send a frame, or what the socket takes of it now; return whether nothing is left over.

        If something is left over, somebody has to call `flush` when the socket takes more. Tensors
        must not change any more. ``passing``: the receiver needs them for a short while only, so
        large ones may lie in shared memory.
        """
        about: list[Any] = [described(tensor) for tensor in tensors]
        bodies = [bytes_of(tensor) for tensor in tensors]
        if passing and self._sharing is not None:
            self._share(self._sharing, about, bodies)
        meta: bytes = packb([data, about])
        if len(meta) > _LARGEST_META:
            raise TransportError(
                f"a message has {len(meta)} bytes besides its tensors, and may have "
                f"{_LARGEST_META}; send large values as tensors"
            )
        size = sum([body.nbytes for body in bodies])
        with self._lock:
            # Else a `flush` is due, which sends this frame too.
            idle = not self._queue and not self._sealed
            self._queue.append(_framed(kind, size, meta))
            self._queue.extend([body for body in bodies if body.nbytes])
            return self._write() if idle else False

    def _share(self, sharing: SharedEnd, about: list[Any], bodies: list[memoryview]) -> None:
        """Move the bodies of large tensors into shared memory, as far as there is room."""
        for number, body in enumerate(bodies):
            if body.nbytes < SMALLEST:
                continue
            with self._lock:
                if (slots := sharing.new_slots()) is not None:
                    sharing.announce(slots, _framed(_SHARES, 0, b""), self._queue)
                taken = sharing.take(body.nbytes)
            if taken is None:
                return
            slots, *at = taken
            try:
                slots.fill(at[0], body)  # without the lock: others send meanwhile
            except BaseException:  # such as Ctrl-C: no frame will name the slot
                slots.give_back(at[0])
                raise
            about[number].extend(at)
            bodies[number] = memoryview(b"")

    def flush(self) -> bool:
        """Send what was left over; return whether nothing is left now."""
        with self._lock:
            return self._write()

    def _write(self) -> bool:
        """Write to the socket until it takes no more; return whether nothing is left."""
        if self._engine is not None:
            return self._write_encrypted(self._engine)
        queue, sharing = self._queue, self._sharing
        while queue:
            try:
                if sharing is None or sharing.announcing is None:
                    sent = self._socket.sendmsg(islice(queue, _AT_ONCE), (), socket.MSG_DONTWAIT)
                else:
                    sent = sharing.send(self._socket, queue, _AT_ONCE)
            except BlockingIOError:
                return False
            while queue and sent >= queue[0].nbytes:
                sent -= queue.popleft().nbytes
            if sent:
                queue[0] = queue[0][sent:]
        return True

    def _write_encrypted(self, engine: TlsEngine) -> bool:
        """Write as `_write` does, through TLS."""
        while self._sealed or self._queue:
            if not self._sealed:
                for piece in self._pieces(_ENCRYPTED_AT_ONCE):
                    engine.write(piece)
                self._sealed = memoryview(engine.sealed())
            try:
                sent = self._socket.send(self._sealed, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            self._sealed = self._sealed[sent:]
        return True

    def _pieces(self, most: int) -> Iterator[bytes | memoryview]:
        """Take so many bytes from the queue; small buffers, as heads are, come joined."""
        queue, small, left = self._queue, bytearray(), most
        while queue and left > 0:
            piece, rest = queue[0][:left], queue[0][left:]
            left -= piece.nbytes
            if rest.nbytes:
                queue[0] = rest
            else:
                queue.popleft()
            if len(small) + piece.nbytes <= _TLS_RECORD:
                small += piece
                continue
            if small:
                yield bytes(small)
                small.clear()
            yield piece
        if small:
            yield bytes(small)

    def receive(self, take: Callable[[Frame], object]) -> bool:
        """Read once and hand over complete frames; return whether the socket was read empty."""
        if self._engine is not None:
            return self._receive_encrypted(self._engine, take)
        room, sharing = self._room[0] if self._room else self._chunk, self._sharing
        try:
            if sharing is None:
                count = self._socket.recv_into(room)
            else:
                count = sharing.receive(self._socket, room)
        except BlockingIOError:
            return True
        if not count:
            raise ConnectionError("it closed the connection")
        is_all = count < room.nbytes
        self._take_in(room, count, take)
        return is_all

    def _receive_encrypted(self, engine: TlsEngine, take: Callable[[Frame], object]) -> bool:
        """Receive as `receive` does, through TLS; nothing that is decrypted stays behind."""
        data = b""
        end: OSError | None = None
        try:
            data = self._socket.recv(_ENCRYPTED_AT_ONCE)
            if not data:
                end = ConnectionError("it closed the connection")
        except BlockingIOError:
            pass
        except OSError as error:
            end = error
        with self._lock:  # another thread may be sending
            engine.take(data)
        while True:
            room = self._room[0] if self._room else self._chunk
            with self._lock:
                count = engine.read_into(room)
            if not count:
                break
            self._take_in(room, count, take)
        if end is not None:  # only now: the first frames may have come with the first record
            raise end
        return len(data) < _ENCRYPTED_AT_ONCE

    def _take_in(self, room: memoryview, count: int, take: Callable[[Frame], object]) -> None:
        """Take in so many bytes of a buffer, and hand over complete frames."""
        if self._room:  # the bytes came straight into a tensor
            self._fill(count)
        else:
            self._buffer += room[:count]
        while (frame := self._next()) is not None:
            take(frame)

    def _fill(self, count: int) -> None:
        """Count so many bytes as received in the memory of the body."""
        room = self._room
        if count == room[0].nbytes:
            room.popleft()
        else:
            room[0] = room[0][count:]

    def _next(self) -> Frame | None:
        """Take the next frame from the buffer; None if it is not complete."""
        while self._coming is None and self._begin():
            pass  # it came with shared memory; the frame behind it may have come too
        while self._room and self._buffer:
            count = min(self._room[0].nbytes, len(self._buffer))
            self._room[0][:count] = self._buffer[:count]
            del self._buffer[:count]
            self._fill(count)
        coming = self._coming
        if coming is None or self._room:
            return None
        self._coming = None
        return coming

    def _begin(self) -> bool:
        """Take head and meta from the buffer once they are there, and make the tensors.

        Return whether it was the one that comes with shared memory, so that the next can begin.
        """
        if len(self._buffer) < _HEAD.size:
            return False
        kind, length, size = _HEAD.unpack_from(self._buffer)
        if length > _LARGEST_META:
            raise TransportError(
                f"a frame of kind {kind} announces {length} bytes besides its tensors, and may "
                f"have {_LARGEST_META}; do all processes run the same version of pipedream-rt?"
            )
        end = _HEAD.size + length
        if len(self._buffer) < end:
            return False
        meta = bytes(self._buffer[_HEAD.size : end])
        del self._buffer[:end]
        if kind == _SHARES:
            self._shared().view()
            return True
        try:
            # A description has dtype, shape and strides; for a slot, also its number and offset.
            data, about = unpackb(meta)
            slots = [place_for(each) if len(each) == 3 else self._in_slot(each) for each in about]
        except OSError as error:  # of `_mapped`
            raise TransportError(
                f"a tensor of a frame of kind {kind} lies in the other end's shared memory, for "
                f"which this process has no room: {error}; it needs more address space "
                "(`ulimit -v`) or mappings (vm.max_map_count)"
            ) from error
        except _MALFORMED as error:
            raise TransportError(
                f"a frame of kind {kind}, with {length} bytes of meta and {size} of "
                f"tensors, has a malformed meta: {error!r}; do all processes run the same version "
                "of pipedream-rt?"
            ) from error
        except RuntimeError as error:  # of torch, whose text says whether it is for want of memory
            raise TransportError(
                f"torch cannot make a tensor of a frame of kind {kind}: {error!r}; its head "
                f"announces {size} bytes of tensors, for which this process needs memory"
            ) from error
        if sum(slot.room.nbytes for slot in slots) != size:
            raise TransportError(
                f"the head of a frame announces {size} bytes of tensors, and its meta describes "
                f"{sum(slot.room.nbytes for slot in slots)}; do all processes run the same "
                "version of pipedream-rt?"
            )
        self._room.extend(slot.room for slot in slots if slot.room.nbytes)
        self._coming = Frame(kind, data, [slot.tensor for slot in slots])
        return False

    def _shared(self) -> SharedEnd:
        """Return this end's shared memory, which a frame of the other end needs."""
        if self._sharing is None:
            raise TransportError(
                "the other end uses shared memory on a link that carries no descriptors, as only a "
                "Unix socket between two processes does; do all processes run the same version of "
                "pipedream-rt?"
            )
        return self._sharing

    def _in_slot(self, about: Sequence[Any]) -> TensorSlot:
        """Return the tensor in a slot; its bytes are there already."""
        return TensorSlot(memoryview(b""), self._shared().tensor(about))

    def close(self) -> None:
        """Close the socket. Shared memory stays until the last tensor over it is gone."""
        self._socket.close()
        with self._lock:
            if self._sharing is not None:
                self._sharing.close()


def _framed(kind: int, size: int, meta: bytes) -> memoryview:
    return memoryview(_HEAD.pack(kind, len(meta), size) + meta)
