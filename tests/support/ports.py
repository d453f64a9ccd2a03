"""Ports that a test has something listen at later, and that nobody takes in between."""

from __future__ import annotations

import atexit
import itertools
import socket
from contextlib import ExitStack

FIRST, LAST, EACH = 15000, 32000, 250
"""Below those that the kernel gives to whoever asks for any, as each connection does."""


class Ports:
    """The ports of a range, in turn: one that was returned comes again after all others."""

    def __init__(self, ports: range) -> None:
        self._ports = ports
        self._next = itertools.cycle(ports)

    def free(self, count: int) -> int:
        """Return the first of so many ports in a row at which nobody listens."""
        for first in itertools.islice(self._next, len(self._ports)):
            wanted = range(first, first + count)
            if wanted[-1] in self._ports and _are_free(wanted):
                for _ in wanted[1:]:
                    next(self._next)
                return first
        raise RuntimeError(f"no {count} free ports in a row from {self._ports}")


def _are_free(wanted: range) -> bool:
    with ExitStack() as bound:
        try:
            for port in wanted:
                each = bound.enter_context(socket.socket())
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                each.bind(("", port))
        except OSError:
            return False
        return True


def _of_this_process() -> Ports:
    """Take the ports that no other process with tests on this machine has."""
    for first in range(FIRST, LAST, EACH):
        # A name that one socket of the network namespace may have, whoever's it is, while it lives.
        held = socket.socket(socket.AF_UNIX)
        try:
            held.bind(f"\0ports of tests from {first}")
        except OSError:
            held.close()
            continue
        atexit.register(held.close)
        return Ports(range(first, first + EACH))
    raise RuntimeError(f"other tests have all ports from {FIRST} to {LAST}")


_own = _of_this_process()


def free_port() -> int:
    """Return a port at which nobody listens."""
    return _own.free(1)


def free_ports(count: int) -> int:
    """Return the first of so many ports in a row at which nobody listens."""
    return _own.free(count)
