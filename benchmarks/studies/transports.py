"""torch RPC or links of our own: what each costs in latency, and in processor time.

Two processes, as two stages: one hands a tensor to the other, by ``rpc_async`` over one of
TensorPipe's transports or over a link, as the runtime does. Who receives it puts it into a queue, a
thread takes it out and hands it back the same way. Measured for each:

- hop, idle: half of the round trip, nothing else running (median, 99th percentile);
- hop, busy: one way, while the compute thread of each process multiplies matrices and hands one
  tensor over after each, as stages do;
- multiplications/s of both processes together meanwhile, and
- processor seconds used per wall second while nothing is sent at all.

    python benchmarks/studies/transports.py --json
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import resource
import socket
import statistics
import tempfile
import threading
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import click
import torch
import torch.distributed.rpc as rpc
from rich.console import Console
from rich.table import Table

from pipedream_rt.transport.group import Group
from pipedream_rt.transport.link import Connection as Connected
from pipedream_rt.transport.link import Frame
from pipedream_rt.transport.links import Links

LINK = "link"
TRANSPORTS = {
    LINK: ([], []),
    "uv": (["uv"], ["basic"]),
    "shm": (["shm"], ["basic"]),
    "shm+cma": (["shm"], ["cma", "basic"]),
}
IDLE_S = 5.0
TIMEOUT_S = 60

_arrived: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()


def deliver(tensor: torch.Tensor) -> None:
    """The handler: as in the runtime, it only fills a queue."""
    _arrived.put(tensor)


_links: Links | None = None


def hop(peer: str, tensor: torch.Tensor) -> None:
    """Hand a tensor to the other process; never waits."""
    if _links is not None:
        _links.send(int(peer[1:]), 0, b"", [tensor])
    else:
        rpc.rpc_async(peer, deliver, args=(tensor,), timeout=TIMEOUT_S)


def stamped(peer: str, stamp: torch.Tensor, tensor: torch.Tensor) -> None:
    """Hand over a tensor with the time; never waits."""
    if _links is not None:
        _links.send(int(peer[1:]), 1, b"", [stamp, tensor])
    else:
        rpc.rpc_async(peer, deliver_stamped, args=(stamp, tensor), timeout=TIMEOUT_S)


def receive(rank: int, frame: Frame) -> None:
    """Take what has come over the link."""
    if frame.kind:
        deliver_stamped(frame.tensors[0], frame.tensors[1])
    else:
        deliver(frame.tensors[0])


def link(rank: int, path: str) -> Links:
    """Connect the two processes by a link, over a local socket."""
    if rank == 0:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{path}.part")
            listener.listen()
            os.rename(f"{path}.part", f"{path}.socket")
            connection, _ = listener.accept()
    else:
        connection = socket.socket(socket.AF_UNIX)
        while True:
            try:
                connection.connect(f"{path}.socket")
                break
            except FileNotFoundError:
                threading.Event().wait(0.01)
    key = b"k" * 32
    group = Group(generation=1, rank=rank, names=("p0", "p1"), hosts=(), key=key)
    ends = {1 - rank: Connected(connection, key)}
    return Links(group, ends, receive, lambda rank, reason: None)


def bounce(rank: int, rounds: int, tensor: torch.Tensor) -> list[float]:
    """Send to and fro. Half round trips, in seconds."""
    peer = f"p{1 - rank}"
    halves = []
    for _ in range(rounds):
        if rank == 0:
            start = time.perf_counter()
            hop(peer, tensor)
            _arrived.get(timeout=TIMEOUT_S)
            halves.append((time.perf_counter() - start) / 2)
        else:
            hop(peer, _arrived.get(timeout=TIMEOUT_S))
    return halves


def compute(
    seconds: float, rank: int, tensor: torch.Tensor, matrix: torch.Tensor
) -> tuple[float, list[float]]:
    """Multiply for a while, handing a tensor over after each; multiplications/s and delays."""
    peer, count, delays = f"p{1 - rank}", 0, []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix @ matrix
        count += 1
        stamp = torch.tensor([time.monotonic()], dtype=torch.float64)
        stamped(peer, stamp, tensor)
        while not _stamps.empty():
            delays.append(_stamps.get())
    return count / seconds, delays


_stamps: queue.SimpleQueue[float] = queue.SimpleQueue()


def deliver_stamped(stamp: torch.Tensor, tensor: torch.Tensor) -> None:
    """Note how long the hop took: both processes read the same monotonic clock."""
    _stamps.put(time.monotonic() - stamp.item())


def process(rank: int, name: str, path: str, size: int, rounds: int, out: Connection) -> None:
    """One of the two."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own call
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    global _links
    if name == LINK:
        _links = link(rank, path)
    else:
        transports, channels = TRANSPORTS[name]
        rpc.init_rpc(
            f"p{rank}",
            rank=rank,
            world_size=2,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                num_worker_threads=4,
                init_method=f"file://{path}",
                _transports=transports,
                _channels=channels,
            ),
        )
    tensor, matrix = torch.ones(size // 4), torch.randn(700, 700)
    bounce(rank, 50, tensor)
    idle = bounce(rank, rounds, tensor)
    rate, busy = compute(4.0, rank, tensor, matrix)
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    while time.perf_counter() - start < IDLE_S:
        try:
            _arrived.get(timeout=IDLE_S)
        except queue.Empty:
            pass
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    out.send({"idle": idle, "busy": busy, "rate": rate, "cpu": used / IDLE_S})
    out.close()
    if _links is None:
        rpc.shutdown(graceful=False)
    os._exit(0)


def measure(name: str, size: int, rounds: int) -> dict[str, Any]:
    """Both processes, once."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, name, f"{folder}/store", size, rounds, theirs)
            processes.append(context.Process(target=process, args=arguments))
            pipes.append(ours)
        for started in processes:
            started.start()
        found = [pipe.recv() for pipe in pipes]
        for started in processes:
            started.join(TIMEOUT_S)
    return {
        "idle": found[0]["idle"],
        "busy": found[0]["busy"] + found[1]["busy"],
        "rate": found[0]["rate"] + found[1]["rate"],
        "cpu": found[0]["cpu"] + found[1]["cpu"],
    }


def summary(name: str, size: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repeats."""

    def percentile(key: str, p: int) -> float:
        per_run = [statistics.quantiles(run[key], n=100)[p - 1] for run in runs]
        return 1e6 * statistics.median(per_run)

    return {
        "transport": name,
        "bytes": size,
        "hop_idle_us": percentile("idle", 50),
        "hop_idle_p99_us": percentile("idle", 99),
        "hop_busy_us": percentile("busy", 50),
        "hop_busy_p99_us": percentile("busy", 99),
        "multiplications_per_s": statistics.median(run["rate"] for run in runs),
        "idle_cpu_s_per_s": statistics.median(run["cpu"] for run in runs),
    }


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--bytes", "size", default=1 << 18, show_default=True, help="Of the tensor.")
@click.option("--rounds", default=500, show_default=True)
@click.option("--repeats", default=3, show_default=True, help="They are taken in turn.")
def main(as_json: bool, size: int, rounds: int, repeats: int) -> None:
    """Compare links and TensorPipe's transports on one host."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # of the two processes, whose ends are no news
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in TRANSPORTS}
    for _ in range(repeats):
        for name in TRANSPORTS:
            runs[name].append(measure(name, size, rounds))
    lines = [summary(name, size, runs[name]) for name in TRANSPORTS]
    if as_json:
        for line in lines:
            click.echo(json.dumps(line))
        return
    table = Table()
    for head in lines[0]:
        table.add_column(head.replace("_", " "), justify="right")
    for line in lines:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in line.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
