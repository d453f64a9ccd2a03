"""Keepers: who starts, and starts again, the workers that are no children of the script."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection

from pipedream_rt.cluster.admission import refusal_of
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.control_records import Record
from pipedream_rt.cluster.engines.interface import Keeper
from pipedream_rt.cluster.handshakes import Handshakes, answer_all
from pipedream_rt.cluster.keys import Handshake, JobKey
from pipedream_rt.deadline import Deadline
from pipedream_rt.transport.tls import Tls

_BY_HAND = "pipedream-rt worker HOST:PORT --name NAME"


class ByHand:
    """The user, who starts each worker with a command."""

    def __init__(self, command: str = _BY_HAND) -> None:
        self._command = command

    def ending(self, name: str) -> str:
        """What the user can do: nobody reports how the worker ended."""
        return (
            "it was started elsewhere: with --persist it comes back by itself as long as its "
            f"process lives, otherwise start it there again with `{self._command}`"
        )

    def missing(self) -> str:
        return f"start them with `{self._command}`"

    def replace(self, names: Collection[str]) -> None:
        """Nothing: the user replaces workers."""


class ByLauncher:
    """A launcher, which starts again what ends; ``renew`` has it replace all workers at once."""

    def __init__(self, title: str, renew: Callable[[], None] | None = None) -> None:
        self._title = title
        self._renew = renew

    def ending(self, name: str) -> str:
        """Empty: a launcher does not report it to the script."""
        return ""

    def missing(self) -> str:
        return f"look at what the other processes of {self._title} say"

    def replace(self, names: Collection[str]) -> None:
        if self._renew is not None:
            self._renew()


BY_HAND: Keeper = ByHand()


def announce_end(
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

    def answer(callers: Handshakes, control: Control, hello: Record, talk: Handshake) -> None:
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
