"""Where workers join: before a generation begins, and in an elastic job while one runs."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import NamedTuple

from pipedream_rt.cluster.addresses import boot_id, joined
from pipedream_rt.cluster.control_loop import until
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.members import Member
from pipedream_rt.cluster.reception import Reception
from pipedream_rt.cluster.records import HELLO, VERSION, Record, is_name
from pipedream_rt.cluster.stream import Stream
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import TransportError
from pipedream_rt.schema import printable, problem_of, shown
from pipedream_rt.software import software
from pipedream_rt.telling import log_of

_log = log_of(__name__)


class Refusal(NamedTuple):
    """Why a worker cannot become a member.

    Attributes:
        passing: Whether the worker may try again later.
    """

    reason: str
    passing: bool = False


class Departure(NamedTuple):
    """The end of a worker before its generation has begun.

    Attributes:
        name: Empty for one that was not started here and has not said its name.
        member: None if it was not admitted yet.
    """

    name: str
    is_local: bool
    error: TransportError
    member: Member | None = None


class Listener:
    """Where workers become members of the next generation.

    Whoever is of this job (`Reception`), has the right versions and a name that is free becomes a
    member; others are refused with the reason. Its methods are for the event loop of the control
    plane.

    Attributes:
        secret: The secret of the job.
        listeners: Where workers that were started elsewhere connect; empty if there are none.
        members: Those that have come for the next generation.
        running: Those of the generation that runs, whose names are taken.
        most: How many may come for the next generation.
        refused: By name, why a worker was refused for good.
        departures: Of those that have gone since somebody took them out of this list.
        expected: How many members the next generation will have if nobody is lost meanwhile; 0 if
            that is not known.
        over: The exit code of a script that has ended for good, for all who come; None before.
        informed: The names of those that have it.
        changed: Set when any of this has changed.
    """

    def __init__(self, secret: Secret, *listeners: socket.socket) -> None:
        self.secret = secret
        self.listeners: Sequence[socket.socket] = listeners
        self.members: list[Member] = []
        self.running: Sequence[Member] = ()
        self.most = 0
        self.refused: dict[str, str] = {}
        self.departures: list[Departure] = []
        self.expected = 0
        self.over: int | None = None
        self.informed: set[str] = set()
        self.changed = asyncio.Event()
        self.is_closed = False
        self._reception: Reception | None = None
        self._unheard: dict[str, Stream] = {}  # connections of workers started here, by name
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """``HOST:PORT`` or the path at which workers join that were started elsewhere."""
        at = self.listeners[0].getsockname()
        return at if isinstance(at, str) else joined(*at[:2])

    def take(self, connection: socket.socket, name: str) -> None:
        """Serve a worker that was started here, whose name is known before its first word."""
        stream = Stream(connection, f"worker {name!r}")
        self._unheard[name] = stream
        task = asyncio.get_running_loop().create_task(self._arrive_here(stream, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def unheard(self) -> list[str]:
        """The names of the workers started here that are not ready yet."""
        silent = [m.name for m in self.members if m.is_local and not m.ready]
        return [*self._unheard, *silent]

    def open(self) -> None:
        """Begin to accept connections. Idempotent."""
        if self._reception is None and self.listeners and not self.is_closed:
            self._reception = Reception(self.secret, self.listeners, self._receive, logging.WARNING)

    async def rest(self) -> None:
        """Accept nobody until `open`; callers wait in the kernel's queue. Idempotent."""
        if self._reception is not None:
            reception, self._reception = self._reception, None
            await reception.close()

    def taken(self) -> list[Member]:
        """Return the members, whom the caller owns from now on, and begin to gather others."""
        members, self.members = self.members, []
        self.expected, self.refused = 0, {}
        return members

    async def expect(self, staying: int) -> int:
        """Expect the members that are ready besides those that stay; return how many are ready."""
        ready = sum(member.ready for member in self.members)
        self.expected = staying + ready
        return ready

    def log_departure(self, departure: Departure) -> None:
        """Log the end of a member that was started elsewhere."""
        if departure.member is not None:
            _log.warning(
                "worker %r (%s) left before all had come: %s; waiting for it or for another",
                departure.name, departure.member.description, departure.error,
            )  # fmt: skip

    async def close(self) -> None:
        """Stop listening, and dismiss the members that no generation has taken. Idempotent."""
        self.is_closed = True
        self.changed.set()
        await self.rest()
        for member in self.taken():
            member.stream.send({"type": "exit", "failed": False})
            member.stream.close()
        self.drop_local()

    def drop_local(self) -> None:
        """Drop the workers started here that no generation has taken: others get their names."""
        dropped, self._unheard = [*self._unheard.values()], {}
        dropped += [member.stream for member in self.members if member.is_local]
        self.members = [member for member in self.members if not member.is_local]
        self.departures = [each for each in self.departures if not each.is_local]
        for stream in dropped:
            stream.close()

    async def _arrive_here(self, stream: Stream, name: str) -> None:
        """Serve a worker that was started here, from its hello to its end."""
        try:
            hello = await stream.read()
            if self._unheard.get(name) is stream:  # else it was dropped here
                await self._serve(stream, hello, name)
        except Exception as error:  # of any kind: it ends this connection and no other
            stream.close()
            if self._unheard.get(name) is stream:
                self.departures.append(Departure(name, True, stream.lost_by(error)))
        finally:
            if self._unheard.get(name) is stream:
                del self._unheard[name]
            self.changed.set()

    async def _receive(self, stream: Stream, hello: Record) -> None:
        """Serve a worker that was started elsewhere, to its end."""
        try:
            await self._serve(stream, hello)
        except Exception as error:  # of any kind, as above
            stream.close()
            if self._reception is not None:
                self._reception.note("a connection that is no worker was dropped: %s", error)

    async def _serve(self, stream: Stream, hello: Record, own_name: str = "") -> None:
        """Refuse a worker, or make it a member and read what it sends until its end."""
        if hello["type"] != "hello":  # as a member's that was led here
            raise TransportError(
                f"the first record of {stream.peer} is {hello['type']!r}, where 'hello' was "
                "expected"
            )
        if self.over is not None and is_name(hello.get("name")):
            stream.send({"type": "over", "code": self.over})
            self.informed.add(hello["name"])
            self.changed.set()
        elif (refusal := self._refusal_of(hello, own_name)) is not None:
            self._refuse(stream, hello, refusal)
        else:
            await self._admit(stream, hello, is_local=bool(own_name)).live()
        await stream.sent()
        stream.close()

    def _refusal_of(self, hello: Record, own_name: str) -> Refusal | None:
        """Why a worker cannot become a member; None if it can."""
        # The version comes first: which fields a hello has depends on it.
        if hello.get("version") != VERSION:
            spoken = shown(hello.get("version"), 20)
            return Refusal(
                f"it speaks protocol {spoken}, the coordinator {VERSION}; install the same "
                "pipedream-rt on all machines"
            )
        if problem := problem_of(hello, HELLO):
            return Refusal(f"its hello makes no sense: {problem}")
        name = hello["name"]
        if own_name and name != own_name:
            return Refusal(f"it says that it is {name!r}, and was started as {own_name!r}")
        if not own_name and hello["job"] != self.secret.job:
            return Refusal("it belongs to another job, whose coordinator is at another address")
        everybody = (*self.running, *self.members)
        twin = next((member for member in everybody if member.name == name), None)
        if twin is not None:
            reason = f"the name {name!r} is taken by {twin.description}; give each worker its own"
            return Refusal(reason, passing=True)
        if hello["software"] != software():
            return Refusal(
                f"it has {hello['software']}, and the script {software()}; its stages might "
                "compute other bits, so install the same on all machines"
            )
        if len(self.members) >= self.most:
            count = self.most + len(self.running)
            return Refusal(f"the job has its {count} workers", passing=True)
        return None

    def _refuse(self, stream: Stream, hello: Record, refusal: Refusal) -> None:
        """Send a worker the reason why it cannot become a member, and log it."""
        name = printable(str(hello.get("name")), 100)
        stream.send({"type": "refused", "reason": refusal.reason, "passing": refusal.passing})
        # Where the job has what it needs, a refused worker is nothing to act upon.
        full = len(self.members) >= self.most or self.running
        level = logging.INFO if full else logging.WARNING
        _log.log(level, "refused worker %r (%s): %s", name, process_of(hello), refusal.reason)
        if not refusal.passing:
            self.refused[name] = refusal.reason
            self.changed.set()

    def _admit(self, stream: Stream, hello: Record, *, is_local: bool) -> Member:
        """Make a worker a member."""
        name, nearby = hello["name"], stream.engine is None
        stream.admit(f"worker {name!r}")
        # What does not leave the machine needs no secret to get in, and brings it.
        stream.send({"type": "admitted", "secret": self.secret.text if nearby else None})
        member = Member(
            name,
            process_of(hello),
            stream,
            is_local=is_local,
            nearby=nearby,
            # Where the kernel has no id, both are empty, which shows nothing.
            same_clock=hello["boot"] == boot_id() != "",
            returns=is_local or hello["returns"],  # workers started here are started again
        )
        member.changed = lambda: self._member_changed(member)
        self._unheard.pop(name, None)
        self.members.append(member)
        self.changed.set()
        return member

    def _member_changed(self, member: Member) -> None:
        """Take out a member that is gone before its generation has begun."""
        if member.ended is not None and member in self.members:
            self.members.remove(member)
            departure = Departure(member.name, member.is_local, member.ended, member)
            if self.running:  # nobody gathers now
                self.log_departure(departure)
            else:
                self.departures.append(departure)
        self.changed.set()


def process_of(hello: Record) -> str:
    """Process number and machine of a worker, escaped, as its hello may be of any version."""
    return printable(f"pid {hello.get('pid')} on {hello.get('host')}", 100)


def announce_end(
    listening: socket.socket, secret: Secret, code: int, count: int, deadline: Deadline
) -> int:
    """Announce the end of the script to workers that join; return how many nodes have heard it.

    It ends once ``count`` nodes have.
    """

    async def announce() -> int:
        listener = Listener(secret, listening)
        listener.over = code
        listener.open()

        def nodes() -> int:
            # The name of a worker is that of its node, and a number.
            return len({name.rpartition("-")[0] for name in listener.informed})

        await until(listener.changed, lambda: nodes() >= count, deadline)
        await listener.close()
        return nodes()

    return asyncio.run(announce())
