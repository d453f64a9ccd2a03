"""Settings of the TCP connections between members."""

from __future__ import annotations

import socket

_UNSEEN_S = 25.0


def prepare(connection: socket.socket) -> None:
    """Set a connection up: nothing waits to be sent, and the end of the other machine is noticed.

    The kernel finds out within half a minute that the other machine is gone, also where nobody
    sends anything.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}.items():
        if hasattr(socket, option):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    set_timeout(connection, _UNSEEN_S)


def set_timeout(connection: socket.socket, seconds: float) -> None:
    """End a connection on which the other machine has confirmed nothing for so long.

    That is for an end that has sent something: then the kernel sends no keep-alive, and without
    this goes on sending again for a quarter of an hour.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * seconds))
        )
