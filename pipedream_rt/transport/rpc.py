"""The transport over torch.distributed.rpc. No other file imports torch RPC but `pickling.py`.

How torch RPC is used, and why (measured; ``benchmarks/transports.py`` prints the figures):

- A hand-over is one ``rpc_async`` to `_deliver`, from worker to worker. `_deliver` decodes the
  message, puts it into an inbox and returns. It never waits, never makes a call and never raises,
  because handlers, completions and timeouts share one small thread pool, which a blocked handler
  would stop.
- The messages go over TensorPipe's ``uv`` transport. Its shared-memory transport (``shm``) is
  quicker between idle processes but polls: its threads take a core per process from the compute
  threads, even with nothing to send. Two processes, 2 cores, 256 KiB, medians of 3::

                    one hop, idle   one hop beside compute   processor seconds per idle second
      uv                  0.49 ms                  0.75 ms                              0.0002
      shm                 0.38 ms                  3.1 ms                               1.99
      shm + cma           0.41 ms                  4.9 ms                               1.99
- The group is formed without ``init_rpc``, which can neither be interrupted nor given a deadline,
  pickles over unsigned sockets, and needs a store that accepts any connection. The agent is built
  over a `Directory` instead: the coordinator knows all names, gathers the addresses over the
  control connections and hands them out.
- When every process has called every other one, no process has to connect any more, and the port
  closes (`RpcTransport.shield`), because TensorPipe dies of bytes that it does not understand.
- A shutdown is never graceful, since that waits without a deadline for peers that may be gone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import (
    ConfigError,
    PeerLost,
    PipelineError,
    RendezvousTimeout,
    TransportError,
)
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.messages.message import Message
from pipedream_rt.messages.wire import decode, encode
from pipedream_rt.schedules.plan import COORDINATOR, Address
from pipedream_rt.transport.base import Lost, Receive
from pipedream_rt.transport.pickling import allow, install
from pipedream_rt.transport.signing import Signer

_log = logging.getLogger(__name__)

_THREADS = 4
"""Number of threads of the RPC pool. Latency was the same with 1 to 16, as handlers do not wait."""

_current: RpcTransport | None = None
"""The open transport, for `_deliver`; there is at most one, as torch allows one agent a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcGroup:
    """One generation of the RPC group.

    Attributes:
        generation: Number of the generation in the coordinator's process.
        rank: The rank of this process; the coordinator has rank 0.
        names: The RPC name of each rank.
        hosts: By stage, the index of the worker that hosts it, which is its rank less one.
        interface: The network interface to listen on, as ``"lo"``.
        timeout: The time after which a hand-over counts as lost.
        key: The key with which the members sign, and which nobody else knows.
    """

    generation: int
    rank: int
    names: tuple[str, ...]
    hosts: tuple[int, ...]
    interface: str
    timeout: timedelta
    key: bytes

    def name_of(self, address: Address) -> str:
        """Return the RPC name of the process that receives for an address."""
        return self.names[0] if address == COORDINATOR else self.names[1 + self.hosts[address]]


class Directory(dist.Store):
    """The store that torch's agent asks for names and addresses of the group; it does not listen.

    Args:
        names: The RPC name of each rank.
        publish: Called with the address of this process.
        gather: Waits for the addresses of all processes and returns them by name; raises to end
            the attempt to join.

    Attributes:
        port: The port at which this process listens; 0 until its address is published.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        publish: Callable[[str], None],
        gather: Callable[[], Mapping[str, str]],
    ) -> None:
        """Begin with the names, and no address."""
        super().__init__()
        self._names = {f"names/{rank}": name for rank, name in enumerate(names)}
        self._publish = publish
        self._gather = gather
        self._addresses: Mapping[str, str] | None = None
        self.port = 0

    def set(self, key: str, value: Any) -> None:
        """Publish the address of this process; ignore its name, which is known."""
        if key.startswith("addrs/"):
            address = bytes(value).decode()
            _, self.port = host_and_port(address)
            self._publish(address)

    def get(self, key: str) -> bytes:
        """Return a name, or an address once all are known."""
        if key in self._names:
            return self._names[key].encode()
        return self.address_of(key.removeprefix("addrs/")).encode()

    def address_of(self, name: str) -> str:
        """Return the address of a process once all are known, as ``uv://10.0.0.1:40000``."""
        if self._addresses is None:
            self._addresses = self._gather()
        return self._addresses[name]

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        """Agree to what the agent sets: that the group is static."""
        return desired


def refuse_second() -> None:
    """Refuse a second transport in this process; callers ask before they start a worker.

    Raises:
        ConfigError: A transport is open.
    """
    if _current is not None:
        raise ConfigError(
            "this process has an open pipeline on worker processes already, and torch RPC allows "
            "only one. Close it first: if the script or the notebook calls it pipe, the line "
            'pipe.close() does, before the next Pipeline(...). Or use workers="in-process" for one '
            "of the two"
        )


class RpcTransport:
    """The transport over torch RPC, of which a process has one at a time.

    Args:
        group: The generation to join.

    Raises:
        ConfigError: This process has an open transport.
    """

    def __init__(self, group: RpcGroup) -> None:
        """Become the transport of this process; `join` connects it."""
        global _current
        refuse_second()
        _current = self
        self._group = group
        self._open: dict[int, tuple[Receive, Lost]] = {}
        self._parts: dict[int, Callable[[str], Any]] = {}
        self._life = Lifecycle("the transport")
        self._directory: Directory | None = None
        self._lock = threading.Lock()

    def open(self, address: int, receive: Receive, lost: Lost) -> None:
        """See `Transport.open`."""
        self._open[address] = (receive, lost)

    def expose(self, address: int, part: Callable[[str], Any]) -> None:
        """Let peers make references to parts of a stage of this process.

        Args:
            address: Address of the stage.
            part: Returns the stage's ``"module"`` or ``"optimizer"``.
        """
        self._parts[address] = part

    def join(self, directory: Directory, deadline: Deadline) -> None:
        """Connect to the group, and return when this process has called every other one.

        Args:
            directory: The names and addresses of the group.
            deadline: When to give up.

        Raises:
            RendezvousTimeout: A peer does not answer in time.
            PipelineError: The transport was closed meanwhile.
        """
        group = self._group
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=_THREADS,
            rpc_timeout=group.timeout.total_seconds(),
            init_method="unused://",
            _transports=["uv"],
            _channels=["basic"],
        )
        world = len(group.names)
        install(Signer(group.key, group.generation, group.rank))
        # torch's engine asks distributed autograd for a context at every hand-over.
        dist_autograd._init(group.rank)
        with self._lock:
            if not self._life.is_open:  # `close` was called meanwhile: no agent may stay behind
                raise PipelineError("the transport was closed while it joined the group")
            # The reference is kept because the agent calls the directory as long as it lives.
            self._directory = directory
            # torch asks for the interface when the agent starts, which is in `_init_rpc_states`.
            with _listening_on(group.interface):
                agent = rpc.TensorPipeAgent(
                    directory, group.names[group.rank], group.rank, world, options, {}, []
                )
                rpc.api._init_rpc_states(agent)
        self._refuse_without_route(directory)
        self._call_everybody(deadline)

    def _refuse_without_route(self, directory: Directory) -> None:
        """Refuse a peer to whose address this machine has no route.

        TensorPipe would abort the process when it connects there.

        Raises:
            RendezvousTimeout: A peer's address has no route.
        """
        mine = self._group.names[self._group.rank]
        for name in self._group.names:
            address = directory.address_of(name)
            try:
                _require_route(address)
            except OSError as error:
                raise RendezvousTimeout(
                    f"{mine!r} has no route to {name!r} at {address}: {error.strerror}; all "
                    "workers must reach each other and the coordinator, so --bind must name an "
                    "interface of a network that all of them share",
                    missing=1,
                ) from error

    def _call_everybody(self, deadline: Deadline) -> None:
        """Call every peer once, which opens the connections.

        Raises:
            RendezvousTimeout: A peer does not answer in time.
        """
        names, mine = self._group.names, self._group.names[self._group.rank]
        seconds = max(0.01, deadline.remaining_s() or 0.0)
        calls = [
            (name, rpc.rpc_async(name, _answer, timeout=seconds)) for name in names if name != mine
        ]
        for name, call in calls:
            try:
                call.wait()
            except RuntimeError as error:
                raise RendezvousTimeout(
                    f"{mine!r} cannot reach {name!r}: {str(error).splitlines()[0]}; all workers "
                    "must reach each other and the coordinator on any port",
                    missing=1,
                ) from error

    def shield(self) -> None:
        """Stop listening, once every peer has connected. Connections stay open.

        TensorPipe owns the listening socket and has no call to close it. So the descriptor of the
        socket is given to another file, whereupon the kernel closes the socket and polls it no
        more. (``shutdown`` would close the port too, but leave a descriptor that is always ready,
        which costs a whole core.)
        """
        with self._lock:
            if not self._life.is_open or self._directory is None:
                return
            for fd in _listeners_at(self._directory.port):
                nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.dup2(nothing, fd, inheritable=False)
                finally:
                    os.close(nothing)

    def send(self, message: Message) -> None:
        """See `Transport.send`."""
        if not self._life.is_open:
            return
        peer = self._group.name_of(message.to)
        try:
            future = rpc.rpc_async(
                peer,
                _deliver,
                args=(encode(message), list(message.tensors)),
                timeout=self._group.timeout.total_seconds(),
            )
        except RuntimeError as error:
            self._tell_lost(message, peer, str(error))
            return
        future.add_done_callback(lambda done: self._check(message, peer, done))

    def _check(self, message: Message, peer: str, done: Any) -> None:
        """Look at the result of a hand-over; runs on a thread of the RPC pool."""
        try:
            problem = done.value()
        except RuntimeError as error:
            problem = str(error)
        if problem is not None:
            self._tell_lost(message, peer, problem)

    def _tell_lost(self, message: Message, peer: str, problem: str) -> None:
        """Tell the sender of a message that was not handed over, unless the transport closes."""
        if not self._life.is_open:
            return
        error = PeerLost(
            f"{message}: worker {peer!r} is gone: {problem.splitlines()[0]}", peer=peer
        )
        _log.debug("%s", error)
        self._open[message.sender][1](error)

    def receive(self, data: bytes, tensors: list[Tensor]) -> str | None:
        """Give an incoming message to its receiver.

        Args:
            data: The bytes of the message.
            tensors: The tensors of the message.

        Returns:
            What is wrong with the message, as a text; None if nothing is.
        """
        try:
            message = decode(data, tensors)
        except TransportError as error:
            _log.warning("%s", error)
            return str(error)
        if message.to not in self._open:
            return f"no stage {message.to} is open in this process"
        self._open[message.to][0](message)
        return None

    def reference(self, address: int, part: str) -> rpc.RRef[Any]:
        """Return an RRef to a part of a stage, which the stage's worker owns.

        Args:
            address: Address of the stage.
            part: ``"module"`` or ``"optimizer"``.
        """
        reference: rpc.RRef[Any] = rpc.remote(
            self._group.name_of(address), _part, args=(address, part)
        )
        return reference

    def parameter_references(self, address: int) -> list[rpc.RRef[nn.Parameter]]:
        """Return RRefs to the trainable parameters of a stage, in the order of the module.

        Raises:
            PeerLost: The worker does not answer in time.
        """
        timeout_s = self._group.timeout.total_seconds()
        name = self._group.name_of(address)
        try:
            references: list[rpc.RRef[nn.Parameter]] = rpc.rpc_sync(
                name, _parameters, args=(address,), timeout=timeout_s
            )
        except RuntimeError as error:
            raise PeerLost(f"worker {name!r} does not answer: {error}", peer=name) from error
        return references

    def part(self, address: int, part: str) -> Any:
        """Return a part of a stage of this process, which `expose` offers."""
        return self._parts[address](part)

    def close(self) -> None:
        """See `Transport.close`. RRefs cannot be used afterwards."""
        global _current
        with self._lock:
            if not self._life.begin_closing():
                return
        self._shut_down()
        install(None)
        _current = None
        self._life.close()

    @staticmethod
    def _shut_down() -> None:
        """Leave the group, if this process is in one."""
        if rpc.api._is_current_rpc_agent_set():
            rpc.api._ignore_rref_leak = True
            with _quiet():
                rpc.shutdown(graceful=False)


@contextmanager
def _listening_on(interface: str) -> Iterator[None]:
    """Let torch listen on an interface while the body runs; it reads only the environment."""
    names = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, interface))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def host_and_port(url: str) -> tuple[str, int]:
    """Return the host and the port of an address of TensorPipe, as ``uv://[fd00::1]:40000``."""
    host, _, port = url.rpartition("/")[2].rpartition(":")
    return host.strip("[]"), int(port)


def _require_route(url: str) -> None:
    """Find out whether this machine has a route to an address of TensorPipe. Sends nothing.

    Args:
        url: The address, as ``uv://10.0.0.1:40000`` or ``uv://[fd00::1]:40000``.

    Raises:
        OSError: There is none.
    """
    host, port = host_and_port(url)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's C++ warnings off the screen while the agent closes its own connections.

    torch 2.13 logs each closed connection as an error of the peer. Its log level is an exported
    variable; a build of torch without that variable logs on.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except ValueError:
        yield
        return
    before, level.value = level.value, 2  # errors
    try:
        yield
    finally:
        level.value = before


def _listeners_at(port: int) -> list[int]:
    """Return this process's descriptors that listen at a TCP port, by the kernel's tables."""
    listening = "0A"
    sockets = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == listening and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor may have been closed meanwhile
            if os.readlink(f"/proc/self/fd/{fd}") in sockets:
                found.append(int(fd))
    return found


@allow
def _answer() -> None:
    """Answer a peer's first call, which opens its connection."""


@allow
def _deliver(data: bytes, tensors: list[Tensor]) -> str | None:
    """Receive a message; peers call it. An error is returned, as torch loses exceptions' types."""
    transport = _current
    return "no transport is open" if transport is None else transport.receive(data, tensors)


@allow
def _part(address: int, part: str) -> Any:
    """Return a part of a stage; peers call it by ``rpc.remote``, which leaves the part here.

    Raises:
        PipelineError: No transport is open.
    """
    if _current is None:
        raise PipelineError("no transport is open")
    return _current.part(address, part)


@allow
def _parameters(address: int) -> list[rpc.RRef[nn.Parameter]]:
    """Return RRefs to the trainable parameters of a stage; peers call it."""
    return [rpc.RRef(p) for p in _part(address, "module").parameters() if p.requires_grad]
