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
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if (
        not colon
        or not host
        or (":" in host) is not bracketed
        or not port.isdecimal()
        or not 0 <= int(port) < 65536
    ):
        raise ConfigError(
            f"{text!r} is no address; write HOST:PORT, as in 127.0.0.1:29500 or [::1]:29500"
        )
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
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen at {joined(host, port)}: {error}") from error
    with listener:
        yield listener


def interface_of(host: str) -> str:
    """Name of the network interface that has an address, for torch's TP_SOCKET_IFNAME.

    Args:
        host: Numeric address of this machine; of a link-local one with its scope, ``fe80::1%eth0``.

    Raises:
        ConfigError: No interface of this machine has the address.
    """
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return "lo0" if sys.platform == "darwin" else "lo"
    has = _has_ipv4 if isinstance(address, ipaddress.IPv4Address) else _has_ipv6
    for _, name in socket.if_nameindex():
        if has(name, address.packed):
            return name
    raise ConfigError(f"no network interface of this machine has the address {host}")


def _has_ipv4(interface: str, packed: bytes) -> bool:
    """Whether an interface has an IPv4 address, given as 4 bytes."""
    import fcntl  # not on every platform; only addresses other than loopback need it

    get_interface_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer: bytes = fcntl.ioctl(probe.fileno(), get_interface_address, request)
        except OSError:
            return False  # an interface without an IPv4 address
        return answer[20:24] == packed


def _has_ipv6(interface: str, packed: bytes) -> bool:
    """Whether an interface has an IPv6 address, given as 16 bytes."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return False
    return any(
        bytes.fromhex(fields[0]) == packed and fields[-1] == interface
        for fields in map(str.split, lines)
    )


def interface_towards(address: str) -> str:
    """Name of the network interface by which this machine reaches ``HOST:PORT``.

    Raises:
        ConfigError: No interface leads there.
    """
    host, port = parse_address(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return interface_of(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"{address} cannot be reached from here: {error}") from error


def joined(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with an IPv6 address in square brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def boot_id() -> str:
    """Identity of the running kernel; empty where the system does not say.

    Processes with the same one read the same monotonic clock.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
