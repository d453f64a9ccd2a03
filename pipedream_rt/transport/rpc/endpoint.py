"""The RPC endpoint of a process: torch RPC for references, carried by the tunnel.

A worker is an endpoint of torch RPC that owns the sub-modules and optimizers of its stages; the
coordinator's endpoint asks for references (RRefs) to them. Messages of the training do not go this
way (see `pipedream_rt.transport.sockets`). No other file imports torch RPC but `pickling.py`, and
`pipedream_rt.torch_private` for its private names.

How torch RPC is used, and why:

- The group is formed without ``init_rpc``, which can neither be interrupted nor given a deadline,
  pickles over sockets that anybody can connect to, and needs a store that accepts any connection.
  The agent is built over a `Directory` instead, which has all names and addresses from the start.
- The agent listens on loopback, where nobody but this process reaches it, and only until the
  coordinator has called (see `Tunnel`).
- TensorPipe's shared-memory transport (``shm``) is not used: it polls, and its threads take a core
  per process from the compute threads, even with nothing to send.
- A shutdown is never graceful: a graceful one waits without a deadline for peers that may be gone.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, PeerLost, PipelineError, RendezvousTimeout
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.torch_private import (
    ignore_leaks_of_rrefs,
    init_distributed_autograd,
    init_rpc_states,
    is_rpc_agent_set,
)
from pipedream_rt.transport.fence import AgentMode
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.interface import StreamTransport
from pipedream_rt.transport.rpc import listening
from pipedream_rt.transport.rpc.pickling import allow, install
from pipedream_rt.transport.rpc.tunnel import Tunnel

_THREADS = 2
"""Threads of the RPC pool. Handlers do not wait, so few are enough."""

_current: RPCEndpoint | None = None
"""The open endpoint, for `_part`. At most one, since torch allows one agent per process."""

_changing = threading.Lock()
"""For `_current`: two threads may open a pipeline each."""


class Directory(dist.Store):
    """The store in which torch's agent finds names and addresses of the group. It has no port."""

    def __init__(self, group: Group, tunnel: Tunnel) -> None:
        super().__init__()
        self._tunnel = tunnel
        self._known = {f"names/{rank}": name for rank, name in enumerate(group.names)}
        for rank, name in enumerate(group.names):
            self._known[f"addrs/{name}"] = tunnel.address_of(rank)

    def set(self, key: str, value: Any) -> None:
        """Guard the port at which the agent of this process listens; ignore its name."""
        if key.startswith("addrs/"):
            address = bytes(value).decode()
            self._known[key] = address
            self._tunnel.guard(int(address.rpartition(":")[2]))

    def get(self, key: str) -> bytes:
        return self._known[key].encode()

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        """Agree to what the agent proposes: that the group is static."""
        return desired


class RPCEndpoint:
    """The endpoint of this process in torch RPC. While one is open, another one is refused."""

    _group: Group  # once it is carried
    _tunnel: Tunnel

    def __init__(self, timeout: timedelta) -> None:
        global _current
        with _changing:
            if _current is not None:
                raise ConfigError(
                    "this process has an open pipeline on worker processes already, and torch RPC "
                    "allows only one. Close it first: if the script or the notebook calls it pipe, "
                    "the line pipe.close() does, before the next Pipeline(...). Or use "
                    'workers="serial" for one of the two, or unset PIPEDREAM_RT_RPC, and the '
                    "second does without torch RPC"
                )
            _current = self
        self._timeout_s = timeout.total_seconds()  # of a call
        self._parts: dict[int, Callable[[str], Any]] = {}
        self._life = Lifecycle("the RPC endpoint")
        self._directory: Directory | None = None
        self._lock = threading.Lock()

    def expose(self, address: int, part: Callable[[str], Any]) -> None:
        """Let the coordinator make references to parts of a stage: ``part(name)`` returns one."""
        self._parts[address] = part

    def carry(self, group: Group, transport: StreamTransport) -> None:
        """Let a transport carry the connections of the agent, before it connects to anybody."""
        self._group = group
        self._tunnel = transport.streams = Tunnel(group, transport.send_stream)

    def join(self, mode: AgentMode, deadline: Deadline) -> None:
        """Join the group. The coordinator returns when it has called every worker."""
        group, tunnel = self._group, self._tunnel
        callees = group.others if group.rank == 0 else ()
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=_THREADS,
            rpc_timeout=self._timeout_s,
            init_method="unused://",
            _transports=["uv"],
            _channels=["basic"],
        )
        install(group.key)
        # torch's engine asks distributed autograd for a context at every call.
        init_distributed_autograd(group.rank)
        with self._lock:
            if not self._life.is_open:  # `close` was called meanwhile: no agent may stay behind
                raise PipelineError("the transport was closed while it joined the group")
            tunnel.start(callees, mode)
            # Kept, since the agent calls the directory for as long as it lives.
            self._directory = directory = Directory(group, tunnel)
            # Nobody can connect between torch's `listen` and the guard of the tunnel.
            listening.run(lambda: self._start_agent(options, directory), tunnel.fence_off)
        self._call(callees, deadline)

    def _start_agent(self, options: rpc.TensorPipeRpcBackendOptions, directory: Directory) -> None:
        group = self._group
        # torch reads the interface when the agent starts (`_init_rpc_states`), not when it is made.
        with _listening_on_loopback():
            agent = rpc.TensorPipeAgent(
                directory, group.name, group.rank, len(group.names), options, {}, []
            )
            init_rpc_states(agent)

    def _call(self, ranks: tuple[int, ...], deadline: Deadline) -> None:
        """Call members once, which opens the connections."""
        # Never 0, which torch takes for no timeout.
        seconds = max(0.01, deadline.remaining_s() or 0.0)
        names = [self._group.names[rank] for rank in ranks]
        calls = [(name, rpc.rpc_async(name, _answer, timeout=seconds)) for name in names]
        for name, call in calls:
            try:
                call.wait()
            except RuntimeError as error:
                raise RendezvousTimeout(
                    f"worker {name!r} does not answer torch RPC: {str(error).splitlines()[0]}",
                    missing=1,
                ) from error

    def shut(self) -> None:
        """Listen no more; connections stay."""
        # A stranger's bytes at TensorPipe's listener would abort the process.
        self._tunnel.shut()

    def reference(self, address: int, part: str) -> rpc.RRef[Any]:
        """Return an RRef to a part of a stage, which the stage's worker owns."""
        # The address as a plain integer: a request may name no class that is not on the allow-list.
        name, args = self._host_of(address), (address, part)
        reference: rpc.RRef[Any] = rpc.remote(name, _part, args=args)
        return reference

    def parameter_references(self, address: int) -> list[rpc.RRef[nn.Parameter]]:
        """Return RRefs to the trainable parameters of a stage, in the order of the module."""
        name = self._host_of(address)
        try:
            references: list[rpc.RRef[nn.Parameter]] = rpc.rpc_sync(
                name, _parameters, args=(address,), timeout=self._timeout_s
            )
        except RuntimeError as error:
            raise PeerLost(f"worker {name!r} does not answer: {error}", peer=name) from error
        return references

    def _host_of(self, address: int) -> str:
        """Return the RPC name of the process that hosts a stage."""
        return self._group.names[self._group.rank_of(address)]

    def part(self, address: int, part: str) -> Any:
        """Return a part of a stage of this process, as `expose` has it."""
        return self._parts[address](part)

    def close(self) -> None:
        """Leave the group. RRefs cannot be used afterwards. Idempotent, from any thread."""
        global _current
        with self._lock:
            if not self._life.begin_closing():
                return
        if self._directory is not None and is_rpc_agent_set():
            ignore_leaks_of_rrefs()
            with _quiet():
                rpc.shutdown(graceful=False)
        install(None)
        _current = None
        self._life.close()


@contextmanager
def _listening_on_loopback() -> Iterator[None]:
    """Let torch listen on loopback while the body runs."""
    # Only the environment tells torch which interface to use.
    names = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "lo"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's C++ warnings off the screen while the agent closes its own connections."""
    # torch 2.13 logs each closed connection as an error of the peer. Its log level is an exported
    # variable; a build of torch without that variable goes on logging.
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


@allow
def _answer() -> None:
    """Answer the coordinator's first call, which opens its connection."""


@allow
def _part(address: int, part: str) -> Any:
    """Return a part of a stage to ``rpc.remote``, which keeps it here and sends a reference."""
    if _current is None:
        raise PipelineError("no endpoint is open")
    return _current.part(address, part)


@allow
def _parameters(address: int) -> list[rpc.RRef[nn.Parameter]]:
    """Return RRefs to the trainable parameters of a stage. Called by the coordinator."""
    return [rpc.RRef(p) for p in _part(address, "parameters")]
