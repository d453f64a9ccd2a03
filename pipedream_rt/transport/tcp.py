"""Settings of the TCP connections between members."""

from __future__ import annotations

import socket


def prepare(connection: socket.socket) -> None:
    """Set a connection up: nothing waits to be sent, and the end of the other machine is noticed.

    The kernel finds out within half a minute that the other machine is gone, also where nobody
    sends anything.

    Args:
        connection: A connected TCP socket.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The last one is for an end that has sent something: then the kernel sends no keep-alive, and
    # without this option goes on sending again for a quarter of an hour.
    options = {
        "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000
    }  # fmt: skip
    for option, value in options.items():
        if hasattr(socket, option):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
