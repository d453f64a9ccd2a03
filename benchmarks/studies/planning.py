"""What the planner predicts beside what is measured, and its plans beside others.

Layers of unequal cost that take their time without a processor (see workload.py) are profiled, and
planned for 4 workers: with replicas of stages, and without. These plans, a stage with as many
layers on each worker, two uneven ones, and data parallelism are then trained, as local processes.

    python benchmarks/studies/planning.py
    python benchmarks/studies/planning.py --memory

The micro-batches per second are those of the full pipe: medians of the repeats, with the largest
distance from them. The repeats of all plans take turns. With ``--memory``, plans of the example's
transformer are trained for some updates, and the peak of each worker's memory is compared with what
was predicted.
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate, pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from pipedream_rt import Layout, Observe, Pipeline, profile
from pipedream_rt.planning.costing import Costing
from pipedream_rt.planning.cuts import Cuts, cuts_of
from pipedream_rt.planning.machines import Machines, Worker
from pipedream_rt.planning.partition import SLOWDOWNS, Partition, partition_of
from pipedream_rt.planning.planner import partitions
from pipedream_rt.planning.search import StageChoice
from pipedream_rt.tracing import summarize

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_charlm import Corpus, build_model, loss_fn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from workload import EmulatedLayer

WORKERS, WIDTH, SAMPLES = 4, 64, 8
CONTEXT = 128
COSTS_MS = (4, 1, 1, 2, 9, 1, 3, 3, 2, 1, 1, 6)
"""Milliseconds of each layer's forward; its backward takes twice as long."""

HOP_S = 0.0004
"""Seconds of a hop between two processes of this machine (`python -m benchmarks hop`, rounded)."""


def layers() -> nn.Sequential:
    """The model, each layer of which is on a device of its own."""
    return nn.Sequential(
        *(EmulatedLayer(i, WIDTH, ms / 1e3, 2 * ms / 1e3) for i, ms in enumerate(COSTS_MS))
    )


def measured(plan: Partition, starts: list[int], updates: int) -> float:
    """Micro-batches per second of a plan, whose stages begin at these layers."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(SAMPLES * WORKERS, WIDTH, generator=generator) for _ in range(2))
    with (
        Pipeline(
            layers(),
            stages=starts[1:] or 1,
            loss_fn=F.mse_loss,
            optimizer=(torch.optim.SGD, {"lr": 1e-3}),
            schedule=plan.schedule,  # type: ignore[arg-type]
            micro_batches=WORKERS,
            layout=Layout(
                slack=tuple(stage.slack for stage in plan.stages[:-1]),
                replicas=[len(stage.workers) for stage in plan.stages],
            ),
            observe=Observe(trace=True),
        ) as pipe
    ):
        for _ in pipe.train_epoch([(x, y)] * updates):
            pass
        return summarize(pipe.trace()).throughput


def chosen(cuts: Cuts, machines: Machines, schedule: str) -> dict[str, Partition]:
    """The plans to compare, by name."""
    costing = Costing(cuts, machines, schedule, WORKERS)
    count = len(COSTS_MS)

    def made(ends: list[int], replicas: list[int]) -> Partition:
        """The plan of stages that end before these layers, with these numbers of replicas."""
        firsts, hosts = [0, *ends[:-1]], list(accumulate([0, *replicas]))
        stages = [
            StageChoice(a - 1, b - 1, tuple(range(*place)))
            for a, b, place in zip(firsts, ends, pairwise(hosts))
        ]
        return partition_of(costing, stages, SLOWDOWNS["none"])

    found = {
        "planned": partitions(cuts, machines, choices=[schedule])[0],
        "planned, no replicas": partitions(cuts, machines, choices=[schedule], replicas=1)[0],
        "equal": made([3, 6, 9, 12], [1, 1, 1, 1]),
        "uneven, 3-1": made([10, count], [3, 1]),
        "uneven, 1-2-1": made([4, 9, count], [1, 2, 1]),
        "data parallel": made([count], [WORKERS]),
    }
    return found


def print_memory() -> None:
    """Print the peak memory of workers beside the predicted one, for plans of the example."""
    model, corpus = build_model(), Corpus.load()
    optimizer = (torch.optim.AdamW, {"lr": 1e-3})
    table = Table(title="MiB on the worker that is furthest above its prediction")
    for head in ("samples", "schedule", "replicas", "predicted", "measured", "error"):
        table.add_column(head)
    for samples in (2, 8):  # of a micro-batch
        batch = next(corpus.batches(samples, CONTEXT, 1, seed=0))
        cuts = cuts_of(profile(model, batch, loss_fn=loss_fn, optimizer=optimizer))
        for count, most, schedule in product((2, WORKERS), (1, None), ("async-1f1b", "1f1b")):
            machines = Machines(workers=(Worker(),) * count, latency_within=HOP_S)
            plan = partitions(
                cuts, machines, choices=[schedule], replicas=most, per_update=WORKERS
            )[0]
            with (
                Pipeline(
                    model,
                    stages=[stage.layers[0] for stage in plan.stages[1:]] or 1,
                    loss_fn=loss_fn,
                    optimizer=optimizer,
                    schedule=schedule,  # type: ignore[arg-type]
                    micro_batches=WORKERS,
                    corrections=(),  # whose memory no plan knows
                    layout=Layout(
                        slack=tuple(stage.slack for stage in plan.stages[:-1]),
                        replicas=[len(stage.workers) for stage in plan.stages],
                    ),
                ) as pipe
            ):
                list(pipe.train_epoch(corpus.batches(samples * WORKERS, CONTEXT, 15, seed=0)))
                peaks = [each["peak_memory_bytes"] for each in pipe.statistics()]
            said = [stage.memory for stage in plan.stages for _ in stage.workers]
            peak, most_of_it = max(zip(peaks, said), key=lambda pair: pair[0] / pair[1])
            table.add_row(
                str(samples), schedule, plan.shape, f"{most_of_it / 2**20:.0f}",
                f"{peak / 2**20:.0f}", f"{peak / most_of_it - 1:+.1%}",
            )  # fmt: skip
    Console().print(table)


@click.command()
@click.option("--updates", default=40, show_default=True, help="Mini-batches of each run.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each plan.")
@click.option("--memory", is_flag=True, help="Compare the memory instead.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def main(updates: int, repeats: int, memory: bool, as_json: bool) -> None:
    """Profile, plan, train, and compare."""
    torch.set_num_threads(1)
    if memory:
        print_memory()
        return
    batch = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    cuts = cuts_of(profile(layers(), batch, loss_fn=F.mse_loss))
    machines = Machines(workers=(Worker(),) * WORKERS, latency_within=HOP_S)
    table = Table(title=f"{WORKERS} workers: micro-batches per second")
    for head in (
        "schedule",
        "plan",
        "layers",
        "replicas",
        "slack",
        "predicted",
        "measured",
        "error",
    ):
        table.add_column(head, justify="right" if head in ("predicted", "measured") else "left")
    for schedule in ("async-1f1b", "1f1b"):
        plans = chosen(cuts, machines, schedule)
        rates: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(repeats):
            for name, plan in plans.items():
                ends = list(accumulate(len(stage.layers) for stage in plan.stages))
                rates[name].append(measured(plan, [0, *ends[:-1]], updates))
        for name, plan in plans.items():
            rate = median(rates[name])
            line: dict[str, Any] = {
                "schedule": schedule, "plan": name,
                "layers": [len(stage.layers) for stage in plan.stages],
                "replicas": [len(stage.workers) for stage in plan.stages],
                "slack": [stage.slack for stage in plan.stages[:-1]],
                "predicted": plan.throughput, "measured": rate,
                "spread": max(abs(each / rate - 1) for each in rates[name]),
                "error": plan.throughput / rate - 1,
            }  # fmt: skip
            if as_json:
                click.echo(json.dumps(line))
            lists = (line[key] for key in ("layers", "replicas", "slack"))
            table.add_row(
                schedule, name, *("-".join(map(str, each)) for each in lists),
                f"{plan.throughput:.2f}", f"{rate:.2f} ± {line['spread']:.1%}",
                f"{line['error']:+.1%}",
            )  # fmt: skip
    if not as_json:
        Console().print(table)


if __name__ == "__main__":
    main()
