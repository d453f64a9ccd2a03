"""Settings of the TCP connections between members."""

from __future__ import annotations

import socket

_UNSEEN_S = 25.0  # as long as the keep-alive below: 10 + 3 * 5


def prepare(connection: socket.socket) -> None:
    """Set a connection up: no delay (Nagle), and a lost machine is noticed within half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Finds a lost machine also where neither end sends anything.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}.items():
        if hasattr(socket, option):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    set_timeout(connection, _UNSEEN_S)


def set_timeout(connection: socket.socket, seconds: float) -> None:
    """Have the kernel end a connection on which nothing was acknowledged for so long."""
    # While sent bytes are unacknowledged, the kernel sends no keep-alive: without this it would
    # retransmit for a quarter of an hour.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * seconds))
        )
