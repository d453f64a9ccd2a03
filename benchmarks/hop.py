"""What it costs to hand a tensor from one process to another, and what the floor is.

One way and one size, in float32:

- link: a frame over a link of ours, on a Unix socket. The thread that waits for the tensor reads
  the link itself, as the thread of a worker does; the tensor comes in memory of its own;
- shared: the same, with the bytes of the tensor in memory that both processes share;
- rpc: ``rpc_async`` over TensorPipe's transport uv; the handler fills a queue;
- gloo: ``torch.distributed.isend`` and ``recv`` into one tensor that is there already. ``isend``
  is ``send`` without its wait: gloo's ``send`` returns when the receiver has asked for the tensor;
- socket: ``sendall`` and ``recv_into``, from and into one tensor each, on a Unix socket;
- memcpy: ``Tensor.copy_`` within one process.

The last line is one JSON object: ``latency_s`` and ``latency_p90_s``, half of a round trip with
nothing else running; ``bytes_per_s`` of many tensors one way, where the receiver acknowledges so
often that the sender need not stop; ``processor_s`` of both processes for each hop of the round
trips. For memcpy a hop is a copy.

    python benchmarks/hop.py link 65536
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import queue
import resource
import signal
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

# Before torch is imported, here and in the processes that inherit them.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # of processes whose ends are no news
if sys.platform == "linux":
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"

import click
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor

from pipedream_rt.deadline import Deadline
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.link import Connection as Connected
from pipedream_rt.transport.link import Frame
from pipedream_rt.transport.links import Links

TIMEOUT_S = 30
DEADLINE_S = 120.0
WARM_UP_S, LATENCY_S, THROUGHPUT_S = 0.3, 1.2, 0.5
FEWEST, MOST = 9, 20_000
GROUP_S = 20e-6
"""A copy is timed together with others, so that reading the clock is no part of it."""


class End(Protocol):
    """One end of a way. Tensors have one size, but for acknowledgements, which have one element."""

    def send(self, tensor: Tensor) -> None:
        """Hand a tensor over, which does not change before it has arrived."""

    def take(self, acknowledgement: bool = False) -> Tensor:
        """Wait for the next tensor; it is valid until the next call."""

    def close(self) -> None:
        """Let go of the other end, which does so too."""


class OverLink:
    """A link of ours, whose waiter is the thread that takes."""

    def __init__(self, rank: int, connection: socket.socket, shares: bool) -> None:
        self._shares = shares
        self._arrived: deque[Tensor] = deque()
        self._takes, self._peer, self._lost = False, 1 - rank, ""
        key = b"k" * 32
        group = Group(generation=1, rank=rank, names=("p0", "p1"), hosts=(), key=key)
        connections = {self._peer: Connected(connection, key, shares)}
        self._links = Links(group, connections, self._receive, self._end, shares)

    def _receive(self, rank: int, frame: Frame) -> None:
        """Keep what came, as an inbox does, and wake the thread that waits for it."""
        self._arrived.append(frame.tensors[0])
        if self._takes:
            self._links.wake()

    def _end(self, rank: int, reason: str) -> None:
        self._lost = reason
        self._links.wake()

    def send(self, tensor: Tensor) -> None:
        """See `End`."""
        if reason := self._links.send(self._peer, 0, b"", [tensor], self._shares):
            raise ConnectionError(reason)

    def take(self, acknowledgement: bool = False) -> Tensor:
        """See `End`."""
        deadline = Deadline(timedelta(seconds=TIMEOUT_S))
        self._takes = True
        while not self._arrived:
            if self._lost or deadline.expired():
                raise ConnectionError(self._lost or f"nothing came within {TIMEOUT_S} s")
            self._links.wait(deadline.remaining_s())
        self._takes = False
        return self._arrived.popleft()

    def close(self) -> None:
        """See `End`."""
        self._links.close()


_arrived: queue.SimpleQueue[Tensor] = queue.SimpleQueue()


def deliver(tensor: Tensor) -> None:
    """The handler of a call: it only fills a queue."""
    _arrived.put(tensor)


class OverRpc:
    """Calls by torch RPC."""

    def __init__(self, rank: int, folder: str) -> None:
        self._peer = f"p{1 - rank}"
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=4,
            rpc_timeout=TIMEOUT_S,
            init_method=f"file://{folder}/store",
            _transports=["uv"],
            _channels=["basic"],
        )
        rpc.init_rpc(f"p{rank}", rank=rank, world_size=2, rpc_backend_options=options)

    def send(self, tensor: Tensor) -> None:
        """See `End`."""
        rpc.rpc_async(self._peer, deliver, args=(tensor,), timeout=TIMEOUT_S)

    def take(self, acknowledgement: bool = False) -> Tensor:
        """See `End`."""
        return _arrived.get(timeout=TIMEOUT_S)

    def close(self) -> None:
        """See `End`."""
        rpc.shutdown(timeout=TIMEOUT_S)


class OverGloo:
    """Sends and receives of torch.distributed, over TCP on loopback."""

    def __init__(self, rank: int, folder: str, count: int) -> None:
        self._peer, self._sending = 1 - rank, deque[Any]()
        self._room = {False: torch.zeros(count), True: torch.zeros(1)}
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=TIMEOUT_S),
        )

    def send(self, tensor: Tensor) -> None:
        """See `End`."""
        self._sending.append(dist.isend(tensor, self._peer))
        # Of these no more than a window of tensors can be on their way.
        if len(self._sending) > window_of(tensor.nbytes):
            self._sending.popleft().wait()

    def take(self, acknowledgement: bool = False) -> Tensor:
        """See `End`."""
        room = self._room[acknowledgement]
        dist.recv(room, self._peer)
        return room

    def close(self) -> None:
        """See `End`."""
        while self._sending:
            self._sending.popleft().wait()
        dist.destroy_process_group()


class OverSocket:
    """The bytes alone."""

    def __init__(self, connection: socket.socket, count: int) -> None:
        # A deadline of the kernel: that of Python would poll before each call.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", TIMEOUT_S, 0))
        self._socket = connection
        self._room = {False: torch.zeros(count), True: torch.zeros(1)}
        self._bytes = {kind: room.numpy().data.cast("B") for kind, room in self._room.items()}

    def send(self, tensor: Tensor) -> None:
        """See `End`."""
        self._socket.sendall(tensor.numpy().data.cast("B"))

    def take(self, acknowledgement: bool = False) -> Tensor:
        """See `End`."""
        room = self._bytes[acknowledgement]
        done = 0
        while done < len(room):
            count = self._socket.recv_into(room[done:])
            if not count:
                raise ConnectionError("the other end is gone")
            done += count
        return self._room[acknowledgement]

    def close(self) -> None:
        """See `End`."""
        self._socket.close()


def window_of(size: int) -> int:
    """Return how many tensors may be on their way."""
    return max(2, min(64, (1 << 28) // size) // 2 * 2)


def processor_s() -> float:
    """Return the processor time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# -- the two processes ------------------------------------------------------------------------


class First:
    """The process that measures; it tells the other one what to do."""

    def __init__(self, end: End, control: Connection, size: int) -> None:
        self._end, self._control = end, control
        self._tensor, self._window = torch.arange(size // 4, dtype=torch.float32), window_of(size)

    def measure(self) -> dict[str, float]:
        """Take all figures."""
        size = self._tensor.nbytes
        came, trips, _ = self.bounce(3)
        if not torch.equal(came, self._tensor):
            raise RuntimeError("the tensor that came back is another one")
        _, trips, _ = self.bounce(rounds_in(WARM_UP_S, min(trips), fewest=2))
        _, trips, used = self.bounce(rounds_in(LATENCY_S, statistics.median(trips)))
        halves = [trip / 2 for trip in trips]
        rough = self.stream(2 * self._window) / (2 * self._window)
        count = (int(THROUGHPUT_S / rough) // self._window + 1) * self._window
        return {
            **latency_of(halves),
            "bytes_per_s": count * size / self.stream(count),
            "processor_s": used / (2 * len(trips)),
        }

    def bounce(self, rounds: int) -> tuple[Tensor, list[float], float]:
        """Send to and fro: what came last, seconds of each round trip, processor time of both."""
        end, tensor, trips = self._end, self._tensor, []
        self._control.send(("bounce", rounds))
        before = processor_s()
        for _ in range(rounds):
            start = time.perf_counter()
            end.send(tensor)
            came = end.take()
            trips.append(time.perf_counter() - start)
        used = processor_s() - before
        return came, trips, used + receive(self._control)

    def stream(self, count: int) -> float:
        """Send so many, a multiple of the window: seconds until the last acknowledgement."""
        end, window, on_their_way = self._end, self._window, 0
        self._control.send(("stream", count))
        start = time.perf_counter()
        for _ in range(count):
            if on_their_way == window:
                end.take(acknowledgement=True)
                on_their_way -= window // 2
            end.send(self._tensor)
            on_their_way += 1
        for _ in range(on_their_way // (window // 2)):
            end.take(acknowledgement=True)
        seconds = time.perf_counter() - start
        receive(self._control)
        return seconds


def second(end: End, control: Connection, size: int) -> None:
    """Do what the first process says: hand back, or acknowledge every half of a window."""
    half, acknowledgement = window_of(size) // 2, torch.ones(1)
    while True:
        what, count = receive(control)
        before = processor_s()
        if what == "end":
            return
        for i in range(count):
            tensor = end.take()
            if what == "bounce":
                end.send(tensor)
            elif (i + 1) % half == 0:
                end.send(acknowledgement)
        control.send(processor_s() - before)


def receive(pipe: Connection) -> Any:
    """Receive an object within the deadline."""
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"the other process said nothing within {TIMEOUT_S} s")
    return pipe.recv()


def rounds_in(seconds: float, each_s: float, fewest: int = FEWEST) -> int:
    """Return how often to do what takes so long."""
    return max(fewest, min(MOST, int(seconds / each_s)))


def latency_of(seconds: list[float]) -> dict[str, float]:
    """Return the median and the 90th percentile."""
    last = statistics.quantiles(seconds, n=10, method="inclusive")[-1]
    return {"latency_s": statistics.median(seconds), "latency_p90_s": last}


def process(
    rank: int,
    way: str,
    size: int,
    folder: str,
    connection: socket.socket,
    control: Connection,
    out: Connection | None,
) -> None:
    """Run one of the two."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own call
    make: dict[str, Callable[[], End]] = {
        "link": lambda: OverLink(rank, connection, shares=False),
        "shared": lambda: OverLink(rank, connection, shares=True),
        "rpc": lambda: OverRpc(rank, folder),
        "gloo": lambda: OverGloo(rank, folder, size // 4),
        "socket": lambda: OverSocket(connection, size // 4),
    }
    end = make[way]()
    if out is None:
        second(end, control, size)
    else:
        out.send(First(end, control, size).measure())
        control.send(("end", 0))
    end.close()


def end_with_parent() -> None:
    """End this process when the one that started it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


# -- the script -------------------------------------------------------------------------------


def between_processes(way: str, size: int) -> dict[str, float]:
    """Start both processes, wait for the figures and for a clean end."""
    context = multiprocessing.get_context("spawn")
    controls, ends = context.Pipe(), socket.socketpair()
    figures, out = context.Pipe(duplex=False)
    until, started = time.monotonic() + DEADLINE_S, []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(2):
                given = (rank, way, size, folder, ends[rank], controls[rank], None if rank else out)
                started.append(context.Process(target=process, args=given, daemon=True))
                started[-1].start()
            for each in (*controls, *ends, out):
                each.close()
            ready = wait([figures, *(one.sentinel for one in started)], until - time.monotonic())
            try:
                found = figures.recv() if figures in ready else None
            except EOFError:
                found = None
            if found is None:
                why = "a process failed; its error is above" if ready else "the deadline has passed"
                raise SystemExit(f"no figures: {why}")
            for one in started:
                one.join(max(0.0, until - time.monotonic()))
                if one.exitcode != 0:
                    raise SystemExit(f"a process ended with {one.exitcode} after the figures")
        finally:
            for one in started:
                one.kill()
                one.join(TIMEOUT_S)
    return found


def within_one(size: int) -> dict[str, float]:
    """Time copies, several at a time if they are small."""
    source = torch.arange(size // 4, dtype=torch.float32)
    target = torch.zeros_like(source)
    copy = functools.partial(target.copy_, source)

    def timed(groups: int, group: int) -> list[float]:
        times = []
        for _ in range(groups):
            start = time.perf_counter()
            for _ in range(group):
                copy()
            times.append((time.perf_counter() - start) / group)
        return times

    group = max(1, int(GROUP_S / min(timed(10, 1))))
    each_s = group * statistics.median(timed(FEWEST, group))
    timed(rounds_in(WARM_UP_S, each_s), group)
    before = processor_s()
    times = timed(rounds_in(LATENCY_S, each_s), group)
    used = processor_s() - before
    found = latency_of(times)
    return {
        **found,
        "bytes_per_s": size / found["latency_s"],
        "processor_s": used / (len(times) * group),
    }


@click.command()
@click.argument("way", type=click.Choice(["link", "shared", "rpc", "gloo", "socket", "memcpy"]))
@click.argument("size", metavar="BYTES", type=click.IntRange(4, 1 << 27))
def main(way: str, size: int) -> None:
    """Measure one WAY to hand over a tensor of BYTES bytes."""
    if size % 4:
        raise click.BadParameter("float32 has 4 bytes; give a multiple")
    # So that the processes are ended when a deadline outside ends this script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    torch.set_num_threads(1)
    found = within_one(size) if way == "memcpy" else between_processes(way, size)
    click.echo(json.dumps({"way": way, "bytes": size, **found}))


if __name__ == "__main__":
    main()
