"""The sockets at which a member listens for other members while the group forms.

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


class PeerAddress(NamedTuple):
    """Where a member listens for the others.

    Attributes:
        host: Numeric address of its TCP port; empty if it has none.
        machine: The id of its kernel and network; empty if it has no Unix socket.
        path: The path of its Unix socket.
    """

    host: str = ""
    port: int = 0
    machine: str = ""
    path: str = ""

    @property
    def in_words(self) -> str:
        """Its TCP address, or else its path, for messages."""
        return joined(self.host, self.port) if self.host else printable(self.path)


class PeerListeners(NamedTuple):
    """The sockets at which a member listens for others, and their addresses."""

    sockets: tuple[socket.socket, ...]
    address: PeerAddress


@contextmanager
def listening_for_peers(host: str | None) -> Iterator[PeerListeners]:
    """Listen for other members until the block ends.

    ``host`` is where to listen by TCP; None for a Unix socket alone, and for TCP on loopback where
    there can be none, as in a folder with a long name.
    """
    address, sockets = PeerAddress(), []
    with ExitStack() as opened:
        try:
            sockets.append(opened.enter_context(listening_at(path := _new_path())))
            address = address._replace(machine=machine_of_process(), path=str(path))
        except OSError as error:
            _log.info("members of this machine are met by TCP: %s", error)
        if host is not None or not sockets:
            tcp = opened.enter_context(listening(host or "127.0.0.1", 0))
            close_in_forked_children(tcp)
            sockets.append(tcp)
            host, port = tcp.getsockname()[:2]
            address = address._replace(host=host, port=port)
        yield PeerListeners(tuple(sockets), address)


def _new_path() -> Path:
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


def machine_of_process() -> str:
    """Id of the kernel and the network of this process: equal ids share Unix sockets."""
    # Two network namespaces count as two machines, even on one disk.
    network = os.stat("/proc/self/ns/net")
    machine = f"{boot_id()}/{network.st_dev}/{network.st_ino}"
    return hashlib.blake2b(machine.encode(), digest_size=8).hexdigest()


def remove_left_behind(addresses: Iterable[PeerAddress]) -> None:
    """Remove the Unix sockets of members that were killed while their group formed."""
    here = machine_of_process()
    for at in addresses:
        if at.path and at.machine == here:
            with suppress(OSError):
                if Path(at.path).parent == private_folder():
                    os.unlink(at.path)
