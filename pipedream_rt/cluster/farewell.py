"""The end of a job of several nodes: its workers are told, so that their nodes end too."""

from __future__ import annotations

import logging
import selectors
import socket

from pipedream_rt.cluster.admission import Refusal, refusal_of
from pipedream_rt.cluster.callers import Callers
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.keys import JobKey
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost, TransportError
from pipedream_rt.transport.tls import Tls

_TURN_S = 0.5


def say_over(
    listener: socket.socket,
    key: JobKey,
    code: int,
    count: int,
    deadline: Deadline,
    tls: Tls | None = None,
) -> int:
    """Tell every worker that calls that the script has ended for good.

    Args:
        listener: Where the workers of the job call.
        key: The key of the job.
        code: The exit code of the script, from 0 to 255.
        count: How many workers there are to be told.
        deadline: When to stop, though some have not come.
        tls: Encrypts the connections; None to leave them.

    Returns:
        How many were told.
    """
    told: set[str] = set()
    with selectors.DefaultSelector() as selector:
        callers = Callers(key, selector, tls)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        try:
            while len(told) < count and not deadline.expired():
                for each, _ in selector.select(min(_TURN_S, deadline.remaining_s() or _TURN_S)):
                    if each.fileobj is listener:
                        callers.accept(listener)
                    elif isinstance(each.fileobj, Control):
                        told |= _answer(each.fileobj, callers, code)
        finally:
            callers.close()
            if tls is not None:
                tls.finish(deadline)
    return len(told)


def _answer(control: Control, callers: Callers, code: int) -> set[str]:
    """Tell a caller that the job is over, if it knows the secret; return the names of the told."""
    try:
        heard = callers.hear(control)
    except TransportError:
        return set()
    if heard is None:
        return set()
    hello, talk = heard
    refusal = refusal_of(hello, talk, ())
    if refusal is not None and not refusal.proven:
        callers.refuse(control, talk, hello, Refusal(refusal.reason), logging.WARNING)
        return set()
    try:
        control.send({"type": "over", "code": code, "proof": talk.prove_over(code)})
    except PeerLost:
        return set()
    finally:
        control.close()
    return {str(hello["name"])}
