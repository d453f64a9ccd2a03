"""The roster: who is a member of the job's group, who may become one, and what follows from events.

It decides, and does nothing. `Roster.handle` takes an event and the time at which it came, and
returns instructions; it knows no socket, process, thread or clock. `listener.py` and
`generation.py` turn bytes and processes into events, and instructions into bytes and processes.

A generation goes through these phases::

    RESTING -- Gather --> GATHERING -- all are ready --> WELCOMED -- all listen --> MEETING
       ^                      |                             |                          | all met
       |                      | End: it cannot come         | End                      v
       +------ Leave ------ ENDING <------------------------+--- Close, End --------- FORMED
                              ^                                                        | Watch
                              +--------------------------------- Close ------------ RUNNING

`Close`, `Stop`, `GiveUp` and `Leave` may come in every phase.

Whoever joins while none is gathered waits in `coming` for the next one. What the script waits for
comes as one of `Welcome`, `Meet`, `Start`, `Stopped`; or as `End`, once, if it never will. A wait
ends by itself at the time that its event names (``until``), or when a member is silent for too
long. What follows from the state as a whole is judged at a `Tick`: the adapter sends one when
others have come, and now and then.

Times are seconds of one clock that never goes back.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from pipedream_rt.cluster.addresses import is_loopback
from pipedream_rt.cluster.peer_listeners import PeerAddress
from pipedream_rt.cluster.records import HELLO, VERSION, Record, is_name
from pipedream_rt.cluster.worker_life import is_of_its_own
from pipedream_rt.errors import (
    ConfigError,
    PeerLost,
    PipelineClosed,
    PipelineError,
    RendezvousTimeout,
    TransportError,
    WorkerLost,
)
from pipedream_rt.job.process_assignment import ProcessAssignment
from pipedream_rt.schedules import Plan
from pipedream_rt.schedules.edges import Address
from pipedream_rt.schema import printable, problem_of, shown
from pipedream_rt.transport.fence import Obstacle


class Phase(Enum):
    """What a generation is about."""

    RESTING = "there is none"
    GATHERING = "its workers join, and import torch"
    WELCOMED = "its members listen for each other, and say where"
    MEETING = "its members meet each other"
    FORMED = "all have met"
    RUNNING = "its members are watched"
    ENDING = "its members are to end: the loss of one is no failure any more"


_WATCHED = (Phase.WELCOMED, Phase.MEETING, Phase.RUNNING)
"""Phases in which something follows of the end of a member."""


class WorkerSlot(NamedTuple):
    """A worker of the plan, by its number there, as a part of the work of a process."""

    worker: int
    title: str
    stages: tuple[Address, ...]

    @property
    def hosts(self) -> str:
        """Its stages, for messages."""
        several = len(self.stages) > 1
        return f"stages {', '.join(map(str, self.stages))}" if several else self.title


@dataclass(slots=True, eq=False)
class Member:
    """A worker process that was admitted.

    Attributes:
        name: Unique in the group.
        description: Its process, for messages.
        connection: What the adapter knows it by.
        is_local: Whether the script's process has started it.
        nearby: Whether its control connection does not leave the machine.
        same_clock: Whether it runs on the coordinator's kernel.
        returns: Whether it joins again by itself when a generation ends.
        slots: The workers of the plan whose work it does; empty until all have come.
        stage: The first stage that it hosts.
        ready: Whether it has imported torch.
        processor: Its kind of processor; empty until it is ready.
        obstacle: What keeps torch RPC from being fenced off there; empty for nothing.
        peer_address: Where it listens for other members while the group forms; None if not known.
        met: Once it has joined, the ranks that it has met at Unix sockets.
        stopped: Whether its stages compute no more, or its connection has ended.
        ended: Why its connection has ended; None while it stands.
        heard: When it last sent anything.
        silent: Whether it was reported lost because it was silent.
        doing: Text form of the action that it announced last; empty where a job asks for none.
        beat: Its last heartbeat.
    """

    name: str
    description: str
    connection: Any
    is_local: bool = False
    nearby: bool = False
    same_clock: bool = False
    returns: bool = True
    slots: list[WorkerSlot] = field(default_factory=list)
    stage: int | None = None
    ready: bool = False
    processor: str = ""
    obstacle: Obstacle = ""
    peer_address: PeerAddress | None = None
    met: set[int] | None = None
    stopped: bool = False
    ended: TransportError | None = None
    heard: float = 0.0
    silent: bool = False
    doing: str = ""
    beat: Record = field(default_factory=dict)

    @property
    def stages(self) -> tuple[Address, ...]:
        """Addresses of the stages that it hosts; empty until all workers have come."""
        return tuple(address for slot in self.slots for address in slot.stages)

    @property
    def hosts(self) -> str:
        """The stages that the worker hosts, for messages."""
        return " and ".join(slot.hosts for slot in self.slots) or "no stage yet"

    def lost(self, ending: str, problem: PipelineError | None = None, note: str = "") -> WorkerLost:
        """Make the error that says that the worker is gone, and how its process ended."""
        what = "does not answer" if "still" in ending else "is gone"
        if problem is not None and not isinstance(problem, PeerLost):
            note += f" ({problem})"  # its connection was given up for what came over it
        error = WorkerLost(
            f"worker {self.name!r} ({self.hosts}, {self.description}) {what}"
            + (f": {ending}" if ending else "")
            + note,
            worker=self.name,
            stage=self.stage,
            doing=self.doing,
            crashed=is_of_its_own(ending),
        )
        error.__cause__ = problem
        return error


class JoiningFailed(TransportError):
    """What a worker says of why it could not join the group."""


# -- events -------------------------------------------------------------------------------------


class Started(NamedTuple):
    """The script's process has started a worker, which has not said anything yet."""

    connection: Any
    name: str


class Joined(NamedTuple):
    """Somebody of this job has said hello, of whatever version.

    ``nearby``: whether the connection does not leave the machine.
    """

    connection: Any
    hello: Record
    nearby: bool


class Said(NamedTuple):
    """A member has sent a record."""

    member: Member
    record: Record


class Left(NamedTuple):
    """The connection of a member has ended."""

    member: Member
    error: TransportError


class Died(NamedTuple):
    """The connection of a worker started here has ended before its hello."""

    connection: Any
    error: TransportError


class Gather(NamedTuple):
    """The script wants a generation.

    Attributes:
        until: When the wait for its workers is over.
        timeout_s: How long that is.
        heartbeat_s: How long a worker may be silent.
    """

    plan: Plan
    assignment: ProcessAssignment
    until: float
    timeout_s: float
    heartbeat_s: float


class Form(NamedTuple):
    """The members have their welcome.

    Attributes:
        name: Of the coordinator in the group.
        address: Where it listens for the members.
        until: When the group has to be complete.
    """

    name: str
    address: PeerAddress
    until: float


class Met(NamedTuple):
    """The coordinator itself has met all members."""


class Watch(NamedTuple):
    """The script begins to feed: from now on the loss of a member is reported."""


class Close(NamedTuple):
    """The script wants no more of this generation: the loss of a member is no failure any more."""


class Stop(NamedTuple):
    """The stages are to stop; the wait for them is over at ``until``."""

    until: float


class GiveUp(NamedTuple):
    """Nobody waits for the stages any more."""


class Leave(NamedTuple):
    """The members are to end; ``failed`` says that the job goes on with others."""

    failed: bool


class Shut(NamedTuple):
    """Nobody becomes a member any more."""


class Tick(NamedTuple):
    """Time has passed."""


Event: TypeAlias = (
    Started | Joined | Said | Left | Died | Gather | Form | Met | Watch | Close | Stop | GiveUp
    | Leave | Shut | Tick
)  # fmt: skip


# -- instructions -------------------------------------------------------------------------------


class Admit(NamedTuple):
    """Tell a worker that it is a member, and read what it says."""

    member: Member


class Tell(NamedTuple):
    """Send a record."""

    connection: Any
    record: Record


class Drop(NamedTuple):
    """Close a connection, once what was to be sent has left."""

    connection: Any


class Welcome(NamedTuple):
    """All have come: welcome these members, in the order of their ranks."""

    members: Sequence[Member]


class Meet(NamedTuple):
    """All know where the others listen: meet them."""

    addresses: Mapping[str, PeerAddress]


class Start(NamedTuple):
    """All have met each other: the group is complete."""


class Stopped(NamedTuple):
    """The stages of all members have stopped, or nobody waits for them any more."""


class Loss(NamedTuple):
    """A worker that is gone. The adapter adds how its process has ended.

    Attributes:
        member: None for one that ended before it was admitted.
    """

    name: str
    member: Member | None
    error: PipelineError | None = None
    note: str = ""


class Missing(NamedTuple):
    """Workers that did not come in time. The adapter adds what to do."""

    text: str
    missing: int


class End(NamedTuple):
    """What the script waits for will not come."""

    cause: PipelineError | Loss | Missing


class Report(NamedTuple):
    """Report that a member of the running generation is lost."""

    loss: Loss


class Kill(NamedTuple):
    """Have another worker started in place of one that lives and is silent."""

    name: str


class Log(NamedTuple):
    """Tell people."""

    level: int
    text: str
    arguments: tuple[object, ...]


Instruction: TypeAlias = (
    Admit | Tell | Drop | Welcome | Meet | Start | Stopped | End | Report | Kill | Log
)


class _Refusal(NamedTuple):
    """Why a worker cannot become a member; one that is ``passing`` may try again later."""

    reason: str
    passing: bool = False


# -- the roster ---------------------------------------------------------------------------------


class Roster:
    """The members of a job, from generation to generation.

    Attributes:
        phase: Of the generation.
        members: Those of the generation, in the order of ranks; empty until it was gathered, also
            in vain.
        coming: Those that have come for the next one.
        most: How many may come for the next one.
        expected: How many members the next generation will have if nobody is lost meanwhile; 0 if
            that is not known.
        refused: By name, why a worker was refused for good since a generation was gathered.
        over: The exit code of a script that has ended for good, for all who come; None before.
        informed: The names of those that have it.
    """

    def __init__(self, job: str, software: str, boot: str) -> None:
        self.phase = Phase.RESTING
        self.members: list[Member] = []
        self.coming: list[Member] = []
        self.most = self.expected = 0
        self.refused: dict[str, str] = {}
        self.over: int | None = None
        self.informed: set[str] = set()
        self.is_shut = False
        self._job, self._software, self._boot = job, software, boot
        self._unheard: dict[str, Any] = {}  # connections of workers started here, by name
        self._asked: Gather | None = None
        self._since = 0.0  # when the phase began
        self._last_joined = 0.0
        self._ticked = 0.0
        self._own: Form | None = None
        self._has_met = False  # the coordinator itself
        self._stop: Stop | None = None
        self._computes = False  # whether stages run in this generation
        self._gave_up = self._is_closed = False
        self._started: set[str] = set()  # names of the workers started here for this generation

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take an event at a time; return what is to be done, in this order."""
        done = self._on(event, now)
        if isinstance(event, Tick):
            done += self._follow(now)
        if self._stop is not None:
            waits = self._computes and not all(member.stopped for member in self.members)
            if not waits or self._gave_up or now >= self._stop.until:
                self._stop = None
                done.append(Stopped())
        return done

    @property
    def unheard(self) -> list[str]:
        """The names of the workers started here that have not said hello."""
        return [*self._unheard]

    def taken(self) -> list[Member]:
        """Return those that have come, which the caller owns from now on, and gather others."""
        members, self.coming = self.coming, []
        self.expected, self.refused = 0, {}
        return members

    def expect(self) -> int:
        """Expect the members that are ready besides those that run; return how many are ready."""
        ready = sum(member.ready for member in self.coming)
        self.expected = len(self.members) + ready
        return ready

    def _on(self, event: Event, now: float) -> list[Instruction]:
        """Take an event; see `handle`."""
        match event:
            case Started(connection, name):
                self._unheard[name] = connection
                self._started.add(name)
            case Joined():
                return self._joined(event, now)
            case Said(member, record):
                return self._said(member, record, now)
            case Left(member, error):
                return self._left(member, error)
            case Died(connection, error):
                return self._died(connection, error)
            case Gather():
                self._asked, self._since, self._last_joined = event, now, now
                # The last generation has ended: its workers come back under their names.
                self.members, self.most = [], event.assignment.most
                self._own, self._stop = None, None
                self._has_met = self._computes = self._gave_up = self._is_closed = False
                self.phase = Phase.GATHERING
            case Form():
                self._own, self._since = event, now
                for member in self.members:
                    member.heard = now  # it had nothing to send so far
            case Met():
                self._has_met = True
            case Watch():
                return self._watch(now)
            case Close():
                return self._close()
            case Stop():
                self._stop = event
                told = self.members if self._computes else []
                return [*self._close(), *self._told(told, {"type": "stop"})]
            case GiveUp():
                self._gave_up = True
                return self._close()
            case Leave(failed):
                return self._leave(failed)
            case Shut():
                return self._shut()
        return []

    def _follow(self, now: float) -> list[Instruction]:
        """Return what follows from the state and the time.

        That is judged at a `Tick` alone, so that all that has come before it counts: a member may
        seem silent, or ready, whose next record lies unread beside that of another.
        """
        match self.phase:
            case Phase.GATHERING:
                return self._gathered(now)
            case Phase.WELCOMED:
                return self._late(now) or self._introduced(now)
            case Phase.MEETING:
                return self._late(now) or self._formed()
            case Phase.RUNNING:
                return self._silent(now)
        return []

    # -- who may become a member --------------------------------------------------------------

    def _joined(self, event: Joined, now: float) -> list[Instruction]:
        """Admit or refuse whoever has said hello."""
        connection, hello, nearby = event
        if self.is_shut:
            return [Drop(connection)]
        if self.over is not None and is_name(hello.get("name")):
            self.informed.add(hello["name"])
            return [Tell(connection, {"type": "over", "code": self.over}), Drop(connection)]
        here = self._heard(connection)
        refusal = self._refusal_of(hello, here)
        if refusal is not None:
            return self._refuse(connection, hello, refusal)
        member = Member(
            hello["name"],
            process_of(hello),
            connection,
            is_local=bool(here),
            nearby=nearby,
            # Where the kernel has no id, both are empty, which shows nothing.
            same_clock=hello["boot"] == self._boot != "",
            returns=bool(here) or hello["returns"],  # workers started here are started again
            heard=now,
        )
        self.coming.append(member)
        self._last_joined = now
        return [Admit(member)]

    def _refusal_of(self, hello: Record, here: str) -> _Refusal | None:
        """Why a worker cannot become a member; None if it can."""
        # The version comes first: which fields a hello has depends on it.
        if hello.get("version") != VERSION:
            spoken = shown(hello.get("version"), 20)
            return _Refusal(
                f"it speaks protocol {spoken}, the coordinator {VERSION}; install the same "
                "pipedream-rt on all machines"
            )
        if problem := problem_of(hello, HELLO):
            return _Refusal(f"its hello makes no sense: {problem}")
        name = hello["name"]
        if here and name != here:
            return _Refusal(f"it says that it is {name!r}, and was started as {here!r}")
        if not here and hello["job"] != self._job:
            return _Refusal("it belongs to another job, whose coordinator is at another address")
        twin = next((m for m in (*self.members, *self.coming) if m.name == name), None)
        if twin is not None:
            reason = f"the name {name!r} is taken by {twin.description}; give each worker its own"
            return _Refusal(reason, passing=True)
        if hello["software"] != self._software:
            return _Refusal(
                f"it has {hello['software']}, and the script {self._software}; its stages might "
                "compute other bits, so install the same on all machines"
            )
        if len(self.coming) >= self.most:
            count = self.most + len(self.members)
            return _Refusal(f"the job has its {count} workers", passing=True)
        return None

    def _refuse(self, connection: Any, hello: Record, refusal: _Refusal) -> list[Instruction]:
        """Tell a worker why it cannot become a member."""
        name = printable(str(hello.get("name")), 100)
        # Where the job has what it needs, a refused worker is nothing to act upon.
        full = len(self.coming) >= self.most or self.members
        if not refusal.passing:
            self.refused[name] = refusal.reason
        said = {"type": "refused", "reason": refusal.reason, "passing": refusal.passing}
        return [
            Tell(connection, said),
            Drop(connection),
            Log(
                logging.INFO if full else logging.WARNING,
                "refused worker %r (%s): %s",
                (name, process_of(hello), refusal.reason),
            ),
        ]

    # -- what members say, and their ends -------------------------------------------------------

    def _said(self, member: Member, record: Record, now: float) -> list[Instruction]:
        """Note what a member says; what it may not say ends its connection."""
        if member.ended is not None:
            return []
        member.heard = now
        problem: TransportError | None = None
        match record["type"]:
            case "doing":
                member.doing = str(record["action"])
            case "beat":
                member.beat = record
            case "ready":
                member.ready, member.processor = True, record["processor"]
                member.obstacle = record["obstacle"]
            case "door":
                member.peer_address = PeerAddress(*record["at"])
            case "joined":
                member.met = set(record["nearby"])
            case "stopped":
                member.stopped = True
            case "story" | "clock" | "findings":
                pass  # the answer to a question, which whoever has asked reads
            case "failed":
                problem = JoiningFailed(str(record["text"]))
            case "unfit":  # it would say so again, however often it is started
                problem = JoiningFailed(str(record["text"]))
                problem.__cause__ = ConfigError(str(record["text"]))
            case kind:
                problem = TransportError(
                    f"worker {member.name!r} sent a {kind!r}, which only a coordinator sends; is "
                    "it pipedream-rt of the same version?"
                )
        return [] if problem is None else [Drop(member.connection), *self._left(member, problem)]

    def _left(self, member: Member, error: TransportError) -> list[Instruction]:
        """Note that a member is gone."""
        if member.ended is not None:
            return []
        member.ended, member.stopped = error, True
        if member in self.coming:
            self.coming.remove(member)
            if member.is_local and self.phase is Phase.GATHERING:
                return self._end(Loss(member.name, member, error))
            return [
                Log(
                    logging.WARNING,
                    "worker %r (%s) left before all had come: %s; waiting for it or for another",
                    (member.name, member.description, error),
                )
            ]
        return self._reported(member) if member in self.members else []

    def _reported(self, member: Member) -> list[Instruction]:
        """Return what follows of the end of a member of the generation."""
        error = member.ended
        if error is None or self.phase not in _WATCHED:
            return []
        if self.phase is Phase.RUNNING:
            if member.silent:
                return []  # it was reported
            note = "" if isinstance(error, PeerLost) else f" ({error})"
            return [Report(Loss(member.name, member, None, note))]
        if not isinstance(error, JoiningFailed):
            return self._end(Loss(member.name, member, error))
        # One that does not come back by itself has given its answer.
        final = None if member.returns else ConfigError(str(error))
        lost = WorkerLost(
            f"worker {member.name!r} could not join: {error}",
            worker=member.name,
            stage=member.stage,
        )
        lost.__cause__ = final or error.__cause__
        return self._end(lost)

    def _died(self, connection: Any, error: TransportError) -> list[Instruction]:
        """Note that a worker started here has ended before its hello."""
        name = self._heard(connection)
        waits = name and self.phase is Phase.GATHERING
        return self._end(Loss(name, None, error)) if waits else []

    def _heard(self, connection: Any) -> str:
        """Take out a worker started here that is silent no more; return its name, "" for none."""
        name = next((name for name, each in self._unheard.items() if each is connection), "")
        self._unheard.pop(name, None)
        return name

    # -- a generation: gathered, formed, watched ------------------------------------------------

    def _gathered(self, now: float) -> list[Instruction]:
        """Welcome the members if all have come, or end a wait that is in vain."""
        assert self._asked is not None
        assignment, heartbeat_s = self._asked.assignment, self._asked.heartbeat_s
        if self.is_shut:
            return self._end(_closed_while_gathering())
        if now >= self._asked.until:
            return self._end(self._missing())
        # A worker started here is forked with torch imported, so it speaks at once, unless it was
        # stopped.
        late = [*self._unheard, *(m.name for m in self.coming if m.is_local and not m.ready)]
        if late and now - self._since > heartbeat_s:
            return self._end(
                WorkerLost(
                    f"worker {late[0]!r} has been silent since it was started, for longer than "
                    f"the heartbeat of {heartbeat_s:g} s",
                    worker=late[0],
                    stage=None,
                )
            )
        count = len(self.coming)
        if count < assignment.fewest or not all(member.ready for member in self.coming):
            return []
        waited = now - self._last_joined >= assignment.wait.total_seconds()
        if count not in (assignment.most, self.expected) and not waited:
            return []
        self._take()
        self.phase = Phase.WELCOMED
        said = self._assign(self._asked.plan, assignment)
        return [*said, Welcome(tuple(self.members))]

    def _take(self) -> None:
        """Make those that have come the members of the generation."""
        assert self._asked is not None
        self.members = self.taken()
        self.most = self._asked.assignment.most - len(self.members)

    def _end(self, cause: PipelineError | Loss | Missing) -> list[Instruction]:
        """End what the script waits for."""
        if self.phase is Phase.GATHERING:
            self._take()  # whoever has come must hear the end from this generation
        self.phase = Phase.ENDING
        return [End(cause)]

    def _missing(self) -> Missing:
        """Name the workers that did not come in time."""
        assert self._asked is not None
        needed, admitted = self._asked.assignment.fewest, {m.name for m in self.coming}
        unready = {m.name for m in self.coming if not m.ready} if len(admitted) >= needed else set()
        joined = sorted(admitted - unready, key=natural)
        absent = sorted({*self._started, *admitted}.difference(joined), key=natural)
        count = max(needed - len(joined), 1)
        return Missing(
            f"{count} of {needed} workers did not join within {self._asked.timeout_s:g} s"
            + (f": {', '.join(absent)}" if absent else "")
            + f"; joined: {', '.join(joined) or 'none'}"
            + (
                f"; still importing torch: {', '.join(sorted(unready, key=natural))}"
                if unready
                else ""
            )
            + "".join(f"; {name!r} was refused: {why}" for name, why in self.refused.items()),
            count,
        )

    def _assign(self, plan: Plan, assignment: ProcessAssignment) -> list[Instruction]:
        """Assign the members their work, in the order of their names; return what to say of it."""
        # Not in the order in which they have joined, which differs from run to run: a stage would
        # move to another machine, whose kernels may round differently.
        self.members.sort(key=lambda member: natural(member.name))
        count, said = len(self.members), list[Instruction]()
        work = assignment.workers_by_process(plan.workers, count)
        for member, workers in zip(self.members, work, strict=True):
            member.slots = [WorkerSlot(w, plan.name_of(w), plan.stages_of(w)) for w in workers]
            member.stage = plan.stage_of(member.stages[0])
        if count < plan.workers and not assignment.seats:
            said.append(
                Log(
                    logging.WARNING,
                    "worker processes: %d, for the work of %d, which gives the same bits and takes "
                    "longer: %s",
                    (
                        count,
                        plan.workers,
                        "; ".join(f"{m.name} has {m.hosts}" for m in self.members),
                    ),
                )
            )
        by_kind: dict[str, list[str]] = {}
        for member in self.members:
            by_kind.setdefault(member.processor, []).append(member.name)
        if len(by_kind) > 1:
            kinds = "; ".join(f"{kind} ({', '.join(names)})" for kind, names in by_kind.items())
            said.append(
                Log(
                    logging.WARNING,
                    "the workers have several kinds of processor: %s; kernels may round "
                    "differently on each, so a run has the same bits again only if every stage "
                    "lies on the same kind as before, which a recovery does not see to",
                    (kinds,),
                )
            )
        return said

    def _late(self, now: float) -> list[Instruction]:
        """End the forming of a group that takes too long."""
        limit = self._own or self._asked
        assert limit is not None
        if now < limit.until:
            return []
        return self._end(
            RendezvousTimeout(
                f"all {len(self.members)} workers came, but the group did not form in "
                "time; can they reach each other and the coordinator on any port?"
            )
        )

    def _introduced(self, now: float) -> list[Instruction]:
        """Introduce the members to each other once all listen."""
        if self._own is None:
            return []
        assert self._asked is not None
        for member in self.members:
            quiet = member.peer_address is None and member.met is None
            if quiet and now - self._since > self._asked.heartbeat_s:
                note = " (it has not answered its welcome within the heartbeat)"
                return self._end(Loss(member.name, member, None, note))
        known = {m.name: m.peer_address for m in self.members if m.peer_address is not None}
        if len(known) < len(self.members):
            return []
        addresses = {self._own.name: self._own.address, **known}
        if problem := _unreachable(addresses):
            return self._end(problem)
        self.phase = Phase.MEETING
        doors: Record = {"type": "doors", "by_name": addresses}
        return [*self._told(self.members, doors), Meet(addresses)]

    def _formed(self) -> list[Instruction]:
        """Say that the group is complete once all have met."""
        if not self._has_met or any(member.met is None for member in self.members):
            return []
        self.phase = Phase.FORMED
        return [Start()]

    def _watch(self, now: float) -> list[Instruction]:
        """Begin to report losses, unless nobody wants to hear of them any more."""
        if self._is_closed:
            return []
        self.phase, self._ticked, self._computes = Phase.RUNNING, now, True
        # The group may have formed for longer than a heartbeat: silence counts from here.
        for member in self.members:
            member.heard = now
        # One may have ended before it was watched.
        return [each for member in self.members for each in self._reported(member)]

    def _silent(self, now: float) -> list[Instruction]:
        """Report members that are silent for longer than the heartbeat."""
        assert self._asked is not None
        heartbeat_s, before, self._ticked = self._asked.heartbeat_s, self._ticked, now
        # If the coordinator itself was stopped for a while, silence means nothing.
        if now - before > heartbeat_s / 2:
            return []
        done: list[Instruction] = []
        for member in self.members:
            silent_s = now - member.heard
            if silent_s > heartbeat_s and not member.stopped and not member.silent:
                member.silent = True
                note = f" (it has been silent for {silent_s:.1f} s)"
                done += [Kill(member.name), Report(Loss(member.name, member, None, note))]
        return done

    # -- the end --------------------------------------------------------------------------------

    def _close(self) -> list[Instruction]:
        """Report no loss any more; end what the script waits for."""
        self._is_closed = True
        match self.phase:
            case Phase.GATHERING:
                return self._end(_closed_while_gathering())
            case Phase.WELCOMED | Phase.MEETING:
                return self._end(PipelineClosed("the pipeline was closed while its workers joined"))
            case Phase.FORMED | Phase.RUNNING:
                self.phase = Phase.ENDING
        return []

    def _leave(self, failed: bool) -> list[Instruction]:
        """Dismiss the members, and workers started here that have not become one."""
        ended = self._close()  # what the script waits for, if it does
        here = [m for m in self.coming if m.is_local]
        self.coming = [m for m in self.coming if not m.is_local]
        exits = self._told(self.members, {"type": "exit", "failed": failed})
        dropped = self._dropped([*self.members, *here])
        self.phase, self.members = Phase.RESTING, []  # their names are free for the next one
        self._started.clear()
        return [*ended, *exits, *dropped]

    def _shut(self) -> list[Instruction]:
        """Dismiss those that have come; a generation that is gathered ends, by `_gathered`."""
        self.is_shut = True
        coming = self.taken()
        exits = self._told(coming, {"type": "exit", "failed": False})
        return [*exits, *self._dropped(coming)]

    def _dropped(self, members: Sequence[Member]) -> list[Instruction]:
        """Drop members, and workers started here that have not said hello."""
        unheard, self._unheard = [*self._unheard.values()], {}
        return [Drop(each) for each in (*(m.connection for m in members), *unheard)]

    def _told(self, members: Sequence[Member], record: Record) -> list[Instruction]:
        """Tell members whose connections stand."""
        return [Tell(m.connection, record) for m in members if m.ended is None]


def _closed_while_gathering() -> PipelineClosed:
    return PipelineClosed("the pipeline was closed while it waited for workers")


def _unreachable(addresses: Mapping[str, PeerAddress]) -> RendezvousTimeout | None:
    """Return the error of members that listen on loopback while others listen elsewhere."""
    hosts = {name: at.host for name, at in addresses.items() if at.host}
    inside = [name for name, host in hosts.items() if is_loopback(host)]
    if not inside or len(inside) == len(hosts):
        return None
    where = ", ".join(f"{name} {at.in_words}" for name, at in addresses.items() if at.host)
    return RendezvousTimeout(
        f"{', '.join(map(repr, inside))} of the group cannot be reached from other "
        f"machines: the addresses are {where}; start such a worker with --bind and a "
        "network interface that has an address",
        missing=len(inside),
    )


def process_of(hello: Record) -> str:
    """Process number and machine of a worker, escaped, as its hello may be of any version."""
    return printable(f"pid {hello.get('pid')} on {hello.get('host')}", 100)


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key of a worker's name by which ``w2`` comes before ``w10``."""
    return [(int(d), "") if d else (-1, t) for d, t in re.findall(r"(\d+)|(\D+)", name)]
