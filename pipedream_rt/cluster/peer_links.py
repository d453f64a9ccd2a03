"""How the members of a group connect to each other.

Each member listens (`peer_listeners.py`), and dials those of lower rank: at a Unix socket if both
may be on one machine, else, or if that fails, by TCP with TLS. Whoever is at the other end is of
this job then. The first record on the connection says which member of which generation it is, and
is answered alike::

    caller                                                        listener
    link: job, group, generation, its rank, the rank it wants  ──►
                                                               ◄──  link: the other way round

The generations of an earlier life of the script have the same job and the same numbers; so the tag
of the group says which life is meant.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from pipedream_rt.cluster.addresses import resolved
from pipedream_rt.cluster.control_loop import until
from pipedream_rt.cluster.identity import Secret, is_same_user
from pipedream_rt.cluster.peer_listeners import PeerAddress, PeerListeners
from pipedream_rt.cluster.reception import Reception
from pipedream_rt.cluster.records import Record
from pipedream_rt.cluster.stream import Stream
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import RendezvousTimeout, TransportError
from pipedream_rt.telling import log_of
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.link import Connection
from pipedream_rt.transport.links import Connections, text_of
from pipedream_rt.transport.tcp import prepare

_log = log_of(__name__)

_PAUSE_S = 0.1
"""Seconds before a member is dialled again that was out of reach or dropped the connection."""

_ATTEMPT_S = 10.0
"""Seconds for one attempt to connect and to exchange the first records."""

_FINAL = (errno.ENETUNREACH, errno.ECONNREFUSED)
"""Errors after which no other attempt would help: every member listens before it is dialled."""


class PeerLinks:
    """Connects one member of a group to all others, in the running event loop.

    Attributes:
        problems: By rank, why a member could not be met at the last attempt.
    """

    def __init__(
        self,
        group: Group,
        secret: Secret,
        listeners: PeerListeners,
        addresses: Mapping[int, PeerAddress],
        deadline: Deadline,
    ) -> None:
        self._group = group
        self._secret = secret
        self._listeners = listeners
        self._addresses = addresses
        self._deadline = deadline
        self._met: Connections = {}
        self._given_up: set[int] = set()
        self._outlived: set[int] = set()  # whose namesakes of an earlier life have called
        self._changed = asyncio.Event()
        self.problems: dict[int, str] = {}

    async def meet(self) -> Connections:
        """Meet all other members, or none."""
        await self._attempt(lambda: bool(self._given_up) or not self._missing())
        if missing := self._missing():
            self._close()
            raise self._not_met([rank for rank in missing if rank in self._given_up] or missing)
        return self._met

    async def reach(self) -> Connections:
        """Meet the other members, as far as they can be reached until the deadline."""
        await self._attempt(lambda: self._given_up >= set(self._missing()))
        return self._met

    async def _attempt(self, enough: Callable[[], bool]) -> None:
        """Dial and answer until ``enough`` holds, or the time is over."""
        reception = Reception(self._secret, self._listeners.sockets, self._answer, logging.DEBUG)
        lower = [rank for rank in self._group.others if rank < self._group.rank]
        dialling = [asyncio.ensure_future(self._dial(rank)) for rank in lower]
        try:
            try:
                await until(self._changed, enough, self._deadline)
            finally:
                for dial in dialling:
                    dial.cancel()
                await asyncio.gather(*dialling, return_exceptions=True)
                await reception.close()
        except BaseException:  # also what cancels while this waits for the end of others
            self._close()
            raise

    def _missing(self) -> list[int]:
        return [rank for rank in self._group.others if rank not in self._met]

    def _close(self) -> None:
        for met in self._met.values():
            met.socket.close()

    def _give_up(self, rank: int) -> None:
        """Note that a member cannot be reached."""
        self._given_up.add(rank)
        self._changed.set()

    async def _dial(self, rank: int) -> None:
        """Connect to a member, and try again as long as that may help."""
        at, name = self._addresses[rank], self._group.names[rank]
        if at.path and at.machine == self._listeners.address.machine:
            try:
                await self._connect(rank, socket.AF_UNIX, at.path)
                return
            except (OSError, TransportError) as error:
                self.problems[rank] = _reason(error)
                _log.info("%r cannot be met at its Unix socket: %s", name, _reason(error))
        if not at.host:
            self._give_up(rank)
            return
        family, address = resolved(at.host, at.port)
        while True:
            try:
                await self._connect(rank, family, address)
                return
            except (OSError, TransportError) as error:
                self.problems[rank] = _reason(error)
                if getattr(error, "errno", None) in _FINAL:
                    self._give_up(rank)
                    return
            await asyncio.sleep(_PAUSE_S)

    async def _connect(self, rank: int, family: int, address: Any) -> None:
        """Make one attempt to connect to a member."""
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        talk = asyncio.ensure_future(self._shake_hands(rank, connection, address))
        try:
            await asyncio.wait([talk], timeout=_ATTEMPT_S)
            if not talk.done():
                raise TransportError(f"it has not answered within {_ATTEMPT_S:g} s")
            self._has_met(rank, talk.result())
        except BaseException:
            talk.cancel()
            try:
                await asyncio.gather(talk, return_exceptions=True)
            finally:  # after an attempt that has failed this may be cancelled while it waits
                connection.close()
            raise

    async def _shake_hands(self, rank: int, connection: socket.socket, address: Any) -> Stream:
        """Check that the member is at the other end."""
        await asyncio.get_running_loop().sock_connect(connection, address)
        stream = Stream(connection, f"member {self._group.names[rank]!r}")
        if connection.family == socket.AF_UNIX:
            if not is_same_user(connection):
                raise TransportError("its Unix socket is of another user")
        else:
            prepare(connection)
            await stream.encrypt(self._secret.tls(called=False), called=False)
        stream.send(self._link(self._group.rank, rank))
        answer = await stream.read()
        # All members have one certificate, so both must say who is meant.
        if answer != self._link(rank, self._group.rank):
            raise TransportError(
                f"who answers there is not {self._group.names[rank]!r} of this generation"
            )
        return stream

    def _link(self, sender: int, recipient: int) -> Record:
        return {
            "type": "link",
            "job": self._secret.job,
            "group": self._group.tag,
            "generation": self._group.generation,
            "sender": sender,
            "recipient": recipient,
        }

    async def _answer(self, stream: Stream, link: Record) -> None:
        """Answer a member that has dialled; drop whoever is none of this generation."""
        sender = link["sender"] if link["type"] == "link" else -1
        is_expected = sender > self._group.rank and sender in self._group.others
        wanted = self._link(sender, self._group.rank) if is_expected else {}
        if link != wanted:
            if link == {**wanted, "group": link.get("group")} and sender not in self._outlived:
                self._outlived.add(sender)  # it calls again and again
                _log.warning(
                    "a process that takes itself for %r is of an earlier life of the script; it is "
                    "no member now, and was sent away",
                    self._group.names[sender],
                )
            _log.debug("a connection of no member of this generation was dropped: %s", link)
            stream.close()
            return
        stream.send(self._link(self._group.rank, sender))
        await stream.sent()
        if stream.is_over:  # it has given this call up, and calls again
            stream.close()
            return
        self._has_met(sender, stream)

    def _has_met(self, rank: int, stream: Stream) -> None:
        """Keep a connection; the later one of a member that has dialled again."""
        earlier = self._met.pop(rank, None)
        if earlier is not None:
            earlier.socket.close()
        nearby = stream.socket.family == socket.AF_UNIX
        self._met[rank] = Connection(stream.socket, stream.engine, carries_descriptors=nearby)
        self._changed.set()

    def _not_met(self, missing: list[int]) -> RendezvousTimeout:
        """Name the members that were not met, and why."""
        group = self._group
        reasons = []
        for rank in missing:
            why = self.problems.get(rank, "it has not called" if rank > group.rank else "no answer")
            reasons.append(f"{group.names[rank]!r} at {self._addresses[rank].in_words}: {why}")
        return RendezvousTimeout(
            f"{group.name!r} has not met {'; '.join(reasons)}; all workers must reach each other "
            "and the coordinator on any port, so --bind must name an interface of a network that "
            "all of them share",
            missing=len(missing),
        )


def _reason(error: Exception) -> str:
    """The reason why a member could not be met."""
    # By its number: asyncio has words of its own for a connection that is refused.
    number = getattr(error, "errno", None)
    is_plain = isinstance(error, OSError) and not isinstance(error, ssl.SSLError)
    return os.strerror(number).lower() if is_plain and number else text_of(error)
