"""What the defaults of `Pipeline` cost in samples, beside plain PyTorch.

A newcomer gives ``stages=4`` and an optimizer and leaves everything else out. Here two tasks are
trained so: a transformer on bytes, and a convolutional network with BatchNorm on pictures. The rate
is constant, and nothing is clipped. Plain training, one process and one micro-batch, is done at
several rates; the best one by held-out loss is then used with stages too, and half of it, of which
the better counts. *Slowdown* is the number of updates of plain training after which it has the
held-out loss that the pipeline ends with, compared with the number that the pipeline took.

All stages run in one thread (``workers="serial"``), which gives the bits of a distributed run. Each
run is a line of JSON in ``benchmarks/results/first_touch.jsonl``, and is not done again.

    python benchmarks/first_touch.py run [SET ...] [--jobs 2]
    python benchmarks/first_touch.py table [SET ...]
"""

from __future__ import annotations

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

from pipedream_rt import Pipeline
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

PLAIN_LONGER = 1.2
"""How many times as many updates plain training does, so that a slowdown below 1 can be read."""

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
        """A short digest of the run."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


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
        on_nan="ignore",
        **given,
    ) as pipe:
        for number, item in enumerate(task.batches(run.updates, batch, run.seed), 1):
            pipe.submit(*item)
            if number % (run.updates // EVALUATIONS) == 0 and number >= run.updates // 4:
                curve.append((number, pipe.evaluate(validation)))
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


def of_plain(task: str, optimizer: str) -> list[Run]:
    """The runs of plain training, over its rates."""
    updates = round(Run.updates * PLAIN_LONGER)
    made = Run(task=task, optimizer=optimizer, schedule="1f1b", updates=updates, k=1)
    return [replace(made, corrections="none", rate=rate) for rate in RATES[optimizer]]


def all_sets() -> dict[str, list[Run]]:
    """The runs of every set, with the rate left open."""

    def some(optimizers: Sequence[str], tasks: Sequence[str] = TASKS, **options: Any) -> list[Run]:
        return [
            Run(task=task, optimizer=optimizer, **options)
            for optimizer in optimizers
            for task in tasks
        ]

    every = tuple(RATES)
    return {
        "defaults": [*some(MAIN, stages=4), *some(MAIN, stages=8)],
        "plain": [],
        "corrections": [
            run
            for corrections in ("none", "ef+extrapolation")
            for run in some(every, stages=4, k=4, corrections=corrections)
        ],
    }


def smooth(curve: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return a curve of losses whose every point is the mean of three."""
    return [
        (curve[i][0], mean(loss for _, loss in curve[i - 1 : i + 2]))
        for i in range(1, len(curve) - 1)
    ]


def final(line: dict[str, Any] | None) -> float:
    """The held-out loss at the end, a mean of three evaluations; infinite if there is none."""
    if line is None or len(line["curve"]) < 3 or not math.isfinite(line["curve"][-1][1]):
        return math.inf
    return smooth(line["curve"])[-1][1]


def at_400(line: dict[str, Any] | None) -> float:
    """The held-out loss of plain training after as many updates as a pipeline does."""
    if line is None or not math.isfinite(line["curve"][-1][1]):
        return math.inf
    near = [loss for number, loss in smooth(line["curve"]) if number >= Run.updates * 0.95]
    return near[0]


def read() -> dict[str, dict[str, Any]]:
    """All results, by key."""
    if not RESULTS.exists():
        return {}
    return {line["key"]: line for line in map(json.loads, RESULTS.read_text().splitlines())}


def best_plain(results: dict[str, dict[str, Any]], run: Run) -> dict[str, Any] | None:
    """The plain run with the lowest loss, of the task and optimizer of a run; None if not done."""
    lines = [results.get(each.key) for each in of_plain(run.task, run.optimizer)]
    if None in lines:
        return None
    return min((line for line in lines if line), key=at_400)


def tried(results: dict[str, dict[str, Any]], run: Run) -> list[Run]:
    """The runs of a method: at the best rate of plain training, and at half of it."""
    plain = best_plain(results, run)
    return [replace(run, rate=plain["rate"] / part) for part in (1, 2)] if plain else []


def slowdown(plain: dict[str, Any], loss: float) -> float:
    """How many times the updates of plain training a pipeline took to its loss; see above.

    Between two evaluations the loss is taken for linear in the logarithm of the updates, and
    likewise beyond them.
    """
    if not math.isfinite(loss):
        return math.inf
    curve, least = [], math.inf
    for number, value in smooth(plain["curve"]):
        if value < least:
            curve.append((number, value))
            least = value
    pairs = list(pairwise(curve))
    (t0, l0), (t1, l1) = next((p for p in pairs if p[1][1] <= loss), pairs[-1])
    needed = math.exp(math.log(t0) + (loss - l0) / (l1 - l0) * (math.log(t1) - math.log(t0)))
    return Run.updates * 0.985 / needed


@click.group(help=__doc__)
def main() -> None:
    """Parse the command."""


@main.command()
@click.argument("names", nargs=-1)
@click.option("--jobs", default=2, show_default=True, help="Runs at a time, one core each.")
def run(names: tuple[str, ...], jobs: int) -> None:
    """Do the runs of sets that are not done yet."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs) as pool:  # whose workers end with this process
        for name in names or ("defaults",):
            runs = all_sets()[name]
            for wanted in (lambda r: of_plain(r.task, r.optimizer), lambda r: tried(read(), r)):
                keys = read()
                todo = {e.key: e for r in runs for e in wanted(r) if e.key not in keys}
                for line in pool.imap_unordered(done, todo.values()):
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    shown = ("task", "optimizer", "stages", "k", "corrections", "rate")
                    print({k: line[k] for k in shown}, final(line), line["processor_s"], flush=True)


@main.command()
@click.argument("names", nargs=-1)
def table(names: tuple[str, ...]) -> None:
    """Print the slowdowns of sets."""
    results = read()
    columns = ("set", "task", "optimizer", "stages", "k", "corrections", "plain: rate", "loss")
    shown = Table(*columns, "rate", "loss", "slowdown")
    for name in names or ("defaults",):
        for each in all_sets()[name]:
            plain = best_plain(results, each)
            found = [results[r.key] for r in tried(results, each) if r.key in results]
            if plain is None or not found:
                continue
            best = min(found, key=final)
            shown.add_row(
                *(name, each.task, each.optimizer, str(each.stages), str(each.k or "default")),
                *(each.corrections, f"{plain['rate']:g}", f"{at_400(plain):.3f}"),
                *(f"{best['rate']:g}", f"{final(best):.3f}"),
                f"{slowdown(plain, final(best)):.2f}",
            )
    Console(width=150).print(shown)


if __name__ == "__main__":
    main()
