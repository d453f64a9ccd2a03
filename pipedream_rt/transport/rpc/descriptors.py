"""The sockets of this process that torch has made, and what can be done with them from outside.

TensorPipe, on which torch RPC runs, owns its sockets and has no calls for what is done here: to let
nobody in but whom we know, and to stop listening. All of it works on descriptors, which are the
process's own, and asks the kernel. It is for Linux.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeAlias

_SO_ATTACH_FILTER = 26
LOAD_WORD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
_LOAD_HALF = 0x28
"""Operations of the kernel's filters."""

_IP_HEADER = 0xFFF00000
"""Where a filter of packets finds the header of IP."""

_SOURCE_PORT = 0
_SOURCE_ADDRESS = _IP_HEADER + 12
_LOOPBACK = 0x7F000001


class OwnSocket(NamedTuple):
    """A TCP socket of this process.

    Attributes:
        local: Its own address and port.
        peer: Address and port of the other end; None if it is not connected.
    """

    fd: int
    listens: bool
    local: tuple[str, int]
    peer: tuple[str, int] | None


Operation: TypeAlias = tuple[int, int, int, int]
"""One operation of a filter, how many to skip if it holds and if not, and its operand."""


@contextmanager
def for_kernel(program: Sequence[Operation]) -> Iterator[bytes]:
    """Yield a program of a filter as the kernel wants it (``sock_fprog``), while the block runs."""
    code = b"".join(struct.pack("HBBI", *operation) for operation in program)
    memory = ctypes.create_string_buffer(code)
    yield struct.pack("@HP", len(program), ctypes.addressof(memory))


def _copy_of(fd: int) -> socket.socket:
    """Return a socket object for another library's descriptor; closing it ends nothing."""
    return socket.socket(fileno=os.dup(fd))


def own_sockets() -> Iterator[OwnSocket]:
    """Find the TCP sockets of this process, whoever made them."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or of another kind
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with _copy_of(fd) as copy:
                if (
                    copy.family not in (socket.AF_INET, socket.AF_INET6)
                    or copy.type is not socket.SOCK_STREAM
                ):
                    continue
                listens = bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                peer = None
                with suppress(OSError):
                    peer = copy.getpeername()[:2]
                yield OwnSocket(fd, listens, copy.getsockname()[:2], peer)


def accept_only(fd: int, ports: list[int]) -> None:
    """Have the kernel drop every packet to a listening socket but those of some ports on loopback.

    A stranger who connects gets no answer, and neither does torch hear of it.
    """
    program = [
        (LOAD_WORD, 0, 0, _SOURCE_ADDRESS),
        (IF_EQUAL, 1, 0, _LOOPBACK),
        (RETURN, 0, 0, 0),
        (_LOAD_HALF, 0, 0, _SOURCE_PORT),
    ]
    for port in ports:
        program += [(IF_EQUAL, 0, 1, port), (RETURN, 0, 0, 0xFFFFFFFF)]
    program.append((RETURN, 0, 0, 0))
    with _copy_of(fd) as copy, for_kernel(program) as about:
        copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, about)


def waiting_at(fd: int) -> int:
    """Return how many connections wait to be accepted at a listening socket."""
    with _copy_of(fd) as copy:
        about = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    (waiting,) = struct.unpack_from("@I", about, 24)  # `tcpi_unacked` means this where one listens
    return int(waiting)


def cut_off(fd: int) -> None:
    """Break a TCP connection at once, so that nothing of it can be read any more.

    ``shutdown`` would leave what has come already to be read. The descriptor stays, and its owner
    finds the connection broken.
    """
    to_nobody = bytes(16)  # a `sockaddr` of the family AF_UNSPEC: the kernel's word for this
    ctypes.CDLL(None).connect(fd, to_nobody, len(to_nobody))


def stop_listening(fd: int) -> None:
    """Close a listening socket that another library owns.

    Its descriptor is given to another file, whereupon the kernel closes the socket and polls it no
    more. ``shutdown`` would close the port too, but leave a descriptor that is always ready, which
    costs a whole core.
    """
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.dup2(nothing, fd, inheritable=False)
    finally:
        os.close(nothing)
