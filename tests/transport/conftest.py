"""Links whose other ends are in the same process."""

import socket

import pytest

from pipedream_rt.transport.link import Connection, Link


@pytest.fixture
def linked():
    """Makes links of two connections, else of the ends of a socket; they are closed afterwards."""
    made = []

    def make(*connections, sharing=(None, None)):
        ends = [*map(Link, connections or map(Connection, socket.socketpair()), sharing)]
        made.extend(ends)
        return ends

    yield make
    for each in made:
        each.close()
