"""Addresses and network interfaces of this machine, and which machine it is."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipedream_rt.errors import ConfigError


def parse_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``; an IPv6 address stands in square brackets.

    Returns:
        Host and port.

    Raises:
        ConfigError: The text is not of that form.
    """
    host, colon, port = text.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ConfigError(f"{text!r} is no address; write HOST:PORT, as in 127.0.0.1:29500")
    return host, int(port)


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen for workers at an address until the block ends.

    Args:
        host: Name or numeric address of this machine.
        port: Port; 0 for one that the system chooses.

    Yields:
        The listening socket.

    Raises:
        ConfigError: This process cannot listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error}") from error
    with listener:
        yield listener


def interface_of(host: str) -> str:
    """Name of the network interface that has an address, for torch's TP_SOCKET_IFNAME.

    Args:
        host: Numeric address of this machine.

    Raises:
        ConfigError: No interface of this machine has the address.
    """
    if ipaddress.ip_address(host).is_loopback:
        return "lo0" if sys.platform == "darwin" else "lo"
    import fcntl  # not on every platform; only addresses other than loopback need it

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
        ConfigError: No interface leads there.
    """
    host, port = parse_address(address)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return interface_of(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"{address} cannot be reached from here: {error}") from error


def boot_id() -> str:
    """Identity of the running kernel; empty where the system does not say.

    Processes with the same one read the same monotonic clock.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
