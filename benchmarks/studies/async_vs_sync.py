"""Throughput, loss and memory of one process, gpipe, 1f1b and async-1f1b, side by side.

All train the example's transformer from the same weights on the same mini-batches, split into the
same micro-batches, with one update for each mini-batch. Repeats are taken in turn (A B C A B C),
because a shared machine changes its speed. Time runs from an empty pipe to an empty pipe, so
filling and draining are counted.

Prints a table, or with --json one object per line:
    schedule, stages, micro_batches, micro_batches_per_s (median), spread (max - min),
    loss (validation, after all samples of a repeat), peak_memory_bytes (one figure per process).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from train_charlm import Corpus, build_model, loss_fn  # from examples/

from pipedream_rt import Layout, Pipeline
from pipedream_rt.stage.process_memory import peak_memory_bytes

OPTIMIZER = (torch.optim.AdamW, {"lr": 1e-3, "fused": True})
WARM_UP = 2
SCHEDULES = ("one-process", "gpipe", "1f1b", "async-1f1b")


def data(shape: dict[str, int]) -> tuple[list[Any], list[Any]]:
    """The mini-batches of a repeat, warm-up first, and those to validate on."""
    corpus = Corpus.load()
    batch = shape["micro_batches"] * shape["samples"]
    count = WARM_UP + shape["updates"]
    train = list(corpus.batches(batch, shape["context"], count, seed=0))
    return train, list(corpus.validation_batches(batch, shape["context"], 4))


def model_of(shape: dict[str, int]) -> torch.nn.Sequential:
    """The same weights every time."""
    torch.manual_seed(0)
    return build_model(shape["layers"], shape["width"], context=shape["context"])


def run_pipeline(schedule: str, shape: dict[str, int]) -> dict[str, Any]:
    """One repeat on worker processes."""
    train, validation = data(shape)
    with Pipeline(
        model_of(shape),
        stages=shape["stages"],
        loss_fn=loss_fn,
        optimizer=OPTIMIZER,
        schedule=schedule,
        micro_batches=shape["micro_batches"],
        corrections=(),  # the schedule alone is measured
        # Nothing here depends on a late learning rate.
        layout=Layout(credits=2 if schedule != "async-1f1b" else None),
    ) as pipe:
        for _ in pipe.train_epoch(train[:WARM_UP]):
            pass
        pipe.flush()
        start = time.perf_counter()
        for _ in pipe.train_epoch(train[WARM_UP:]):
            pass
        pipe.flush()
        elapsed_s = time.perf_counter() - start
        memory = [counters["peak_memory_bytes"] for counters in pipe.statistics()]
        return {"seconds": elapsed_s, "loss": pipe.evaluate(validation), "memory": memory}


def run_one_process(shape: dict[str, int]) -> dict[str, Any]:
    """One repeat of plain PyTorch with gradient accumulation and one thread."""
    torch.set_num_threads(1)
    train, validation = data(shape)
    model = model_of(shape)
    optimizer = OPTIMIZER[0](model.parameters(), **OPTIMIZER[1])
    start = 0.0
    for i, (x, y) in enumerate(train):
        if i == WARM_UP:
            start = time.perf_counter()
        for xm, ym in zip(x.chunk(shape["micro_batches"]), y.chunk(shape["micro_batches"])):
            (loss_fn(model(xm), ym) * (len(xm) / len(x))).backward()
        optimizer.step()
        optimizer.zero_grad()
    elapsed_s = time.perf_counter() - start
    with torch.no_grad():
        loss = statistics.fmean(loss_fn(model(x), y).item() for x, y in validation)
    return {"seconds": elapsed_s, "loss": loss, "memory": [peak_memory_bytes()]}


def repeat(schedule: str, shape: dict[str, int]) -> dict[str, Any]:
    """One repeat in a process of its own, so that nothing is warm or left over."""
    command = [sys.executable, __file__, "--one", schedule, "--shape", json.dumps(shape)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    outcome: dict[str, Any] = json.loads(output.splitlines()[-1])
    return outcome


def summary(schedule: str, shape: dict[str, int], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of the result."""
    rates = [shape["updates"] * shape["micro_batches"] / run["seconds"] for run in runs]
    losses = {run["loss"] for run in runs}
    if len(losses) != 1:
        raise SystemExit(f"{schedule}: repeats ended with different losses {sorted(losses)}")
    return {
        "schedule": schedule,
        "stages": 1 if schedule == "one-process" else shape["stages"],
        "micro_batches": shape["micro_batches"],
        "micro_batches_per_s": statistics.median(rates),
        "spread": max(rates) - min(rates),
        "loss": losses.pop(),
        "peak_memory_bytes": [max(column) for column in zip(*(run["memory"] for run in runs))],
    }


def print_table(shape: dict[str, int], lines: list[dict[str, Any]]) -> None:
    """For people."""
    table = Table(title=", ".join(f"{k} {v}" for k, v in shape.items()))
    heads = ("schedule", "micro-batches/s", "spread", "of one process", "loss", "peak MiB")
    for head in heads:
        table.add_column(head, justify="left" if head == "schedule" else "right")
    base = next((x for x in lines if x["schedule"] == "one-process"), lines[0])
    for line in lines:
        table.add_row(
            line["schedule"],
            f"{line['micro_batches_per_s']:.2f}",
            f"{line['spread']:.2f}",
            f"{line['micro_batches_per_s'] / base['micro_batches_per_s']:.2f}x",
            f"{line['loss']:.4f}",
            " ".join(f"{m / 2**20:.0f}" for m in line["peak_memory_bytes"]),
        )
    Console().print(table)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--stages", default=2, show_default=True)
@click.option("--micro-batches", default=4, show_default=True, help="Per mini-batch.")
@click.option("--samples", default=8, show_default=True, help="Per micro-batch.")
@click.option("--updates", default=8, show_default=True, help="Mini-batches timed per repeat.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--width", default=256, show_default=True)
@click.option("--layers", default=8, show_default=True)
@click.option("--context", default=128, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(SCHEDULES), help="Leave the others out.")
@click.option("--one", hidden=True)
@click.option("--shape", "given", hidden=True)
def main(
    as_json: bool,
    repeats: int,
    only: tuple[str, ...],
    one: str | None,
    given: str | None,
    **shape: int,
) -> None:
    """Compare asynchronous with synchronous pipelines and with one process."""
    if one is not None and given is not None:
        chosen = json.loads(given)
        outcome = run_one_process(chosen) if one == "one-process" else run_pipeline(one, chosen)
        click.echo(json.dumps(outcome))
        return
    schedules = only or SCHEDULES
    runs: dict[str, list[dict[str, Any]]] = {schedule: [] for schedule in schedules}
    for _ in range(repeats):
        for schedule in schedules:
            runs[schedule].append(repeat(schedule, shape))
    lines = [summary(schedule, shape, runs[schedule]) for schedule in schedules]
    if as_json:
        for line in lines:
            click.echo(json.dumps(line))
    else:
        print_table(shape, lines)


if __name__ == "__main__":
    main()
