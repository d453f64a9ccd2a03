"""How the first machine asks the others, by a few records after the handshake of a worker.

    first                       other
    call, hello, admitted       as for a worker; see `pipedream_rt.cluster.control`
    examine         ->          the folder that is to be shared, and the token in its file
                    <- findings what the machine has found
    clock           ->
                    <- clock    its time of day, in nanoseconds
    answer calls    ->
                    <- call on  where it answers measurements, and the nonce that callers show
    call on         ->          the machine measures the link to another one
                    <- findings what the link is like
    exit            ->          nothing more is asked

The connection is signed and encrypted as that of a worker. Measurements go over connections of
their own, in the clear.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from pipedream_rt.cluster.addresses import address_towards, host_to_listen_at, joined, listening
from pipedream_rt.cluster.admission import admit, refusal_of
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.control_records import Record
from pipedream_rt.cluster.dial import DialOptions, ask_to_join, reached
from pipedream_rt.cluster.engines import Membership
from pipedream_rt.cluster.environment import tls_of_environment
from pipedream_rt.cluster.handshakes import Handshakes, answer_all
from pipedream_rt.cluster.keys import Handshake, Secret
from pipedream_rt.cluster.members import Member
from pipedream_rt.deadline import Deadline
from pipedream_rt.doctor.facts import Facts, facts, token_file
from pipedream_rt.doctor.judgement import MeasuredLink
from pipedream_rt.doctor.links import Echo, measure
from pipedream_rt.errors import ConfigError, MessageTimeout, PeerLost, PipelineError, TransportError
from pipedream_rt.transport.tls import Tls

_ANSWER = timedelta(seconds=60)
"""For a machine to examine itself, which imports torch, or to measure a link."""

_SENT = timedelta(seconds=2)
"""For the last records to leave, where they are encrypted."""

_CLOCK_READINGS = 5


@dataclass(slots=True)
class Found:
    """What was found of all machines; the arguments of `judge`.

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


def look_at_all(job: Membership, folder: str, source: str, patience: timedelta) -> Found:
    """Ask all machines of a job, as the first one; wait for them as long as ``patience``."""
    node, deadline = job.node, Deadline(patience)
    secret = job.secret(deadline)
    found = Found()
    with ExitStack() as opened:
        listener = opened.enter_context(
            listening(host_to_listen_at(node.host, alone=False), node.port)
        )
        token = opened.enter_context(_written(folder))
        mine = facts(folder, token, source)
        tls = tls_of_environment()
        # Registered before the connections, so it runs once they are closed, and sends the rest.
        if tls is not None:
            opened.callback(lambda: tls.finish(Deadline(_SENT)))
        members = _gathered(listener, secret, node.size - 1, deadline, found.refused, tls)
        for member in members:
            opened.callback(member.control.close)
        found.machines["first"] = mine
        for member in members:
            found.machines[member.name] = _examined(member, folder, token)
        found.clocks.update({member.name: _ahead_s(member.control) for member in members})
        if members:
            doors = _measure_links(members, found.links)
            found.addresses.update(
                (member.name, (str(doors[member.name]["host"]), member.control.remote_host))
                for member in members
                if member.name in doors
            )
        for member in members:
            with suppress(PeerLost):
                member.control.send({"type": "exit", "failed": False})
    job.finish()
    return found


def answer_examiner(job: Membership, source: str, patience: timedelta) -> str:
    """Answer the first machine until it asks nothing more; return why it refused, else nothing."""
    node = job.node
    secret = job.secret(Deadline(patience))
    place = DialOptions(joined(node.host, node.port), patience.total_seconds(), known=True)
    tls = tls_of_environment()
    control = reached(place, "the first machine", tls)
    name = node.name or f"node-{node.rank}"
    with ExitStack() as opened:
        if tls is not None:
            opened.callback(lambda: tls.finish(Deadline(_SENT)))
        opened.callback(control.close)
        try:
            ask_to_join(control, name, secret, _ANSWER)
        except PipelineError as error:
            return str(error)
        host = address_towards(place.address)
        echo = Echo(host)
        opened.callback(echo.close)
        while True:
            record = control.receive(Deadline(None))  # the others have their turn meanwhile
            match record["type"]:
                case "examine":
                    seen = facts(record["folder"], record["token"], source)
                    control.send({"type": "findings", "text": json.dumps(seen)})
                case "clock":
                    control.send({"type": "clock", "ns": time.time_ns()})
                case "answer calls":
                    control.send(
                        {"type": "call on", "host": host, "port": echo.port, "nonce": echo.nonce}
                    )
                case "call on":
                    link = measure(record["host"], record["port"], record["nonce"])
                    control.send({"type": "findings", "text": json.dumps(asdict(link))})
                case _:
                    return ""


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


def _gathered(
    listener: socket.socket,
    secret: Secret,
    count: int,
    deadline: Deadline,
    refused: dict[str, str],
    tls: Tls | None,
) -> list[Member]:
    """Wait until ``count`` machines have come, or the time is over; note which are refused."""
    members: list[Member] = []

    def answer(callers: Handshakes, control: Control, hello: Record, talk: Handshake) -> None:
        refusal = refusal_of(hello, talk, members)
        if refusal is None:
            members.append(admit(control, hello, talk))
            return
        callers.refuse(control, talk, hello, refusal, logging.WARNING)
        # Who has not proven the secret is no machine of the job, and takes no place in the count.
        if refusal.proven:
            refused[str(hello["name"])] = refusal.reason

    def enough() -> bool:
        return len(members) + len(refused) >= count

    answer_all(listener, secret.job_key(), answer, enough, deadline, tls)
    return sorted(members, key=lambda member: member.name)


def _examined(member: Member, folder: str, token: str) -> Facts:
    """Have a machine examine itself; empty if it does not answer."""
    said = _asked(member.control, {"type": "examine", "folder": folder, "token": token})
    return dict(json.loads(said["text"])) if said["type"] == "findings" else {}


def _ahead_s(control: Control) -> float:
    """Return the seconds by which the clock of a machine is ahead of this one's."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        before = time.time_ns()
        there = _asked(control, {"type": "clock", "ns": None}).get("ns")
        after = time.time_ns()
        if there is not None:
            readings.append((after - before, there - (before + after) / 2))
    return min(readings)[1] / 1e9 if readings else 0.0  # the shortest round trip errs the least


def _measure_links(
    members: list[Member], links: dict[tuple[str, str], MeasuredLink]
) -> dict[str, Record]:
    """Measure each link from both of its ends; return where each machine answers."""
    own_host = members[0].control.local_host
    echo = Echo(own_host)
    try:
        doors: dict[str, Record] = {
            "first": {"host": own_host, "port": echo.port, "nonce": echo.nonce}
        }
        for member in members:
            door = _asked(member.control, {"type": "answer calls"})
            if door["type"] == "call on":
                doors[member.name] = door
        for called, door in doors.items():
            if called != "first":
                links["first", called] = measure(door["host"], door["port"], door["nonce"])
        # One link after another: two at a time might share a cable.
        for member in members:
            for called, door in doors.items():
                if called != member.name:
                    said = _asked(member.control, {**door, "type": "call on"})
                    links[member.name, called] = _link_of(said)
        return doors
    finally:
        echo.close()


def _link_of(said: Mapping[str, object]) -> MeasuredLink:
    """Read what a machine says of a link."""
    if not said["type"]:
        return MeasuredLink(None, 0.0, str(said["text"]))
    try:
        read = json.loads(str(said["text"]))
        late = read["latency_s"]
        return MeasuredLink(
            None if late is None else float(late), float(read["bandwidth"]), str(read["problem"])
        )
    except (KeyError, ValueError, TypeError) as error:
        problem = f"malformed answer {said['type']!r}: {error!r}"
        return MeasuredLink(None, 0.0, f"{problem}; is it pipedream-rt of the same version?")


def _asked(control: Control, record: Record) -> Record:
    """Send a record, and return the answer; if none comes, a record with an empty type."""
    try:
        control.send(record)
        return control.receive(Deadline(_ANSWER))
    except (MessageTimeout, TransportError) as error:
        return {"type": "", "text": str(error)}
