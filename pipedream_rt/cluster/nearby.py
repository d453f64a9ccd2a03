"""The second door of a member: a Unix socket, for the members that are on the same machine.

A link over it is cheaper than one over TCP, and memory can be shared beside it. It lies in Linux's
abstract namespace, which is that of the network: containers of one pod find each other there, and
two network namespaces of one kernel do not. So the *place* of a member is the kernel and the
network namespace that it runs in. Who calls at this door proves who it is as at the other one.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from pipedream_rt.cluster.addresses import boot_id
from pipedream_rt.cluster.environment import memory_is_shared
from pipedream_rt.transport.tls import Tls

_BACKLOG = 4096


class Nearby(NamedTuple):
    """The second door of this member.

    Attributes:
        listener: Listens, and does not block.
        place: What the members have in common that find this door.
        name: The name of this door.
    """

    listener: socket.socket
    place: str
    name: str


class DoorAt(NamedTuple):
    """Where a member listens for the others.

    Attributes:
        host: Numeric address of its door.
        port: Port of its door.
        place: What the members have in common that find its second door; empty if it has none.
        name: The name of its second door.
    """

    host: str
    port: int
    place: str = ""
    name: str = ""

    @staticmethod
    def of(door: socket.socket, nearby: Nearby | None) -> DoorAt:
        """Return where this member listens."""
        host, port = door.getsockname()[:2]
        return DoorAt(host, port) if nearby is None else DoorAt(host, port, *nearby[1:])


@contextmanager
def listening_nearby(tls: Tls | None) -> Iterator[Nearby | None]:
    """Listen for members of the same machine until the block ends.

    Args:
        tls: Encrypts the links of this member. Where it is to encrypt those within a machine too,
            none of them is a Unix socket.

    Yields:
        The door; None where memory is not to be shared, and where there can be none.
    """
    nearby = None
    if memory_is_shared() and (tls is None or not tls.always):
        with suppress(OSError):  # then there is the other door
            nearby = _opened()
    try:
        yield nearby
    finally:
        if nearby is not None:
            nearby.listener.close()


def _opened() -> Nearby | None:
    """Return a door; None where the system does not say which kernel it is.

    Raises:
        OSError: There can be none.
    """
    network, kernel = os.stat("/proc/self/ns/net"), boot_id()
    if not kernel:
        return None
    name = f"pipedream-rt-{secrets.token_hex(16)}"
    with ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX))
        listener.setblocking(False)
        listener.bind(address_of(name))
        listener.listen(_BACKLOG)
        undo.pop_all()
    return Nearby(listener, f"{kernel}/{network.st_dev}/{network.st_ino}", name)


def address_of(name: str) -> str:
    """Return the address of a second door, which lies in no file system."""
    return f"\0{name}"
