"""The transport over links: messages go from worker to worker, without torch RPC.

Why not RPCs (``benchmarks/studies/transports.py`` prints the figures): an RPC of torch passes
through four threads, which costs more processor time than most layers of a small model need; and
whoever reaches its port can have it parse anything. A message over a link is written by the thread
that sends it, if the socket has room, and is read by the thread that waits for it; while that one
computes, by the links' own thread.
"""

from __future__ import annotations

import msgpack

from pipedream_rt.errors import PeerLost, TransportError
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.messages.inbox import Waiter
from pipedream_rt.messages.message import Message
from pipedream_rt.messages.tree import own
from pipedream_rt.messages.wire import decode, encode, sendable
from pipedream_rt.packing import packb, unpackb
from pipedream_rt.schedules.channels import CHANNELS
from pipedream_rt.schedules.edges import By
from pipedream_rt.telling import log_of
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.interface import Lost, Receive, Streams
from pipedream_rt.transport.link import Frame
from pipedream_rt.transport.links import Connections, Links

_log = log_of(__name__)

_MESSAGE, _RETURNED, _STREAM = range(3)
"""Kinds of frames: a message, the reason why one was not received, a part of a stream."""


_PASSING = {each.kind for each in CHANNELS if each.by in (By.MICRO_BATCH, By.UPDATE)}
"""The kinds of messages whose tensors a worker drops after a backward or an update."""


class SocketTransport:
    """The transport over links between processes.

    Attributes:
        nearby: The ranks of the members that can share memory with this one.
        streams: Who takes the streams that others send, as torch RPC does; None for nobody.
    """

    def __init__(self, group: Group, shares_memory: bool = False) -> None:
        self._group = group
        self._shares_memory = shares_memory  # whether large values go by shared memory
        self._open: dict[int, tuple[Receive, Lost]] = {}
        self._links: Links | None = None
        self.nearby: list[int] = []
        self._life = Lifecycle("the transport")
        self.streams: Streams | None = None

    def connect(self, connections: Connections) -> None:
        """Take connections over, and begin to receive."""
        self.nearby = [rank for rank, each in connections.items() if each.carries_descriptors]
        self._links = Links(connections, self._receive, self._end_of_link, self._shares_memory)

    @property
    def waiter(self) -> Waiter | None:
        """Lets one thread read the links while it waits; None before `connect`."""
        return self._links

    def open(self, address: int, receive: Receive, lost: Lost) -> None:
        self._open[address] = (receive, lost)

    def send(self, message: Message) -> None:
        if not self._life.is_open:
            return
        rank, data = self._group.rank_of(message.key.edge.target), encode(message)
        if rank == self._group.rank:
            problem = self._deliver(decode(data, [own(t, copy=True) for t in message.tensors]))
        else:
            assert self._links is not None
            tensors = [sendable(tensor) for tensor in message.tensors]
            passing = rank != 0 and message.key.edge.kind in _PASSING
            reason = self._links.send(rank, _MESSAGE, data, tensors, passing)
            problem = None if reason is None else f"{{}} is gone: {reason}"
        if problem is not None:
            self._report_lost(message.sender, rank, f"{message}: {problem}")

    def receiver(self, address: int) -> Receive | None:
        return self._open[address][0] if address in self._open else None

    def _report_lost(self, sender: int, rank: int, text: str) -> None:
        """Report a lost message to its sender in this process, unless the transport closes."""
        name = self._group.names[rank]
        if self._life.is_open and sender in self._open:
            error = PeerLost(text.replace("{}", f"worker {name!r}", 1), peer=name)
            _log.debug("%s", error)
            self._open[sender][1](error)

    def _end_of_link(self, rank: int, reason: str) -> None:
        """Report a lost peer to all addresses of this process. On the thread that reads."""
        if self.streams is not None:
            self.streams.end(rank)
        for address in list(self._open):
            self._report_lost(address, rank, f"{{}} is gone: {reason}")

    def _receive(self, rank: int, frame: Frame) -> None:
        """Take a frame from a link. On the thread that reads."""
        if frame.kind == _STREAM:
            if self.streams is None:
                raise TransportError(
                    f"{self._group.names[rank]!r} sends a stream of torch RPC, which this group "
                    "does without"
                )
            self.streams.receive(rank, frame.data)
        elif frame.kind == _RETURNED:
            try:
                sender, text = unpackb(frame.data)
            except (ValueError, TypeError, msgpack.UnpackException) as error:
                raise TransportError(
                    f"{len(frame.data)} bytes that should say why a message was not received "
                    f"cannot be read: {error!r}"
                ) from error
            self._report_lost(sender, rank, str(text))
        else:
            self._receive_message(rank, decode(frame.data, frame.tensors))

    def _receive_message(self, rank: int, message: Message) -> None:
        """Deliver a message of a member, or return to it the reason why not."""
        group, (_, sender, to) = self._group, message.key.edge
        # The link tells which member sent it, so a member cannot speak for another's addresses.
        for address, host in ((sender, rank), (to, group.rank)):
            if group.rank_of(address) != host:
                raise TransportError(
                    f"{message} came over the link from {group.names[rank]!r} to {group.name!r}, "
                    f"and address {address} is on {group.names[group.rank_of(address)]!r}"
                )
        problem = self._deliver(message)
        if problem is not None:
            assert self._links is not None
            text = f"{message}: {problem}"
            self._links.send(rank, _RETURNED, packb([sender, text]))

    def _deliver(self, message: Message) -> str | None:
        """Give a message to its receiver; return the reason of a failure, or None."""
        to = message.key.edge.target
        if to not in self._open:
            return f"{{}} has no receiver at address {to}: is the pipeline there closed?"
        self._open[to][0](message)
        return None

    def send_stream(self, rank: int, data: bytes) -> None:
        if self._links is not None:
            self._links.send(rank, _STREAM, data)

    def close(self) -> None:
        if not self._life.begin_closing():
            return
        if self._links is not None:
            self._links.close()
        if self.streams is not None:
            self.streams.close()
        self._life.close()
