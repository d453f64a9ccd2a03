"""The end of a job of several nodes: one worker of each is told, and its node ends the others."""

from __future__ import annotations

import logging
import socket

from pipedream_rt.cluster.admission import refusal_of
from pipedream_rt.cluster.callers import Callers, answer_all
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.keys import JobKey, Talk
from pipedream_rt.cluster.records import Record
from pipedream_rt.deadline import Deadline
from pipedream_rt.transport.tls import Tls


def say_over(
    listener: socket.socket,
    key: JobKey,
    code: int,
    count: int,
    deadline: Deadline,
    tls: Tls | None = None,
) -> int:
    """Tell workers that the script has ended for good, until ``count`` nodes have heard it.

    Returns how many nodes have.
    """
    told: set[str] = set()

    def answer(callers: Callers, control: Control, hello: Record, talk: Talk) -> None:
        refusal = refusal_of(hello, talk, ())
        # Who has proved the secret hears it even where it could not join.
        if refusal is not None and not refusal.proven:
            callers.refuse(control, talk, hello, refusal, logging.WARNING)
            return
        try:
            control.send({"type": "over", "code": code, "proof": talk.prove_over(code)})
        finally:
            control.close()
        # The name of a worker is that of its node, and a number.
        told.add(str(hello["name"]).rpartition("-")[0])

    try:
        answer_all(listener, key, answer, lambda: len(told) >= count, deadline, tls)
    finally:
        if tls is not None:
            tls.finish(deadline)
    return len(told)
