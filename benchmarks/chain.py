"""Network namespaces in a row, each joined to the next one by a wire of a given rate.

To every socket they are machines. Each has one address, on an interface ``me``. What goes to a
neighbour goes over the wire between the two, of which each direction has the rate for itself; what
goes anywhere else goes over a switch without a limit, as to the coordinator, whose machine hangs on
the switch alone. It needs root, and a kernel that shapes (tc tbf).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from slow_link import PAYLOAD, command, remove, require_namespaces, shape

_CLONE_NEWNET = 0x40000000


def address(number: int) -> str:
    """Return the address of a machine."""
    return f"10.78.0.{number + 1}"


@contextmanager
def chain(count: int, rate: float, room: int) -> Iterator[list[str]]:
    """Make machines in a row and one more for the coordinator, and remove them with all processes.

    Args:
        count: The number of machines in the row.
        rate: Bits per second of what TCP carries, in each direction of a wire.
        room: Bytes that wait for a wire before packets are lost.

    Raises:
        Unavailable: This machine does not allow it.
    """
    require_namespaces()
    names = [f"chain-{os.getpid()}-{number}" for number in range(count + 1)]
    switch = f"chain-{os.getpid()}-switch"
    with ExitStack() as removal:
        for machine in (*names, switch):
            removal.callback(remove, machine)
            command("ip", "netns", "add", machine)
            command("ip", "-n", machine, "link", "set", "lo", "up")
        command("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        command("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, machine in enumerate(names):
            command("ip", "-n", machine, "link", "add", "me", "type", "bridge")
            command("ip", "-n", machine, "addr", "add", f"{address(number)}/32", "dev", "me")
            _join(machine, "away", switch, f"port{number}")
            command("ip", "-n", switch, "link", "set", f"port{number}", "master", "bridge")
            command("ip", "-n", machine, "link", "set", "me", "up")
            _route(machine, "10.78.0.0/24", "away", number)
        for left in range(count - 1):
            _join(names[left], "right", names[left + 1], "left")
            _route(names[left], f"{address(left + 1)}/32", "right", left)
            _route(names[left + 1], f"{address(left)}/32", "left", left + 1)
            for machine, device in ((names[left], "right"), (names[left + 1], "left")):
                shape(machine, device, rate / PAYLOAD, room)
        yield names


def _join(one: str, device: str, other: str, peer: str) -> None:
    """Put a cable between two machines."""
    words = ("type", "veth", "peer", "name", peer, "netns", other)
    command("ip", "link", "add", device, "netns", one, *words)
    for machine, name in ((one, device), (other, peer)):
        command("ip", "-n", machine, "link", "set", name, "up")


def _route(machine: str, to: str, device: str, number: int) -> None:
    """Say over which device a machine reaches others."""
    command("ip", "-n", machine, "route", "add", to, "dev", device, "src", address(number))


def move_to(machine: str) -> None:
    """Let this thread, and those that it starts, be on a machine."""
    with open(f"/run/netns/{machine}") as there:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{machine} cannot be entered")
