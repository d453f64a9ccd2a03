"""Throughput of the schedules on 4 to 32 stages, with emulated compute (see emulated.py).

The model takes 20 ms forward and 40 ms backward for each worker, so n workers do n times the work
per micro-batch. Efficiency is the measured throughput over that of workers that never wait, one
micro-batch every 60 ms. Beside it what the simulator says of the
same schedule with the same costs and no latency, which is what the schedule itself allows.

Prints a table, or with --json one object per line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import mse_loss

from pipedream_rt import Layout, Observe, Pipeline
from pipedream_rt.schedules import plan_for
from pipedream_rt.simulation import costs_of, simulate
from pipedream_rt.tracing import summarize

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from emulated import emulated_data, emulated_model

FORWARD_S, BACKWARD_S = 0.020, 0.040
SCHEDULES = ("async-1f1b", "2bw", "1f1b", "zero-bubble", "interleaved-1f1b")


def measured(schedule: str, workers: int, micro_batches: int, updates: int) -> dict[str, Any]:
    """One run with a trace, and one simulation."""
    each = 2 if schedule == "interleaved-1f1b" else 1
    stages = workers * each
    with Pipeline(
        emulated_model(stages, 256, FORWARD_S / each, BACKWARD_S / each),
        stages=stages,
        loss_fn=mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 1e-3}),
        schedule=schedule,
        micro_batches=micro_batches,
        workers="local",
        observe=Observe(trace=True),
        layout=Layout(stages_per_worker=each),
    ) as pipe:
        for _ in pipe.train_epoch(emulated_data(updates, micro_batches * 8, 256)):
            pass
        trace = pipe.trace()
    chosen = plan_for(schedule, num_stages=stages, per_update=micro_batches, stages_per_worker=each)
    costs = costs_of({"forward": FORWARD_S / each, "backward": BACKWARD_S / each})
    ideal = simulate(chosen, costs, updates * micro_batches)
    best = FORWARD_S + BACKWARD_S
    summary = summarize(trace)
    return {
        "schedule": schedule,
        "workers": workers,
        "micro_batches_per_s": summary.throughput,
        "efficiency": summary.throughput * best,
        "allowed": summarize(ideal).throughput * best,
        "hop_p50_s": summary.hops[0],
        "hop_p99_s": summary.hops[2],
    }


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--workers", multiple=True, type=int, default=(4, 8, 16), show_default=True)
@click.option("--micro-batches", default=2, show_default=True, help="Per update, for each worker.")
@click.option("--updates", default=4, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(SCHEDULES), help="Leave the others out.")
def main(
    as_json: bool,
    workers: tuple[int, ...],
    micro_batches: int,
    updates: int,
    only: tuple[str, ...],
) -> None:
    """Measure how the schedules scale."""
    lines = [
        measured(schedule, n, micro_batches * n, updates)
        for n in workers
        for schedule in only or SCHEDULES
    ]
    if as_json:
        for line in lines:
            click.echo(json.dumps(line))
        return
    table = Table(title=f"{micro_batches} n micro-batches per update")
    for head in ("workers", "schedule", "micro-batches/s", "efficiency", "schedule allows",
                 "hop p50", "hop p99"):  # fmt: skip
        table.add_column(head, justify="left" if head == "schedule" else "right")
    for line in lines:
        table.add_row(
            str(line["workers"]), line["schedule"], f"{line['micro_batches_per_s']:.3f}",
            f"{line['efficiency']:.1%}", f"{line['allowed']:.1%}",
            f"{line['hop_p50_s'] * 1e3:.2f} ms", f"{line['hop_p99_s'] * 1e3:.2f} ms",
        )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
