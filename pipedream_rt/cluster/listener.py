"""The door of a pipeline: where workers join, before a generation begins and while one runs."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Sequence
from typing import NamedTuple

from pipedream_rt.cluster.addresses import joined
from pipedream_rt.cluster.admission import Refusal, admit, refusal_of
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.handshakes import Handshakes
from pipedream_rt.cluster.keys import JobKey
from pipedream_rt.cluster.members import Member
from pipedream_rt.errors import PeerLost, TransportError
from pipedream_rt.schema import printable
from pipedream_rt.transport.tls import Tls

_log = logging.getLogger(__name__)


class Gone(NamedTuple):
    """A connection that has ended.

    Attributes:
        member: Whose it was; None if nobody was admitted on it.
    """

    control: Control
    error: TransportError
    member: Member | None = None


class Listener:
    """Where workers become members of the next generation.

    Every connection is called with a nonce. Whoever answers with a proof of the job's secret, the
    right versions and a name that is free becomes a member; others are refused with the reason.

    Attributes:
        listener: Where workers that were started elsewhere connect; None if there are none.
        members: Those that have come for the next generation.
        refused: By name, why a worker that knows the secret was refused for good.
        expected: How many members the next generation will have if nobody is lost meanwhile; 0 if
            that is not known.
    """

    def __init__(
        self, key: JobKey, listener: socket.socket | None = None, tls: Tls | None = None
    ) -> None:
        self.key = key
        self.listener = listener
        self.tls = tls
        self.members: list[Member] = []
        self.refused: dict[str, str] = {}
        self.expected = 0
        self.is_closed = False
        self._opened: tuple[selectors.BaseSelector, Handshakes] | None = None

    @property
    def address(self) -> str:
        """``HOST:PORT`` at which workers join that were started elsewhere."""
        assert self.listener is not None
        host, port = self.listener.getsockname()[:2]
        return joined(host, port)

    def call_local(self, control: Control) -> None:
        """Call a worker that was started here."""
        self._open()[1].call_local(control)

    def attend(self, seconds: float, most: int, running: Sequence[Member] = ()) -> list[Gone]:
        """Accept connections and read what workers say, after a wait; return what has ended."""
        gone: list[Gone | None] = []
        # A signal handler may close the door before this loop, or while it runs.
        for key, _ in () if self.is_closed else self._open()[0].select(seconds):
            if self.is_closed:
                break
            callers = self._open()[1]
            if key.fileobj is self.listener:
                assert self.listener is not None
                callers.accept(self.listener)
            elif isinstance(key.fileobj, Control) and key.fileobj in callers:
                gone.append(self._hear(key.fileobj, most, running))
            elif key.data is not None:
                gone.append(self._hear_member(key.data))
        return [each for each in gone if each is not None]

    def unheard(self) -> list[Control]:
        """The inherited connections over which no worker has sent a signed record yet."""
        silent = [m.control for m in self.members if m.control.is_local and not m.ready]
        return silent + (self._opened[1].local() if self._opened else [])

    def note(self, gone: Gone) -> None:
        """Log the end of a connection of a worker that was started elsewhere, or of a stranger."""
        if (member := gone.member) is not None:
            _log.warning(
                "worker %r (%s) left before all had come: %s; waiting for it or for another",
                member.name, member.description, gone.error,
            )  # fmt: skip
            return
        text = "a connection that is no worker was dropped: %s"
        self._open()[1].note(logging.WARNING, text, gone.error)

    def taken(self) -> list[Member]:
        """Return the members, whom the caller owns from now on, and begin to gather others."""
        if self._opened is not None:
            for member in self.members:
                self._opened[0].unregister(member.control)
        members, self.members = self.members, []
        self.expected, self.refused = 0, {}
        return members

    def rest(self) -> None:
        """Drop the connections that are no members', and watch none until `attend`. Idempotent."""
        if self._opened is not None:
            selector, callers = self._opened
            self._opened = None
            callers.close()
            selector.close()

    def close(self) -> None:
        """Let nobody join any more, and send away the members that have come. Idempotent."""
        self.is_closed = True
        for member in self.taken():
            try:
                member.control.send({"type": "exit", "failed": False})
            except PeerLost:
                pass
            member.control.close()
        self.rest()

    def _open(self) -> tuple[selectors.BaseSelector, Handshakes]:
        """Return the selector and the callers, made if there are none."""
        if self._opened is None:
            selector = selectors.DefaultSelector()
            self._opened = selector, Handshakes(self.key, selector, self.tls)
            if self.listener is not None:
                self.listener.setblocking(False)
                selector.register(self.listener, selectors.EVENT_READ)
            for member in self.members:
                selector.register(member.control, selectors.EVENT_READ, member)
        return self._opened

    def _hear(self, control: Control, most: int, running: Sequence[Member]) -> Gone | None:
        """Read a hello once all of it has come; admit its worker, or refuse it."""
        selector, callers = self._open()
        try:
            heard = callers.hear(control)
        except TransportError as error:
            return Gone(control, error)
        if heard is None:
            return None
        hello, talk = heard
        refusal = refusal_of(hello, talk, (*running, *self.members))
        full = len(self.members) >= most
        if refusal is None and full:
            reason = f"the job has its {most + len(running)} workers"
            refusal = Refusal(reason, passing=True, proven=True)
        if refusal is not None:
            # Where the job has what it needs, a refused worker is nothing to act upon.
            level = logging.INFO if full or running else logging.WARNING
            callers.refuse(control, talk, hello, refusal, level)
            if refusal.proven and not refusal.passing:
                self.refused[printable(str(hello.get("name")), 100)] = refusal.reason
            return None
        try:
            member = admit(control, hello, talk)
        except PeerLost as error:
            control.close()
            return Gone(control, error)
        self.members.append(member)
        selector.register(control, selectors.EVENT_READ, member)
        return None

    def _hear_member(self, member: Member) -> Gone | None:
        """Read a member's `ready`; one that is gone makes room for another."""
        try:
            records = member.control.receive_all()
        except TransportError as error:
            self._open()[0].unregister(member.control)
            self.members.remove(member)
            member.control.close()
            return Gone(member.control, error, member)
        for record in records:
            if record["type"] == "ready":
                member.ready, member.processor = True, record["processor"]
                member.obstacle = record["obstacle"]
        return None
