"""How the first machine asks the others: as the coordinator of a job that has no stages.

The machines join it as workers do, and form a group, whose links are measured. Between the
admission and the end of a job these records take the place of training::

    first                       other
    examine         ->          the folder that is to be shared, and the token in its file
                    <- findings what the machine has found
    clock           ->
                    <- clock    its time of day, in nanoseconds
    welcome, door, doors, joined    as of every job
    measure         ->          the rank of another machine, to which the link is measured
                    <- findings what the link is like
    exit            ->          nothing more is asked
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from pipedream_rt.cluster.addresses import address_towards, host_to_listen_at, joined, listening
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.control_loop import until
from pipedream_rt.cluster.dial import DialOptions, ask_to_join, expect, reached
from pipedream_rt.cluster.engines import NodeJob
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.cluster.peer_links import PeerLinks
from pipedream_rt.cluster.peer_listeners import PeerAddress, PeerListeners, listening_for_peers
from pipedream_rt.cluster.records import Record, welcome
from pipedream_rt.cluster.roster import Member
from pipedream_rt.deadline import Deadline
from pipedream_rt.doctor.facts import Facts, facts, token_file
from pipedream_rt.doctor.judgement import MeasuredLink
from pipedream_rt.doctor.links import Probe
from pipedream_rt.errors import ConfigError, PipelineError
from pipedream_rt.transport.group import Group

_ANSWER_S = 60.0
"""Seconds for a machine to examine itself, which imports torch, or to measure a link."""

_MEETING = timedelta(seconds=15)
"""The time for machines to connect to each other; one that is not reached then cannot be."""

_CLOCK_READINGS = 5


@dataclass(slots=True)
class Found:
    """The findings of all machines; the arguments of `judge`.

    Attributes:
        links: By caller and called.
        clocks: Seconds ahead of the first machine's.
        refused: Why a machine was refused, by its name.
        addresses: Announced by the machine, and as the first one sees it.
    """

    machines: dict[str, Facts] = field(default_factory=dict)
    links: dict[tuple[str, str], MeasuredLink] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, tuple[str, str]] = field(default_factory=dict)


def examine_self(folder: str, source: str) -> Found:
    """Look at this machine alone."""
    with _written(folder) as token:
        return Found({socket.gethostname(): facts(folder, token, source)})


def look_at_all(job: NodeJob, folder: str, source: str, patience: timedelta) -> Found:
    """Ask all machines of a job, as the first one; wait for them as long as ``patience``."""
    node, deadline = job.node, Deadline(patience)
    secret = job.secret(deadline)
    with ExitStack() as opened:
        listener = opened.enter_context(
            listening(host_to_listen_at(node.host, alone=False), node.port)
        )
        token = opened.enter_context(_written(folder))
        found = Found({"first": facts(folder, token, source)})
        asyncio.run(_look(found, listener, secret, node.size - 1, folder, token, deadline))
    return found


async def _look(
    found: Found, listening: socket.socket, secret: Secret, count: int, folder: str, token: str,
    deadline: Deadline,
) -> None:  # fmt: skip
    """Wait for the other machines, and ask them one after another."""
    listener = Listener(secret, listening)
    listener.roster.most = count
    listener.open()
    try:
        # A peer that does not know the secret is no machine of the job, and does not count.
        def enough() -> bool:
            return len(listener.roster.coming) + len(listener.roster.refused) >= count

        await until(listener.changed, enough, deadline)
        found.refused.update(listener.roster.refused)
        members = sorted(listener.roster.taken(), key=lambda member: member.name)
        await listener.rest()
        for member in members:
            found.machines[member.name] = await _examined(listener, member, folder, token)
        for member in members:
            found.clocks[member.name] = await _ahead_s(listener, member)
        if members:
            await _measure_links(listener, members, secret, found)
        for member in members:
            member.connection.send({"type": "exit", "failed": False})
            await member.connection.sent()
            member.connection.close()
    finally:
        await listener.close()


async def _examined(listener: Listener, member: Member, folder: str, token: str) -> Facts:
    """Have a machine examine itself; empty if it does not answer."""
    question = {"type": "examine", "folder": folder, "token": token}
    answer = await listener.ask(member, question, "findings", _ANSWER_S)
    try:
        return dict(json.loads(answer[0]["text"])) if answer else {}
    except (ValueError, TypeError, RecursionError):  # as one that does not answer
        return {}


async def _ahead_s(listener: Listener, member: Member) -> float:
    """Return the seconds by which the clock of a machine is ahead of this one's."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        before = time.time_ns()
        answer = await listener.ask(member, {"type": "clock", "ns": None}, "clock", _ANSWER_S)
        after = time.time_ns()
        if answer is not None:
            readings.append((after - before, answer[0]["ns"] - (before + after) / 2))
    return min(readings)[1] / 1e9 if readings else 0.0  # the shortest round trip errs the least


async def _measure_links(
    listener: Listener, members: list[Member], secret: Secret, found: Found
) -> None:
    """Form a group with all machines, and measure each link from both of its ends."""
    names, deadline = ("first", *(member.name for member in members)), Deadline(2 * _MEETING)
    with listening_for_peers(members[0].connection.local_host) as doors:
        for rank, member in enumerate(members, 1):
            member.connection.send(welcome(rank, names, doors.address.host))
        await until(
            listener.changed, lambda: all(m.peer_address or m.ended for m in members), deadline
        )
        there = {m.name: m.peer_address for m in members if m.peer_address is not None}
        at = {"first": doors.address, **there}
        for member in members:
            member.connection.send({"type": "doors", "by_name": at})
        probe = await _probe(0, names, secret, doors, at)
    try:
        await until(
            listener.changed, lambda: all(m.met is not None or m.ended for m in members), deadline
        )
        found.addresses.update(
            (m.name, (m.peer_address.host, m.connection.remote_host))
            for m in members
            if m.peer_address and not m.ended
        )
        loop = asyncio.get_running_loop()
        for rank, called in enumerate(names):
            if rank:
                measured = await loop.run_in_executor(None, probe.measure, rank)
                found.links["first", called] = measured
        # One link after another: two at a time might share a cable.
        for own_rank, member in enumerate(members, 1):
            for rank, called in enumerate(names):
                if rank != own_rank:
                    question = {"type": "measure", "rank": rank}
                    answer = await listener.ask(member, question, "findings", _ANSWER_S)
                    found.links[member.name, called] = _link_of(answer and answer[0])
    finally:
        probe.close()


async def _probe(
    rank: int,
    names: tuple[str, ...],
    secret: Secret,
    doors: PeerListeners,
    at: Mapping[str, PeerAddress],
) -> Probe:
    """Connect to the other machines, as far as they can be reached."""
    group = Group(generation=0, rank=rank, names=names, hosts=(), key=b"")
    addresses = {other: at[name] for other, name in enumerate(names) if name in at}
    links = PeerLinks(group, secret, doors, addresses, Deadline(_MEETING))
    return Probe(await links.reach(), links.problems)


def _link_of(answer: Record | None) -> MeasuredLink:
    """Read the record of a machine about a link."""
    if answer is None:
        return MeasuredLink(None, 0.0, f"no answer within {_ANSWER_S:g} s")
    try:
        read = json.loads(str(answer["text"]))
        late = read["latency_s"]
        return MeasuredLink(
            None if late is None else float(late), float(read["bandwidth"]), str(read["problem"])
        )
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        problem = f"malformed answer {answer['type']!r}: {error!r}"
        return MeasuredLink(None, 0.0, f"{problem}; is it pipedream-rt of the same version?")


def answer_examiner(job: NodeJob, source: str, patience: timedelta) -> str:
    """Answer the first machine until it asks nothing more; return why it refused, else nothing."""
    node = job.node
    secret = job.secret(Deadline(patience))
    options = DialOptions(joined(node.host, node.port), patience.total_seconds(), known=True)
    name = node.name or f"node-{node.rank}"
    try:
        control = reached(options, "the first machine", secret)
    except PipelineError as error:
        return str(error)
    with ExitStack() as opened:
        opened.callback(control.close)
        try:
            ask_to_join(control, name, secret)
        except PipelineError as error:
            return str(error)
        probe: Probe | None = None
        while True:
            record = control.receive(Deadline(None))  # the others have their turn meanwhile
            match record["type"]:
                case "examine":
                    seen = facts(record["folder"], record["token"], source)
                    control.send({"type": "findings", "text": json.dumps(seen)})
                case "clock":
                    control.send({"type": "clock", "ns": time.time_ns()})
                case "welcome":
                    probe = _joined(control, record, secret, address_towards(options.address))
                    opened.callback(probe.close)
                case "measure" if probe is not None:
                    link = probe.measure(record["rank"])
                    control.send({"type": "findings", "text": json.dumps(asdict(link))})
                case _:
                    return ""


def _joined(control: Control, record: Record, secret: Secret, host: str) -> Probe:
    """Join the group of the machines."""
    with listening_for_peers(host) as doors:
        control.send({"type": "door", "at": doors.address})
        answer = control.receive(Deadline(2 * _MEETING))
        expect(answer, "doors")
        at = {name: PeerAddress(*each) for name, each in answer["by_name"].items()}
        probe = asyncio.run(_probe(record["rank"], tuple(record["names"]), secret, doors, at))
    control.send({"type": "joined", "nearby": []})
    return probe


@contextmanager
def _written(folder: str) -> Iterator[str]:
    """Let the folder have the file that shows whether machines share it, within the block."""
    token = secrets.token_hex(16)
    if not folder:
        yield token
        return
    path = token_file(folder, token)
    try:
        path.write_text(token)
    except OSError as error:
        raise ConfigError(f"the shared folder cannot be written to: {error}") from error
    try:
        yield token
    finally:
        path.unlink(missing_ok=True)
