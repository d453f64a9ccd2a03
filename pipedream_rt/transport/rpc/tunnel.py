"""The tunnel: carries the connections of torch RPC over the links between the members.

torch's RPC agent (TensorPipe) accepts whatever connects to its port, aborts the process at bytes
that it does not understand, and runs torch's built-in operators for everybody. So it does not get
onto a network. It listens on loopback, where the kernel drops all packets to it but those of this
process. It connects to *gates*: one for each peer, also on loopback, which take connections of this
process alone. What comes in at a gate travels over the link to that peer, whose tunnel connects to
the agent there. Bytes go both ways.

    agent ──► gate of worker 2 ══════ link ══════► tunnel of worker 2 ──► agent of worker 2

Once the coordinator is connected to all agents, neither agents nor gates listen any more.
"""

from __future__ import annotations

import functools
import os
import queue
import re
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import TransportError
from pipedream_rt.lifecycle import Lifecycle, close_in_forked_children, name_this_thread
from pipedream_rt.telling import log_of
from pipedream_rt.transport.fence import AgentMode, accept_only, can_filter
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.rpc.descriptors import (
    OwnSocket,
    cut_off,
    own_sockets,
    stop_listening,
    waiting_at,
)
from pipedream_rt.transport.wakeup import Alarm

_log = log_of(__name__)

_PART = struct.Struct("!IIB")
"""Header of a part of a stream: rank of its opener, its number there, what the part is."""

_OPENS, _CARRIES, _ENDS = range(3)
_CHUNK = 1 << 16
_HOME = "127.0.0.1"
# The address that an agent tells its peer, as text.
_ADDRESS = re.compile(rb"(127\.0\.0\.1:)(\d{2,5})")

_GUARD_TIMEOUT = timedelta(seconds=1)
"""For the agent to accept what waits at its port. Its thread does so at once."""

_CONNECT_TIMEOUT = timedelta(seconds=10)
"""For a connection to this process's own agent. The kernel makes it at once."""

StreamId = tuple[int, int, int]
"""Rank of the peer, rank of the opener, and the number that the opener gave."""


class _Relay:
    """This process's end of one connection with its own agent."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        close_in_forked_children(connection)
        self.socket = connection
        self.waiting: deque[bytes] = deque()
        self.ends = False
        """Whether the connection is to be closed once nothing waits."""
        self.answered = False
        """Whether anything has come from the other side."""

    def flush(self) -> bool:
        """Write what waits; return whether nothing waits any more."""
        while self.waiting:
            try:
                sent = self.socket.send(self.waiting[0])
            except BlockingIOError:
                return False
            part = self.waiting.popleft()
            if sent < len(part):
                self.waiting.appendleft(part[sent:])
        return True


class Tunnel:
    """Carries the connections between the RPC agents of this process and of its peers.

    Its thread starts with `start`. From then on only that thread touches the connections.
    """

    def __init__(self, group: Group, send: Callable[[int, bytes], None]) -> None:
        self._group = group
        self._send = send  # `send(rank, data)` sends a part of a stream and never blocks
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._early: list[tuple[int, bytes]] = []  # parts that came before the agent listened
        self._gates: dict[int, socket.socket] = {}
        self._relays: dict[StreamId, _Relay] = {}
        self._opened = 0
        self._port = 0
        self._let_in: list[int] = []  # ports of our own connections to the agent
        self._fenced = True
        # Set by the thread only, so that no part of a stream overtakes an early one.
        self._guarded = False
        self._life = Lifecycle("the tunnel")
        self._wake = Alarm()
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None

    def start(self, ranks: tuple[int, ...], mode: AgentMode = "fenced") -> None:
        """Open gates to the members that this process will call, and start the thread."""
        self._fenced = mode != "open" or can_filter()
        self._selector.register(self._wake, selectors.EVENT_READ)
        for rank in ranks:
            self._gates[rank] = gate = socket.create_server((_HOME, 0), backlog=16)
            gate.setblocking(False)
            self._selector.register(gate, selectors.EVENT_READ, rank)
        # A daemon, as the interpreter joins other threads before it closes a forgotten pipeline.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def address_of(self, rank: int) -> str:
        """Return the address at which the agent finds a member, as TensorPipe writes it."""
        gate = self._gates.get(rank)
        # Without a gate, port 1: nobody listens there.
        return f"uv://{_HOME}:{1 if gate is None else gate.getsockname()[1]}"

    def guard(self, port: int) -> None:
        """Let nobody but this process reach the agent, which has begun to listen at ``port``.

        Called before the agent has told anybody where it listens, and before it takes what has
        connected.
        """
        self._port = port
        self._filter()
        # Where `listen` could not be held up, a stranger may have come before the filter.
        self._cut_off_strangers(Deadline(_GUARD_TIMEOUT))
        self._call_in_thread(self._catch_up)

    def fence_off(self, fd: int) -> None:
        """Have the kernel let only this process's own connections reach a listening socket."""
        if not self._fenced:
            return
        try:
            accept_only(fd, self._let_in)
        except OSError as error:
            raise TransportError(
                "the kernel does not keep strangers from torch RPC (SO_ATTACH_FILTER: "
                f"{error.strerror}); PIPEDREAM_RT_RPC=off does without torch RPC"
            ) from error

    def _filter(self) -> None:
        """Fence off every socket at which the agent listens."""
        for each in self._listeners():
            self.fence_off(each.fd)

    def _listeners(self) -> list[OwnSocket]:
        """Return the sockets at which the agent listens: one, or none after `shut`."""
        return [s for s in own_sockets() if s.listens and s.local == (_HOME, self._port)]

    def _cut_off_strangers(self, deadline: Deadline) -> None:
        """Reset the connections to the agent that are not this process's own."""
        # Only an accepted connection has a descriptor that can be reset.
        while any(waiting_at(each.fd) for each in self._listeners()) and not deadline.expired():
            os.sched_yield()
        members = {(_HOME, port) for port in self._let_in}
        for each in own_sockets():
            mine = each.local == (_HOME, self._port) and not each.listens
            if mine and each.peer not in members:
                cut_off(each.fd)
                _log.warning("a stranger at %s was cut off from torch RPC", each.peer)

    def shut(self) -> None:
        """Close the ports of the agent and of the gates. Connections stay open."""
        for each in self._listeners():
            stop_listening(each.fd)
        self._cut_off_strangers(Deadline(_GUARD_TIMEOUT))
        self._call_in_thread(self._close_gates)

    def receive(self, rank: int, data: bytes) -> None:
        """Take a part of a stream that has come from a member. Any thread; never blocks."""
        self._call_in_thread(lambda: self._take(rank, data))

    def end(self, rank: int) -> None:
        """Close the connections to a member that is gone. Any thread; never blocks."""
        self._call_in_thread(lambda: self._end_of(rank))

    def _call_in_thread(self, what: Callable[[], object]) -> None:
        """Have the thread call a function."""
        self._calls.put(what)
        self._wake.ring()

    def _run(self) -> None:
        """Carry streams until `close` is called; the thread of the tunnel runs this."""
        name_this_thread("tunnel")
        while self._life.is_open:
            # No deadline: `close` wakes it.
            for key, events in self._selector.select():
                if key.fileobj is self._wake:
                    self._wake.quiet()
                elif isinstance(key.data, int):
                    self._do(functools.partial(self._accept, key.data))
                elif key.data in self._relays:
                    self._do(functools.partial(self._attend_to, key.data, events))
            while not self._calls.empty():
                self._do(self._calls.get())

    @staticmethod
    def _do(what: Callable[[], object]) -> None:
        """Call a function whose error must end neither the thread nor another stream."""
        try:
            what()
        except Exception:  # the top of a thread
            _log.exception("the tunnel could not do %s", what)

    def _accept(self, rank: int) -> None:
        """Accept the agent's connection to a member; close a stranger's."""
        try:
            connection, peer = self._gates[rank].accept()
        except (OSError, KeyError):
            return  # whoever connected is gone again
        # The connection is ours if this process has the socket at its other end. Address and port
        # count: the same port at another address of loopback can be anybody's.
        ends = (peer[:2], connection.getsockname()[:2])
        if not any((s.local, s.peer) == ends for s in own_sockets()):
            connection.close()
            return
        self._opened += 1
        stream = (rank, self._group.rank, self._opened)
        self._add(stream, connection)
        self._send_part(stream, _OPENS)

    def _add(self, stream: StreamId, connection: socket.socket) -> None:
        self._relays[stream] = relay = _Relay(connection)
        self._selector.register(relay.socket, selectors.EVENT_READ, stream)

    def _send_part(self, stream: StreamId, what: int, data: bytes = b"") -> None:
        """Send a part of a stream to its other end."""
        rank, opener, number = stream
        self._send(rank, _PART.pack(opener, number, what) + data)

    def _attend_to(self, stream: StreamId, events: int) -> None:
        """Write to the agent's connection and read from it, as far as it is ready."""
        relay = self._relays[stream]
        try:
            if events & selectors.EVENT_WRITE and relay.flush():
                if relay.ends:
                    self._drop(stream)
                    return
                self._selector.modify(relay.socket, selectors.EVENT_READ, stream)
            if events & selectors.EVENT_READ:
                data = relay.socket.recv(_CHUNK)
                if not data:
                    raise ConnectionError  # closed by the agent: handled like a broken one
                self._send_part(stream, _CARRIES, data)
        except BlockingIOError:
            return
        except OSError:
            self._drop(stream)
            self._send_part(stream, _ENDS)

    def _drop(self, stream: StreamId) -> None:
        """Close the agent's end of a stream, and let its port in no more."""
        relay = self._relays.pop(stream)
        self._selector.unregister(relay.socket)
        port = relay.socket.getsockname()[1]
        if port in self._let_in:  # before the socket closes, when anybody can bind its port
            self._let_in.remove(port)
            with suppress(TransportError):
                self._filter()
        relay.socket.close()

    def _take(self, rank: int, data: bytes) -> None:
        """Act on a part of a stream from a member, at once or when the agent listens."""
        if not self._guarded:
            self._early.append((rank, data))
            return
        if len(data) < _PART.size:
            return
        opener, number, what = _PART.unpack_from(data)
        stream = (rank, opener, number)
        if what == _OPENS and opener == rank and stream not in self._relays:
            self._connect(stream)
        elif (relay := self._relays.get(stream)) is not None:
            relay.ends = relay.ends or what == _ENDS
            if what == _CARRIES:
                part = data[_PART.size :]
                if opener == self._group.rank and not relay.answered:
                    part = self._through_gate(rank, part)
                relay.answered = True
                relay.waiting.append(part)
            # The loop finds the socket writable at once, and writes.
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(relay.socket, both, stream)

    def _through_gate(self, rank: int, answer: bytes) -> bytes:
        """Replace the address in the first answer of a member's agent by that of our gate.

        An agent opens several connections to a peer, and learns from the answer to the first where
        to open the others. The address is text, which keeps its length here.
        """
        gate = self._gates.get(rank)
        if gate is None:
            return answer
        port = gate.getsockname()[1]
        return _ADDRESS.sub(
            lambda found: found[1] + str(port).zfill(len(found[2])).encode(), answer, count=1
        )

    def _connect(self, stream: StreamId) -> None:
        """Connect to this process's own agent, for a stream that a member has opened."""
        connection = socket.socket()
        try:
            # Bound first: the filter lets the port in before the connection is made, and nobody
            # else on this machine can have it meanwhile.
            connection.bind((_HOME, 0))
            self._let_in.append(connection.getsockname()[1])
            self._filter()
            connection.settimeout(_CONNECT_TIMEOUT.total_seconds())
            connection.connect((_HOME, self._port))
        except (OSError, TransportError) as error:
            connection.close()
            _log.debug("no connection to this process's RPC agent: %s", error)
            self._send_part(stream, _ENDS)
            return
        self._add(stream, connection)

    def _catch_up(self) -> None:
        """Act on what came before the agent listened, in order."""
        self._guarded = True
        early, self._early = self._early, []
        for rank, data in early:
            self._take(rank, data)

    def _end_of(self, rank: int) -> None:
        """Close the connections to a member that is gone."""
        for stream in [stream for stream in self._relays if stream[0] == rank]:
            self._drop(stream)

    def _close_gates(self) -> None:
        for gate in self._gates.values():
            self._selector.unregister(gate)
            gate.close()
        self._gates = {}

    def close(self) -> None:
        """Close everything. Idempotent."""
        if not self._life.begin_closing():
            return
        if self._thread is not None:
            self._call_in_thread(lambda: None)  # wakes the thread
            self._thread.join()
        for opened in (*self._gates.values(), *(relay.socket for relay in self._relays.values())):
            opened.close()
        self._selector.close()
        self._wake.close()
        self._life.close()
