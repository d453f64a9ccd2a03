"""The life of one generation of workers: it is gathered, forms a group, is watched, and ends.

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
from pipedream_rt.cluster.elsewhere import Elsewhere
from pipedream_rt.cluster.identity import NONCE
from pipedream_rt.cluster.interface import ClusterSpec, memoized_error
from pipedream_rt.cluster.listener import Departure, Listener
from pipedream_rt.cluster.local import Local
from pipedream_rt.cluster.members import (
    JoiningFailed,
    Member,
    WorkerSlot,
    is_of_its_own,
    natural,
)
from pipedream_rt.cluster.peer_links import PeerLinks
from pipedream_rt.cluster.peer_listeners import (
    PeerAddress,
    PeerListeners,
    listening_for_peers,
    remove_left_behind,
)
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
        members: The workers that have joined, in the order of ranks; empty until `gather` has
            ended, also by an error.
        silent: Names of the workers that were reported lost because they were silent.
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
        self._peer_listeners: PeerListeners | None = None

    async def _until(
        self, condition: Callable[[], bool], check: Callable[[], object], seconds: float
    ) -> None:
        """Wait until a condition holds; ``check`` may raise, at each change and after a time."""
        while True:
            self._changed.clear()
            check()
            if condition():
                return
            try:
                await within(self._changed.wait(), seconds)
            except asyncio.TimeoutError:
                continue

    # -- gather ---------------------------------------------------------------------------------

    async def gather(self, deadline: Deadline) -> None:
        """Gather members until each has imported torch, and assign them their work."""
        listener, assignment = self._listener, self._spec.assignment
        began = time.monotonic()
        last_joined, count = began, 0

        def check() -> None:
            nonlocal last_joined, count
            if listener.is_closed:
                raise PipelineClosed("the pipeline was closed while it waited for workers")
            departures, listener.departures = listener.departures, []
            for departure in departures:
                self._note_departure(departure)
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
            if len(listener.members) > count:
                last_joined = time.monotonic()
            count = len(listener.members)

        def complete() -> bool:
            """Whether all have joined, or enough and the others are late."""
            members = listener.members
            if len(members) < assignment.fewest or not all(member.ready for member in members):
                return False
            late = time.monotonic() - last_joined >= assignment.wait.total_seconds()
            return len(members) in (assignment.most, listener.expected) or late

        # The last generation has ended: its workers come back under the names that they had.
        listener.running, listener.most = (), assignment.most
        for name, connection in self._local.connections.items():
            listener.take(connection, name)
        listener.open()
        try:
            await self._until(complete, check, self._turn_s(deadline))
        finally:
            # Also after an error: whoever has joined must hear the end from this generation. Taken
            # before the wait below, in which another may join, for the next one.
            self.members += listener.taken()
            if not assignment.stays_open:
                await listener.rest()  # while the generation runs, nobody may join
            listener.running = self.members
            listener.most = assignment.most - len(self.members)
        self._assign()

    def _turn_s(self, deadline: Deadline) -> float:
        """Seconds until the deadlines are checked again, if nothing changes."""
        waits = (1.0, self._heartbeat_s / 4, deadline.remaining_s())
        return max(0.01, min(wait for wait in waits if wait is not None))

    def _assign(self) -> None:
        """Assign the members their work, in the order of their names."""
        plan, assignment, count = self._spec.plan, self._spec.assignment, len(self.members)
        # Not in the order in which they have joined, which differs from run to run: a stage would
        # move to another machine, whose kernels may round differently.
        self.members.sort(key=lambda member: natural(member.name))
        work = assignment.workers_by_process(plan.workers, count)
        for member, workers in zip(self.members, work, strict=True):
            member.slots = [WorkerSlot(w, plan.name_of(w), plan.stages_of(w)) for w in workers]
            member.stage = plan.stage_of(member.stages[0])
        if count < plan.workers and not assignment.seats:
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

    def _note_departure(self, departure: Departure) -> None:
        """Log the end of a worker from elsewhere; that of one started here is an error."""
        name, error = departure.name, departure.error
        if not departure.is_local:
            self._listener.log_departure(departure)
        elif departure.member is not None:
            raise departure.member.lost(self._local.ending(name), error) from error
        else:
            how = self._local.ending(name)
            raise WorkerLost(
                f"worker {name!r} ended before it joined ({how}); its output says why"
                if isinstance(error, PeerLost)
                else f"worker {name!r} cannot join: {error}",
                worker=name,
                stage=None,
                crashed=is_of_its_own(how),
            ) from error

    def _missing(self, deadline: Deadline) -> RendezvousTimeout:
        """Name the workers that did not join in time, and what to do."""
        listener, needed = self._listener, self._spec.assignment.fewest
        admitted = {m.name for m in listener.members}
        unready = (
            {m.name for m in listener.members if not m.ready} if len(admitted) >= needed else set()
        )
        expected = {*self._local.connections, *admitted}
        joined = sorted(admitted - unready, key=natural)
        absent = sorted(expected.difference(joined), key=natural)
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
        """Send each member its welcome, and return the group with its key."""
        # Drawn for each generation: what a member of an earlier one has signed, or sends late, is
        # nothing here, also where an earlier life of the script has counted up to this number.
        spec, nonce = self._spec, secrets.token_bytes(NONCE)
        names = (COORDINATOR_NAME, *(member.name for member in self.members))
        by_address = {a: index for index, member in enumerate(self.members) for a in member.stages}
        hosts = tuple(by_address[address] for address in spec.plan.addresses)
        # Members that have all joined within this machine meet each other at Unix sockets.
        far = any(not member.nearby for member in self.members)
        listeners = self._peer_listeners = self._opened.enter_context(
            listening_for_peers(self._meeting_host() if far else None)
        )
        for rank, member in enumerate(self.members, 1):
            member.heard = time.monotonic()  # it had nothing to send so far
            member.stream.send(
                welcome(
                    rank,
                    names,
                    listeners.address.host,
                    nonce=nonce,
                    beat_s=self._heartbeat_s / 4,
                    seats=[[w, title, list(stages)] for w, title, stages in member.slots],
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
        """Connect this process to all members, once the addresses of all are known to all."""
        assert self._peer_listeners is not None
        welcomed = time.monotonic()

        def check() -> None:
            self._check_forming(deadline)
            for member in self.members:
                quiet = member.peer_address is None and member.met is None
                if quiet and time.monotonic() - welcomed > self._heartbeat_s:
                    note = " (it has not answered its welcome within the heartbeat)"
                    raise member.lost(self._local.ending(member.name), note=note)

        try:
            turn = self._turn_s(deadline)
            await self._until(lambda: all(m.peer_address for m in self.members), check, turn)
            by_name = {COORDINATOR_NAME: self._peer_listeners.address}
            by_name |= {m.name: m.peer_address for m in self.members if m.peer_address is not None}
            self._refuse_unreachable(by_name)
            for member in self.members:
                member.stream.send({"type": "doors", "by_name": by_name})
            by_rank = {group.names.index(name): address for name, address in by_name.items()}
            links = PeerLinks(group, self._listener.secret, self._peer_listeners, by_rank, deadline)
            met: Connections = await self._while_checking(links.meet(), deadline)
            return met
        finally:
            self._opened.close()  # the group is complete, or will never be: nothing listens

    async def _while_checking(self, awaited: Any, deadline: Deadline) -> Any:
        """Wait for a coroutine or a future, and check the members meanwhile."""
        check = functools.partial(self._check_forming, deadline)
        task = asyncio.ensure_future(awaited)
        task.add_done_callback(lambda _: self._changed.set())
        try:
            await self._until(task.done, check, self._turn_s(deadline))
            return await task
        finally:
            task.cancel()
            # It lets go of the listeners first: a socket that is closed before its reader is
            # removed leaves that behind, and the next one of its number would never be heard.
            await asyncio.gather(task, return_exceptions=True)

    def _check_forming(self, deadline: Deadline) -> None:
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

    def _refuse_unreachable(self, addresses: Mapping[str, PeerAddress]) -> None:
        """Refuse a member that listens on loopback while others listen elsewhere."""
        hosts = {name: at.host for name, at in addresses.items() if at.host}
        inside = [name for name, host in hosts.items() if is_loopback(host)]
        if inside and len(inside) < len(hosts):
            where = ", ".join(f"{name} {at.in_words}" for name, at in addresses.items() if at.host)
            raise RendezvousTimeout(
                f"{', '.join(map(repr, inside))} of the group cannot be reached from other "
                f"machines: the addresses are {where}; start such a worker with --bind and a "
                "network interface that has an address",
                missing=len(inside),
            )

    async def all_joined(self, joining: Future[None], deadline: Deadline) -> None:
        """Wait until all members have joined, and this process in another thread."""
        await self._while_checking(asyncio.wrap_future(joining), deadline)
        check = functools.partial(self._check_forming, deadline)
        everybody = self.members
        await self._until(
            lambda: all(m.met is not None for m in everybody), check, self._turn_s(deadline)
        )

    async def broadcast(self, record: Record) -> None:
        """Send a record to all members whose connections stand."""
        for member in self.members:
            if member.ended is None:
                member.stream.send(record)

    def host_ids(self) -> dict[str, str]:
        """Per worker, the id of its host: workers with equal ids share memory; empty for none."""
        met = {rank: {rank, *(m.met or ())} - {0} for rank, m in enumerate(self.members, 1)}
        return {
            # All of one host have met each other at Unix sockets: memory goes over those only.
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
            self._member_changed(member)  # it may have ended before it was watched
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
        """Name a lost worker, and say how it ended if that is known; may block for a second."""
        name = member.name
        own = name in self._local.processes
        how = self._local.ending(name) if own else self._elsewhere.ending(name)
        return member.lost(how, problem, note)

    async def stories(self) -> list[str]:
        """Ask every worker what it waits for; it has `_STORY_S` to answer."""
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
        """Read the clocks of all members."""
        # One after another: answers to several questions at once would wait for each other here,
        # and the round trip is the error of a reading.
        return [await _clock_of(member) for member in self.members]

    # -- end ------------------------------------------------------------------------------------

    def expect_ends(self) -> None:
        """Take the end of a worker for no failure any more."""
        self.ending = True

    async def stop(self, timeout: timedelta) -> None:
        """Stop the stages, and wait until none computes any more, or the time is over."""
        self.ending = True
        if self._watching is None:
            return  # no stage runs yet
        self._watching.cancel()
        deadline = Deadline(timeout)
        await self.broadcast({"type": "stop"})
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
        """End the workers, and close their connections."""
        self.ending = True
        self._opened.close()
        remove_left_behind(m.peer_address for m in self.members if m.peer_address is not None)
        await self.broadcast({"type": "exit", "failed": failed})
        standing = [member.stream for member in self.members if member.ended is None]
        if standing:
            # A record that has not left goes with its connection, and the worker would take this
            # process for dead.
            await asyncio.wait(
                [asyncio.ensure_future(stream.sent()) for stream in standing], timeout=_LEAVE_S
            )
        for member in self.members:
            member.stream.close()
        self._listener.drop_local()
        self._listener.running = ()  # their names are free for the next generation


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
