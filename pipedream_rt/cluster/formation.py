"""The formation of the RPC group of a generation, with the workers that have come."""

from __future__ import annotations

import ipaddress
import secrets
import selectors
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

from pipedream_rt.cluster.addresses import interface_of
from pipedream_rt.cluster.keys import NONCE, group_key
from pipedream_rt.cluster.local_workers import LocalWorkers
from pipedream_rt.cluster.members import Member, tell
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost, RendezvousTimeout, TransportError, WorkerLost
from pipedream_rt.schedules import Plan
from pipedream_rt.transport.rpc import Directory, RpcGroup, RpcTransport, host_and_port

_COORDINATOR = "coordinator"
"""RPC name of the coordinator."""


class Formation:
    """Forms the RPC group of a generation: `welcome` first, then `join`.

    Args:
        plan: Which worker hosts which stage.
        members: The workers, in the order of their ranks.
        local: The workers that were started here, which says how one of them has ended.
        deadline: When to give up.
    """

    def __init__(
        self, plan: Plan, members: Sequence[Member], local: LocalWorkers, deadline: Deadline
    ) -> None:
        """Tell nobody yet."""
        self._members = members
        self._local = local
        self._deadline = deadline
        self._names = (_COORDINATOR, *(member.name for member in members))
        self._hosts = plan.hosts
        self._found: dict[str, str] = {}  # the addresses that are known, by name
        self._addresses: Future[dict[str, str]] = Future()  # all of them

    def welcome(
        self, *, generation: int, timeout: timedelta, heartbeat: timedelta, secret: bytes
    ) -> RpcTransport:
        """Welcome the members to the group, and make the coordinator's transport.

        Args:
            generation: Number of the group in this process.
            timeout: How long to wait for a message that is sure to come.
            heartbeat: How long a worker may be silent; it sends four signs of life in that time.
            secret: The secret of the job.

        Returns:
            The transport, which is not connected yet.

        Raises:
            PeerLost: A member is gone.
        """
        host, nonce = self._meeting_host(), secrets.token_bytes(NONCE)
        for rank, member in enumerate(self._members, 1):
            member.control.send(
                {
                    "type": "welcome",
                    "nonce": nonce,
                    "beat_s": heartbeat.total_seconds() / 4,
                    "rank": rank,
                    "stages": list(member.stages),
                    "names": list(self._names),
                    "hosts": list(self._hosts),
                    "host": host,
                    "generation": generation,
                    "timeout_s": timeout.total_seconds(),
                    "start_timeout_s": self._deadline.remaining_s(),
                    "path": sys.path,
                }
            )
        return RpcTransport(
            RpcGroup(
                generation=generation,
                rank=0,
                names=self._names,
                hosts=self._hosts,
                interface=interface_of(host),
                timeout=timeout,
                key=group_key(secret, nonce),
            )
        )

    def _meeting_host(self) -> str:
        """Address of this machine that every member reaches: not loopback if one is elsewhere."""
        hosts = [member.control.local_host for member in self._members]
        return next((h for h in hosts if not ipaddress.ip_address(h).is_loopback), hosts[0])

    def join(self, transport: RpcTransport) -> None:
        """Join the group, watching the members meanwhile; nothing listens afterwards.

        torch's part of joining blocks until all members have joined. It runs in a thread of its
        own, so that a worker that dies meanwhile ends it.

        Args:
            transport: Made by `welcome`. Closed after an error.

        Raises:
            RendezvousTimeout: The members do not reach each other in time.
            WorkerLost: A member is gone, or could not join.
            TransportError: torch could not join.
        """
        ours, theirs = socket.socketpair()
        with ours, ThreadPoolExecutor(1, thread_name_prefix="join") as thread:
            joining = thread.submit(self._join_in_thread, transport, theirs)
            try:
                self._exchange(ours)
            except BaseException as error:
                if not self._addresses.done():
                    self._addresses.set_exception(error)
                transport.close()  # ends the calls to other members that are under way
                raise
            try:
                joining.result()
            except RuntimeError as error:
                raise TransportError(f"joining the RPC group failed: {error}") from error
        transport.shield()
        tell(self._members, {"type": "shield"})

    def _join_in_thread(self, transport: RpcTransport, theirs: socket.socket) -> None:
        """Join the group; writes to a socket when the address is known and closes it at the end."""

        def publish(address: str) -> None:
            self._found[_COORDINATOR] = address
            theirs.send(b"x")

        with theirs:
            directory = Directory(self._names, publish, self._addresses.result)
            transport.join(directory, self._deadline)

    def _exchange(self, joining: socket.socket) -> None:
        """Gather the addresses of all, hand them out, and wait until all have joined.

        Args:
            joining: Readable when this process has published its address; closed by the other side
                when this process has joined.

        Raises:
            RendezvousTimeout: The group did not form in time.
            WorkerLost: A member is gone, or could not join.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(joining, selectors.EVENT_READ)
            for member in self._members:
                selector.register(member.control, selectors.EVENT_READ, member)
            waiting = 1 + len(self._members)
            while waiting:
                ready = selector.select(self._deadline.remaining_s())
                if not ready:
                    raise RendezvousTimeout(
                        f"all {len(self._members)} workers came, but the RPC group did not form "
                        "in time; can they reach each other and the coordinator on any port?"
                    )
                for key, _ in ready:
                    member = key.data
                    if not joining.recv(1) if member is None else self._has_joined(member):
                        selector.unregister(key.fileobj)
                        waiting -= 1
                self._hand_out()

    def _has_joined(self, member: Member) -> bool:
        """Read what a member has sent: its address, or its word that it has joined.

        Raises:
            WorkerLost: It is gone, or could not join.
        """
        try:
            records = member.control.receive_all()
        except PeerLost as error:
            raise member.lost(self._local.ending(member.name)) from error
        for record in records:
            if record["type"] == "joined":
                return True  # a sign of life may have come behind it
            if record["type"] != "address":
                raise WorkerLost(
                    f"worker {member.name!r} could not join: {record.get('text', record['type'])}",
                    worker=member.name,
                    stage=member.stages[0],
                )
            self._found[member.name] = str(record["address"])
        return False

    def _hand_out(self) -> None:
        """Hand out the addresses, once all are known.

        Raises:
            RendezvousTimeout: One listens on loopback, where the others do not reach it.
        """
        if len(self._found) == len(self._names) and not self._addresses.done():
            self._refuse_unreachable()
            self._addresses.set_result(self._found)
            tell(self._members, {"type": "addresses", "by_name": self._found})

    def _refuse_unreachable(self) -> None:
        """Refuse a member that listens on loopback while others listen elsewhere.

        Raises:
            RendezvousTimeout: There is one.
        """
        inside = [name for name, address in self._found.items() if _is_loopback(address)]
        if inside and len(inside) < len(self._found):
            raise RendezvousTimeout(
                f"{', '.join(map(repr, inside))} of the group cannot be reached from other "
                f"machines: the addresses are {self._found}; start such a worker with --bind and a "
                "network interface that has an address",
                missing=len(inside),
            )


def _is_loopback(url: str) -> bool:
    """Whether an address of TensorPipe, as ``uv://127.0.0.1:40000``, is on loopback."""
    return ipaddress.ip_address(host_and_port(url)[0]).is_loopback
