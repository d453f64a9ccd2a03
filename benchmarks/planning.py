"""What the planner predicts beside what is measured, and its split beside others.

Layers of unequal cost that take their time without a processor (see workload.py) are profiled, and
planned for 4 workers without replicas. The plan's split, the split with as many layers on each
stage, and the one that balances parameters are then trained, as local processes.

    python benchmarks/planning.py

The micro-batches per second are those of the full pipe.
"""

from __future__ import annotations

import json
from itertools import accumulate

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from workload import EmulatedLayer

from pipedream_rt import Pipeline, profile
from pipedream_rt.observe import summarize
from pipedream_rt.partitioning.costing import Costing
from pipedream_rt.partitioning.cuts import cuts_of
from pipedream_rt.partitioning.machines import Machines, Worker
from pipedream_rt.partitioning.partition import SLOWDOWNS, partition_of
from pipedream_rt.partitioning.planner import partitions
from pipedream_rt.partitioning.search import Stage

WORKERS, WIDTH, SAMPLES = 4, 64, 8
COSTS_MS = (4, 1, 1, 2, 9, 1, 3, 3, 2, 1, 1, 6)
"""Milliseconds of each layer's forward; its backward takes twice as long."""

HOP_S = 0.0004
"""Seconds of a hop between two processes of this machine (`python -m benchmarks hop`, rounded)."""


def layers() -> nn.Sequential:
    """The model, each layer of which is on a device of its own."""
    return nn.Sequential(
        *(EmulatedLayer(i, WIDTH, ms / 1e3, 2 * ms / 1e3) for i, ms in enumerate(COSTS_MS))
    )


def measured(starts: list[int], slack: tuple[int, ...], schedule: str, updates: int) -> float:
    """Micro-batches per second of a split, given by the first layer of each stage."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(SAMPLES * WORKERS, WIDTH, generator=generator) for _ in range(2))
    with Pipeline(
        layers(),
        stages=starts[1:],
        loss_fn=F.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 1e-3}),
        schedule=schedule,  # type: ignore[arg-type]
        micro_batches=WORKERS,
        slack=slack,
        trace=True,
    ) as pipe:
        for _ in pipe.train_epoch([(x, y)] * updates):
            pass
        return summarize(pipe.trace()).throughput


@click.command()
@click.option("--updates", default=40, show_default=True, help="Mini-batches of each run.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def main(updates: int, as_json: bool) -> None:
    """Profile, plan, train, and compare."""
    torch.set_num_threads(1)
    batch = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    cuts = cuts_of(profile(layers(), batch, loss_fn=F.mse_loss))
    machines = Machines(workers=(Worker(),) * WORKERS, latency_within=HOP_S)
    each = len(COSTS_MS) // WORKERS
    table = Table(title=f"{WORKERS} workers: micro-batches per second")
    for head in ("schedule", "split", "layers of each stage", "predicted", "measured", "error"):
        table.add_column(head, justify="left" if "s" in head[:2] else "right")
    for schedule in ("async-1f1b", "1f1b"):
        found = partitions(cuts, machines, choices=[schedule], replicas=1)[0]
        planned = [len(stage.layers) for stage in found.stages]
        for name, sizes in (("planned", planned), ("equal", [each] * WORKERS)):
            ends = list(accumulate(sizes))
            starts = [0, *ends[:-1]]
            stages = [Stage(a - 1, b - 1, (w,)) for w, (a, b) in enumerate(zip(starts, ends))]
            costing = Costing(cuts, machines, schedule, WORKERS)
            predicted = partition_of(costing, stages, SLOWDOWNS["none"])
            slack = tuple(stage.slack for stage in predicted.stages[:-1])
            rate = measured(starts, slack, schedule, updates)
            error = predicted.throughput / rate - 1
            line = {
                "schedule": schedule, "split": name, "sizes": sizes,
                "predicted": predicted.throughput, "measured": rate, "error": error,
            }  # fmt: skip
            if as_json:
                click.echo(json.dumps(line))
            table.add_row(
                schedule, name, ", ".join(map(str, sizes)),
                f"{predicted.throughput:.2f}", f"{rate:.2f}", f"{error:+.1%}",
            )  # fmt: skip
    if not as_json:
        Console().print(table)


if __name__ == "__main__":
    main()
