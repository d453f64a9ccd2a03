"""The crowd at a door: connections that have not proved yet who they are.

Anybody can connect to a port, so the connections that wait are bounded: the oldest one has to go
when there are too many. A member proves who it is at once, so the oldest is a stranger.
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
"""Connections that may wait, where descriptors abound."""

_FEWEST = 4


def most_strangers() -> int:
    """Return how many connections may wait: at most half of the descriptors that are free now.

    Each takes three where it is encrypted.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = max(0, limit - len(os.listdir("/proc/self/fd")))
    return max(_FEWEST, min(_MOST, free // 6))


def accept(door: socket.socket, make_room: Callable[[], bool]) -> socket.socket | None:
    """Accept a connection."""
    try:
        return door.accept()[0]
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE) and not make_room():
            _log.warning(
                "nobody can be accepted: %s; allow more open files, as by `ulimit -n 4096`",
                (error.strerror or "").lower(),
            )
            threading.Event().wait(_PAUSE_S)  # not to turn round until others close theirs
    return None
