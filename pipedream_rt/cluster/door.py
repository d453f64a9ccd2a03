"""The door of a pipeline: where workers join that were started elsewhere."""

from __future__ import annotations

import logging
import select
import socket
from dataclasses import dataclass, field
from datetime import timedelta

from pipedream_rt.cluster.admission import admit, refusal_of
from pipedream_rt.cluster.callers import Callers, answer_all
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.keys import JobKey, Talk
from pipedream_rt.cluster.members import Member
from pipedream_rt.cluster.records import Record
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost
from pipedream_rt.transport.tls import Tls

_LOOK = timedelta(seconds=0.5)
"""For those that have called while a generation ran to say who they are."""


@dataclass(slots=True, kw_only=True)
class Door:
    """Where workers join, one generation after another.

    Attributes:
        key: The key of the job; a worker that joins proves that it knows it.
        listener: Where workers that were started elsewhere connect; None where all are started
            here.
        tls: Encrypts their connections; None to leave them.
        early: Those that have come while a generation ran, for the next one.
    """

    key: JobKey
    listener: socket.socket | None = None
    tls: Tls | None = None
    early: list[Member] = field(default_factory=list)

    def look(self, wanted: int) -> int:
        """Admit workers that have called while a generation runs; costs nothing if none has.

        Args:
            wanted: How many there is work for.

        Returns:
            How many wait for the next generation.
        """
        listener = self.listener
        if listener is None or wanted <= len(self.early):
            return len(self.early)
        if not select.select([listener], [], [], 0)[0]:
            return len(self.early)

        def answer(callers: Callers, control: Control, hello: Record, talk: Talk) -> None:
            refusal = refusal_of(hello, talk, self.early)
            if refusal is None:
                self.early.append(admit(control, hello, talk))
            else:
                callers.refuse(control, talk, hello, refusal, logging.WARNING)

        enough = lambda: len(self.early) >= wanted  # noqa: E731 - shorter than a function
        answer_all(listener, self.key, answer, enough, Deadline(_LOOK), self.tls)
        return len(self.early)

    def taken(self) -> list[Member]:
        """Return those that have come early, who are the caller's from now on."""
        early, self.early = self.early, []
        return early

    def close(self) -> None:
        """Send those away that have come early. Idempotent."""
        for member in self.taken():
            try:
                member.control.send({"type": "exit", "failed": False})
            except PeerLost:
                pass
            member.control.close()
