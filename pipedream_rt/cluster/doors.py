"""The doors of a member: the sockets at which it listens for other members while the group forms.

The path of a Unix socket lies in a folder that its user alone can enter. It can be reached by the
processes of one kernel and one network that see the same folder; a link there is cheaper than one
by TCP, and memory can be shared beside it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pipedream_rt.cluster.addresses import BACKLOG, boot_id, joined, listening
from pipedream_rt.cluster.environment import private_folder
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.schema import printable
from pipedream_rt.telling import log_of

_log = log_of(__name__)


class DoorAddress(NamedTuple):
    """Where a member listens for the others.

    Attributes:
        host: Numeric address of its TCP port; empty if it has none.
        place: The id of its kernel and network; empty if it has no Unix socket.
        path: The path of its Unix socket.
    """

    host: str = ""
    port: int = 0
    place: str = ""
    path: str = ""

    @property
    def in_words(self) -> str:
        """Its TCP address, or else its path."""
        return joined(self.host, self.port) if self.host else printable(self.path)


class Doors(NamedTuple):
    """The listening sockets of a member, and where they are."""

    listeners: tuple[socket.socket, ...]
    address: DoorAddress


@contextmanager
def opened_doors(host: str | None) -> Iterator[Doors]:
    """Listen for other members until the block ends.

    ``host`` is where to listen by TCP; None for a Unix socket alone, and for TCP on loopback where
    there can be none, as in a folder with a long name.
    """
    at, listeners = DoorAddress(), []
    with ExitStack() as opened:
        try:
            listeners.append(opened.enter_context(listening_at(path := _new_path())))
            at = at._replace(place=place_of_process(), path=str(path))
        except OSError as error:
            _log.info("members of this machine are met by TCP: %s", error)
        if host is not None or not listeners:
            tcp = opened.enter_context(listening(host or "127.0.0.1", 0))
            close_in_forked_children(tcp)
            listeners.append(tcp)
            at = at._replace(host=tcp.getsockname()[0], port=tcp.getsockname()[1])
        yield Doors(tuple(listeners), at)


def _new_path() -> Path:
    """Return a path for a Unix socket, in the folder that this user alone can enter."""
    return private_folder() / f"link-{secrets.token_hex(8)}"


@contextmanager
def listening_at(path: Path) -> Iterator[socket.socket]:
    """Listen at a path until the block ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        close_in_forked_children(listener)
        listener.bind(str(path))
        try:
            listener.listen(BACKLOG)
            yield listener
        finally:
            path.unlink(missing_ok=True)


def place_of_process() -> str:
    """Return an id of the kernel and the network of this process, by which others find it."""
    # Two network namespaces count as two machines, even on one disk.
    network = os.stat("/proc/self/ns/net")
    place = f"{boot_id()}/{network.st_dev}/{network.st_ino}"
    return hashlib.blake2b(place.encode(), digest_size=8).hexdigest()


def remove_left_behind(addresses: Iterable[DoorAddress]) -> None:
    """Remove the Unix sockets of members that were killed while their group formed."""
    here = place_of_process()
    for at in addresses:
        if at.path and at.place == here:
            with suppress(OSError):
                if Path(at.path).parent == private_folder():
                    os.unlink(at.path)
