"""What it costs to have fewer worker processes than the plan has workers, and how fast a spare is.

First, four emulated stages (10 ms forward, 20 ms backward each) on 4, 3, 2 and 1 processes: updates
per second, and their share of what the processes could do if they did nothing else: the slowest has
the work of ceil(4 / processes) stages. Then, three workers by address with a checkpoint every 20
mini-batches: the seconds from the SIGKILL of one to the first new result, where a spare worker
waits, where the worker is started again by hand at once, and where nobody comes (`elastic_wait`, a
second, is in it); and how long the run stands when one more has come. Last, `pipedream-rt run` on
four nodes for the work of three, of which one is killed: the time of the recovery.

    python benchmarks/studies/elastic.py --repeat 3 --output benchmarks/results/elastic.jsonl
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from pipedream_rt import Checkpoints, Pipeline, Recovery

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support import elastic
from support.nodes import nodes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from emulated import emulated_data, emulated_model

SECRET = "0123456789abcdef-of-a-benchmark-alone-fedcba9876543210"


def rate(processes: int, count: int = 60) -> float:
    """Updates per second in the steady phase, on so many processes."""
    with Pipeline(
        emulated_model(4, 16, 0.010, 0.020), stages=4, loss_fn=nn.functional.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 1e-3}), micro_batches=1, corrections=(),
        workers="local", recovery=Recovery(elastic=(1, processes)),
    ) as pipe:  # fmt: skip
        times = [time.monotonic() for _ in pipe.train_epoch(emulated_data(count, 4, 16))]
    begin, end = count // 4, count - 10
    return (end - begin) / (times[end] - times[begin])


def throughput() -> dict[str, Any]:
    """The rates on 4 to 1 processes, with the share of what could be."""
    rates = {processes: rate(processes) for processes in (4, 3, 2, 1)}
    possible = {p: 1 / (0.030 * -(-4 // p)) for p in rates}
    return {
        "what": "throughput",
        **{f"rate_{p}": found for p, found in rates.items()},
        **{f"share_{p}": found / possible[p] for p, found in rates.items()},
    }


class Workers:
    """Workers that are processes of their own, by name."""

    def __init__(self, address: str) -> None:
        """Start none yet."""
        self._address = address
        self._by_name: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *options: str) -> None:
        """Start one."""
        words = [self._address, "--name", name, "--persist", *options]
        self._by_name[name] = subprocess.Popen(
            [sys.executable, "-m", "pipedream_rt.workers", *words],
            env={**os.environ, "PIPEDREAM_RT_SECRET": SECRET, "PIPEDREAM_RT_LOG": "ERROR"},
        )

    def kill(self, name: str) -> None:
        """Kill one, and wait for its end."""
        process = self._by_name.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """Kill all."""
        for name in list(self._by_name):
            self.kill(name)


@contextmanager
def trained(fewest: int) -> Iterator[tuple[Pipeline, Workers]]:
    """A pipeline on three workers, with a folder for its checkpoints."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    os.environ["PIPEDREAM_RT_SECRET"] = SECRET
    with ExitStack() as opened:
        workers = Workers(address)
        opened.callback(workers.close)
        for name in "abc":
            workers.start(name)
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        pipe = opened.enter_context(
            Pipeline(
                nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), stages=3,
                loss_fn=nn.functional.mse_loss, optimizer=(torch.optim.SGD, {"lr": 1e-3}),
                micro_batches=1, corrections=(), workers=address,
                checkpoint=Checkpoints(folder, every=20, keep=2),
                recovery=Recovery(
                    max_restarts=9, elastic=(fewest, 3), elastic_wait=timedelta(seconds=1)
                ),
            )
        )  # fmt: skip
        yield pipe, workers


def after_kill(case: str) -> dict[str, Any]:
    """Kill a worker once, and measure until the run goes on; with another one, until it has it."""
    found: dict[str, Any] = {"what": case}
    data = itertools.repeat((torch.randn(8, 64), torch.randn(8, 64)))
    with trained(2 if case == "nobody comes" else 3) as (pipe, workers):
        if case == "a spare waits":
            workers.start("spare", "--spare")
        killed = 0.0
        for result in pipe.train_epoch(data):
            if not killed and result.step > 2000:  # the spare has imported torch long ago
                workers.kill("b")
                killed = time.monotonic()
                if case == "started again":
                    workers.start("b")
            elif len(pipe.restarts) == 1 and "seconds" not in found:
                found["seconds"] = time.monotonic() - killed
                if case != "nobody comes":
                    return found
                workers.start("b", "--spare")
            elif len(pipe.restarts) == 2:
                return {**found, "grown_s": pipe.restarts[1].seconds}
    raise AssertionError("the loader has no end")


def with_a_spare_node() -> dict[str, Any]:
    """Kill a node of four, of which one has nothing to do; its workers have torch by their fork."""
    with tempfile.TemporaryDirectory() as folder, nodes(Path(folder) / "run", size=4) as job:
        script = [elastic.__file__, f"{folder}/run", "-", "3", "3", "15", "55"]
        started = [job.start(rank, script=script) for rank in range(4)]
        hosts = started[0].wait_for("at 15")
        victim = next(rank for rank in (1, 2, 3) if f"node-{rank}-0" in hosts)
        started[victim].signal(signal.SIGKILL)
        started[victim].ended()
        started[0].go_on()
        started[0].wait_for("at 55")
        started[0].go_on()
        return {
            "what": "a spare node waits",
            "seconds": float(started[0].wait_for("restart").split()[1]),
        }


@click.command()
@click.option("--repeat", default=3, show_default=True)
@click.option("--output", type=click.Path(), help="File to add the lines to.")
def main(repeat: int, output: str | None) -> None:
    """Print a JSON line for each run, and one with the medians of each kind."""
    lines: list[dict[str, Any]] = []
    for _ in range(repeat):
        for made in (
            throughput(),
            *map(after_kill, ("a spare waits", "started again", "nobody comes")),
            with_a_spare_node(),
        ):
            lines.append(made)
            click.echo(json.dumps(made))
    for what in dict.fromkeys(line["what"] for line in lines):
        those = [line for line in lines if line["what"] == what]
        keys = [key for key in those[0] if key != "what"]
        medians = {key: round(statistics.median(each[key] for each in those), 3) for key in keys}
        click.echo(json.dumps({"median of": what, **medians}))
    if output:
        with Path(output).open("a") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
