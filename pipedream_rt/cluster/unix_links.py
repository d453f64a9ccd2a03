"""The Unix door of a member, for the members that are on the same machine.

A member listens at its TCP door for all others, and at a Unix socket for those of its machine: a
link over that is cheaper, and memory can be shared beside it. The socket has an abstract name, and
those belong to the network namespace: containers of one pod find each other, two namespaces of one
kernel do not. So the *place* of a member is its kernel and its network namespace. The name of a
door is no secret, as the kernel lists it; callers prove who they are as at a TCP door.
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
    """Whether a value can be a place or the name of a Unix door, or is empty for none."""
    return isinstance(value, str) and _TOKEN.fullmatch(value) is not None


class UnixListener(NamedTuple):
    """The Unix door of this member.

    Attributes:
        listener: Does not block.
        place: The id of the kernel and network namespace; equal for members that can call here.
        name: The abstract name, without what all doors have in common.
    """

    listener: socket.socket
    place: str
    name: str


class UnixAddress(NamedTuple):
    """Where a member listens for the others.

    Attributes:
        host: Numeric address of its TCP door.
        place: Equal for members that can call at its Unix door; empty if there is none.
        name: The name of its Unix door.
    """

    host: str
    port: int
    place: str = ""
    name: str = ""

    @staticmethod
    def of(door: socket.socket, nearby: UnixListener | None) -> UnixAddress:
        """Return where the doors of this member are."""
        at = UnixAddress(*door.getsockname()[:2])
        return at if nearby is None else at._replace(place=nearby.place, name=nearby.name)

    @property
    def tcp_address(self) -> str:
        """``HOST:PORT`` of its TCP door."""
        return joined(self.host, self.port)

    @property
    def unix_address(self) -> str:
        """The abstract address of its Unix door, which is no path."""
        return _address_of(self.name)


@contextmanager
def listening_nearby(tls: Tls | None) -> Iterator[UnixListener | None]:
    """Listen for members of the same machine until the block ends."""
    nearby = None
    if memory_is_shared() and (tls is None or not tls.always):
        with suppress(OSError):  # the TCP door serves all then
            nearby = _opened()
    try:
        yield nearby
    finally:
        if nearby is not None:
            nearby.listener.close()


def _opened() -> UnixListener | None:
    """Return a Unix door; None where the kernel has no id, so that no place could be compared."""
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
    return UnixListener(listener, hashlib.blake2b(place.encode(), digest_size=8).hexdigest(), name)


def _address_of(name: str) -> str:
    """Return the address of a Unix door."""
    return f"\0pipedream-rt-{name}"
