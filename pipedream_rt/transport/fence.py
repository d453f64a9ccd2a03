"""The fence around torch RPC: whether a machine allows it, and what to do where it does not.

torch's agent obeys whoever connects to it, so the kernel drops the packets of strangers
(`accept_only`). Newer kernels allow such a filter on a TCP socket only with CAP_NET_ADMIN, which
ordinary users and containers lack. The agent serves only references to modules and optimizers; so
where one process of a group cannot have the fence, the group forms without agents.

Imports no torch, because the doctor and a worker that has just started ask too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, TypeAlias

from pipedream_rt.errors import ConfigError
from pipedream_rt.telling import log_of

_log = log_of(__name__)

Wish: TypeAlias = Literal["auto", "on", "off"]
"""What the user wants: ``auto`` has agents where all have a fence, ``on`` also without one."""

AgentMode: TypeAlias = Literal["off", "fenced", "open"]
"""Decision for a group: no agents; agents, all fenced; or agents, fenced where possible."""

Obstacle: TypeAlias = Literal["", "filter", "loopback", "taken"]
"""What keeps a process from having a fenced agent; empty for nothing."""

OBSTACLES: dict[Obstacle, tuple[str, str]] = {
    "filter": (
        "the kernel allows no packet filter on a TCP socket there (SO_ATTACH_FILTER)",
        "CAP_NET_ADMIN for all processes gives it; PIPEDREAM_RT_RPC=on has it without a fence",
    ),
    "loopback": (
        "the process cannot connect to itself at 127.0.0.1",
        "`ip link set lo up` gives it, also in a container or a network namespace of its own",
    ),
    "taken": (
        "another pipeline of the process has the one agent that torch allows",
        "to close that one first gives it",
    ),
}
"""By obstacle: what it is, and how to have torch RPC all the same."""

_TRY_S = 5.0
"""Seconds for a connection over loopback, which takes less than a millisecond."""

_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
"""Errors of a shortage, which say nothing about what this process is allowed to do."""


_SO_ATTACH_FILTER = 26
LOAD_WORD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
_LOAD_HALF = 0x28
"""Opcodes of classic BPF (`linux/filter.h`): load a word, jump if equal, return, load 16 bits."""

_IP_HEADER = 0xFFF00000
"""SKF_NET_OFF: offsets from here count from the IP header; others from the TCP header."""

_SOURCE_PORT = 0
_SOURCE_ADDRESS = _IP_HEADER + 12
_LOOPBACK = 0x7F000001


Operation: TypeAlias = tuple[int, int, int, int]
"""Opcode, operations to skip if it holds, operations to skip if not, operand."""


@contextmanager
def for_kernel(program: Sequence[Operation]) -> Iterator[bytes]:
    """Yield a filter program as a ``sock_fprog``, whose memory lives as long as the block."""
    code = b"".join(struct.pack("HBBI", *operation) for operation in program)
    memory = ctypes.create_string_buffer(code)
    yield struct.pack("@HP", len(program), ctypes.addressof(memory))


def copy_of(fd: int) -> socket.socket:
    """Return a socket object over a duplicate, so that closing it leaves the library's open."""
    return socket.socket(fileno=os.dup(fd))


def accept_only(fd: int, ports: list[int]) -> None:
    """Have the kernel drop packets to a listening socket, except from some ports of loopback."""
    # A dropped SYN gets no answer, and torch, which accepts whatever connects, never sees it.
    program = [
        (LOAD_WORD, 0, 0, _SOURCE_ADDRESS),
        (IF_EQUAL, 1, 0, _LOOPBACK),
        (RETURN, 0, 0, 0),
        (_LOAD_HALF, 0, 0, _SOURCE_PORT),
    ]
    for port in ports:
        program += [(IF_EQUAL, 0, 1, port), (RETURN, 0, 0, 0xFFFFFFFF)]
    program.append((RETURN, 0, 0, 0))
    with copy_of(fd) as copy, for_kernel(program) as about:
        copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, about)


def can_filter() -> bool:
    """Whether a packet filter can be put on a TCP socket of this process."""
    try:
        with socket.socket() as tried:
            accept_only(tried.fileno(), [])
    except OSError as error:
        _refuse_shortage(error)
        return False
    return True


def can_reach_itself() -> bool:
    """Whether this process can connect to itself over loopback."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), timeout=_TRY_S),
        ):
            return True
    except OSError as error:
        _refuse_shortage(error)
        return False


def _refuse_shortage(error: OSError) -> None:
    """Raise where this process or the machine has run out of descriptors or memory."""
    if error.errno in _SHORT_OF:
        raise ConfigError(f"this process can open no more sockets: {error.strerror}") from error


def obstacle() -> Obstacle:
    """Return what keeps this process from having a fenced agent."""
    if not can_reach_itself():
        return "loopback"
    return "" if can_filter() else "filter"


def decided(wish: Wish, obstacles: Mapping[str, Obstacle]) -> AgentMode:
    """Return whether a group has torch RPC: all members do, or none."""
    if wish == "off" or (wish == "auto" and any(obstacles.values())):
        return "off"
    return "open" if any(obstacles.values()) else "fenced"


def why_left_out(wish: Wish, obstacles: Mapping[str, Obstacle]) -> str:
    """Return why a group forms without agents; empty if it has agents."""
    if decided(wish, obstacles) != "off":
        return ""
    if wish == "off":
        return "PIPEDREAM_RT_RPC=off leaves it out"
    where, first = _named(obstacles)
    what, remedy = OBSTACLES[first]
    if first == "taken":
        return f"{what}; {remedy}"
    return f"nothing would keep strangers from it at {where}: {what}; {remedy}"


def refusal(left_out: str) -> str:
    """The error of a call that needs torch RPC where it was left out."""
    return (
        "this needs torch RPC, over which references lead to modules, parameters and optimizers; "
        f"{left_out}. pipe.module(), pipe.state_dict(), pipe.optimizer and the methods of "
        "pipe.stages[i].rref do without it"
    )


class NoEndpoint:
    """Stands in for an `Endpoint` where torch RPC is left out. ``why`` goes into the errors."""

    def __init__(self, why: str = "") -> None:
        self._why = why

    def expose(self, address: int, part: Callable[[str], Any]) -> None:
        pass

    def carry(self, group: object, transport: object) -> None:
        pass

    def join(self, mode: AgentMode, deadline: object) -> None:
        pass

    def shut(self) -> None:
        pass

    def close(self) -> None:
        pass

    def reference(self, address: int, part: str) -> NoReturn:
        raise ConfigError(refusal(self._why))

    def parameter_references(self, address: int) -> NoReturn:
        raise ConfigError(refusal(self._why))


def warn_once(wish: Wish, obstacles: Mapping[str, Obstacle]) -> None:
    """Warn once of agents without a fence. Who needs agents where there are none gets an error."""
    global _has_warned
    if _has_warned or decided(wish, obstacles) != "open":
        return
    _has_warned = True
    _log.warning(
        "PIPEDREAM_RT_RPC=on: torch RPC has no fence at %s. While a group forms (some 30 ms, "
        "at the start and in each recovery) whoever can connect to 127.0.0.1 there can end the "
        "process, and run torch's operators in it, which read and write files; afterwards "
        "nothing listens",
        _named(obstacles)[0],
    )


_has_warned = False
"""Whether this process has warned: else each generation and each pipeline would."""


def _named(obstacles: Mapping[str, Obstacle]) -> tuple[str, Obstacle]:
    """Name the members that have an obstacle, three at most; return the first obstacle too."""
    names = [name for name, what in obstacles.items() if what]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    some = f"{', '.join(names[:3])}{more}" if len(names) < len(obstacles) else "every process"
    return some, obstacles[names[0]]
