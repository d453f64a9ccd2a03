"""The control connection: one socket for each worker, from before the RPC group to after it.

It carries small msgpack records, each behind its length. The connection is also the sign of life:
however a process dies, the kernel closes its end, and the other side reads end of file at once.

Every record after the answer to the hello is signed with a session key, derived from the job's key,
the nonces of both sides and, where the connection is encrypted, the coordinator's certificate (see
`pipedream_rt.cluster.keys`). So each side knows that the other knows the secret, and nobody in
between can insert, repeat or leave out a record. Neither the secret nor the key is sent over a
network: only a worker that inherits its connection gets the key, with the call.

    coordinator                     worker
    call            ->              a nonce, and the salt of the key (the worker is light: it has
                                    not imported torch yet)
                    <- hello        name, pid, host, boot, version, versions of its software,
                                    a nonce, proof of the secret
    refused reason  ->              the worker ends, or tries again later; or
    over code       ->              the script has ended for good, and so does the worker; or
    admitted        ->              proof of the secret; the worker imports torch
                    <- ready        the worker has imported torch; its kind of processor,
                                    and what keeps torch RPC from being fenced off there
    welcome         ->              a nonce for a key, rank, names, ...
    link rank       ->              with it comes a socket, the worker's end of its link to the
                                    member of that rank; one for each, if it was started here; else
                    <- door         where the worker listens for other members
    doors           ->              of all processes; each calls those of lower rank
                    <- joined       the worker has its links and is an endpoint of torch RPC
    shut            ->              all have joined: nothing of the worker listens from now on
    ...training, over the links...
    story           ->              the coordinator reports a stall
                    <- story        what the worker's stages wait for, and did last
                    <- beat         the worker is alive, what it does, its memory; at intervals
                    <- doing        the worker is about to do an action; where a job asks for it
    clock           ->              the coordinator collects a trace
                    <- clock        the worker's monotonic clock, in nanoseconds
    stop            ->              the worker's stages end the action at hand
                    <- stopped      the worker's stages compute no more
    exit failed     ->              the worker leaves the RPC group and ends; whether the job goes
                                    on with others
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
import threading
from collections import deque
from concurrent.futures import Future
from datetime import timedelta

import msgpack

from pipedream_rt.cluster.control_records import FIELDS, Record
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout, PeerLost, TransportError
from pipedream_rt.lifecycle import close_in_forked_children
from pipedream_rt.schema import printable, problem_of
from pipedream_rt.transport.signing import DIGEST, proof
from pipedream_rt.transport.tcp import set_timeout

VERSION = 13
"""Version of this protocol; the two ends must have the same."""

EXIT_FAILED = 1
"""Exit code of a worker that was refused or could not join: starting it again would not help."""

EXIT_COORDINATOR_LOST = 3
"""Exit code of a worker whose coordinator died or did not come, or whose job goes on with other
workers: whoever has started it may start it again."""


def is_final(code: int) -> bool:
    """Whether an exit code says that starting the same again is not needed, or would not help."""
    # 0 is the end of the work, 1 an error, 2 a wrong command line. Not final are signals, as 143
    # after a checkpoint at SIGTERM, and 3, a lost coordinator or lost workers.
    return code < 128 and code != EXIT_COORDINATOR_LOST


LIFE_AGAIN = 75
"""Result of a worker's life if its job ended before it began: with ``--persist`` the worker tries
again after a pause, without it the process exits with `EXIT_COORDINATOR_LOST`."""

LIFE_OVER = 76
"""Result of a worker's life, to the process that forked it, if the script has ended well for good:
that process exits with 0."""

_LENGTH = struct.Struct("!I")
_LARGEST = 1 << 20
"""Limit of a signed record, in bytes."""

_LARGEST_OF_A_STRANGER = 1 << 12
"""Limit of an unsigned record, which anybody may have sent, in bytes."""

_MOST_ENDS = 16
"""Sockets taken with one read; one `recvmsg` never joins the descriptors of two messages."""

_SEND_TIMEOUT = timedelta(seconds=10)
"""After which an end that reads nothing counts as gone."""


class Control:
    """One end of a control connection. Sending is safe from any thread, receiving from one.

    Attributes:
        peer: Name of the other end, for error messages.
        remote_host: Numeric address of the other end, as this end sees it; empty if nobody asks.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        local_host: str = "",
        channel: Future[bytes] | None = None,
        below: socket.socket | None = None,
        remote_host: str = "",
    ) -> None:
        self.peer = peer
        self.remote_host = remote_host
        self._tcp = below  # the TCP socket under an encrypted connection, owned by this object
        if below is not None:
            close_in_forked_children(below)
        self._channel = channel
        self._socket = connection
        close_in_forked_children(connection)
        self._buffer = bytearray()
        self._ends: deque[socket.socket] = deque()
        self._sending = threading.Lock()
        self._sign_with: tuple[bytes, bytes] | None = None
        self._open_with: tuple[bytes, bytes] | None = None
        self._sent = self._received = 0  # signed records, which each signature covers
        self._largest = _LARGEST_OF_A_STRANGER
        self._local_host = local_host  # empty for a socket pair

    def fileno(self) -> int:
        """Descriptor of the socket, for selectors."""
        return self._socket.fileno()

    @property
    def channel(self) -> bytes:
        """Hash of the coordinator's certificate, known once data came; empty if not encrypted."""
        return b"" if self._channel is None else self._channel.result(0)

    @property
    def is_local(self) -> bool:
        """Whether the connection is a socket pair, which one process made."""
        return not self._local_host

    @property
    def local_host(self) -> str:
        """Numeric address of this end; loopback for a socket pair."""
        return self._local_host or "127.0.0.1"

    def notice_within(self, seconds: float) -> None:
        """Have the kernel end the connection if the other machine confirms nothing for so long."""
        # It counts what was sent and not acknowledged. The kernel of a stopped process still
        # acknowledges; such a process is noticed by the heartbeat.
        if self._tcp is not None:
            set_timeout(self._tcp, seconds)

    def secure(self, key: bytes, ours: bytes, theirs: bytes) -> None:
        """Sign every record from now on, and accept signed ones only."""
        self._sign_with = (key, ours)
        self._open_with = (key, theirs)
        self._largest = _LARGEST

    def send(self, record: Record, end: socket.socket | None = None) -> None:
        """Send a record."""
        data = bytes(msgpack.packb(record))
        deadline = Deadline(_SEND_TIMEOUT)
        with self._sending:
            if self._sign_with is not None:
                key, name = self._sign_with
                # The number makes a record that is repeated or left out as wrong as a changed one.
                data = proof(key, name, self._sent.to_bytes(8, "big"), data) + data
                self._sent += 1
            left = memoryview(_LENGTH.pack(len(data)) + data)
            beside = [] if end is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _fd_of(end))]
            while left:
                try:
                    # Not by the socket's own timeout: another thread may be receiving.
                    if not self._wait(select.POLLOUT, deadline):
                        raise TimeoutError(f"it read nothing for {_SEND_TIMEOUT.seconds} s")
                    left = left[self._socket.sendmsg([left], beside, socket.MSG_DONTWAIT) :]
                    beside = []  # the socket goes with the first part only
                except BlockingIOError:
                    continue
                except (OSError, ValueError) as error:
                    raise PeerLost(f"{self.peer} is gone: {error}", peer=self.peer) from error

    def receive(self, deadline: Deadline) -> Record:
        """Wait for a record."""
        while True:
            record = self._next_buffered()
            if record is not None:
                return record
            try:
                ready = self._wait(select.POLLIN, deadline)
            except (OSError, ValueError) as error:
                raise PeerLost(f"{self.peer} is gone: {error}", peer=self.peer) from error
            if not ready:
                raise MessageTimeout(f"nothing came from {self.peer} in time")
            self._read()

    def _wait(self, event: int, deadline: Deadline) -> bool:
        """Wait until the socket is ready; return whether it is in time."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(deadline.remaining_ms()))

    def receive_all(self) -> list[Record]:
        """Return all whole records that have come, without waiting; at least one read is made."""
        # No whole record may stay in the buffer: the selector that led here does not see it.
        self._read()
        records = []
        while (record := self._next_buffered()) is not None:
            records.append(record)
        return records

    def poll(self) -> Record | None:
        """Return the next record if all of it has come, without waiting; keep later ones."""
        record = self._next_buffered()
        if record is None:
            self._read()
            record = self._next_buffered()
        return record

    def _read(self) -> None:
        """Read what has come into the buffer."""
        # No more than the largest record: a stranger must not fill the memory.
        room = min(1 << 16, _LENGTH.size + self._largest - len(self._buffer))
        try:
            if self.is_local:
                data, fds, _, _ = socket.recv_fds(
                    self._socket, max(1, room), _MOST_ENDS, socket.MSG_DONTWAIT
                )
                self._ends.extend(socket.socket(fileno=fd) for fd in fds)
            else:
                data = self._socket.recv(max(1, room), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(f"{self.peer} is gone: {error}", peer=self.peer) from error
        if not data:
            raise PeerLost(f"{self.peer} closed the connection", peer=self.peer)
        self._buffer += data

    def _next_buffered(self) -> Record | None:
        """Take the next whole record from the buffer; None if there is none."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._largest:
            raise TransportError(
                f"{self.peer} sent a record of {length} bytes, where at most {self._largest} are "
                "allowed; is it pipedream-rt of the same version?"
            )
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        data = self._checked(bytes(self._buffer[_LENGTH.size : end]))
        del self._buffer[:end]
        try:
            record = msgpack.unpackb(data)
        except (ValueError, RecursionError, msgpack.UnpackException) as error:
            raise TransportError(
                f"{self.peer} sent a record that is no msgpack: {error}; is it pipedream-rt of "
                "the same version?"
            ) from error
        if not isinstance(record, dict):
            raise TransportError(
                f"{self.peer} sent a {type(record).__name__} as a record, which is a map; is it "
                "pipedream-rt of the same version?"
            )
        if not all(isinstance(key, str) for key in record):
            raise TransportError(
                f"{self.peer} sent a record with a field whose name is no text; is it "
                "pipedream-rt of the same version?"
            )
        kind = record.get("type")
        if not isinstance(kind, str) or kind not in FIELDS:
            what = printable(repr(kind), 60)
            raise TransportError(
                f"{self.peer} sent a record of the unknown type {what}; is it pipedream-rt of "
                "the same version?"
            )
        # Unsigned records have no parts, so whoever sends one that has is a stranger.
        if self._open_with is None and any(isinstance(v, dict | list) for v in record.values()):
            raise TransportError(
                f"{self.peer} sent a {kind!r} with nested values, where records are not signed "
                "yet; is it pipedream-rt of the same version?"
            )
        if problem := problem_of(record, FIELDS[kind]):
            raise TransportError(
                f"{self.peer} sent a {kind!r} that makes no sense: {problem}; is it pipedream-rt "
                "of the same version?"
            )
        return dict(record)

    def _checked(self, data: bytes) -> bytes:
        """Check the signature of a record, if records are signed by now, and remove it."""
        if self._open_with is None:
            return data
        key, name = self._open_with
        expected = proof(key, name, self._received.to_bytes(8, "big"), data[DIGEST:])
        if not hmac.compare_digest(expected, data[:DIGEST]):
            raise TransportError(
                f"{self.peer} sent record {self._received} with a wrong signature: somebody in "
                "between has changed, repeated or left out a record"
            )
        self._received += 1
        return data[DIGEST:]

    def take_end(self) -> socket.socket:
        """Take the oldest socket that has come with a record and was not taken yet."""
        if not self._ends:
            raise TransportError(
                f"{self.peer} sent a record whose socket has not come with it; if this process is "
                "at its limit of open files, raise that (ulimit -n)"
            )
        return self._ends.popleft()

    def has_come(self) -> bool:
        """Whether there is anything to receive, if only the end of the connection."""
        return bool(self._buffer) or self._wait(select.POLLIN, Deadline(timedelta(0)))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()
        if self._tcp is not None:
            self._tcp.close()
        while self._ends:
            self._ends.pop().close()


def _fd_of(end: socket.socket) -> bytes:
    """Return the descriptor of a socket as the data of SCM_RIGHTS."""
    return struct.pack("@i", end.fileno())
