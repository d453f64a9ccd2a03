"""Addresses and network interfaces of this machine, and which machine it is."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError
from pipedream_rt.schema import is_count, printable, shown

BACKLOG = 4096
"""Length of the accept queue: all workers of a large job connect at once."""

UNIX = "unix:"
"""What the address of a Unix socket begins with; its path is behind it."""

_NO_PORT_LEFT = (
    "; every port that this machine gives out by itself is taken at that address: see which "
    "connections hold them (ss -tan), or widen net.ipv4.ip_local_port_range"
)


_AGAIN_S = 0.2
"""Seconds between two attempts to bind a port: the kernel does not tell when one gets free."""


class PortTaken(ConfigError):
    """Another process listens at a port."""


def parse_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``; an IPv6 address stands in square brackets."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if (
        not colon
        or not host
        or (":" in host) is not bracketed
        or not is_count(port)
        or not 0 <= int(port) < 65536
    ):
        raise ConfigError(
            f"{shown(text)} is no address; write HOST:PORT, as in 127.0.0.1:29500 or [::1]:29500"
        )
    try:
        host.encode("idna")  # as `getaddrinfo` does, whose UnicodeError would not name the address
    except UnicodeError as error:
        raise ConfigError(f"{shown(host)} can be the name of no host: {error}") from error
    return host, int(port)


def resolved(host: str, port: int | None, kind: socket.SocketKind = socket.SOCK_STREAM) -> Any:
    """Return family and socket address of the first result of ``getaddrinfo``."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=kind)[0]
    except UnicodeError as error:  # a name that is too long, or has ".."; callers expect OSError
        raise socket.gaierror(socket.EAI_NONAME, f"{printable(host)}: {error}") from error
    return family, address


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen for workers at an address until the block ends."""
    try:
        family, address = resolved(host, port)
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise (PortTaken if taken and port else ConfigError)(
            f"cannot listen at {joined(host, port)}: {error}"
            + (_NO_PORT_LEFT if taken and not port else "")
        ) from error
    with listener:
        yield listener


@contextmanager
def listening_in_time(host: str, port: int, deadline: Deadline) -> Iterator[socket.socket]:
    """Listen as `listening` does; wait until the deadline for another process to free the port."""
    with ExitStack() as opened:
        while True:
            try:
                listener = opened.enter_context(listening(host, port))
                break
            except PortTaken:
                if deadline.expired():
                    raise
            threading.Event().wait(_AGAIN_S)
        yield listener


def is_here(name: str) -> bool:
    """Whether a name or an address stands for this machine."""
    if name in ("localhost", socket.gethostname()):
        return True
    with suppress(OSError):
        family, address = resolved(name, 0)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)  # the kernel binds only addresses of this machine
        return True
    return False


def host_to_listen_at(name: str, *, alone: bool) -> str:
    """Numeric address to listen at for others that know this machine by a name.

    They are processes of this machine only where it is ``alone``.
    """
    with suppress(ValueError):
        return str(ipaddress.ip_address(name))
    try:
        host = str(resolved(name, None)[1][0])
    except OSError:
        host = ""
    if host and (alone or not is_loopback(host)):
        return host
    # Debian maps the machine's own name to loopback, and other machines may know a name that is
    # unknown here: so listen at every address.
    return "::" if ":" in host else "0.0.0.0"


def is_loopback(host: str) -> bool:
    """Whether a numeric address is one at which a machine talks to itself."""
    return ipaddress.ip_address(host).is_loopback


def interface_of(host: str) -> str:
    """Name of the network interface that has an address."""
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return "lo0" if sys.platform == "darwin" else "lo"
    for _, name in socket.if_nameindex():
        if address.packed in (ipaddress.ip_address(each).packed for each in _addresses_on(name)):
            return name
    raise ConfigError(f"no network interface of this machine has the address {host}")


def address_on(interface: str, like: str) -> str:
    """Numeric address of a network interface: ``like`` if it has that, else one of its version."""
    wanted = ipaddress.ip_address(like)
    found = [ipaddress.ip_address(each) for each in _addresses_on(interface)]
    if not found:
        raise ConfigError(f"the network interface {interface!r} has no address")
    # Link-local addresses come last: they are valid on one link, and the peer may be on another.
    found.sort(
        key=lambda a: (a.packed != wanted.packed, a.version != wanted.version, a.is_link_local)
    )
    return str(found[0])


def _addresses_on(interface: str) -> list[str]:
    four = _ipv4_on(interface)
    return ([four] if four else []) + _ipv6_on(interface)


def _ipv4_on(interface: str) -> str:
    """Return the IPv4 address of a network interface; empty if it has none."""
    import fcntl  # not on every platform; only addresses other than loopback need it

    get_interface_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])  # IFNAMSIZ is 16 with the NUL
        try:
            answer: bytes = fcntl.ioctl(probe.fileno(), get_interface_address, request)
        except OSError:
            return ""
        return socket.inet_ntoa(answer[20:24])  # of the sockaddr_in behind the name


def _ipv6_on(interface: str) -> list[str]:
    """Return the IPv6 addresses of a network interface, link-local ones with their scope."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    found = [
        ipaddress.IPv6Address(bytes.fromhex(fields[0]))
        for fields in map(str.split, lines)
        if fields[-1] == interface
    ]
    return [f"{each}%{interface}" if each.is_link_local else str(each) for each in found]


def interface_towards(address: str) -> str:
    """Name of the network interface by which this machine reaches ``HOST:PORT``."""
    return interface_of(address_towards(address))


def address_towards(address: str) -> str:
    """Numeric address that this machine has where it reaches ``HOST:PORT``."""
    host, port = parse_address(address)
    try:
        family, target = resolved(host, port, socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # of a datagram socket: picks the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"{address} cannot be reached from here: {error}") from error


def joined(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with an IPv6 address in square brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def boot_id() -> str:
    """Id of the running kernel; processes with the same one read the same monotonic clock.

    Empty where the system does not say.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
