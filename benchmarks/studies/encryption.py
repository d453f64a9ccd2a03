"""What it costs to encrypt a connection between two workers, beside leaving it as it is.

Two processes on this machine send values back and forth over one link of the transport, over
loopback, with TLS and without, in turn. *Processor time* is that of both processes for a value one
way, everything included. On a real network the time of the wire comes on top of both.

    python benchmarks/studies/encryption.py --mib 0.0625,1,16
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import socket
import statistics
import time
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from pipedream_rt.cluster.identity import Secret
from pipedream_rt.transport.link import Connection, Frame
from pipedream_rt.transport.links import Links
from pipedream_rt.transport.tcp import prepare
from pipedream_rt.transport.tls import TlsEngine

SECRET = Secret("0" * 64)


def linked(connection: socket.socket, rank: int, encrypts: bool, came: queue.Queue[Frame]) -> Links:
    """Return the link of one end."""
    prepare(connection)
    engine = encrypted(connection, called=rank == 0) if encrypts else None
    ends = {1 - rank: Connection(connection, engine)}
    return Links(ends, lambda _, frame: came.put(frame), lambda *_: None)


def encrypted(connection: socket.socket, called: bool) -> TlsEngine:
    """Shake hands over a connection."""
    engine = TlsEngine(SECRET.tls(called), called)
    while not engine.shake_hands():
        connection.sendall(engine.sealed())
        engine.take(connection.recv(1 << 16))
    connection.sendall(engine.sealed())
    return engine


def answer(address: tuple[str, int], encrypts: bool, results: Any) -> None:
    """Send back what comes, until something empty comes."""
    came: queue.Queue[Frame] = queue.Queue()
    links = linked(socket.create_connection(address), 1, encrypts, came)
    while (frame := came.get()).tensors:
        links.send(0, 0, b"", frame.tensors)
    results.put(time.process_time())
    links.close()


def measured(mib: float, encrypts: bool, count: int) -> dict[str, float]:
    """Return the milliseconds for a value one way: on the clock, and of both processors."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    value = torch.zeros(int(mib * (1 << 20)), dtype=torch.uint8)
    came: queue.Queue[Frame] = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = context.Process(target=answer, args=(listener.getsockname(), encrypts, results))
        other.start()
        links = linked(listener.accept()[0], 0, encrypts, came)
    for _ in range(3):  # the handshake, and what is done once
        links.send(1, 0, b"", [value])
        came.get()
    theirs = _processor_s(other.pid or 0)
    wall, ours = time.perf_counter(), time.process_time()
    for _ in range(count):
        links.send(1, 0, b"", [value])
        came.get()
    wall, ours = time.perf_counter() - wall, time.process_time() - ours
    theirs = _processor_s(other.pid or 0) - theirs
    links.send(1, 0, b"")
    results.get()
    other.join()
    links.close()
    return {"wall_ms": 500 * wall / count, "processor_ms": 500 * (ours + theirs) / count}


def _processor_s(pid: int) -> float:
    """Return the processor time of another process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@click.command(help=__doc__)
@click.option("--mib", default="0.0625,1,16", show_default=True, help="Sizes of values.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")
def main(mib: str, repeats: int, as_json: bool) -> None:
    """Measure both, in turn."""
    columns = ("MiB", "", "one way, ms", "processor, ms", "processor, ms per MiB", "of plain")
    table = Table(*columns, title="medians")
    for size in map(float, mib.split(",")):
        count = max(20, min(400, int(200 / size)))
        runs = [[measured(size, each, count) for each in (False, True)] for _ in range(repeats)]
        middle = [
            {name: statistics.median(run[i][name] for run in runs) for name in runs[0][0]}
            for i in (0, 1)
        ]
        ratio = statistics.median(r[1]["processor_ms"] / r[0]["processor_ms"] for r in runs)
        for name, found, of_plain in zip(("plain", "TLS 1.3"), middle, (1.0, ratio), strict=True):
            line = {"mib": size, "how": name, **found, "of_plain": of_plain}
            if as_json:
                print(json.dumps(line))
            per_mib = found["processor_ms"] / size
            cells = (found["wall_ms"], found["processor_ms"], per_mib, of_plain)
            table.add_row(f"{size:g}", name, *(f"{cell:.2f}" for cell in cells))
    if not as_json:
        Console().print(table)


if __name__ == "__main__":
    main()
