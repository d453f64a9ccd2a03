"""The life of one generation of workers: they are gathered, form a group, are watched, and end.

Each part is a coroutine of the control plane's event loop. The members themselves (`Member.live`)
say what changes, and one condition wakes whoever waits for it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

from pipedream_rt.cluster.addresses import is_loopback
from pipedream_rt.cluster.control_loop import within
from pipedream_rt.cluster.doors import DoorAddress, Doors, opened_doors, remove_left_behind
from pipedream_rt.cluster.elsewhere import Elsewhere
from pipedream_rt.cluster.identity import NONCE
from pipedream_rt.cluster.interface import ClusterSpec, memoized_error
from pipedream_rt.cluster.listener import Gone, Listener
from pipedream_rt.cluster.local import Local
from pipedream_rt.cluster.members import (
    JoiningFailed,
    Member,
    WorkerSlot,
    is_of_its_own,
    natural,
)
from pipedream_rt.cluster.peer_links import PeerLinks
from pipedream_rt.cluster.records import Record, welcome
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import (
    ConfigError,
    MessageTimeout,
    PeerLost,
    PipelineClosed,
    PipelineError,
    RendezvousTimeout,
    WorkerLost,
)
from pipedream_rt.telling import log_of
from pipedream_rt.tracing.clock import Reading, best
from pipedream_rt.transport.fence import AgentMode
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.links import Connections

_log = log_of(__name__)

COORDINATOR_NAME = "coordinator"
"""Name of the coordinator in the group."""

_STORY_S = 2.0
"""Seconds for the workers to say what they wait for, when something stalls."""

_CLOCK_S = 5.0
"""Seconds for one worker to say what its clock shows."""

_READINGS = 16
"""How often a clock is read; the reading with the shortest round trip counts."""

_LEAVE_S = 2.0
"""Seconds for the last records to the workers to leave."""


class Generation:
    """The workers of one generation, in the event loop of the control plane.

    Attributes:
        members: The workers that have come, once `gather` has ended, also by an error; in the order
            of ranks.
        silent: Names of the workers that were given up because they did not answer.
        ending: Whether the workers are to end, so that the loss of one is no failure any more; the
            event loop alone sets it.
    """

    def __init__(
        self, spec: ClusterSpec, listener: Listener, local: Local, elsewhere: Elsewhere
    ) -> None:
        self._spec = spec
        self._listener = listener
        self._local = local
        self._elsewhere = elsewhere
        self._heartbeat_s = spec.heartbeat.total_seconds()
        self._changed = listener.changed
        self.members: list[Member] = []
        self.silent: set[str] = set()
        self.ending = False
        self._gave_up = False
        self._watching: asyncio.Task[None] | None = None
        self._opened = ExitStack()  # of what the group needs while it forms
        self._doors: Doors | None = None

    async def _until(
        self, condition: Callable[[], bool], look: Callable[[], object], seconds: float
    ) -> None:
        """Wait until a condition holds; ``look``, at each change and in between, may raise."""
        while True:
            self._changed.clear()
            look()
            if condition():
                return
            try:
                await within(self._changed.wait(), seconds)
            except asyncio.TimeoutError:
                continue

    # -- gather ---------------------------------------------------------------------------------

    async def gather(self, deadline: Deadline) -> None:
        """Gather members until each has imported torch; sort them by name, and seat them."""
        listener, crew = self._listener, self._spec.assignment
        began = time.monotonic()
        came, before = began, 0

        def look() -> None:
            nonlocal came, before
            if listener.is_closed:
                raise PipelineClosed("the pipeline was closed while it waited for workers")
            gone, listener.gone = listener.gone, []
            for each in gone:
                self._note_gone(each)
            if deadline.expired():
                raise self._missing(deadline)
            # A worker started here is forked with torch imported, so it speaks at once, unless it
            # was stopped.
            unheard = listener.unheard()
            if unheard and time.monotonic() - began > self._heartbeat_s:
                raise WorkerLost(
                    f"worker {unheard[0]!r} has been silent since it was started, for longer than "
                    f"the heartbeat of {self._heartbeat_s:g} s",
                    worker=unheard[0],
                    stage=None,
                )
            if len(listener.members) > before:
                came = time.monotonic()
            before = len(listener.members)

        def complete() -> bool:
            """Whether no more are waited for: all have come, or enough and the others are late."""
            members = listener.members
            if len(members) < crew.fewest or not all(member.ready for member in members):
                return False
            late = time.monotonic() - came >= crew.wait.total_seconds()
            return len(members) in (crew.most, listener.expected) or late

        listener.running, listener.most = (), crew.most
        for name, connection in self._local.connections.items():
            listener.take(connection, name)
        listener.open()
        try:
            await self._until(complete, look, self._turn_s(deadline))
        finally:
            self.members += listener.taken()
            if not crew.stays_open:
                await listener.rest()  # while the generation runs, nobody may join
            listener.running = self.members
            listener.most = crew.most - len(self.members)
        self._seat()

    def _turn_s(self, deadline: Deadline) -> float:
        """Seconds after which the deadlines are looked at again, if nothing changes."""
        waits = (1.0, self._heartbeat_s / 4, deadline.remaining_s())
        return max(0.01, min(wait for wait in waits if wait is not None))

    def _seat(self) -> None:
        """Give the members their work, in the order of their names."""
        plan, crew, count = self._spec.plan, self._spec.assignment, len(self.members)
        self.members.sort(key=lambda member: natural(member.name))
        work = crew.workers_by_process(plan.workers, count)
        for member, seats in zip(self.members, work, strict=True):
            member.seats = [WorkerSlot(w, plan.name_of(w), plan.stages_of(w)) for w in seats]
            member.stage = plan.stage_of(member.stages[0])
        if count < plan.workers and not crew.seats:
            _log.warning(
                "worker processes: %d, for the work of %d, which gives the same bits and takes "
                "longer: %s",
                count, plan.workers, "; ".join(f"{m.name} has {m.hosts}" for m in self.members),
            )  # fmt: skip
        by_kind: dict[str, list[str]] = {}
        for member in self.members:
            by_kind.setdefault(member.processor, []).append(member.name)
        if len(by_kind) > 1:
            _log.warning(
                "the workers have several kinds of processor: %s; kernels may round differently "
                "on each, so a run has the same bits again only if every stage lies on the same "
                "kind as before, which a recovery does not see to",
                "; ".join(f"{kind} ({', '.join(names)})" for kind, names in by_kind.items()),
            )

    def _note_gone(self, gone: Gone) -> None:
        """Log that a worker from elsewhere has left; that of one started here is an error."""
        name = gone.name
        if not gone.is_local:
            self._listener.note(gone)
        elif gone.member is not None:
            raise gone.member.lost(self._local.ending(name), gone.error) from gone.error
        else:
            how = self._local.ending(name)
            raise WorkerLost(
                f"worker {name!r} ended before it joined ({how}); its output says why"
                if isinstance(gone.error, PeerLost)
                else f"worker {name!r} cannot join: {gone.error}",
                worker=name,
                stage=None,
                crashed=is_of_its_own(how),
            ) from gone.error

    def _missing(self, deadline: Deadline) -> RendezvousTimeout:
        """Make the error that says which workers did not join in time."""
        listener, needed = self._listener, self._spec.assignment.fewest
        came = {m.name for m in listener.members}
        unready = (
            {m.name for m in listener.members if not m.ready} if len(came) >= needed else set()
        )
        expected = {*self._local.connections, *came}
        came -= unready
        joined = sorted(came, key=natural)
        absent = sorted(expected - came, key=natural)
        missing = max(needed - len(joined), 1)
        seconds = deadline.timeout.total_seconds() if deadline.timeout else 0.0
        return RendezvousTimeout(
            f"{missing} of {needed} workers did not join within {seconds:g} s"
            + (f": {', '.join(absent)}" if absent else "")
            + f"; joined: {', '.join(joined) or 'none'}"
            + (
                f"; still importing torch: {', '.join(sorted(unready, key=natural))}"
                if unready
                else ""
            )
            + "".join(f"; {name!r} was refused: {why}" for name, why in listener.refused.items())
            + f"; {self._elsewhere.missing()}, or give Pipeline recovery=Recovery(start=...) with "
            "more time",
            missing=missing,
        )

    # -- form -----------------------------------------------------------------------------------

    async def welcome(self, rpc: AgentMode, deadline: Deadline) -> Group:
        """Welcome the members to the group."""
        spec, nonce = self._spec, secrets.token_bytes(NONCE)
        names = (COORDINATOR_NAME, *(member.name for member in self.members))
        by_address = {a: index for index, member in enumerate(self.members) for a in member.stages}
        hosts = tuple(by_address[address] for address in spec.plan.addresses)
        # Members that all came within this machine find each other at Unix sockets.
        far = any(not member.nearby for member in self.members)
        self._doors = self._opened.enter_context(
            opened_doors(self._meeting_host() if far else None)
        )
        for rank, member in enumerate(self.members, 1):
            member.heard = time.monotonic()
            member.stream.send(
                welcome(
                    rank,
                    names,
                    self._doors.address.host,
                    nonce=nonce,
                    beat_s=self._heartbeat_s / 4,
                    seats=[[w, title, list(stages)] for w, title, stages in member.seats],
                    hosts=list(hosts),
                    rpc=rpc,
                    generation=spec.generation,
                    timeout_s=spec.timeout.total_seconds(),
                    start_timeout_s=deadline.remaining_s(),
                    path=sys.path,
                )
            )
        return Group(
            generation=spec.generation,
            rank=0,
            names=names,
            hosts=hosts,
            key=self._listener.secret.group_key(nonce),
        )

    def _meeting_host(self) -> str:
        """Address of this machine that every member reaches: no loopback if one is elsewhere."""
        hosts = [m.stream.local_host for m in self.members if not m.nearby]
        return next((h for h in hosts if not is_loopback(h)), hosts[0])

    async def connect(self, group: Group, deadline: Deadline) -> Connections:
        """Connect this process to all members, once their doors are known to all."""
        assert self._doors is not None
        welcomed = time.monotonic()

        def look() -> None:
            self._look_while_forming(deadline)
            for member in self.members:
                quiet = member.door is None and member.met is None
                if quiet and time.monotonic() - welcomed > self._heartbeat_s:
                    note = " (it has not answered its welcome within the heartbeat)"
                    raise member.lost(self._local.ending(member.name), note=note)

        try:
            turn = self._turn_s(deadline)
            await self._until(lambda: all(m.door for m in self.members), look, turn)
            doors = {COORDINATOR_NAME: self._doors.address}
            doors |= {m.name: m.door for m in self.members if m.door is not None}
            self._refuse_unreachable(doors)
            for member in self.members:
                member.stream.send({"type": "doors", "by_name": doors})
            by_rank = {group.names.index(name): at for name, at in doors.items()}
            links = PeerLinks(group, self._listener.secret, self._doors, by_rank, deadline)
            met: Connections = await self._beside(links.meet(), deadline)
            return met
        finally:
            self._opened.close()

    async def _beside(self, doing: Any, deadline: Deadline) -> Any:
        """Wait for a coroutine or a future, and look at the members meanwhile."""
        look = functools.partial(self._look_while_forming, deadline)
        task = asyncio.ensure_future(doing)
        task.add_done_callback(lambda _: self._changed.set())
        try:
            await self._until(task.done, look, self._turn_s(deadline))
            return await task
        finally:
            task.cancel()
            # It lets go of the doors first: a socket that is closed before its reader is removed
            # leaves that behind, and the next one of its number would never be heard.
            await asyncio.gather(task, return_exceptions=True)

    def _look_while_forming(self, deadline: Deadline) -> None:
        """Raise if a member is lost or could not join, or the time is over."""
        if self.ending:
            raise PipelineClosed("the pipeline was closed while its workers joined")
        for member in self.members:
            if isinstance(member.ended, JoiningFailed):
                # One that does not come back by itself has given its answer.
                final = None if member.returns else ConfigError(str(member.ended))
                raise WorkerLost(
                    f"worker {member.name!r} could not join: {member.ended}",
                    worker=member.name,
                    stage=member.stage,
                ) from (final or member.ended.__cause__)
            if member.ended is not None:
                raise member.lost(self._local.ending(member.name), member.ended) from member.ended
        if deadline.expired():
            raise RendezvousTimeout(
                f"all {len(self.members)} workers came, but the group did not form in "
                "time; can they reach each other and the coordinator on any port?"
            )

    def _refuse_unreachable(self, doors: Mapping[str, DoorAddress]) -> None:
        """Refuse a member that listens on loopback while others listen elsewhere."""
        hosts = {name: at.host for name, at in doors.items() if at.host}
        inside = [name for name, host in hosts.items() if is_loopback(host)]
        if inside and len(inside) < len(hosts):
            where = ", ".join(f"{name} {at.in_words}" for name, at in doors.items() if at.host)
            raise RendezvousTimeout(
                f"{', '.join(map(repr, inside))} of the group cannot be reached from other "
                f"machines: the addresses are {where}; start such a worker with --bind and a "
                "network interface that has an address",
                missing=len(inside),
            )

    async def all_joined(self, joining: Future[None], deadline: Deadline) -> None:
        """Wait until all members have joined, and this process in another thread."""
        await self._beside(asyncio.wrap_future(joining), deadline)
        look = functools.partial(self._look_while_forming, deadline)
        everybody = self.members
        await self._until(
            lambda: all(m.met is not None for m in everybody), look, self._turn_s(deadline)
        )

    async def tell(self, record: Record) -> None:
        """Send a record to all members that are there."""
        for member in self.members:
            if member.ended is None:
                member.stream.send(record)

    def places(self) -> dict[str, str]:
        """Per worker, the id of its host: workers with equal ids share memory; empty for none."""
        met = {rank: {rank, *(m.met or ())} - {0} for rank, m in enumerate(self.members, 1)}
        return {
            # All at one place have met each other at Unix sockets: memory goes over those only.
            member.name: str(min(met[rank]))
            if all(met.get(other) == met[rank] for other in met[rank])
            else ""
            for rank, member in enumerate(self.members, 1)
        }

    # -- watch ----------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Begin to report workers that are lost or silent."""
        # The group may have formed for longer than a heartbeat: silence counts from here.
        for member in self.members:
            member.heard = time.monotonic()
            member.changed = functools.partial(self._member_changed, member)
        for member in self.members:
            self._member_changed(member)  # it may have ended a moment ago
        self._watching = asyncio.get_running_loop().create_task(self._notice_silence())
        self._watch_forks()

    def _watch_forks(self) -> None:
        """Have another fork server ready before a worker needs it, should the present one end."""
        forks = self._local.open_end_of_forks()
        if forks is None:
            return
        loop = asyncio.get_running_loop()

        def replace() -> None:
            loop.remove_reader(forks)
            # At the end of a script that does not close its pipeline the server has ended first,
            # and no thread can be had any more.
            with suppress(RuntimeError):
                loop.run_in_executor(None, self._local.replace_forks)

        def close() -> None:
            loop.remove_reader(forks)
            os.close(forks)

        loop.add_reader(forks, replace)
        self._opened.callback(close)

    def _member_changed(self, member: Member) -> None:
        """Report a member whose connection has ended."""
        if member.ended is not None and not self.ending:
            error = member.ended
            note = "" if isinstance(error, PeerLost) else f" ({error})"
            self._report(member, note)
        self._changed.set()

    def _report(self, member: Member, note: str) -> None:
        """Report a lost worker; how it ended may take a second to find out, so others ask."""
        self._spec.fail(memoized_error(lambda: self.loss_of(member, note=note)))

    async def _notice_silence(self) -> None:
        """Report members that are silent for longer than the heartbeat."""
        turn_s, looked = self._heartbeat_s / 4, time.monotonic()
        while not self.ending:
            await asyncio.sleep(turn_s)
            before, looked = looked, time.monotonic()
            # If this process itself was stopped for a while, silence means nothing.
            if looked - before > 2 * turn_s:
                continue
            for member in self.members:
                silent_s = looked - member.heard
                if silent_s > self._heartbeat_s and not member.stopped and not self.ending:
                    self.silent.add(member.name)
                    self._report(member, f" (it has been silent for {silent_s:.1f} s)")

    def loss_of(
        self, member: Member, problem: PipelineError | None = None, note: str = ""
    ) -> WorkerLost:
        """Make the error that names a lost worker, and says how it ended if that is known."""
        name = member.name
        own = name in self._local.processes
        how = self._local.ending(name) if own else self._elsewhere.ending(name)
        return member.lost(how, problem, note)

    async def stories(self) -> list[str]:
        """Ask every worker what it waits for, for 2 s; the text says who does not answer."""
        question: Record = {"type": "story", "text": None}
        answers = await asyncio.gather(
            *(member.ask(question, "story", _STORY_S) for member in self.members)
        )
        return [
            f"{member.hosts} (worker {member.name!r}): "
            + (str(answer[0]["text"]) if answer else "its worker does not answer")
            for member, answer in zip(self.members, answers, strict=True)
        ]

    async def clocks(self) -> list[Reading]:
        """Read the clocks of all members, one after another."""
        return [await _clock_of(member) for member in self.members]

    # -- end ------------------------------------------------------------------------------------

    def expect_ends(self) -> None:
        """Report no worker any more that ends."""
        self.ending = True

    async def stop(self, timeout: timedelta) -> None:
        """Tell the stages to stop, and wait until none computes any more, or the time is over."""
        self.ending = True
        if self._watching is None:
            return  # no stage runs yet
        self._watching.cancel()
        deadline = Deadline(timeout)
        await self.tell({"type": "stop"})
        await self._until(
            lambda: self._gave_up or deadline.expired() or all(m.stopped for m in self.members),
            lambda: None,
            self._turn_s(deadline),
        )

    async def give_up(self) -> None:
        """Have `stop` wait for nobody."""
        self.ending = self._gave_up = True
        self._changed.set()

    async def leave(self, *, failed: bool) -> None:
        """Tell the workers to end, and close their connections."""
        self.ending = True
        self._opened.close()
        remove_left_behind(m.door for m in self.members if m.door is not None)
        await self.tell({"type": "exit", "failed": failed})
        there = [member.stream for member in self.members if member.ended is None]
        if there:
            await asyncio.wait(
                [asyncio.ensure_future(stream.sent()) for stream in there], timeout=_LEAVE_S
            )
        for member in self.members:
            member.stream.close()
        self._listener.drop_local()
        self._listener.running = ()


async def _clock_of(member: Member) -> Reading:
    """Read a worker's clock several times, and keep the reading with the shortest round trip."""
    readings = []
    for _ in range(_READINGS):
        sent = time.monotonic_ns()
        answer = await member.ask({"type": "clock", "ns": None}, "clock", _CLOCK_S)
        if answer is None:
            raise MessageTimeout(
                f"worker {member.name!r} did not say within {_CLOCK_S:g} s what its clock shows; "
                "is it stopped, or its machine overloaded?"
            )
        record, received = answer
        readings.append(Reading(sent, int(record["ns"]), received))
    found = best(readings)
    # Processes of one kernel share the monotonic clock, unless a container has its own time
    # namespace: then the offset is larger than the error of the reading.
    if member.same_clock and abs(found.offset) <= found.error:
        return Reading(found.answered, found.answered, found.answered)
    return found


def status_of(members: Sequence[Member]) -> list[dict[str, Any]]:
    """Describe every worker process, for `pipedream-rt status`."""
    now = time.monotonic()
    return [
        {
            "name": member.name,
            "stages": member.hosts,
            "process": member.description,
            "silent_s": now - member.heard,
            "rss": int(member.beat.get("rss", 0)),
            "doing": str(member.beat.get("doing", "")),
        }
        for member in members
    ]
