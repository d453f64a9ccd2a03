"""What a trace costs in throughput: the same run with and without it, in turn.

Two figures. The throughput on and off, medians of several repeats, which a shared machine blurs;
and what recording one span takes, against the time of an action, which it does not.

Prints a table, or with --json one object per line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import mse_loss

from pipedream_rt import Observe, Pipeline
from pipedream_rt.tracing.spans import Recorder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from emulated import emulated_data, emulated_model


def seconds(traced: bool, updates: int, stages: int) -> float:
    """One repeat: from an empty pipe to an empty pipe, actions of 1 and 2 ms."""
    data = emulated_data(updates, 8, 64)
    with Pipeline(
        emulated_model(stages, 64, 0.001, 0.002),
        stages=stages,
        loss_fn=mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 1e-3}),
        micro_batches=1,
        workers="local",
        observe=Observe(trace=traced),
    ) as pipe:
        for _ in pipe.train_epoch(data[:20]):
            pass
        pipe.flush()
        start = time.perf_counter()
        for _ in pipe.train_epoch(data):
            pass
        pipe.flush()
        return time.perf_counter() - start


def span_seconds() -> float:
    """Recording one span: the clock, and the write."""
    recorder, count = Recorder(1 << 16), 200_000
    start = time.perf_counter()
    for i in range(count):
        asked = time.monotonic_ns()
        end = time.monotonic_ns()
        recorder.record(70, 0, i, i, 1, 1, -2, asked, asked, asked, end, 0)
    return (time.perf_counter() - start) / count


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--updates", default=1000, show_default=True)
@click.option("--stages", default=2, show_default=True)
@click.option("--repeats", default=7, show_default=True)
def main(as_json: bool, updates: int, stages: int, repeats: int) -> None:
    """Compare throughput with and without a trace."""
    off, on = [], []
    for i in range(repeats):
        # The first of a pair takes turns too.
        for traced in (False, True) if i % 2 else (True, False):
            (on if traced else off).append(updates / seconds(traced, updates, stages))
    ratios = [b / a for a, b in zip(off, on)]
    line: dict[str, Any] = {
        "off": statistics.median(off),
        "on": statistics.median(on),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "span_us": span_seconds() * 1e6,
    }
    if as_json:
        click.echo(json.dumps(line))
        return
    table = Table(title=f"{stages} stages, actions of 1 and 2 ms, {repeats} pairs")
    for head in ("micro-batches/s off", "on", "on/off, median of pairs", "min", "max",
                 "one span"):  # fmt: skip
        table.add_column(head, justify="right")
    table.add_row(
        f"{line['off']:.2f}", f"{line['on']:.2f}", f"{line['ratio']:.4f}",
        f"{line['ratio_min']:.4f}", f"{line['ratio_max']:.4f}", f"{line['span_us']:.2f} us",
    )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
