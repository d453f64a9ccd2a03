"""Forms the group of a generation out of the workers that have come."""

from __future__ import annotations

import secrets
import selectors
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from itertools import combinations

from pipedream_rt.cluster.addresses import is_loopback, listening
from pipedream_rt.cluster.environment import memory_is_shared
from pipedream_rt.cluster.keys import NONCE, group_key
from pipedream_rt.cluster.local_workers import LocalWorkers
from pipedream_rt.cluster.members import Member, tell
from pipedream_rt.cluster.peer_links import PeerLinks
from pipedream_rt.cluster.unix_links import UnixAddress, listening_nearby
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import RendezvousTimeout, TransportError, WorkerLost
from pipedream_rt.schedules import Plan
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.link import Connection, link_key
from pipedream_rt.transport.links import Connections
from pipedream_rt.transport.rpc.endpoint import Endpoint, NoEndpoint
from pipedream_rt.transport.rpc.fence import AgentMode
from pipedream_rt.transport.sockets import SocketTransport
from pipedream_rt.transport.tls import Tls

_TURN_S = 0.5
"""Seconds after which the deadlines are looked at again, whatever comes."""

COORDINATOR_NAME = "coordinator"
"""Name of the coordinator in the group."""


class Formation:
    """Forms the group of a generation: `welcome` first, then `join`.

    Where all workers were started here, this process hands out their links and none of them
    listens. Else they meet at their doors (see `PeerLinks`). The members are in the order of ranks.
    """

    def __init__(
        self,
        plan: Plan,
        members: Sequence[Member],
        local: LocalWorkers,
        deadline: Deadline,
        heartbeat: timedelta,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self._heartbeat = heartbeat
        self._alive = Deadline(heartbeat)
        # Who has said nothing since its welcome.
        self._silent = {member.name: member for member in members}
        self._members = members
        self._local = local
        self._deadline = deadline
        self._names = (COORDINATOR_NAME, *(member.name for member in members))
        by_address = {a: index for index, member in enumerate(members) for a in member.stages}
        self._hosts = tuple(by_address[address] for address in plan.addresses)
        self._inherits = all(member.control.is_local for member in members)
        self._found: dict[str, UnixAddress] = {}  # the doors that are known, by name
        self._nearby: dict[str, set[int]] = {}  # whom each has met at a Unix door, by rank
        self._doors: Future[dict[str, UnixAddress]] = Future()  # all of them
        self._given_up = False

    def welcome(self, *, generation: int, timeout: timedelta, key: bytes, rpc: AgentMode) -> Group:
        """Welcome the members to the group."""
        nonce = secrets.token_bytes(NONCE)
        for rank, member in enumerate(self._members, 1):
            member.control.send(
                {
                    "type": "welcome",
                    "nonce": nonce,
                    "beat_s": self._heartbeat.total_seconds() / 4,
                    "rank": rank,
                    "seats": [[w, title, list(stages)] for w, title, stages in member.seats],
                    "names": list(self._names),
                    "hosts": list(self._hosts),
                    "host": None if self._inherits else self._meeting_host(),
                    "rpc": rpc,
                    "generation": generation,
                    "timeout_s": timeout.total_seconds(),
                    "start_timeout_s": self._deadline.remaining_s(),
                    "path": sys.path,
                }
            )
        return Group(
            generation=generation,
            rank=0,
            names=self._names,
            hosts=self._hosts,
            key=group_key(key, nonce),
        )

    def _meeting_host(self) -> str:
        """Address of this machine that every member reaches: no loopback if one is elsewhere."""
        hosts = [member.control.local_host for member in self._members]
        return next((h for h in hosts if not is_loopback(h)), hosts[0])

    def join(
        self, group: Group, transport: SocketTransport, endpoint: Endpoint | NoEndpoint
    ) -> None:
        """Join the group, watching the members meanwhile; nothing listens afterwards."""
        # Meeting and joining torch RPC block until all members do the same, so they run on another
        # thread: this one notices a worker that dies meanwhile, and ends them.
        with ExitStack() as stack:
            door, nearby = None, None
            if self._inherits:
                transport.connect(self._hand_out_links(group))
            else:
                door = stack.enter_context(listening(self._meeting_host(), 0))
                door.setblocking(False)
                nearby = stack.enter_context(listening_nearby(self._tls))
                self._found[COORDINATOR_NAME] = UnixAddress.of(door, nearby)
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="join"))

            def join() -> None:
                with theirs:  # its close tells `_exchange` that this thread has ended
                    if door is not None:
                        doors = {group.names.index(n): at for n, at in self._doors.result().items()}
                        meeting = PeerLinks(group, door, doors, self._deadline, self._tls, nearby)
                        transport.connect(meeting.meet(lambda: self._given_up))
                    endpoint.join(self._deadline)

            joining = thread.submit(join)
            try:
                self._exchange(ours)
            except BaseException as error:
                self._given_up = True
                if not self._doors.done():
                    self._doors.set_exception(error)
                endpoint.close()  # ends the calls to other members that are under way
                transport.close()
                raise
            try:
                joining.result()
            except RuntimeError as error:
                raise TransportError(f"joining the RPC group failed: {error}") from error
        if isinstance(endpoint, Endpoint):
            # TensorPipe's listener: a stranger's bytes would abort the process.
            transport.tunnel.shut()
            tell(self._members, {"type": "shut"})

    def places(self) -> dict[str, str]:
        """Per worker, the id of its host: workers with equal ids share memory."""
        if self._inherits:
            return dict.fromkeys(self._names, "here" if memory_is_shared() else "")
        ranks: dict[str, set[int]] = {}  # of the workers at each place
        for rank, name in enumerate(self._names[1:], 1):
            ranks.setdefault(self._found[name].place, set()).add(rank)
        # Empty for one that has not met all others of its place at Unix doors, as where it could
        # not open one: memory is given away over Unix sockets only.
        return {
            self._names[rank]: place if there - {rank} <= self._nearby[self._names[rank]] else ""
            for place, there in ranks.items()
            for rank in there
        }

    def _hand_out_links(self, group: Group) -> Connections:
        """Make a link between every two members, hand out the ends, and return our own."""
        mine: Connections = {}
        try:
            for low, high in combinations(range(len(self._names)), 2):
                ends = socket.socketpair()
                if low == 0:
                    key = link_key(group.key, low, high)
                    mine[high] = Connection(ends[0], key, carries_descriptors=True)
                else:
                    self._hand_out_end(low, high, ends[0])
                self._hand_out_end(high, low, ends[1])
        except BaseException:
            for connection in mine.values():
                connection.socket.close()
            raise
        return mine

    def _hand_out_end(self, rank: int, other: int, end: socket.socket) -> None:
        """Give a member its end of the link to another one."""
        with end:
            self._members[rank - 1].control.send({"type": "link", "rank": other}, end)

    def _exchange(self, joining: socket.socket) -> None:
        """Gather the doors of all members, hand them out, and wait until all have joined."""
        with selectors.DefaultSelector() as selector:
            selector.register(joining, selectors.EVENT_READ)
            for member in self._members:
                selector.register(member.control, selectors.EVENT_READ, member)
            waiting = 1 + len(self._members)  # the coordinator's own thread, and each member
            while waiting:
                ready = selector.select(_TURN_S)
                self._notice_silence()
                if self._deadline.expired():
                    raise RendezvousTimeout(
                        f"all {len(self._members)} workers came, but the group did not form in "
                        "time; can they reach each other and the coordinator on any port?"
                    )
                for key, _ in ready:
                    member = key.data
                    self._silent.pop(member and member.name, None)
                    if member is None or self._has_joined(member):
                        selector.unregister(key.fileobj)
                        waiting -= 1
                self._hand_out()

    def _notice_silence(self) -> None:
        """Report a member that has said nothing since its welcome for longer than the heartbeat."""
        if self._alive.expired() and self._silent:
            member = next(iter(self._silent.values()))
            note = " (it has not answered its welcome within the heartbeat)"
            raise member.lost(self._local.ending(member.name), note=note)

    def _has_joined(self, member: Member) -> bool:
        """Read where a member's door is, or that it has joined."""
        try:
            records = member.control.receive_all()
        except TransportError as error:  # it is gone, or has sent what no member sends
            raise member.lost(self._local.ending(member.name), error) from error
        for record in records:
            if record["type"] == "joined":
                self._nearby[member.name] = set(record["nearby"])
                return True  # behind it only beats may have come
            if record["type"] != "door":
                text = record.get("text") or (
                    f"it sent a {record['type']!r}, where its door was expected; is it "
                    "pipedream-rt of the same version?"
                )
                raise WorkerLost(
                    f"worker {member.name!r} could not join: {text}",
                    worker=member.name,
                    stage=member.stage,
                )
            self._found[member.name] = UnixAddress(*record["at"])
        return False

    def _hand_out(self) -> None:
        """Send all members the doors, once all are known."""
        if not self._inherits and len(self._found) == len(self._names) and not self._doors.done():
            self._refuse_unreachable()
            self._doors.set_result(self._found)
            tell(self._members, {"type": "doors", "by_name": self._found})

    def _refuse_unreachable(self) -> None:
        """Refuse a member that listens on loopback while others listen elsewhere."""
        inside = [name for name, at in self._found.items() if is_loopback(at.host)]
        if inside and len(inside) < len(self._found):
            where = ", ".join(f"{name} {at.tcp_address}" for name, at in self._found.items())
            raise RendezvousTimeout(
                f"{', '.join(map(repr, inside))} of the group cannot be reached from other "
                f"machines: the addresses are {where}; start such a worker with --bind and a "
                "network interface that has an address",
                missing=len(inside),
            )
