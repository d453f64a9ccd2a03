"""Acts on the sockets of this process that torch has made, from outside of torch.

TensorPipe, on which torch RPC runs, owns its sockets and has no calls to filter who connects, or to
stop listening. The descriptors belong to the process, so the kernel is asked instead. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from pipedream_rt.transport.fence import copy_of


class OwnSocket(NamedTuple):
    """A TCP socket of this process.

    Attributes:
        local: Own address and port.
        peer: Address and port of the other end; None if it is not connected.
    """

    fd: int
    listens: bool
    local: tuple[str, int]
    peer: tuple[str, int] | None


def own_sockets() -> Iterator[OwnSocket]:
    """Yield the TCP sockets of this process, whoever made them."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or of another kind
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with copy_of(fd) as copy:
                if (
                    copy.family not in (socket.AF_INET, socket.AF_INET6)
                    or copy.type is not socket.SOCK_STREAM
                ):
                    continue
                listens = bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                peer = None
                with suppress(OSError):  # not connected
                    peer = copy.getpeername()[:2]
                yield OwnSocket(fd, listens, copy.getsockname()[:2], peer)


def waiting_at(fd: int) -> int:
    """Return the length of the accept queue of a listening socket."""
    with copy_of(fd) as copy:
        about = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    (waiting,) = struct.unpack_from("@I", about, 24)  # of a listener, `tcpi_unacked`
    return int(waiting)


def cut_off(fd: int) -> None:
    """Reset a TCP connection at once; its owner keeps the descriptor and finds it broken."""
    # Connecting to AF_UNSPEC dissolves a connection. After `shutdown`, torch could still read what
    # a stranger has sent already.
    to_nobody = bytes(16)
    ctypes.CDLL(None).connect(fd, to_nobody, len(to_nobody))


def stop_listening(fd: int) -> None:
    """Close a listening socket that another library owns."""
    # Another file takes the number of the descriptor, so the kernel closes the socket and drops it
    # from the library's epoll. `shutdown` would close the port too, but leave a descriptor that is
    # always ready: the library's loop would take a whole core.
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.dup2(nothing, fd, inheritable=False)
    finally:
        os.close(nothing)
