"""The rendezvous: the coordinator gathers as many workers as the group needs."""

from __future__ import annotations

import errno
import logging
import secrets
import selectors
import socket
import time
from contextlib import suppress
from datetime import timedelta

from pipedream_rt.cluster.addresses import joined
from pipedream_rt.cluster.admission import Refusal, admit, process_of, refusal_of, talk_of
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.crowd import accept, most_strangers
from pipedream_rt.cluster.keys import NONCE, JobKey, Talk
from pipedream_rt.cluster.local_workers import LocalWorkers
from pipedream_rt.cluster.members import Member, natural
from pipedream_rt.cluster.records import Record
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost, RendezvousTimeout, TransportError, WorkerLost
from pipedream_rt.schedules import Plan
from pipedream_rt.schema import printable
from pipedream_rt.transport.tcp import prepare
from pipedream_rt.transport.tls import Tls, wrapped

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
        key: The key of the job.
        heartbeat: How long a worker that was started here may be silent.
        command: The command that starts a worker elsewhere, for messages.
        tls: Encrypts the connections of workers that were started elsewhere; None to leave them.

    Attributes:
        members: The workers that have come so far. Whoever made the rendezvous closes their
            connections, also after an error.
    """

    def __init__(
        self,
        plan: Plan,
        local: LocalWorkers,
        key: JobKey,
        heartbeat: timedelta,
        command: str = "",
        tls: Tls | None = None,
    ) -> None:
        """Call nobody yet."""
        self._tls = tls
        self._heartbeat_s = heartbeat.total_seconds()
        self._began = time.monotonic()
        self._most = most_strangers()
        self._said: dict[str, tuple[float, int]] = {}
        self._refused: dict[str, str] = {}  # those that know the secret, and why
        self._command = command or "pipedream-rt worker HOST:PORT --name NAME"
        self.members: list[Member] = []
        self._plan = plan
        self._local = local
        self._key = key
        # Connections that have not said hello, oldest first, each with the nonce of its call.
        self._asked: dict[Control, bytes] = {}

    def gather(self, listener: socket.socket | None, deadline: Deadline) -> None:
        """Gather all members, in the order of their names, and wait until each has imported torch.

        Args:
            listener: Where workers that were started elsewhere connect; None for none.
            deadline: When to give up.

        Raises:
            RendezvousTimeout: Some workers did not join in time.
            WorkerLost: A worker that was started here ended before it joined.
        """
        with selectors.DefaultSelector() as selector:
            try:
                self._began = time.monotonic()
                self._call_local(selector)
                if listener is not None:
                    listener.setblocking(False)
                    selector.register(listener, selectors.EVENT_READ)
                while not self._complete:
                    self._attend(selector, listener, deadline)
            finally:
                for control in self._asked:
                    control.close()
                self._asked.clear()
        self.members.sort(key=lambda member: natural(member.name))
        for worker, member in enumerate(self.members):
            member.stages = self._plan.stages_of(worker)
            member.title = self._plan.name_of(worker)
            member.stage = self._plan.stage_of(member.stages[0])
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
        """Whether as many workers have come as there are to be."""
        return len(self.members) == self._plan.workers

    @property
    def _complete(self) -> bool:
        """Whether all members have come and have imported torch, so that forming is quick."""
        return self._full and all(member.ready for member in self.members)

    def _call_local(self, selector: selectors.BaseSelector) -> None:
        """Call the workers that were started here; their calls carry the key of the job."""
        for control in self._local.controls.values():
            self._call(control, key=self._key.key)
            selector.register(control, selectors.EVENT_READ)

    def _attend(
        self, selector: selectors.BaseSelector, listener: socket.socket | None, deadline: Deadline
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
        self._notice_silence()
        for key, _ in ready:
            if key.fileobj is listener:
                self._accept(listener, selector)
            elif key.fileobj in self._asked:
                self._hear(key.fileobj, selector)
            elif key.data is not None:
                self._hear_member(key.data, selector)

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        """Take a connection, call it, and drop the oldest stranger where there are too many."""
        connection = accept(listener, lambda: self._drop_oldest(selector))
        if connection is None:
            return
        try:
            host, port = connection.getpeername()[:2]
            here = str(connection.getsockname()[0])
            prepare(connection)
            connection.setblocking(True)
            connection, channel = wrapped(self._tls, connection, calls=False)
            peer = f"the worker at {joined(host, port)}"
            control = Control(connection, peer, here, channel)
            self._call(control)
        except (OSError, PeerLost) as error:  # whoever connected is gone again
            connection.close()
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE, errno.EAGAIN):
                self._drop_oldest(selector)
            self._asked = {c: nonce for c, nonce in self._asked.items() if c.fileno() >= 0}
            return
        selector.register(control, selectors.EVENT_READ)
        if sum(not control.is_local for control in self._asked) > self._most:
            self._drop_oldest(selector)

    def _drop_oldest(self, selector: selectors.BaseSelector) -> bool:
        """Close the oldest connection that has not said hello; return whether there was one."""
        oldest = next((control for control in self._asked if not control.is_local), None)
        if oldest is not None:
            self._forget(oldest, selector)
            oldest.close()
        return oldest is not None

    def _notice_silence(self) -> None:
        """Notice a worker that was started here and has not said its first signed word for long.

        It has torch already, so it speaks at once, unless it was stopped.

        Raises:
            WorkerLost: A worker is silent for longer than that.
        """
        if time.monotonic() - self._began < self._heartbeat_s:
            return
        silent = [c for c in self._asked if c.is_local]
        silent += [m.control for m in self.members if m.control.is_local and not m.ready]
        if silent:
            name = self._local.name_of(silent[0])
            raise WorkerLost(
                f"worker {name!r} has been silent since it was started, for longer than the "
                f"heartbeat of {self._heartbeat_s:g} s",
                worker=name or "",
                stage=None,
            )

    def _call(self, control: Control, **more: bytes) -> None:
        """Send the call with a new nonce, which the answer has to prove that it has seen."""
        self._asked[control] = nonce = secrets.token_bytes(NONCE)
        control.send({"type": "call", "nonce": nonce, "salt": self._key.salt, **more})

    def _forget(self, control: Control, selector: selectors.BaseSelector) -> bytes:
        """Wait for nothing more from a connection, and return the nonce of its call."""
        selector.unregister(control)
        return self._asked.pop(control)

    def _hear(self, control: Control, selector: selectors.BaseSelector) -> None:
        """Read a hello, if all of it has come; make its worker a member, or refuse it.

        Raises:
            WorkerLost: The connection of a worker that was started here has ended.
        """
        try:
            hello = control.poll()
        except TransportError as error:
            self._forget(control, selector)
            control.close()
            self._note_end(control, error)
            return
        if hello is None:
            return
        nonce = self._forget(control, selector)
        talk = talk_of(control, hello, nonce, self._key.key)
        refusal = refusal_of(hello, talk, self.members)
        if refusal is None and self._full:
            reason = f"the job has its {self._plan.workers} workers"
            refusal = Refusal(reason, passing=True, proven=True)
        if refusal is not None:
            self._refuse(control, talk, hello, refusal)
            return
        try:
            member = admit(control, hello, talk)
        except PeerLost as error:
            control.close()
            self._note_end(control, error)
            return
        self.members.append(member)
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

    def _note_end(self, control: Control, error: TransportError) -> None:
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
        self._note(logging.WARNING, "a connection that is no worker was dropped: %s", error)

    def _note(self, level: int, text: str, *arguments: object) -> None:
        """Log what a stranger has done; each kind of thing once a second at most."""
        now = time.monotonic()
        said, unsaid = self._said.get(text, (-1.0, 0))
        if now - said < 1:
            self._said[text] = (said, unsaid + 1)
            return
        more = f" (and {unsaid} others)" if unsaid else ""
        _log.log(level, text + more, *arguments)
        self._said[text] = (now, 0)

    def _refuse(self, control: Control, talk: Talk, hello: Record, refusal: Refusal) -> None:
        """Tell a worker why it cannot become a member, and close its connection.

        A proof goes to those alone that have shown one: of another they could guess the secret.

        Args:
            control: The connection.
            talk: What proofs are made of.
            hello: What the worker has said of itself; anybody may have sent it.
            refusal: Why.
        """
        name, process = printable(str(hello.get("name")), 100), process_of(hello)
        level = logging.INFO if self._full else logging.WARNING
        self._note(level, "refused worker %r (%s): %s", name, process, refusal.reason)
        with suppress(PeerLost):
            reason = {"reason": refusal.reason, "passing": refusal.passing}
            shown = {"proof": talk.prove_refusal(reason)} if refusal.proven else {}
            control.send({"type": "refused", **reason, **shown})
        control.close()
        if refusal.proven and not refusal.passing:
            self._refused[name] = refusal.reason

    def _missing(self, deadline: Deadline) -> RendezvousTimeout:
        """Make the error that says which workers did not join in time."""
        needed = self._plan.workers
        came = {m.name for m in self.members}
        if len(came) == needed:  # then some of them have not become ready
            came -= {m.name for m in self.members if not m.ready}
        joined = sorted(came, key=natural)
        expected = {*self._local.controls, *(m.name for m in self.members)}
        absent = sorted(expected - came, key=natural)
        missing = needed - len(joined)
        seconds = deadline.timeout.total_seconds() if deadline.timeout else 0.0
        return RendezvousTimeout(
            f"{missing} of {needed} workers did not join within {seconds:g} s"
            + (f": {', '.join(absent)}" if absent else "")
            + f"; joined: {', '.join(joined) or 'none'}"
            + "".join(f"; {name!r} was refused: {why}" for name, why in self._refused.items())
            + "; start them with "
            f"`{self._command}`, or give Pipeline "
            "recovery=Recovery(start=...) with more time",
            missing=missing,
        )
