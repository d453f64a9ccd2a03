"""The rendezvous: the coordinator gathers as many workers as the group needs."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from pipedream_rt.cluster.engines.interface import Keeper
from pipedream_rt.cluster.listener import Gone, Listener
from pipedream_rt.cluster.local_workers import LocalWorkers
from pipedream_rt.cluster.members import Member, WorkerSlot, natural
from pipedream_rt.cluster.supervision import BY_HAND
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost, PipelineClosed, RendezvousTimeout, WorkerLost
from pipedream_rt.job.process_assignment import ProcessAssignment, assignment_for
from pipedream_rt.schedules import Plan

_log = logging.getLogger(__name__)

_TURN_S = 1.0
"""Seconds after which the deadlines are looked at again, whatever comes."""


class Rendezvous:
    """Gathers as many workers as there are to be, over their control connections.

    Attributes:
        members: The workers that have come, once `gather` has ended, also by an error. Whoever
            made the rendezvous owns them.
    """

    def __init__(
        self,
        plan: Plan,
        local: LocalWorkers,
        door: Listener,
        heartbeat: timedelta,
        keeper: Keeper = BY_HAND,
        assignment: ProcessAssignment | None = None,
    ) -> None:
        self._door = door
        self._crew = assignment or assignment_for(plan.workers, None, timedelta())
        self._heartbeat_s = heartbeat.total_seconds()
        self._began = self._came = time.monotonic()  # the start, and when the last member came
        self._keeper = keeper
        self.members: list[Member] = []
        self._plan = plan
        self._local = local

    def gather(self, deadline: Deadline) -> None:
        """Gather members until each has imported torch; sort them by name, and seat them."""
        door, self._began = self._door, time.monotonic()
        self._came = self._began
        try:
            for control in self._local.controls.values():
                door.call_local(control)
            while not self._complete:
                self._attend(deadline)
        finally:
            self.members += door.taken()
            if door.listener is None or not self._crew.stays_open:
                door.rest()  # while the generation runs, nobody may join
        self.members.sort(key=lambda member: natural(member.name))
        plan, assignment, count = self._plan, self._crew, len(self.members)
        for member, seats in zip(
            self.members, assignment.workers_by_process(plan.workers, count), strict=True
        ):
            member.seats = [WorkerSlot(w, plan.name_of(w), plan.stages_of(w)) for w in seats]
            member.stage = plan.stage_of(member.stages[0])
        if count < plan.workers and not assignment.seats:
            _log.warning(
                "worker processes: %d, for the work of %d, which gives the same bits and takes "
                "longer: %s",
                count, plan.workers, "; ".join(f"{m.name} has {m.hosts}" for m in self.members),
            )  # fmt: skip
        self._tell_of_processors()

    def _tell_of_processors(self) -> None:
        """Warn if the workers have several kinds of processor."""
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

    @property
    def _enough(self) -> bool:
        """Whether no more are waited for: all have come, or enough have and the others are late."""
        assignment, count = self._crew, len(self._door.members)
        if count < assignment.fewest:
            return False
        late = time.monotonic() - self._came >= assignment.wait.total_seconds()
        return count == assignment.most or late or count == self._door.expected

    @property
    def _complete(self) -> bool:
        """Whether all members have come and imported torch, so that the group forms quickly."""
        return self._enough and all(member.ready for member in self._door.members)

    def _attend(self, deadline: Deadline) -> None:
        """Attend to the door for one turn, and check the deadlines."""
        door, left, before = self._door, deadline.remaining_s(), len(self._door.members)
        gone = door.attend(_TURN_S if left is None else min(left, _TURN_S), self._crew.most)
        if door.is_closed:
            raise PipelineClosed("the pipeline was closed while it waited for workers")
        if deadline.expired():  # looked at in every turn, as strangers may keep coming
            raise self._missing(deadline)
        self._notice_silence()
        if len(door.members) > before:
            self._came = time.monotonic()
        for each in gone:
            self._note_end(each)

    def _notice_silence(self) -> None:
        """Report a worker started here that has sent no signed record within the heartbeat."""
        # It is forked with torch imported, so it speaks at once, unless it was stopped.
        if time.monotonic() - self._began < self._heartbeat_s:
            return
        if silent := self._door.unheard():
            name = self._local.name_of(silent[0])
            raise WorkerLost(
                f"worker {name!r} has been silent since it was started, for longer than the "
                f"heartbeat of {self._heartbeat_s:g} s",
                worker=name or "",
                stage=None,
            )

    def _note_end(self, gone: Gone) -> None:
        """Log the end of a connection from elsewhere; that of a worker started here is an error."""
        name = self._local.name_of(gone.control)
        if name is None:
            self._door.note(gone)
        elif gone.member is not None:
            raise gone.member.lost(self._local.ending(name), gone.error) from gone.error
        else:
            raise WorkerLost(
                f"worker {name!r} ended before it joined "
                f"({self._local.ending(name)}); its output says why"
                if isinstance(gone.error, PeerLost)
                else f"worker {name!r} cannot join: {gone.error}",
                worker=name,
                stage=None,
            ) from gone.error

    def _missing(self, deadline: Deadline) -> RendezvousTimeout:
        """Make the error that says which workers did not join in time."""
        needed = self._crew.fewest
        members = self._door.members
        came = {m.name for m in members}
        unready = {m.name for m in members if not m.ready} if len(came) >= needed else set()
        came -= unready
        joined = sorted(came, key=natural)
        expected = {*self._local.controls, *(m.name for m in members)}
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
            + "".join(f"; {name!r} was refused: {why}" for name, why in self._door.refused.items())
            + f"; {self._keeper.missing()}, or give Pipeline recovery=Recovery(start=...) with "
            "more time",
            missing=missing,
        )
