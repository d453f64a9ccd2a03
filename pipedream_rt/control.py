"""The control connection: one socket for each worker, from before the RPC group to after it.

Small msgpack records, each behind its length. The connection is also the sign of life: when a
process dies, however, its end closes and the other side reads the end of file at once.

    coordinator                     worker
    call            ->              (light: has not imported torch yet)
                    <- hello        name, pid, host, boot, version
                    <- ready        has imported torch
    refused reason  ->                                          or
    welcome         ->              rank, names, ...; both build their RPC agent
                    <- address      where it listens
    addresses       ->              of all; every process calls every other
                    <- joined
    shield          ->              all have joined: it listens no more
    ...training, over RPC...
    story           ->              in a stall
                    <- story        what its stage waits for, and did last
    clock           ->              for a trace
                    <- clock        the worker's monotonic clock, in nanoseconds
    stop            ->
                    <- stopped      its stage computes no more
    exit            ->              leaves the RPC group and ends
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import msgpack

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, MessageTimeout, PeerLost, TransportError

VERSION = 3
"""Of this protocol; the two ends must agree."""

EXIT_FAILED = 1
"""Exit code of a worker that was refused or could not join."""

EXIT_COORDINATOR_LOST = 3
"""Exit code of a worker whose coordinator died."""

_LENGTH = struct.Struct("!I")
_LARGEST = 1 << 20

Record = dict[str, Any]


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
        self._buffer = bytearray()
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

    def send(self, record: Record) -> None:
        """Send a record.

        Raises:
            PeerLost: The other end is gone.
        """
        data = bytes(msgpack.packb(record))
        try:
            self._socket.settimeout(10)
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise PeerLost(f"{self.peer} is gone: {error}", peer=self.peer) from error

    def receive(self, deadline: Deadline) -> Record:
        """Wait for a record.

        Raises:
            MessageTimeout: None came in time.
            PeerLost: The other end is gone.
            TransportError: What came is no record.
        """
        while True:
            record = self._next_buffered()
            if record is not None:
                return record
            try:
                self._socket.settimeout(deadline.remaining_s())
                data = self._socket.recv(1 << 16)
            except (TimeoutError, BlockingIOError):
                raise MessageTimeout(f"nothing came from {self.peer} in time") from None
            except OSError as error:
                raise PeerLost(f"{self.peer} is gone: {error}", peer=self.peer) from error
            if not data:
                raise PeerLost(f"{self.peer} closed the connection", peer=self.peer)
            self._buffer += data

    def receive_all(self, deadline: Deadline) -> list[Record]:
        """Wait for a record, and return it with those that have arrived behind it.

        A selector says nothing of what is in the buffer already, so nothing may stay there.

        Raises:
            TransportError: As `receive`.
        """
        records = [self.receive(deadline)]
        while (record := self._next_buffered()) is not None:
            records.append(record)
        return records

    def _next_buffered(self) -> Record | None:
        """The next whole record that has arrived, if any."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _LARGEST:
            raise TransportError(f"{self.peer} speaks another protocol")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            record = msgpack.unpackb(data)
        except (ValueError, msgpack.UnpackException) as error:
            raise TransportError(f"{self.peer} speaks another protocol: {error}") from error
        if not isinstance(record, dict) or "type" not in record:
            raise TransportError(f"{self.peer} speaks another protocol")
        return record

    def close(self) -> None:
        """Close. Idempotent."""
        self._socket.close()


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


def boot_id() -> str:
    """Of the running kernel: processes with the same one read the same monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
