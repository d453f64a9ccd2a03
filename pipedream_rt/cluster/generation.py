"""The life of one generation of workers: it is gathered, forms a group, is watched, and ends.

Each part is a coroutine of the control plane's event loop. The roster decides (`roster.py`); here
its instructions are carried out, and the script's thread waits for them.
"""

from __future__ import annotations

import asyncio
import functools
import math
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
from pipedream_rt.cluster.control_loop import until, within
from pipedream_rt.cluster.elsewhere import Elsewhere
from pipedream_rt.cluster.identity import NONCE
from pipedream_rt.cluster.interface import ClusterSpec, memoized_error
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.local import Local
from pipedream_rt.cluster.peer_links import PeerLinks
from pipedream_rt.cluster.peer_listeners import (
    PeerAddress,
    PeerListeners,
    listening_for_peers,
    remove_left_behind,
)
from pipedream_rt.cluster.records import Record, welcome
from pipedream_rt.cluster.roster import (
    Close,
    End,
    Event,
    Form,
    Gather,
    GiveUp,
    Instruction,
    Kill,
    Leave,
    Loss,
    Meet,
    Member,
    Met,
    Missing,
    Report,
    Start,
    Stop,
    Stopped,
    Tick,
    Watch,
    Welcome,
)
from pipedream_rt.cluster.worker_life import is_of_its_own
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import (
    MessageTimeout,
    PeerLost,
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

_CLOCK: Record = {"type": "clock", "ns": None}
"""Asks a worker what its clock shows."""


class Generation:
    """The workers of one generation, in the event loop of the control plane.

    What is decided of them is the roster's; here it is carried out, and awaited.

    Attributes:
        members: The workers that have joined, in the order of ranks; empty until `gather` has
            ended, also by an error.
        silent: Names of the workers that were reported lost because they were silent.
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
        self._done: set[type] = set()  # the types of the instructions that have come
        self._end: End | None = None
        self._addresses: Mapping[str, PeerAddress] = {}
        self._opened = ExitStack()  # of what the group needs while it forms, or while it is watched
        self._peer_listeners: PeerListeners | None = None

    @property
    def _is_current(self) -> bool:
        """Whether the roster has this generation: not before `gather`, nor after the next one."""
        return self._listener.generation == self._carry_out

    def _handle(self, event: Event) -> None:
        """Have the roster take an event, if it has this generation."""
        if self._is_current:
            self._listener.handle(event)

    def _carry_out(self, instruction: Instruction) -> None:
        """Carry out an instruction of the roster that is not for a connection."""
        match instruction:
            case Report(loss):
                # How it ended may take a second to find out, so others ask.
                self._spec.fail(memoized_error(functools.partial(self._loss_in_run, loss)))
            case Kill(name):
                self.silent.add(name)
            case End():
                self._end = instruction
            case Meet(addresses):
                self._addresses = addresses
        self._done.add(type(instruction))

    async def _until(self, condition: Callable[[], bool], deadline: Deadline) -> None:
        """Wait until a condition holds; raise what ends the wait."""
        while True:
            self._changed.clear()
            self._handle(Tick())
            if self._end is not None:
                raise self._error_of(self._end.cause)
            if condition():
                return
            try:
                await within(self._changed.wait(), self._turn_s(deadline))
            except asyncio.TimeoutError:
                continue

    def _turn_s(self, deadline: Deadline) -> float:
        """Seconds until the roster hears of the time again, if nothing else comes."""
        waits = (1.0, self._heartbeat_s / 4, deadline.remaining_s())
        return max(0.01, min(wait for wait in waits if wait is not None))

    def _error_of(self, cause: PipelineError | Loss | Missing) -> PipelineError:
        """Return the error of what ends a wait; may block for a second."""
        match cause:
            case Missing(text, missing):
                return RendezvousTimeout(
                    f"{text}; {self._elsewhere.missing()}, or give Pipeline "
                    "recovery=Recovery(start=...) with more time",
                    missing=missing,
                )
            case Loss(name, member, error, note):
                how = self._local.ending(name)
                if member is not None:
                    return member.lost(how, error, note)
                lost = WorkerLost(
                    f"worker {name!r} ended before it joined ({how}); its output says why"
                    if isinstance(error, PeerLost)
                    else f"worker {name!r} cannot join: {error}",
                    worker=name,
                    stage=None,
                    crashed=is_of_its_own(how),
                )
                lost.__cause__ = error
                return lost
        return cause

    # -- gather ---------------------------------------------------------------------------------

    async def gather(self, deadline: Deadline) -> None:
        """Gather members until each has imported torch, and assign them their work."""
        listener, assignment = self._listener, self._spec.assignment
        timeout_s = deadline.timeout.total_seconds() if deadline.timeout else 0.0
        listener.generation = self._carry_out
        for name, connection in self._local.connections.items():
            listener.take(connection, name)
        end, plan = _moment(deadline), self._spec.plan
        self._handle(Gather(plan, assignment, end, timeout_s, self._heartbeat_s))
        try:
            listener.open()
            await self._until(lambda: Welcome in self._done, deadline)
        finally:
            if Welcome not in self._done:
                self._handle(Close())  # whoever has joined must hear the end from this generation
            self.members = [*listener.roster.members]
            if not assignment.stays_open:
                await listener.rest()  # while the generation runs, nobody may join

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
            member.connection.send(
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
        self._handle(Form(COORDINATOR_NAME, listeners.address, _moment(deadline)))
        return Group(
            generation=spec.generation,
            rank=0,
            names=names,
            hosts=hosts,
            key=self._listener.secret.group_key(nonce),
        )

    def _meeting_host(self) -> str:
        """Address of this machine that every member reaches: no loopback if one is elsewhere."""
        hosts: list[str] = [m.connection.local_host for m in self.members if not m.nearby]
        return next((h for h in hosts if not is_loopback(h)), hosts[0])

    async def connect(self, group: Group, deadline: Deadline) -> Connections:
        """Connect this process to all members, once the addresses of all are known to all."""
        assert self._peer_listeners is not None
        try:
            await self._until(lambda: Meet in self._done, deadline)
            by_rank = {group.names.index(name): at for name, at in self._addresses.items()}
            links = PeerLinks(group, self._listener.secret, self._peer_listeners, by_rank, deadline)
            met: Connections = await self._beside(links.meet(), deadline)
            return met
        finally:
            self._opened.close()  # the group is complete, or will never be: nothing listens

    async def _beside(self, awaited: Any, deadline: Deadline) -> Any:
        """Wait for a coroutine or a future, unless the roster ends the wait."""
        task = asyncio.ensure_future(awaited)
        task.add_done_callback(lambda _: self._changed.set())
        try:
            await self._until(task.done, deadline)
            return await task
        finally:
            task.cancel()
            # It lets go of the listeners first: a socket that is closed before its reader is
            # removed leaves that behind, and the next one of its number would never be heard.
            await asyncio.gather(task, return_exceptions=True)

    async def all_joined(self, joining: Future[None], deadline: Deadline) -> None:
        """Wait until all members have joined, and this process in another thread."""
        await self._beside(asyncio.wrap_future(joining), deadline)
        self._handle(Met())
        await self._until(lambda: Start in self._done, deadline)

    async def broadcast(self, record: Record) -> None:
        """Send a record to all members whose connections stand."""
        for member in self.members:
            if member.ended is None:
                member.connection.send(record)

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
        self._handle(Watch())
        self._opened.callback(asyncio.get_running_loop().create_task(self._tick()).cancel)
        self._watch_forks()

    async def _tick(self) -> None:
        """Let the roster hear of the time, so that it notices who is silent."""
        while True:
            await asyncio.sleep(self._heartbeat_s / 4)
            self._handle(Tick())

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

    def _loss_in_run(self, loss: Loss) -> WorkerLost:
        """Name a worker that was lost while the generation ran; may block for a second."""
        assert loss.member is not None
        return self.loss_of(loss.member, note=loss.note)

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
            *(self._listener.ask(each, question, "story", _STORY_S) for each in self.members)
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
        return [await self._clock_of(member) for member in self.members]

    async def _clock_of(self, member: Member) -> Reading:
        """Read a worker's clock several times; keep the reading with the shortest round trip."""
        readings = []
        for _ in range(_READINGS):
            sent = time.monotonic_ns()
            answer = await self._listener.ask(member, _CLOCK, "clock", _CLOCK_S)
            if answer is None:
                raise MessageTimeout(
                    f"worker {member.name!r} did not say within {_CLOCK_S:g} s what its clock "
                    "shows; is it stopped, or its machine overloaded?"
                )
            record, received = answer
            readings.append(Reading(sent, int(record["ns"]), received))
        found = best(readings)
        # Processes of one kernel share the monotonic clock, unless a container has its own time
        # namespace: then the offset is larger than the error of the reading.
        if member.same_clock and abs(found.offset) <= found.error:
            return Reading(found.answered, found.answered, found.answered)
        return found

    async def expected(self) -> int:
        """Expect the members that are ready for the next generation; return how many they are."""
        return self._listener.roster.expect()

    # -- end ------------------------------------------------------------------------------------

    def expect_ends(self) -> None:
        """Report no worker any more that ends."""
        self._handle(Close())

    async def stop(self, timeout: timedelta) -> None:
        """Stop the stages, and wait until none computes any more, or the time is over."""
        deadline = Deadline(timeout)
        self._handle(Stop(_moment(deadline)))
        if self._is_current:
            await until(self._changed, lambda: Stopped in self._done, deadline)

    async def give_up(self) -> None:
        """Have `stop` wait for nobody."""
        self._handle(GiveUp())

    async def leave(self, *, failed: bool) -> None:
        """End the workers, and close their connections."""
        self._opened.close()
        remove_left_behind(m.peer_address for m in self.members if m.peer_address is not None)
        self._handle(Leave(failed))
        await self._listener.drained()


def _moment(deadline: Deadline) -> float:
    """Return a deadline as a time of the monotonic clock."""
    left_s = deadline.remaining_s()
    return math.inf if left_s is None else time.monotonic() + left_s


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
