"""Where workers join: the roster's connections.

A `Listener` turns what comes over connections into events of the roster (`roster.py`), and carries
out what the roster says of them. The rest is for the generation that runs; see `generation.py`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence

from pipedream_rt.cluster.addresses import boot_id, joined
from pipedream_rt.cluster.control_loop import until, within
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.reception import Reception
from pipedream_rt.cluster.records import Record
from pipedream_rt.cluster.roster import (
    Admit,
    Died,
    Drop,
    Event,
    Instruction,
    Joined,
    Left,
    Log,
    Member,
    Roster,
    Said,
    Shut,
    Started,
    Tell,
    Tick,
)
from pipedream_rt.cluster.stream import Stream
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import TransportError
from pipedream_rt.software import software
from pipedream_rt.telling import log_of

_log = log_of(__name__)

_ANSWERS = ("story", "clock", "findings")
"""Types of the records that answer a question of the coordinator."""

_LEAVE_S = 2.0
"""Seconds for the last records on a connection to leave, before it is closed."""


class Listener:
    """The connections of a job's members, and of those that become members.

    Its methods are for the event loop of the control plane.

    Attributes:
        secret: The secret of the job.
        listeners: Where workers that were started elsewhere connect; empty if there are none.
        roster: Who is a member, and what follows from events.
        generation: Takes the instructions that are not for connections.
        changed: Set when anything but time has come.
    """

    def __init__(self, secret: Secret, *listeners: socket.socket) -> None:
        self.secret = secret
        self.listeners: Sequence[socket.socket] = listeners
        self.roster = Roster(secret.job, software(), boot_id())
        self.generation: Callable[[Instruction], object] = lambda _: None
        self.changed = asyncio.Event()
        self._reception: Reception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._admitted: dict[Stream, Member] = {}
        self._answers: dict[Member, dict[str, asyncio.Queue[tuple[Record, int] | None]]] = {}

    @property
    def address(self) -> str:
        """``HOST:PORT`` or the path at which workers join that were started elsewhere."""
        at = self.listeners[0].getsockname()
        return at if isinstance(at, str) else joined(*at[:2])

    def handle(self, event: Event) -> None:
        """Have the roster take an event, and carry out its instructions."""
        for each in self.roster.handle(event, time.monotonic()):
            match each:
                case Admit(member):
                    self._admit(member)
                case Tell(stream, record):
                    stream.send(record)
                case Drop(stream):
                    self._drop(stream)
                case Log(level, text, arguments):
                    _log.log(level, text, *arguments)
                case _:
                    self.generation(each)
        if not isinstance(event, Tick):
            self.changed.set()

    def take(self, connection: socket.socket, name: str) -> None:
        """Serve a worker that was started here, whose name is known before its first word."""
        stream = Stream(connection, f"worker {name!r}")
        self.handle(Started(stream, name))
        self._keep(self._tasks, asyncio.get_running_loop().create_task(self._arrive_here(stream)))

    def open(self) -> None:
        """Begin to accept connections. Idempotent."""
        if self._reception is None and self.listeners and not self.roster.is_shut:
            self._reception = Reception(self.secret, self.listeners, self._receive, logging.WARNING)

    async def rest(self) -> None:
        """Accept nobody until `open`; callers wait in the kernel's queue. Idempotent."""
        if self._reception is not None:
            reception, self._reception = self._reception, None
            await reception.close()

    async def close(self) -> None:
        """Stop listening, and dismiss the members that no generation has taken. Idempotent."""
        self.handle(Shut())
        await self.rest()

    async def drained(self) -> None:
        """Wait until the connections that were dropped are closed."""
        if self._leaving:
            await asyncio.wait(self._leaving)

    async def ask(
        self, member: Member, record: Record, kind: str, seconds: float
    ) -> tuple[Record, int] | None:
        """Send a question; return the answer and its arrival (monotonic, ns), None for none."""
        if member.ended is not None:
            return None
        queue = self._answers_of(member, kind)
        while not queue.empty():  # an answer to an earlier question, which came too late
            queue.get_nowait()
        member.connection.send(record)
        try:
            return await within(queue.get(), seconds)
        except asyncio.TimeoutError:
            return None

    def _answers_of(self, member: Member, kind: str) -> asyncio.Queue[tuple[Record, int] | None]:
        """The answers of a member to questions of one kind; None once its connection has ended."""
        return self._answers.setdefault(member, {}).setdefault(kind, asyncio.Queue())

    async def _arrive_here(self, stream: Stream) -> None:
        """Serve a worker that was started here, from its hello to its end."""
        try:
            await self._serve(stream, await stream.read())
        except Exception as error:  # of any kind: it ends this connection and no other
            stream.close()
            self.handle(Died(stream, stream.lost_by(error)))

    async def _receive(self, stream: Stream, hello: Record) -> None:
        """Serve a worker that was started elsewhere, to its end."""
        try:
            await self._serve(stream, hello)
        except Exception as error:  # of any kind, as above
            stream.close()
            if self._reception is not None:
                self._reception.note("a connection that is no worker was dropped: %s", error)

    async def _serve(self, stream: Stream, hello: Record) -> None:
        """Have a worker become a member or be refused, and read what it sends until its end."""
        if hello["type"] != "hello":  # as a member's that was led here
            raise TransportError(
                f"the first record of {stream.peer} is {hello['type']!r}, where 'hello' was "
                "expected"
            )
        if stream.socket.fileno() < 0:  # dropped here, as the hello came
            return
        self.handle(Joined(stream, hello, nearby=stream.engine is None))
        member = self._admitted.pop(stream, None)
        if member is not None:
            await self._read(stream, member)

    async def _read(self, stream: Stream, member: Member) -> None:
        """Read the records of a member, until its connection ends."""
        try:
            while member.ended is None:
                record = await stream.read()
                if (kind := record["type"]) in _ANSWERS:
                    answer = record, time.monotonic_ns()
                    self._answers_of(member, kind).put_nowait(answer)
                self.handle(Said(member, record))
        except Exception as error:  # of any kind, as above
            self.handle(Left(member, stream.lost_by(error)))
        finally:
            stream.close()
            for queue in self._answers.pop(member, {}).values():
                queue.put_nowait(None)

    def _admit(self, member: Member) -> None:
        """Tell a worker that it is a member."""
        stream: Stream = member.connection
        self._admitted[stream] = member
        stream.admit(f"worker {member.name!r}")
        # What does not leave the machine needs no secret to get in, and brings it.
        stream.send({"type": "admitted", "secret": self.secret.text if member.nearby else None})

    def _drop(self, stream: Stream) -> None:
        """Close a connection, when what was to be sent has left."""
        if not stream.is_sending:
            stream.close()
            return
        # A record that has not left goes with its connection, and the worker would take this
        # process for dead.
        self._keep(self._leaving, asyncio.get_running_loop().create_task(_closed(stream)))

    def _keep(self, tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        """Keep a task until it is done; the loop itself would not."""
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _closed(stream: Stream) -> None:
    """Close a connection when its last records have left, or have had the time for it."""
    try:
        await within(stream.sent(), _LEAVE_S)
    except asyncio.TimeoutError:
        pass
    finally:
        stream.close()


def announce_end(
    listening: socket.socket, secret: Secret, code: int, count: int, deadline: Deadline
) -> int:
    """Announce the end of the script to workers that join; return how many nodes have heard it.

    It ends once ``count`` nodes have.
    """

    async def announce() -> int:
        listener = Listener(secret, listening)
        listener.roster.over = code
        listener.open()

        def nodes() -> int:
            # The name of a worker is that of its node, and a number.
            return len({name.rpartition("-")[0] for name in listener.roster.informed})

        await until(listener.changed, lambda: nodes() >= count, deadline)
        await listener.close()
        return nodes()

    return asyncio.run(announce())
