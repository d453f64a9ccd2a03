"""The rendezvous: the coordinator gathers as many workers as the group needs."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from datetime import timedelta

from pipedream_rt.cluster.admission import Refusal, admit, refusal_of
from pipedream_rt.cluster.callers import Callers
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.door import Door
from pipedream_rt.cluster.engines.base import Keeper
from pipedream_rt.cluster.keepers import BY_HAND
from pipedream_rt.cluster.local_workers import LocalWorkers
from pipedream_rt.cluster.members import Member, Seat, natural
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost, RendezvousTimeout, TransportError, WorkerLost
from pipedream_rt.schedules import Plan
from pipedream_rt.schedules.seats import Crew, crew_for, seated
from pipedream_rt.schema import printable

_log = logging.getLogger(__name__)

_TURN_S = 1.0
"""Seconds after which the deadlines are looked at again, whatever comes."""


class Rendezvous:
    """Gathers as many workers as there are to be, over their control connections.

    The coordinator calls every connection with a nonce. Whoever answers with a proof that it knows
    the job's secret, with the right version of the protocol and with a name that is still free
    becomes a member; whoever answers otherwise is refused with the reason.

    Args:
        plan: How many workers are needed, and which stages each hosts.
        local: The workers that were started here, which come over inherited connections.
        door: Where workers join that were started elsewhere.
        heartbeat: How long a worker that was started here may be silent.
        keeper: Who has started those.
        crew: How many workers there are to be; None for one for each of the plan.

    Attributes:
        members: The workers that have come so far. Whoever made the rendezvous closes their
            connections, also after an error.
    """

    def __init__(
        self,
        plan: Plan,
        local: LocalWorkers,
        door: Door,
        heartbeat: timedelta,
        keeper: Keeper = BY_HAND,
        crew: Crew | None = None,
    ) -> None:
        """Call nobody yet."""
        self._door = door
        self._crew = crew or crew_for(plan.workers, None, timedelta())
        self._heartbeat_s = heartbeat.total_seconds()
        self._began = self._came = time.monotonic()  # and when the last member has come
        self._refused: dict[str, str] = {}  # those that know the secret, and why
        self._keeper = keeper
        self.members: list[Member] = door.taken()
        self._plan = plan
        self._local = local

    def gather(self, deadline: Deadline) -> None:
        """Gather all members, in the order of their names, and wait until each has imported torch.

        Args:
            deadline: When to give up.

        Raises:
            RendezvousTimeout: Some workers did not join in time.
            WorkerLost: A worker that was started here ended before it joined.
        """
        door, listener = self._door, self._door.listener
        with selectors.DefaultSelector() as selector:
            callers = Callers(door.key, selector, door.tls)
            try:
                self._began = self._came = time.monotonic()
                for member in self.members:
                    selector.register(member.control, selectors.EVENT_READ, member)
                for control in self._local.controls.values():
                    callers.call_local(control)
                if listener is not None:
                    listener.setblocking(False)
                    selector.register(listener, selectors.EVENT_READ)
                while not self._complete:
                    self._attend(selector, callers, listener, deadline)
            finally:
                callers.close()
        self.members.sort(key=lambda member: natural(member.name))
        plan, count = self._plan, len(self.members)
        for member, seats in zip(self.members, seated(plan.workers, count), strict=True):
            member.seats = [Seat(w, plan.name_of(w), plan.stages_of(w)) for w in seats]
            member.stage = plan.stage_of(member.stages[0])
        if count < plan.workers:
            _log.warning(
                "worker processes: %d, for the work of %d, which gives the same bits and takes "
                "longer: %s",
                count, plan.workers, "; ".join(f"{m.name} has {m.hosts}" for m in self.members),
            )  # fmt: skip
        self._tell_of_processors()

    def _tell_of_processors(self) -> None:
        """Log where the workers have several kinds of processor."""
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
    def _full(self) -> bool:
        """Whether as many workers have come as there are to be at most."""
        return len(self.members) == self._crew.most

    @property
    def _enough(self) -> bool:
        """Whether there are to be no more: all have come, or enough, and the others are late."""
        late = time.monotonic() - self._came >= self._crew.wait.total_seconds()
        return self._full or (late and len(self.members) >= self._crew.fewest)

    @property
    def _complete(self) -> bool:
        """Whether all members have come and have imported torch, so that forming is quick."""
        return self._enough and all(member.ready for member in self.members)

    def _attend(
        self,
        selector: selectors.BaseSelector,
        callers: Callers,
        listener: socket.socket | None,
        deadline: Deadline,
    ) -> None:
        """Wait until something comes; take connections, and read what workers say.

        Raises:
            RendezvousTimeout: Nothing came in time.
            WorkerLost: A worker that was started here ended before it joined.
        """
        left = deadline.remaining_s()
        ready = selector.select(_TURN_S if left is None else min(left, _TURN_S))
        if deadline.expired():  # in every turn, for strangers may keep coming
            raise self._missing(deadline)
        self._notice_silence(callers)
        for key, _ in ready:
            if key.fileobj is listener:
                callers.accept(listener)
            elif isinstance(key.fileobj, Control) and key.fileobj in callers:
                self._hear(key.fileobj, callers, selector)
            elif key.data is not None:
                self._hear_member(key.data, selector)

    def _notice_silence(self, callers: Callers) -> None:
        """Notice a worker that was started here and has not said its first signed word for long.

        It has torch already, so it speaks at once, unless it was stopped.

        Raises:
            WorkerLost: A worker is silent for longer than that.
        """
        if time.monotonic() - self._began < self._heartbeat_s:
            return
        silent = callers.local()
        silent += [m.control for m in self.members if m.control.is_local and not m.ready]
        if silent:
            name = self._local.name_of(silent[0])
            raise WorkerLost(
                f"worker {name!r} has been silent since it was started, for longer than the "
                f"heartbeat of {self._heartbeat_s:g} s",
                worker=name or "",
                stage=None,
            )

    def _hear(self, control: Control, callers: Callers, selector: selectors.BaseSelector) -> None:
        """Read a hello, if all of it has come; make its worker a member, or refuse it.

        Raises:
            WorkerLost: The connection of a worker that was started here has ended.
        """
        try:
            heard = callers.hear(control)
        except TransportError as error:
            self._note_end(control, callers, error)
            return
        if heard is None:
            return
        hello, talk = heard
        refusal = refusal_of(hello, talk, self.members)
        if refusal is None and self._full:
            reason = f"the job has its {self._crew.most} workers"
            refusal = Refusal(reason, passing=True, proven=True)
        if refusal is not None:
            level = logging.INFO if self._full else logging.WARNING
            callers.refuse(control, talk, hello, refusal, level)
            if refusal.proven and not refusal.passing:
                self._refused[printable(str(hello.get("name")), 100)] = refusal.reason
            return
        try:
            member = admit(control, hello, talk)
        except PeerLost as error:
            control.close()
            self._note_end(control, callers, error)
            return
        self.members.append(member)
        self._came = time.monotonic()
        selector.register(control, selectors.EVENT_READ, member)

    def _hear_member(self, member: Member, selector: selectors.BaseSelector) -> None:
        """Read whether a member has imported torch; a member that is gone makes room for another.

        Raises:
            WorkerLost: The connection of a worker that was started here has ended.
        """
        try:
            records = member.control.receive_all()
        except TransportError as error:
            selector.unregister(member.control)
            self.members.remove(member)
            member.control.close()
            if self._local.name_of(member.control) is not None:
                raise member.lost(self._local.ending(member.name), error) from error
            _log.warning(
                "worker %r (%s) left before all had come: %s; waiting for it or for another",
                member.name, member.description, error,
            )  # fmt: skip
            return
        for record in records:
            if record["type"] == "ready":
                member.ready, member.processor = True, record["processor"]

    def _note_end(self, control: Control, callers: Callers, error: TransportError) -> None:
        """Note that a connection ended without a hello, which only a stranger's may do.

        Raises:
            WorkerLost: It is the connection of a worker that was started here.
        """
        name = self._local.name_of(control)
        if name is not None:
            raise WorkerLost(
                f"worker {name!r} ended before it joined "
                f"({self._local.ending(name)}); its output says why",
                worker=name,
                stage=None,
            ) from error
        callers.note(logging.WARNING, "a connection that is no worker was dropped: %s", error)

    def _missing(self, deadline: Deadline) -> RendezvousTimeout:
        """Make the error that says which workers did not join in time."""
        needed = self._crew.fewest
        came = {m.name for m in self.members}
        if len(came) >= needed:  # then some of them have not become ready
            came -= {m.name for m in self.members if not m.ready}
        joined = sorted(came, key=natural)
        expected = {*self._local.controls, *(m.name for m in self.members)}
        absent = sorted(expected - came, key=natural)
        missing = max(needed - len(joined), 1)
        seconds = deadline.timeout.total_seconds() if deadline.timeout else 0.0
        return RendezvousTimeout(
            f"{missing} of {needed} workers did not join within {seconds:g} s"
            + (f": {', '.join(absent)}" if absent else "")
            + f"; joined: {', '.join(joined) or 'none'}"
            + "".join(f"; {name!r} was refused: {why}" for name, why in self._refused.items())
            + f"; {self._keeper.missing()}, or give Pipeline recovery=Recovery(start=...) with "
            "more time",
            missing=missing,
        )
