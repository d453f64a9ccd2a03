"""The Unix door of a member, for the members that are on the same machine.

A member listens at its TCP door for all others, and at a Unix socket for those that find it: a link
over that is cheaper, and memory can be shared beside it. The socket lies in Linux's abstract
namespace, which is that of the network: containers of one pod find each other there, and two
network namespaces of one kernel do not. So the *place* of a member is the kernel and the network
namespace that it runs in. The name of a door is no secret, as the kernel lists it; who calls there
proves who it is as at a TCP door.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from pipedream_rt.cluster.addresses import BACKLOG, boot_id, joined
from pipedream_rt.cluster.environment import memory_is_shared
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.transport.tls import Tls

_TOKEN = re.compile(r"[0-9a-f]{16}|")


def is_token(value: object) -> bool:
    """Whether a value can be a place, or the name of a Unix door; an empty text can."""
    return isinstance(value, str) and _TOKEN.fullmatch(value) is not None


class UnixDoor(NamedTuple):
    """The Unix door of this member.

    Attributes:
        place: A text that is the same for the members that find this door.
    """

    listener: socket.socket
    place: str
    name: str


class DoorAt(NamedTuple):
    """Where a member listens for the others.

    Attributes:
        place: A text that is the same for the members that find its Unix door; empty if there is
            none.
    """

    host: str
    port: int
    place: str = ""
    name: str = ""

    @staticmethod
    def of(door: socket.socket, nearby: UnixDoor | None) -> DoorAt:
        """Return where this member listens."""
        at = DoorAt(*door.getsockname()[:2])
        return at if nearby is None else at._replace(place=nearby.place, name=nearby.name)

    @property
    def tcp_address(self) -> str:
        """``HOST:PORT`` of its TCP door."""
        return joined(self.host, self.port)

    @property
    def unix_address(self) -> str:
        """The address of its Unix door, which lies in no file system."""
        return _address_of(self.name)


@contextmanager
def listening_nearby(tls: Tls | None) -> Iterator[UnixDoor | None]:
    """Listen for members of the same machine until the block ends."""
    nearby = None
    if memory_is_shared() and (tls is None or not tls.always):
        with suppress(OSError):  # then there is the TCP door alone
            nearby = _opened()
    try:
        yield nearby
    finally:
        if nearby is not None:
            nearby.listener.close()


def _opened() -> UnixDoor | None:
    """Return a door; None where the system does not say which kernel it is."""
    network, kernel = os.stat("/proc/self/ns/net"), boot_id()
    if not kernel:
        return None
    place = f"{kernel}/{network.st_dev}/{network.st_ino}"
    name = secrets.token_hex(8)
    with ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX))
        close_in_forked_children(listener)
        listener.setblocking(False)
        listener.bind(_address_of(name))
        listener.listen(BACKLOG)
        undo.pop_all()
    return UnixDoor(listener, hashlib.blake2b(place.encode(), digest_size=8).hexdigest(), name)


def _address_of(name: str) -> str:
    """Return the address of a Unix door."""
    return f"\0pipedream-rt-{name}"
