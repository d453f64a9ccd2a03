"""The fence around torch RPC: whether it can stand on a machine, and what is done where it cannot.

torch's agent obeys whoever connects to it, so the kernel is told to drop the packets of strangers
(`accept_only`). Newer kernels let a process do that to TCP sockets with CAP_NET_ADMIN alone, which
an ordinary user lacks, and so do containers. References to modules and optimizers are all that the
agent is for; so where one process of a group cannot have the fence, the group forms without agents.

Imports no torch: the doctor and a worker that has just come ask too.
"""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Mapping
from typing import Literal, TypeAlias

from pipedream_rt.transport.rpc.descriptors import accept_only

_log = logging.getLogger(__name__)

Wish: TypeAlias = Literal["auto", "on", "off"]
"""What the user has said of torch RPC: ``on`` has agents also without a fence."""

REMEDY = "CAP_NET_ADMIN for all processes gives it; PIPEDREAM_RT_RPC=on has it without a fence"
"""What to do for torch RPC where there is no fence."""

_TRY_S = 5.0
"""For a connection over loopback, which takes less than a millisecond."""


def no_filter() -> str:
    """Return why no packet filter can be put on a TCP socket of this process; empty if one can."""
    try:
        with socket.socket() as tried:
            accept_only(tried.fileno(), [])
    except OSError as error:
        return f"the kernel allows no packet filter on a TCP socket here ({error.strerror})"
    return ""


def no_loopback() -> str:
    """Return why this process cannot connect to itself; empty if it can."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), timeout=_TRY_S),
        ):
            return ""
    except OSError as error:
        return f"this process cannot connect to itself at 127.0.0.1 ({error.strerror or error})"


def obstacle() -> str:
    """Return why a fenced agent cannot be in this process, in a line; empty if it can."""
    return no_loopback() or no_filter()


def why_left_out(wish: Wish, obstacles: Mapping[str, str]) -> str:
    """Return why a group forms without agents; empty if every member is to have one.

    Args:
        wish: What the user has said.
        obstacles: By name of a member, what `obstacle` has returned there.
    """
    if wish == "off":
        return "PIPEDREAM_RT_RPC=off leaves it out"
    if wish == "on" or not any(obstacles.values()):
        return ""
    return f"nothing keeps strangers from it at {_named(obstacles)}; {REMEDY}"


def in_words(left_out: str, obstacles: Mapping[str, str]) -> str:
    """Return what `Pipeline.explain` says of torch RPC.

    Args:
        left_out: What `why_left_out` has returned.
        obstacles: See there.
    """
    if left_out:
        return f"the workers are no endpoints of torch RPC: {left_out}"
    if any(obstacles.values()):
        return f"the workers are endpoints of torch RPC, without a fence at {_named(obstacles)}"
    return "the workers are endpoints of torch RPC"


def refusal(left_out: str) -> str:
    """Return what is said where torch RPC would be needed, and was left out for a reason."""
    return (
        "this needs torch RPC, over which references lead to modules, parameters and optimizers; "
        f"{left_out}. pipe.module(), pipe.state_dict(), pipe.optimizer and the methods of "
        "pipe.stages[i].rref do without it"
    )


def tell(left_out: str, obstacles: Mapping[str, str]) -> None:
    """Log that agents are left out, or that they have no fence; see `in_words`."""
    if left_out:
        _log_once(logging.INFO, in_words(left_out, obstacles))
    elif any(obstacles.values()):
        _log_once(
            logging.WARNING,
            f"PIPEDREAM_RT_RPC=on: torch RPC has no fence at {_named(obstacles)}. While a group "
            "forms (some 30 ms, at the start and in each recovery) whoever can connect to "
            "127.0.0.1 there can end the process, and run torch's operators in it, which read and "
            "write files; afterwards nothing listens",
        )


@functools.cache
def _log_once(level: int, text: str) -> None:
    """Log a text that each generation would log again."""
    _log.log(level, "%s", text)


def _named(obstacles: Mapping[str, str]) -> str:
    """Return the members that cannot have the fence, the first ones by name, and why the first."""
    names = [name for name, why in obstacles.items() if why]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    some = f"{', '.join(names[:3])}{more}" if len(names) < len(obstacles) else "every process"
    return f"{some}: {obstacles[names[0]]}"
