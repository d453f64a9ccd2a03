"""What the defaults of `Pipeline` cost in samples, beside plain PyTorch.

A newcomer gives ``stages=4`` and an optimizer and leaves everything else out. Here two tasks are
trained so: a transformer on bytes (``text``), with a constant rate, and a convolutional network
with BatchNorm on pictures (``pictures``), whose rate falls along a cosine, since BatchNorm makes
losses leap at a constant one. Plain training, one process and one micro-batch, is done at several
rates. The one with the lowest held-out loss is then used with stages too, and half of it, of which
the better counts. *Slowdown* is how many times the updates of plain training a pipeline took to the
held-out loss that it ends with.

All stages run in one thread (``workers="serial"``), which gives the bits of a distributed run. Each
run is a line of JSON in ``benchmarks/results/first_touch.jsonl``, and is not done again.

    python benchmarks/first_touch.py run [SET ...] [--jobs 2]
    python benchmarks/first_touch.py table [SET ...]
    python -m benchmarks defaults                      # the set "defaults" alone, as a table
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import multiprocessing
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import click
import torch
from learning import Task, method_named, task_named, transformer_layers
from rich.console import Console
from rich.table import Table
from torch import nn

from pipedream_rt import Pipeline, Training
from pipedream_rt.corrections.advice import advised
from pipedream_rt.optimizers import Muon, RotatedAdamW, hidden_matrices

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "first_touch.jsonl"

TASKS = ("text", "pictures")

RATES = {
    "sgd": (0.1, 0.3, 1.0),
    "momentum": (0.01, 0.03, 0.1, 0.3),
    "adam": (1e-3, 3e-3, 6e-3),
    "adamw": (1e-3, 3e-3, 6e-3),
    "nadam": (1e-3, 3e-3, 6e-3),
    "rmsprop": (3e-4, 1e-3, 3e-3),
    "adagrad": (0.01, 0.03, 0.1),
    "adafactor": (0.01, 0.03, 0.1),
    "muon": (3e-3, 1e-2, 3e-2),
    "rotated": (1e-3, 3e-3, 1e-2),
}
"""By optimizer, the rates that plain training tries."""

MAIN = ("adamw", "adam", "momentum", "nadam")

LENGTHS = {"text": (480,), "pictures": (200, 280, 400, 560)}
"""By task, the numbers of updates that plain training does.

At a constant rate one run has the losses after every number of updates; otherwise each length is a
run of its own. The longest is beyond what a pipeline does, so that a slowdown below 1 can be read.
"""

SEEDS = {"text": (0,), "pictures": (0, 1)}
"""By task, the seeds over which losses are averaged."""

EVALUATIONS = 24


def task_of(name: str) -> tuple[Task, int]:
    """Return a task by its name, and the number of samples in its mini-batches."""
    if name == "text":
        task = task_named("transformer")
        return replace(task, model=lambda: transformer_layers(4, 48, 64)), 16
    return task_named("conv"), 32


def optimizer_named(name: str, model: nn.Module, rate: float) -> Any:
    """Return the argument ``optimizer`` of `Pipeline`."""
    matrices = [(hidden_matrices(model), {"matrices": True})]
    named: dict[str, tuple[Any, ...]] = {
        "sgd": (torch.optim.SGD, {}),
        "momentum": (torch.optim.SGD, {"momentum": 0.9}),
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {}),
        "nadam": (torch.optim.NAdam, {}),
        "rmsprop": (torch.optim.RMSprop, {}),
        "adagrad": (torch.optim.Adagrad, {}),
        "adafactor": (torch.optim.Adafactor, {}),
        "muon": (Muon, {}, matrices),
        "rotated": (RotatedAdamW, {}, matrices),
    }
    kind, arguments, *groups = named[name]
    if groups and not any(groups[0][0][0](n, p) for n, p in model.named_parameters()):
        groups = []
    return (kind, {"lr": rate, **arguments}, *groups)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        task: What is trained.
        optimizer: By what.
        stages: The number of stages; 1 for plain training.
        k: The number of micro-batches per update; None for the default.
        corrections: ``"default"``; else names as in ``learning.py``, joined by ``+``.
        schedule: The schedule.
        rate: The learning rate.
        updates: The number of updates.
        seed: Of the model and the data.
    """

    task: str
    optimizer: str
    stages: int = 1
    k: int | None = None
    corrections: str = "default"
    schedule: str = "async-1f1b"
    rate: float = 0.0
    updates: int = 400
    seed: int = 0

    @property
    def key(self) -> str:
        """A short digest of the run, and of the defaults that it leaves to the pipeline."""
        text = json.dumps(asdict(self), sort_keys=True)
        if self.k is None or self.corrections == "default":
            text += advised_for(self.optimizer)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


@functools.cache
def advised_for(optimizer: str) -> str:
    """What the pipeline does about a staleness of one with an optimizer, as text."""
    cls, options, *_ = optimizer_named(optimizer, nn.Linear(2, 2), 0.1)
    return repr(advised(cls, [options], 1))


def done(run: Run) -> dict[str, Any]:
    """Do a run; return its results."""
    torch.set_num_threads(1)
    task, batch = task_of(run.task)
    torch.manual_seed(run.seed)
    model = task.model()
    given: dict[str, Any] = {} if run.k is None else {"micro_batches": run.k}
    if run.corrections != "default":
        names = "" if run.corrections == "none" else f"+{run.corrections}"
        given["corrections"] = method_named(f"sgd{names}", model)[1]
    validation = task.validation()
    curve: list[tuple[int, float]] = []
    start = time.process_time()
    with Pipeline(
        model,
        stages=run.stages,
        loss_fn=task.loss_fn,
        optimizer=optimizer_named(run.optimizer, model, run.rate),
        schedule=run.schedule,  # type: ignore[arg-type]
        seed=run.seed,
        workers="serial",
        training=Training(on_nan="ignore"),
        **given,
    ) as pipe:
        last = 0.05 if run.task == "pictures" else 1.0  # of the rate
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            pipe.optimizer,
            lambda step: last + (1 - last) * (1 + math.cos(math.pi * step / run.updates)) / 2,
        )
        for number, item in enumerate(task.batches(run.updates, batch, run.seed), 1):
            pipe.submit(*item)
            scheduler.step()
            if number % (run.updates // EVALUATIONS) == 0 and number >= run.updates // 4:
                curve.append((number, round(pipe.evaluate(validation), 4)))
                if not math.isfinite(curve[-1][1]):
                    break
    return {
        **asdict(run),
        "key": run.key,
        "curve": curve,
        "processor_s": round(time.process_time() - start, 2),
        "torch": torch.__version__,
    }


# -- sets of runs -------------------------------------------------------------------------------


def of_plain(run: Run, rates: Sequence[float], updates: int) -> list[Run]:
    """The runs of plain training for the task and the optimizer of a run."""
    made = Run(
        task=run.task, optimizer=run.optimizer, schedule="1f1b", updates=updates, k=1,
        corrections="none",
    )  # fmt: skip
    return [replace(made, rate=rate, seed=seed) for rate in rates for seed in SEEDS[run.task]]


def all_sets() -> dict[str, list[Run]]:
    """The runs of every set, with the rate left open."""

    def some(*optimizers: str, tasks: Sequence[str] = TASKS, **options: Any) -> list[Run]:
        return [
            Run(task=task, optimizer=optimizer, **options)
            for optimizer in optimizers
            for task in tasks
        ]

    def compared(optimizers: Sequence[str], *corrections: str, **options: Any) -> list[Run]:
        return [run for c in corrections for run in some(*optimizers, corrections=c, **options)]

    every = tuple(RATES)
    return {
        # What the README's ten lines give.
        "defaults": [*some(*MAIN, stages=4), *some(*MAIN, stages=8)],
        # What corrections do for each optimizer with as many micro-batches as stages.
        "corrections": compared(every, "none", "ef+extrapolation", stages=4, k=4),
        "momentum": compared(
            ("momentum",), "ef", "extrapolation", "prediction", "ef+prediction", stages=4, k=4
        ),
        "deeper": compared((*MAIN, "muon"), "none", "ef+extrapolation", stages=8, k=8),
        # The same with one micro-batch per update.
        "stale": compared(every, "none", "ef2+extrapolation+damped", stages=4, k=1),
        # More micro-batches than stages.
        "micro-batches": [
            run
            for k in (8, 12)
            for corrections in ("none", "ef+extrapolation")
            for run in some("adamw", "momentum", stages=4, k=k, corrections=corrections)
        ],
    }


def smooth(curve: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return a curve of losses whose every point is the mean of three."""
    return [
        (curve[i][0], mean(loss for _, loss in curve[i - 1 : i + 2]))
        for i in range(1, len(curve) - 1)
    ]


Results = dict[str, dict[str, Any]]


def final(results: Results, runs: Sequence[Run]) -> float | None:
    """The mean over runs of the held-out loss at the end; None if one is not done.

    At a constant rate, the loss at the end is the mean of three evaluations.
    """
    losses = []
    for run in runs:
        if run.key not in results:
            return None
        curve = results[run.key]["curve"]
        if not math.isfinite(curve[-1][1]):
            return math.inf
        losses.append(smooth(curve)[-1][1] if run.task == "text" else curve[-1][1])
    return mean(losses)


def read() -> Results:
    """All results, by key."""
    if not RESULTS.exists():
        return {}
    return {line["key"]: line for line in map(json.loads, RESULTS.read_text().splitlines())}


def best_rate(results: Results, run: Run) -> float | None:
    """The best rate of plain training; None if not all of its rates are done."""
    updates = LENGTHS[run.task][0] if run.task == "text" else Run.updates
    rates = RATES[run.optimizer]
    losses = [final(results, of_plain(run, [rate], updates)) for rate in rates]
    if None in losses:
        return None
    return min(zip(losses, rates, strict=True))[1]  # type: ignore[type-var]


def seeded(run: Run) -> list[Run]:
    """A run with each seed."""
    return [replace(run, seed=seed) for seed in SEEDS[run.task]]


def plain_curve(results: Results, run: Run, rate: float) -> list[tuple[float, float]]:
    """The losses of plain training by its updates, falling; empty if not all is done."""
    if run.task == "text":
        runs = of_plain(run, [rate], LENGTHS["text"][0])
        points = smooth(results[runs[0].key]["curve"]) if runs[0].key in results else []
    else:
        lengths = LENGTHS[run.task]
        found = [final(results, of_plain(run, [rate], length)) for length in lengths]
        points = [(n, loss) for n, loss in zip(lengths, found, strict=True) if loss is not None]
    falling: list[tuple[float, float]] = []
    for number, loss in points:
        if not falling or loss < falling[-1][1]:
            falling.append((number, loss))
    return falling


def slowdown(curve: Sequence[tuple[float, float]], task: str, loss: float) -> float:
    """How many times the updates of plain training a pipeline took to its loss; see above.

    Between two points of the curve the loss is taken for linear in the logarithm of the updates,
    and likewise beyond them.
    """
    if not math.isfinite(loss) or len(curve) < 2:
        return math.inf
    pairs = list(pairwise(curve))
    (t0, l0), (t1, l1) = next((p for p in pairs if p[1][1] <= loss), pairs[-1])
    needed = math.exp(math.log(t0) + (loss - l0) / (l1 - l0) * (math.log(t1) - math.log(t0)))
    # The mean of the last three evaluations is that of the last but one.
    took = Run.updates - Run.updates // EVALUATIONS if task == "text" else Run.updates
    return took / needed


def wanted(results: Results, run: Run) -> list[Run]:
    """The runs that can be done now for one of a set: plain ones first."""
    rates = RATES[run.optimizer]
    lengths = LENGTHS[run.task]
    if (rate := best_rate(results, run)) is None:
        return of_plain(run, rates, lengths[0] if run.task == "text" else Run.updates)
    plain = [each for length in lengths for each in of_plain(run, [rate], length)]
    return [*plain, *(each for part in (1, 2) for each in seeded(replace(run, rate=rate / part)))]


@click.group(help=__doc__)
def main() -> None:
    """Parse the command."""


def do(runs: Sequence[Run], jobs: int) -> None:
    """Do those of some runs that are not done yet, and keep what came of each."""
    results = read()
    todo = {run.key: run for run in runs if run.key not in results}
    if not todo:
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs) as pool:  # whose workers end with this process
        for line in pool.imap_unordered(done, todo.values()):
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            shown = ("task", "optimizer", "stages", "k", "corrections", "rate", "updates")
            last = round(line["curve"][-1][1], 4)
            told = {k: line[k] for k in shown}
            print(told, last, line["processor_s"], file=sys.stderr, flush=True)


@main.command()
@click.argument("names", nargs=-1)
@click.option("--jobs", default=2, show_default=True, help="Runs at a time, one core each.")
def run(names: tuple[str, ...], jobs: int) -> None:
    """Do the runs of sets that are not done yet."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for name in names or ("defaults",):
        for _ in range(2):  # plain training first, which says what the other runs are
            results = read()
            do([each for run in all_sets()[name] for each in wanted(results, run)], jobs)


@main.command()
@click.argument("task", type=click.Choice(TASKS))
@click.argument("optimizer", type=click.Choice(list(RATES)))
@click.argument("stages", type=int)
def one(task: str, optimizer: str, stages: int) -> None:
    """Print the slowdown of the defaults for a task, an optimizer and a number of stages."""
    run = Run(task=task, optimizer=optimizer, stages=stages)
    for _ in range(2):
        do(wanted(read(), run), jobs=1)
    results = read()
    print(json.dumps(outcome(results, run)))


@main.command()
@click.argument("names", nargs=-1)
def table(names: tuple[str, ...]) -> None:
    """Print the slowdowns of sets."""
    results = read()
    columns = ("set", "task", "optimizer", "stages", "k", "corrections", "plain: rate", "loss")
    shown = Table(*columns, "rate", "loss", "slowdown")
    for name in names or ("defaults",):
        for run in all_sets()[name]:
            if not (made := outcome(results, run)):
                continue
            shown.add_row(
                *(name, run.task, run.optimizer, str(run.stages), str(run.k or "default")),
                *(run.corrections, f"{made['plain_rate']:g}", f"{made['plain_loss']:.3f}"),
                *(f"{made['rate']:g}", f"{made['loss']:.3f}", f"{made['slowdown']:.2f}"),
            )
    Console(width=150).print(shown)


def outcome(results: Results, run: Run) -> dict[str, float]:
    """Return the better of two rates of a run, beside plain training; nothing if it is not done."""
    if (rate := best_rate(results, run)) is None:
        return {}
    made = [(final(results, seeded(replace(run, rate=rate / p))), rate / p) for p in (1, 2)]
    found = [(loss, at) for loss, at in made if loss is not None]
    if not found:
        return {}
    loss, at = min(found)
    curve = plain_curve(results, run, rate)
    plain = next((loss for number, loss in curve if number >= 0.95 * Run.updates), math.nan)
    return {
        "plain_rate": rate,
        "plain_loss": round(plain, 4),
        "rate": at,
        "loss": round(loss, 4),
        "slowdown": round(slowdown(curve, run.task, loss), 3),
    }


if __name__ == "__main__":
    main()
