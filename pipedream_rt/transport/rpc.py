"""Transport over torch.distributed.rpc. The only file that imports it.

How torch RPC is used, and why (measured; ``benchmarks/transports.py`` prints the figures):

- A hand-off is one ``rpc_async`` to `_deliver`, worker to worker. `_deliver` decodes, puts into an
  inbox and returns. It never waits, never calls, never raises: handlers, completions and timeouts
  share one small thread pool, and a blocked handler stops them all.
- TensorPipe's ``uv`` transport. The shared-memory one (``shm``) is quicker between idle processes
  but polls: its threads take a core per process from the compute threads, even with nothing to
  send. Two processes, 2 cores, 256 KiB, medians of 3::

                    one hop, idle   one hop beside compute   processor seconds per idle second
      uv                  0.49 ms                  0.75 ms                              0.0002
      shm                 0.38 ms                  3.1 ms                               1.99
      shm + cma           0.41 ms                  4.9 ms                               1.99
- Static group, one per generation. The process-wide counters that torch keeps for its store keys
  are set to the generation, since a coordinator may open many groups and its workers but one.
- Never a graceful shutdown: it waits without a deadline for peers that may be gone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError, PeerLost, PipelineError, TransportError
from pipedream_rt.stage.messages import COORDINATOR, Message
from pipedream_rt.transport.base import Lost, Receive
from pipedream_rt.transport.wire import decode, encode

_log = logging.getLogger(__name__)

_SCHEME = "pipedream-rt"
_THREADS = 4
"""Of the RPC pool. Handlers only fill inboxes; 1 to 16 made no difference to the latency."""

_LAST_JOIN_S = 5.0
"""For an attempt to join that was given up to end inside torch; its workers are dead by then."""

_joining: threading.Thread | None = None
"""The thread that is inside init_rpc: it changes what is global in torch, so one at a time."""

_current: RpcTransport | None = None
"""Where `_deliver` finds the inboxes: torch allows one RPC agent in a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcGroup:
    """One generation of the RPC group.

    Attributes:
        generation: Counts the groups of this coordinator.
        rank: Of this process; the coordinator has 0.
        names: RPC names by rank, the coordinator's first.
        interface: Network interface to listen on, as ``"lo"``.
        timeout: After which a hand-over counts as lost.
    """

    generation: int
    rank: int
    names: tuple[str, ...]
    interface: str
    timeout: timedelta

    def name_of(self, address: int) -> str:
        """RPC name of an address; stages are dealt to the workers as `Shape` says."""
        if address == COORDINATOR:
            return self.names[0]
        workers = len(self.names) - 1
        return self.names[1 + address % workers]


def refuse_second() -> None:
    """Refuse a second transport while one is open; to be asked before anything is started.

    Raises:
        ConfigError: One is open.
    """
    joining = _joining
    if joining is not None:
        joining.join(_LAST_JOIN_S)
        if joining.is_alive():
            raise ConfigError(
                "an earlier attempt to form a group of workers still hangs inside torch, which "
                "cannot be interrupted; start the script anew"
            )
    if _current is not None:
        raise ConfigError(
            "this process has an open pipeline on worker processes already, and torch RPC "
            'allows one; close it first, or use workers="in-process" for one of the two'
        )


class RpcTransport:
    """Hands messages over by RPC. One per process at a time.

    Args:
        group: The generation to join.

    Raises:
        ConfigError: This process has an open one.
    """

    def __init__(self, group: RpcGroup) -> None:
        """Register for incoming messages; `join` connects."""
        global _current
        refuse_second()
        _current = self
        self._group = group
        self._open: dict[int, tuple[Receive, Lost]] = {}
        self._parts: dict[int, Callable[[str], Any]] = {}
        self._closed = False
        self._lock = threading.Lock()

    def open(self, address: int, receive: Receive, lost: Lost) -> None:
        """See `Transport.open`."""
        self._open[address] = (receive, lost)

    def expose(self, address: int, part: Callable[[str], Any]) -> None:
        """Let peers refer to parts of what runs here.

        Args:
            address: Of the stage.
            part: Returns its ``"module"`` or its ``"optimizer"``.
        """
        self._parts[address] = part

    def join(self, store: dist.Store) -> None:
        """Connect to the group. Blocks until every rank has; the caller watches the time.

        init_rpc can neither be interrupted nor given a deadline, hence rendezvous comes before.

        Args:
            store: Where the ranks find each other; kept alive by torch until `close`.
        """
        group = self._group
        global _joining
        _joining = threading.current_thread()
        # torch 2.6 to 2.13 count init_rpc calls per process and put the number into the store
        # keys, so a fresh process and one with a history never meet; likewise for all_gather.
        rpc._init_counter = group.generation
        rpc.api._all_gather_sequence_id.clear()
        rpc.api._all_gather_sequence_id_to_states.clear()
        _stores[group.generation] = store
        try:
            with warnings.catch_warnings():
                # init_rpc calls a deprecated part of torch itself.
                warnings.filterwarnings("ignore", message="You are using a Backend")
                with _listening_on(group.interface):
                    self._init_rpc(group)
        finally:
            del _stores[group.generation]
            with self._lock:
                late = self._closed
            if late:  # given up meanwhile: leave nothing behind
                self._shut_down()
            _joining = None

    @staticmethod
    def _init_rpc(group: RpcGroup) -> None:
        """The call itself."""
        rpc.init_rpc(
            group.names[group.rank],
            rank=group.rank,
            world_size=len(group.names),
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                num_worker_threads=_THREADS,
                rpc_timeout=group.timeout.total_seconds(),
                init_method=f"{_SCHEME}://generation/{group.generation}",
                _transports=["uv"],
                _channels=["basic"],
            ),
        )

    def send(self, message: Message) -> None:
        """See `Transport.send`."""
        if self._closed:
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
        """Look at the outcome of a hand-over; runs in the RPC pool."""
        try:
            problem = done.value()
        except RuntimeError as error:
            problem = str(error)
        if problem is not None:
            self._tell_lost(message, peer, problem)

    def _tell_lost(self, message: Message, peer: str, problem: str) -> None:
        """Report a hand-over that failed, unless everything is closing."""
        if self._closed:
            return
        error = PeerLost(
            f"{message}: worker {peer!r} is gone: {problem.splitlines()[0]}", peer=peer
        )
        _log.debug("%s", error)
        self._open[message.sender][1](error)

    def receive(self, data: bytes, tensors: list[Tensor]) -> str | None:
        """Put an incoming message into its inbox.

        Returns:
            What is wrong with it, or None.
        """
        try:
            message = decode(data, tensors)
        except TransportError as error:
            _log.warning("%s", error)
            return str(error)
        if message.to not in self._open:
            return f"no stage {message.to} here"
        self._open[message.to][0](message)
        return None

    def reference(self, address: int, part: str) -> rpc.RRef[Any]:
        """Return an RRef to a part of a stage; its worker owns it."""
        reference: rpc.RRef[Any] = rpc.remote(
            self._group.name_of(address), _part, args=(address, part)
        )
        return reference

    def parameter_references(self, address: int) -> list[rpc.RRef[nn.Parameter]]:
        """Return RRefs to the trainable parameters of a stage, in the order of the module.

        Raises:
            PeerLost: The worker does not answer.
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
        """Return what `expose` offers."""
        return self._parts[address](part)

    def close(self) -> None:
        """See `Transport.close`. RRefs die with it."""
        global _current
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._shut_down()
        # torch would keep the store open until the next group.
        rpc.rendezvous_iterator = iter(())  # type: ignore[assignment]  # any iterator will do
        _current = None

    @staticmethod
    def _shut_down() -> None:
        """Leave the group, if this process is in one."""
        if rpc.api._is_current_rpc_agent_set():
            rpc.api._ignore_rref_leak = True
            with _quiet():
                rpc.shutdown(graceful=False)


@contextmanager
def _listening_on(interface: str) -> Iterator[None]:
    """Tell torch where to listen; it takes that from the environment alone."""
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's C++ warnings off the screen while the agent closes its own pipes.

    torch 2.13 logs each of them as an error of the peer. Its log level is a plain exported
    variable; a build without it stays as it is.
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


def _deliver(data: bytes, tensors: list[Tensor]) -> str | None:
    """Receive a message; called by peers. Errors are data: torch loses the types of exceptions."""
    transport = _current
    return "no transport is open" if transport is None else transport.receive(data, tensors)


def _part(address: int, part: str) -> Any:
    """Return a part of a stage; called by peers through ``rpc.remote``, which keeps it here."""
    if _current is None:
        raise PipelineError("no transport is open")
    return _current.part(address, part)


def _parameters(address: int) -> list[rpc.RRef[nn.Parameter]]:
    """Return RRefs to the trainable parameters of a stage; called by peers."""
    return [rpc.RRef(p) for p in _part(address, "module").parameters() if p.requires_grad]


_stores: dict[int, dist.Store] = {}


def _rendezvous(url: str, **kwargs: Any) -> Any:
    """Hand init_rpc the store that our own rendezvous agreed on."""
    generation = int(url.split("?")[0].rsplit("/", 1)[1])
    yield _stores[generation], -1, -1


dist.register_rendezvous_handler(_SCHEME, _rendezvous)
