"""The crowd at a door: connections that have not proved yet who they are.

Anybody can connect to a port, so their number is bounded, and the oldest is dropped when there are
too many: a member proves at once who it is, so the oldest is a stranger.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)

_PAUSE_S = 0.2
_MOST = 128
"""Limit of the connections that wait, where descriptors abound."""

_FEWEST = 4
"""The limit where descriptors are scarce."""


def most_strangers() -> int:
    """Return how many connections may wait."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = max(0, limit - len(os.listdir("/proc/self/fd")))
    # Half of what is free; an encrypted connection takes three.
    return max(_FEWEST, min(_MOST, free // 6))


def accept(door: socket.socket, make_room: Callable[[], bool]) -> socket.socket | None:
    """Accept a connection; None where nobody is there any more or no descriptor is left."""
    try:
        return door.accept()[0]
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE) and not make_room():
            _log.warning(
                "nobody can be accepted: %s; allow more open files, as by `ulimit -n 4096`",
                (error.strerror or "").lower(),
            )
            threading.Event().wait(_PAUSE_S)  # the door stays readable: without it, a busy loop
    return None
