"""What a failure costs, and what being ready for one costs.

The example's transformer. First, on 4 local workers: a worker is killed with SIGKILL, each in its
turn; the time until the script gets the first loss that the new workers have computed (not one that
had come already). Then, on 2: throughput with a checkpoint every so many micro-batches over that
without, in pairs, and for how long the coordinator was kept from other work by them.

Prints two tables, or with --json one object per line.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from pipedream_rt import Checkpoints, Pipeline, Recovery

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from train_charlm import Corpus, build_model, loss_fn  # from examples/

ADAMW = (torch.optim.AdamW, {"lr": 2e-3, "weight_decay": 0.05, "fused": True})


@contextmanager
def opened(stages: int, every: int | None, max_restarts: int) -> Iterator[Pipeline]:
    """A pipeline on local workers, with a folder for its checkpoints."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Pipeline(
            build_model(),
            stages=stages,
            loss_fn=loss_fn,
            optimizer=ADAMW,
            micro_batches=1,
            corrections=(),  # what is computed again is one update for each mini-batch
            workers="local",
            checkpoint=Checkpoints(folder, every=every),
            recovery=Recovery(max_restarts=max_restarts),
        ) as pipe,
    ):
        yield pipe


def seconds_to_recover(kills: int, between: int) -> list[float]:
    """Kill one worker after another; the time to the next new loss of each."""
    corpus, found = Corpus.load(), []
    with opened(4, between, kills) as pipe:
        killed, at = 0, 0.0
        for result in pipe.train_epoch(corpus.batches(8, 128, 1_000_000, 0)):
            if len(pipe.restarts) == killed > len(found):
                found.append(time.monotonic() - at)
                if killed == kills:
                    return found
            if len(found) == killed and result.step % between == between - 1:
                name = pipe.stages[killed % 4].worker
                pid = pipe._group.cluster._local.processes[name].pid  # type: ignore[attr-defined]
                at, killed = time.monotonic(), killed + 1
                os.kill(pid, signal.SIGKILL)
    raise AssertionError("the loader has no end")


def throughput(every: int | None, count: int) -> tuple[float, float]:
    """Micro-batches per second from an empty pipe to an empty pipe; seconds kept by checkpoints."""
    data = list(Corpus.load().batches(8, 128, count, 0))
    with opened(2, every, 0) as pipe:
        for _ in pipe.train_epoch(data[:10]):
            pass
        pipe.flush()
        start = time.perf_counter()
        for _ in pipe.train_epoch(data):
            pass
        pipe.flush()
        return count / (time.perf_counter() - start), pipe._run.checkpointer.blocked_s


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--kills", default=20, show_default=True)
@click.option("--between", default=20, show_default=True, help="Steps between kills.")
@click.option("--every", default=100, show_default=True, help="Micro-batches per checkpoint.")
@click.option("--count", default=300, show_default=True, help="Micro-batches of a repeat.")
@click.option("--pairs", default=7, show_default=True)
def main(as_json: bool, kills: int, between: int, every: int, count: int, pairs: int) -> None:
    """Measure the time to recover and the cost of checkpoints."""
    lines: list[dict[str, Any]] = []
    if kills:
        times = seconds_to_recover(kills, between)
        lines.append(
            {
                "kills": kills,
                "median_s": statistics.median(times),
                "worst_s": max(times),
                "best_s": min(times),
            }
        )
    if pairs:
        ratios, blocked = [], []
        for i in range(pairs):
            rates = {}
            # The first of a pair takes turns too.
            for with_them in (False, True) if i % 2 else (True, False):
                rates[with_them], blocked_s = throughput(every if with_them else None, count)
                if with_them:
                    blocked.append(blocked_s / (count / every))
            ratios.append(rates[True] / rates[False])
        lines.append(
            {
                "every": every,
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "coordinator_ms": 1e3 * statistics.median(blocked),
            }
        )
    for line in lines:
        if as_json:
            click.echo(json.dumps(line))
            continue
        table = Table(*line)
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in line.values()))
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
