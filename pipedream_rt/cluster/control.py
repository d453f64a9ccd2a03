"""The control connection: one socket for each worker, from before the RPC group to after it.

Small msgpack records, each behind its length. The connection is also the sign of life: when a
process dies, however, its end closes and the other side reads the end of file at once.

Every record after the hello is signed with a key that the job's secret and both nonces make, so
that each side knows that the other knows the secret, and nobody can put in, repeat or leave out a
record. The secret itself is never sent over a network: a worker that inherits its connection gets
it with the call.

    coordinator                     worker
    call            ->              a nonce (the worker is light: it has not imported torch yet)
                    <- hello        name, pid, host, boot, version, a nonce, proof of the secret
                    <- ready        has imported torch
    refused reason  ->                                          or
    welcome         ->              a nonce for a key, rank, names, ...; both build an RPC agent
                    <- address      where it listens
    addresses       ->              of all; every process calls every other
                    <- joined
    shield          ->              all have joined: it listens no more
    ...training, over RPC...
    story           ->              in a stall
                    <- story        what its stage waits for, and did last
                    <- beat         now and then: it is alive, what it does, its memory
                    <- doing        before an action, where a job asks for it
    clock           ->              for a trace
                    <- clock        the worker's monotonic clock, in nanoseconds
    stop            ->
                    <- stopped      its stage computes no more
    exit            ->              leaves the RPC group and ends
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import select
import socket
import struct
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgpack

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, MessageTimeout, PeerLost, TransportError
from pipedream_rt.transport.signing import DIGEST, proof

VERSION = 3
"""Of this protocol; the two ends must agree."""

NONCE = 32
"""Bytes of a nonce, of the secret that a launcher makes, and of the keys."""

COORDINATOR_END, WORKER_END = b"coordinator", b"worker"
"""Names of the two ends, for `Control.secure`."""

EXIT_FAILED = 1
"""Exit code of a worker that was refused or could not join."""

EXIT_COORDINATOR_LOST = 3
"""Exit code of a worker whose coordinator died."""

_LENGTH = struct.Struct("!I")
_LARGEST = 1 << 20
_LARGEST_OF_A_STRANGER = 1 << 12

Record = dict[str, Any]

_ends: WeakSet[socket.socket] = WeakSet()
"""Connections whose end tells the other side that this process is dead."""


def close_in_forked_children(connection: socket.socket) -> None:
    """Do not let a child that the user's script forks, as a data loader's, keep a connection."""
    _ends.add(connection)


def _close_ends() -> None:
    """In a forked child."""
    for connection in list(_ends):
        connection.close()


os.register_at_fork(after_in_child=_close_ends)


class Control:
    """One end of a control connection. Sending is safe from any thread, receiving from one.

    Args:
        connection: A connected stream socket.
        peer: Name of the other end, for messages.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        """Own the socket from now on."""
        self.peer = peer
        self._socket = connection
        close_in_forked_children(connection)
        self._buffer = bytearray()
        self._sending = threading.Lock()
        self._sign_with: tuple[bytes, bytes] | None = None
        self._open_with: tuple[bytes, bytes] | None = None
        self._sent = self._received = 0
        self._largest = _LARGEST_OF_A_STRANGER
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_silence(connection)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    @property
    def is_local(self) -> bool:
        """Whether both ends were made by one process."""
        return self._socket.family == socket.AF_UNIX

    @property
    def local_host(self) -> str:
        """Address of this end; loopback for a socket pair."""
        if self.is_local:
            return "127.0.0.1"
        return str(self._socket.getsockname()[0])

    def secure(self, key: bytes, ours: bytes, theirs: bytes) -> None:
        """Sign every record from now on, and take none that is not signed.

        Args:
            key: That both ends know.
            ours: Name of this end.
            theirs: Name of the other.
        """
        self._sign_with = (key, ours)
        self._open_with = (key, theirs)
        self._largest = _LARGEST

    def send(self, record: Record) -> None:
        """Send a record.

        Raises:
            PeerLost: The other end is gone, or takes nothing for ten seconds.
        """
        data = bytes(msgpack.packb(record))
        deadline = Deadline(timedelta(seconds=10))
        with self._sending:
            if self._sign_with is not None:
                key, name = self._sign_with
                data = proof(key, name, self._sent.to_bytes(8, "big"), data) + data
                self._sent += 1
            left = memoryview(_LENGTH.pack(len(data)) + data)
            while left:
                try:
                    # Not by the socket's own timeout: another thread may be receiving.
                    if not self._wait(select.POLLOUT, deadline):
                        raise TimeoutError("it takes nothing")
                    left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    continue
                except (OSError, ValueError) as error:
                    raise PeerLost(f"{self.peer} is gone: {error}", peer=self.peer) from error

    def receive(self, deadline: Deadline) -> Record:
        """Wait for a record.

        Raises:
            MessageTimeout: None came in time.
            PeerLost: The other end is gone.
            TransportError: What came is no record, or not signed.
        """
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
        """Wait until the socket is ready; False if it was not in time."""
        poll = select.poll()
        poll.register(self._socket, event)
        seconds = deadline.remaining_s()
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def receive_all(self) -> list[Record]:
        """Return the records that have come, without waiting; for what a selector found readable.

        A selector says nothing of what is in the buffer already, so nothing may stay there.

        Raises:
            TransportError: As `receive`.
        """
        self._read()
        records = []
        while (record := self._next_buffered()) is not None:
            records.append(record)
        return records

    def poll(self) -> Record | None:
        """Return the next record if all of it has come, without waiting.

        Those behind it stay, for `receive`.

        Raises:
            TransportError: As `receive`.
        """
        record = self._next_buffered()
        if record is None:
            self._read()
            record = self._next_buffered()
        return record

    def _read(self) -> None:
        """Read what there is into the buffer, of a stranger no more than a record."""
        room = min(1 << 16, _LENGTH.size + self._largest - len(self._buffer))
        try:
            data = self._socket.recv(max(1, room), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(f"{self.peer} is gone: {error}", peer=self.peer) from error
        if not data:
            raise PeerLost(f"{self.peer} closed the connection", peer=self.peer)
        self._buffer += data

    def _next_buffered(self) -> Record | None:
        """The next whole record that has arrived, if any."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._largest:
            raise TransportError(f"{self.peer} speaks another protocol")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        data = self._checked(bytes(self._buffer[_LENGTH.size : end]))
        del self._buffer[:end]
        try:
            record = msgpack.unpackb(data)
        except (ValueError, msgpack.UnpackException) as error:
            raise TransportError(f"{self.peer} speaks another protocol: {error}") from error
        names = isinstance(record, dict) and all(isinstance(key, str) for key in record)
        if not names or "type" not in record:
            raise TransportError(f"{self.peer} speaks another protocol")
        return dict(record)

    def _checked(self, data: bytes) -> bytes:
        """Take off the signature of a record, if there has to be one."""
        if self._open_with is None:
            return data
        key, name = self._open_with
        expected = proof(key, name, self._received.to_bytes(8, "big"), data[DIGEST:])
        if not hmac.compare_digest(expected, data[:DIGEST]):
            raise TransportError(
                self._refusal(data)
                or f"{self.peer} does not know the secret of this job; give both sides the same "
                "PIPEDREAM_RT_SECRET"
            )
        self._received += 1
        return data[DIGEST:]

    def _refusal(self, data: bytes) -> str:
        """The reason in a refusal, which is not signed: the two may not share a secret."""
        try:
            record = msgpack.unpackb(data)
        except (ValueError, msgpack.UnpackException):
            return ""
        if not isinstance(record, dict) or record.get("type") != "refused":
            return ""
        return f"{self.peer} refused this process: {record.get('reason')}"

    def close(self) -> None:
        """Close. Idempotent."""
        self._socket.close()


def prove(secret: bytes, asked: bytes, answer: bytes, hello: Record) -> bytes:
    """What a worker shows to prove that it knows the secret of the job.

    Args:
        secret: Of the job.
        asked: Nonce of the coordinator.
        answer: Nonce of the worker.
        hello: Its record, without the proof.
    """
    said = [hello.get(name) for name in ("name", "pid", "host", "boot", "version")]
    return proof(secret, b"worker", asked, answer, msgpack.packb(said))


def session_key(secret: bytes, asked: bytes, answer: bytes) -> bytes:
    """The key that signs what both ends say after the hello."""
    return proof(secret, b"session", asked, answer)


def group_key(secret: bytes, nonce: bytes) -> bytes:
    """The key that signs the RPCs of a generation, for which the coordinator draws a nonce."""
    return proof(secret, b"group", nonce)


def _notice_silence(connection: socket.socket) -> None:
    """Let the kernel find out, within half a minute, that the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def parse_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``.

    Raises:
        ConfigError: It is not of that form.
    """
    host, colon, port = text.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ConfigError(f"{text!r} is no address; write HOST:PORT, as in 127.0.0.1:29500")
    return host, int(port)


def interface_of(host: str) -> str:
    """Name of the network interface that has an address, for torch's TP_SOCKET_IFNAME.

    Args:
        host: Numeric address of this machine.

    Raises:
        ConfigError: No interface has it.
    """
    if ipaddress.ip_address(host).is_loopback:
        return "lo0" if sys.platform == "darwin" else "lo"
    import fcntl  # not on every platform; needed for other than loopback only

    get_interface_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), get_interface_address, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    raise ConfigError(f"no network interface of this machine has the address {host}")


def interface_towards(address: str) -> str:
    """Name of the network interface by which this machine reaches ``HOST:PORT``.

    Raises:
        ConfigError: There is no way there.
    """
    host, port = parse_address(address)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return interface_of(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"{address} cannot be reached from here: {error}") from error


def boot_id() -> str:
    """Of the running kernel: processes with the same one read the same monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
