"""The fence around torch RPC: whether a machine allows it, and what to do where it does not.

torch's agent obeys whoever connects to it, so the kernel is told to drop the packets of strangers
(`accept_only`). Newer kernels allow such a filter on a TCP socket only with CAP_NET_ADMIN, which
ordinary users and containers lack. The agent serves only references to modules and optimizers; so
where one process of a group cannot have the fence, the group forms without agents.

Imports no torch, because the doctor and a worker that has just started ask too.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Mapping
from typing import Literal, TypeAlias

from pipedream_rt.errors import ConfigError
from pipedream_rt.transport.rpc.descriptors import accept_only

_log = logging.getLogger(__name__)

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


def in_words(wish: Wish, obstacles: Mapping[str, Obstacle]) -> str:
    """Return what `Pipeline.explain` says of torch RPC."""
    match decided(wish, obstacles):
        case "off":
            left_out = why_left_out(wish, obstacles)
            return f"the workers are no endpoints of torch RPC: {left_out}"
        case "open":
            where, first = _named(obstacles)
            what = OBSTACLES[first][0]
            return f"the workers are endpoints of torch RPC, without a fence at {where}: {what}"
        case _:
            return "the workers are endpoints of torch RPC"


def refusal(left_out: str) -> str:
    """Return the text of the error for calls that need torch RPC where it was left out."""
    return (
        "this needs torch RPC, over which references lead to modules, parameters and optimizers; "
        f"{left_out}. pipe.module(), pipe.state_dict(), pipe.optimizer and the methods of "
        "pipe.stages[i].rref do without it"
    )


def tell(wish: Wish, obstacles: Mapping[str, Obstacle]) -> None:
    """Log once that agents are left out, or run without a fence."""
    mode = decided(wish, obstacles)
    if mode == "fenced" or wish == "off" or mode in _told:
        return
    _told.add(mode)
    if mode == "off":
        _log.info("%s", in_words(wish, obstacles))
    else:
        _log.warning(
            "PIPEDREAM_RT_RPC=on: torch RPC has no fence at %s. While a group forms (some 30 ms, "
            "at the start and in each recovery) whoever can connect to 127.0.0.1 there can end the "
            "process, and run torch's operators in it, which read and write files; afterwards "
            "nothing listens",
            _named(obstacles)[0],
        )


_told: set[AgentMode] = set()
"""What this process has logged. Otherwise each generation and each pipeline would log it again."""


def _named(obstacles: Mapping[str, Obstacle]) -> tuple[str, Obstacle]:
    """Return in words which members have an obstacle, naming at most three, and the first one."""
    names = [name for name, what in obstacles.items() if what]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    some = f"{', '.join(names[:3])}{more}" if len(names) < len(obstacles) else "every process"
    return some, obstacles[names[0]]
