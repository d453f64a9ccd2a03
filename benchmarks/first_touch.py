"""What the defaults of `Pipeline` cost in samples, beside plain PyTorch.

A newcomer gives ``stages=4`` and an optimizer and leaves everything else out. Here two tasks are
trained so: a transformer on bytes (``text``), with a constant rate, and a convolutional network
with BatchNorm on pictures (``pictures``), whose rate falls along a cosine, since BatchNorm makes
losses leap at a constant one. Plain training, one process and one micro-batch, is done at several
rates. The one with the lowest held-out loss is then used with stages too. Where it needs more than
1.05 times the updates, half of it is tried as well, of which the better counts. *Slowdown* is how
many times the updates of plain training a pipeline took to the held-out loss that it ends with.

All stages run in one thread (``workers="serial"``), which gives the bits of a distributed run. Each
run is a line of JSON in ``benchmarks/results``, and is not done again.

Other programs, as newcomers write them, stand in `PROGRAMS`.

    python benchmarks/first_touch.py run [SET ...] [--jobs 2]
    python benchmarks/first_touch.py table [SET ...]
    python -m benchmarks defaults                      # the set "defaults" alone, as a table
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
import grid
import learning
import torch
import torch.nn.functional as F
from grid import RESULTS, Line, Results
from learning import Narrow, Task, method_named, task_named, trained, transformer_layers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pipedream_rt import Clip, Pipeline, Training
from pipedream_rt.corrections.advice import advised
from pipedream_rt.job.defaults import time_of_flush
from pipedream_rt.optimizers import Muon, RotatedAdamW, hidden_matrices


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a newcomer trains, and how.

    Attributes:
        task: Makes the task.
        batch: The samples of a mini-batch.
        updates: How many updates a pipeline does.
        lengths: The numbers of updates that plain training does. At a constant rate one run has the
            losses after every number of updates; otherwise each length is a run of its own. The
            longest is beyond what a pipeline does, so that a slowdown below 1 can be read.
        warm_up: The updates in which the rate rises.
        last: The share of the rate that is left at the end of a cosine.
        clip: The largest norm of gradients; None for any.
        times: How many times as high the rates are as those of `RATES`.
        rates: The rates that are tried in the place of those; empty for none.
        seeds: Over which losses are averaged.
    """

    task: Callable[[], Task]
    batch: int
    updates: int
    lengths: tuple[int, ...]
    warm_up: int = 0
    last: float = 0.0
    clip: float | None = None
    times: int = 1
    rates: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0, 1)

    @property
    def constant(self) -> bool:
        """Whether the rate is."""
        return self.last == 1.0

    def factor(self, step: int, updates: int) -> float:
        """Return what the rate is multiplied by at a step of so many."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        done = (step - self.warm_up) / (updates - self.warm_up)
        return self.last + (1 - self.last) * (1 + math.cos(math.pi * done)) / 2


def _text(blocks: int, width: int, dropout: float = 0.0) -> Task:
    def model() -> nn.Sequential:
        first, *halves, head = transformer_layers(blocks, width, 64)
        if dropout:
            halves = [Dropped(half, dropout) for half in halves]
        return nn.Sequential(first, *halves, head)

    return replace(task_named("transformer"), model=model)


class Dropped(nn.Module):
    """What a layer adds to its input, with dropout: (B, T, D) -> (B, T, D)."""

    def __init__(self, inner: nn.Module, share: float) -> None:
        super().__init__()
        self.inner, self.drop = inner, nn.Dropout(share)

    def forward(self, x: Tensor) -> Tensor:
        """Drop out."""
        return x + self.drop(self.inner(x) - x)


class RotaryAttention(learning.Attention):
    """Attention as in Llama: no biases, and places are turns of queries and keys."""

    def __init__(self, width: int, context: int = 64) -> None:
        super().__init__(width)
        self.norm = nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, False), nn.Linear(width, width, False)
        half = width // self.heads // 2
        turns = torch.outer(torch.arange(context), 1e4 ** -(torch.arange(half) / half))
        self.register_buffer("cos", turns.cos())
        self.register_buffer("sin", turns.sin())

    def placed(self, x: Tensor) -> Tensor:
        """Turn them."""
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)


class Gated(nn.Module):
    """The feed-forward layer of Llama, beside a residual: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 6 * width, False)
        self.down = nn.Linear(3 * width, width, False)

    def forward(self, x: Tensor) -> Tensor:
        """Feed forward."""
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _llama(blocks: int, width: int) -> Task:
    """Text, by a small Llama whose blocks are cut in halves."""

    def model() -> nn.Sequential:
        halves = [half(width) for _ in range(blocks) for half in (RotaryAttention, Gated)]
        head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 256, False))
        return nn.Sequential(nn.Embedding(256, width), *halves, head)

    return replace(task_named("transformer"), model=model)


def _groups() -> Task:
    """Pictures by convolutions without BatchNorm."""
    plain = task_named("conv")

    def model() -> nn.Sequential:
        made: nn.Sequential = plain.model()
        for layer in made:
            if isinstance(layer, learning.Convolution):
                layer.norm = nn.GroupNorm(4, layer.norm.num_features)
        return made

    return replace(plain, model=model)


def _mlp() -> Task:
    """Pictures by layers that see every point."""
    plain = task_named("conv")

    def model() -> nn.Sequential:
        layers = [Narrow(96) for _ in range(8)]
        return nn.Sequential(nn.Flatten(), nn.Linear(256, 96), *layers, nn.Linear(96, 10))

    return replace(plain, model=model)


@functools.cache
def _trained() -> dict[str, Tensor]:
    """The weights of a transformer that was trained on the text as it is."""
    task = _text(4, 48)
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for x, y in task.batches(300, 16, 0):
        optimizer.zero_grad()
        task.loss_fn(model(x), y).backward()
        optimizer.step()
    state: dict[str, Tensor] = model.state_dict()
    return state


def _tuned() -> Task:
    """Text that is read from its end, by a transformer that knows it from its beginning."""
    plain, state = _text(4, 48), _trained()

    def model() -> nn.Sequential:
        made: nn.Sequential = plain.model()
        made.load_state_dict(state)
        return made

    def turned(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in pairs:
            whole = torch.cat([x[:, :1], y], 1).flip(1)
            yield whole[:, :-1], whole[:, 1:]

    return replace(
        plain, model=model,
        batches=lambda count, batch, seed: turned(plain.batches(count, batch, seed)),
        validation=lambda: list(turned(plain.validation())),
    )  # fmt: skip


def _with_spikes() -> Task:
    """The newcomer's, where every 30th mini-batch has targets that nothing can tell."""
    plain = _text(4, 64, 0.1)

    def batches(count: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for number, (x, y) in enumerate(plain.batches(count, batch, seed)):
            noise = torch.randint(256, y.shape, generator=generator)
            yield x, noise if number % 30 == 29 else y

    return replace(plain, batches=batches)


_PICTURES = Program(
    task=lambda: task_named("conv"), batch=32, updates=400, lengths=(200, 280, 400, 560), last=0.05
)

_NEWCOMER = Program(
    task=lambda: _text(4, 64, 0.1), batch=32, updates=240, lengths=(120, 168, 240, 336),
    warm_up=20, clip=1.0, times=2, seeds=(0,),
)  # fmt: skip

PROGRAMS = {
    "text": Program(
        task=lambda: _text(4, 48), batch=16, updates=400, lengths=(480,), last=1.0, seeds=(0,)
    ),
    "pictures": _PICTURES,
    "groups": replace(_PICTURES, task=_groups),
    "newcomer": _NEWCOMER,
    "newcomer-800": replace(
        _NEWCOMER, updates=800, lengths=(400, 560, 800, 1120), warm_up=40, seeds=(0,)
    ),
    "wide": replace(_NEWCOMER, task=lambda: _text(4, 256, 0.1)),
    # The text and the rate are those of a tutorial; no other rate is tried.
    "bytes": replace(
        _NEWCOMER, task=lambda: _text(4, 128, 0.1), updates=232, lengths=(116, 164, 232, 324),
        rates=(2e-3,),
    ),
    "llama": replace(_NEWCOMER, task=lambda: _llama(4, 64), times=1),
    "spikes": replace(_NEWCOMER, task=_with_spikes),
    "unclipped": replace(_NEWCOMER, clip=None),
    "mlp": Program(
        task=_mlp, batch=64, updates=400, lengths=(200, 280, 400, 560), warm_up=20, times=2,
        seeds=(0,),
    ),
    "tuned": Program(
        task=_tuned, batch=32, updates=160, lengths=(80, 112, 160, 224), warm_up=8, times=2,
        seeds=(0,),
    ),
}  # fmt: skip
"""By name."""

TASKS = ("text", "pictures")

SEVEN = ("newcomer", "tuned", "mlp", "pictures", "groups", "bytes", "llama")
"""The programs on which the correction for AdamW was measured."""

FOUR = ("newcomer", "tuned", "pictures", "llama")
"""Those on which it is compared with others."""

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

EVALUATIONS = 24

ENOUGH = 1.05
"""The slowdown up to which a rate is not halved."""


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
        seeds: Over which the losses of a set are averaged; empty for those of the program.
        whole: Whether held-out losses are taken from the beginning on, for a picture.
    """

    task: str
    optimizer: str
    stages: int = 1
    k: int | None = None
    corrections: str = "default"
    schedule: str = "async-1f1b"
    rate: float = 0.0
    updates: int = 0
    seed: int = 0
    seeds: tuple[int, ...] = ()
    whole: bool = False

    @property
    def program(self) -> Program:
        """What is trained, and how."""
        return PROGRAMS[self.task]

    @property
    def key(self) -> str:
        """A short digest of the run, and of the defaults that it leaves to the pipeline."""
        default = self.k is None or self.corrections == "default"
        one = replace(self, seeds=())
        return grid.key_of(one, ("seeds", "whole"), advised_for(self.optimizer) if default else "")


@functools.cache
def advised_for(optimizer: str) -> str:
    """What the pipeline does about a staleness of one with an optimizer, as text."""
    cls, options, *_ = optimizer_named(optimizer, nn.Linear(2, 2), 0.1)
    return repr(advised(cls, [options], 1))


def done(run: Run) -> Line:
    """Do a run; return its results."""
    torch.set_num_threads(1)
    program = run.program
    task = program.task()
    torch.manual_seed(run.seed)
    model = task.model()
    given: dict[str, Any] = {} if run.k is None else {"micro_batches": run.k}
    if run.corrections != "default":
        names = "" if run.corrections == "none" else f"+{run.corrections}"
        given["corrections"] = method_named(f"sgd{names}", model)[1]
    clip = None if program.clip is None else Clip(norm=program.clip)
    often = run.updates // EVALUATIONS if program.constant or run.whole else run.updates
    line = trained(
        run, task, program.batch, lambda step: program.factor(step, run.updates),
        lambda number: number % often == 0 and (run.whole or number >= run.updates // 4),
        model=model, stages=run.stages, optimizer=optimizer_named(run.optimizer, model, run.rate),
        training=Training(on_nan="ignore", clip=clip, verify=False), **given,
    )  # fmt: skip
    del line["seeds"]
    line = {name: value for name, value in line.items() if name != "whole" or value}
    return {**line, "curve": [(number, round(loss, 4)) for number, loss in line["curve"]]}


# -- sets of runs -------------------------------------------------------------------------------


def of_plain(run: Run, rates: Sequence[float], updates: int) -> list[Run]:
    """The runs of plain training for the task and the optimizer of a run."""
    made = Run(
        task=run.task, optimizer=run.optimizer, schedule="1f1b", updates=updates, k=1,
        corrections="none", seeds=run.seeds,
    )  # fmt: skip
    return [each for rate in rates for each in seeded(replace(made, rate=rate))]


def all_sets() -> dict[str, list[Run]]:
    """The runs of every set, with the rate left open."""

    def some(*optimizers: str, tasks: Sequence[str] = TASKS, **options: Any) -> list[Run]:
        given = grid.combinations(**options, optimizer=[*optimizers], task=[*tasks])
        return [Run(updates=PROGRAMS[each["task"]].updates, **each) for each in given]

    def before(runs: list[Run]) -> list[Run]:
        """Runs of sets that are older than the corrections of today, with those of then."""
        then = ("adamw", "adam", "momentum")
        return [
            replace(run, corrections="ef+extrapolation")
            if run.optimizer in then and run.corrections == "default"
            else run
            for run in runs
        ]

    every, both = tuple(RATES), ["none", "ef+extrapolation"]
    return {
        # What the README's ten lines give.
        "defaults": some(*MAIN, stages=[4, 8]),
        # What corrections do for each optimizer with as many micro-batches as stages.
        "corrections": some(*every, corrections=both, stages=4, k=4),
        "momentum": some(
            "momentum", corrections=["ef", "extrapolation", "prediction", "ef+prediction"],
            stages=4, k=4,
        ),
        "deeper": some(*MAIN, "muon", corrections=both, stages=8, k=8),
        # The same with one micro-batch per update.
        "stale": some(*every, corrections=["none", "ef2+extrapolation+damped"], stages=4, k=1),
        # More micro-batches than stages, in programs as newcomers write them.
        "choice": before([
            run
            for optimizer in ("adamw", "momentum", "muon", "nadam")
            for task in ("newcomer", "mlp", "tuned")
            for stages, k, corrections in (
                (4, 16, "default"), (2, 8, "default"), (4, 4, "default"), (4, 16, "none"),
                (8, 32, "default"),
            )
            for run in some(optimizer, tasks=[task], stages=stages, k=k, corrections=corrections)
        ]),
        "choice-adam": before([
            run
            for stages, k in ((4, 16), (2, 8), (4, 4))
            for run in some("adam", tasks=["newcomer"], stages=stages, k=k)
        ]),
        "choice-others": before([
            run
            for optimizer in ("adamw", "momentum", "muon")
            for task in ("unclipped", "text", "pictures")
            for stages in (4, 2)
            for run in some(optimizer, tasks=[task], stages=stages, k=4 * stages)
        ]),
        # What BatchNorm sees is what a mini-batch is cut into, whatever the schedule.
        "batch-norm": some(
            "adamw", "momentum", tasks=["pictures"], k=[2, 4, 8, 16], corrections="none",
            schedule="1f1b",
        ),
        # Clipping by an estimate of the norm beside exact clipping.
        "spikes": some(
            "adamw", tasks=["spikes"], stages=4, k=4, corrections="none",
            schedule=["async-1f1b", "async-1f1b+vertical-sync", "1f1b"],
        ),
        # The correction that is chosen for AdamW, over depths and cuts, and what else was tried.
        "nesterov": [
            run
            for stages, k in ((4, 4), (8, 8), (2, 2), (4, 8), (8, 16), (2, 4))
            for run in some(
                "adamw", tasks=SEVEN, stages=stages, k=k, corrections="nesterov", seeds=(0, 1)
            )
        ],
        "nesterov-sgd": [
            run
            for n in (4, 8, 2)
            for run in some(
                "momentum", tasks=SEVEN[:5], stages=n, k=n, corrections="nesterov", seeds=(0, 1)
            )
        ],
        "nesterov-sgd-2n": [
            run
            for n in (4, 8)
            for run in some(
                "momentum", tasks=("text", "newcomer", "tuned"), stages=n, k=2 * n,
                corrections="nesterov",
            )
        ],
        "nesterov-adam": some("adam", tasks=SEVEN[:4], stages=4, k=4, corrections="nesterov"),
        # What else was tried in its place.
        "ideas": [
            run
            for names in (
                "nesterov", "none", "ef+extrapolation", "nesterov2", "nesterov-long", "prediction",
                "nesterov+prediction", "momentum+nesterov-long",
            )
            for run in some("adamw", tasks=FOUR, stages=4, k=4, corrections=names, seeds=(0,))
        ],
        "2bw": before(
            some("adamw", "muon", tasks=["newcomer"], stages=4, k=[4, 16], schedule="2bw")
        ),
        "longer": before(some("adamw", tasks=["newcomer-800"], stages=4, k=16)),
        # More micro-batches than stages.
        "micro-batches": some("adamw", "momentum", stages=4, k=[8, 12], corrections=both),
    }  # fmt: skip


def smooth(curve: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return a curve of losses whose every point is the mean of three."""
    return [
        (curve[i][0], mean(loss for _, loss in curve[i - 1 : i + 2]))
        for i in range(1, len(curve) - 1)
    ]


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
        losses.append(smooth(curve)[-1][1] if run.program.constant else curve[-1][1])
    return mean(losses)


def file_of(line: Line) -> Path:
    """The file with the results of a task."""
    return RESULTS / ("first_touch.jsonl" if line["task"] in TASKS else "newcomers.jsonl")


def read() -> Results:
    """All results, by key."""
    return grid.by_key(*dict.fromkeys(file_of({"task": task}) for task in PROGRAMS))


def rates_of(run: Run) -> list[float]:
    """The rates that plain training tries."""
    return [*run.program.rates] or [run.program.times * rate for rate in RATES[run.optimizer]]


def best_rate(results: Results, run: Run) -> float | None:
    """The best rate of plain training; None if not all of its rates are done."""
    program = run.program
    updates = program.lengths[0] if program.constant else program.updates
    rates = rates_of(run)
    losses = [final(results, of_plain(run, [rate], updates)) for rate in rates]
    if None in losses:
        return None
    return min(zip(losses, rates, strict=True))[1]  # type: ignore[type-var]


def seeded(run: Run) -> list[Run]:
    """A run with each seed."""
    return [replace(run, seed=seed) for seed in run.seeds or run.program.seeds]


def plain_curve(results: Results, run: Run, rate: float) -> list[tuple[float, float]]:
    """The losses of plain training by its updates, falling; empty if not all is done."""
    lengths = run.program.lengths
    if run.program.constant:
        runs = of_plain(run, [rate], lengths[0])
        points = smooth(results[runs[0].key]["curve"]) if runs[0].key in results else []
    else:
        found = [final(results, of_plain(run, [rate], length)) for length in lengths]
        points = [(n, loss) for n, loss in zip(lengths, found, strict=True) if loss is not None]
    falling: list[tuple[float, float]] = []
    for number, loss in points:
        if not falling or loss < falling[-1][1]:
            falling.append((number, loss))
    return falling


def slowdown(curve: Sequence[tuple[float, float]], task: str, loss: float) -> float:
    """How many times the updates of plain training a pipeline took to its loss; see above."""
    # The mean of the last three evaluations is that of the last but one.
    program = PROGRAMS[task]
    took = program.updates - program.updates // EVALUATIONS if program.constant else program.updates
    return learning.slowdown(curve, took, loss) or math.inf


def wanted(results: Results, run: Run) -> list[Run]:
    """The runs that can be done now for one of a set: plain ones first."""
    rates = rates_of(run)
    program = run.program
    lengths = program.lengths
    if (rate := best_rate(results, run)) is None:
        return of_plain(run, rates, lengths[0] if program.constant else program.updates)
    plain = [each for length in lengths for each in of_plain(run, [rate], length)]
    # Where the whole rate is good enough, nobody needs to know whether half of it is better.
    enough = outcome(results, run).get("slowdown", 0.0) <= ENOUGH
    parts = (1,) if enough else (1, 2)
    return [*plain, *(each for part in parts for each in seeded(replace(run, rate=rate / part)))]


@click.group(help=__doc__)
def main() -> None:
    """Parse the command."""


def do(runs: Sequence[Run], jobs: int) -> Results:
    """Do all that some runs of sets want: plain training first, which says what else there is."""
    results = read()

    def left(results: Results) -> list[Run]:
        return [each for run in runs for each in wanted(results, run)]

    for line in grid.fill(results, left, done, file_of, jobs):
        shown = ("task", "optimizer", "stages", "k", "corrections", "rate", "updates")
        told = {k: line[k] for k in shown}
        print(told, line["curve"][-1][1], line["processor_s"], file=sys.stderr, flush=True)
    return results


@main.command()
@click.argument("names", nargs=-1)
@click.option("--jobs", default=2, show_default=True, help="Runs at a time, one core each.")
def run(names: tuple[str, ...], jobs: int) -> None:
    """Do the runs of sets that are not done yet."""
    grid.end_by_signals()
    for name in names or ("defaults",):
        do(all_sets()[name], jobs)


@main.command()
@click.argument("task", type=click.Choice(list(PROGRAMS)))
@click.argument("optimizer", type=click.Choice(list(RATES)))
@click.argument("stages", type=int)
def one(task: str, optimizer: str, stages: int) -> None:
    """Print the slowdown of the defaults for a task, an optimizer and a number of stages."""
    updates = PROGRAMS[task].updates
    run = Run(task=task, optimizer=optimizer, stages=stages, updates=updates)
    print(json.dumps(outcome(do([run], jobs=1), run)))


@main.command()
@click.argument("names", nargs=-1)
def table(names: tuple[str, ...]) -> None:
    """Print the slowdowns of sets."""
    results = read()
    columns = ("set", "task", "optimizer", "schedule", "stages", "k", "corrections")
    shown = Table(*columns, "plain: rate", "loss", "rate", "loss", "slowdown")
    for name in names or ("defaults",):
        for run in all_sets()[name]:
            if not (made := outcome(results, run)):
                continue
            shown.add_row(
                *(name, run.task, run.optimizer, run.schedule, str(run.stages)),
                str(run.k or "default"),
                *(run.corrections, f"{made['plain_rate']:g}", f"{made['plain_loss']:.3f}"),
                *(f"{made['rate']:g}", f"{made['loss']:.3f}", f"{made['slowdown']:.2f}"),
            )
    Console(width=150).print(shown)


# -- losses over time ---------------------------------------------------------------------------

SHOWN = (
    ("pipedream-rt", "async-1f1b"), ("pipedream-rt", "1f1b"),
    ("torch.distributed.pipelining", "zero-bubble"), ("torch.distributed.pipelining", "1f1b"),
)  # fmt: skip
"""Whose rates a picture shows, as the benchmark ``peers`` has measured them."""


def rates_measured(stages: int) -> dict[tuple[str, str], float]:
    """Micro-batches per second on emulated stages of 30 ms, as many as there are stages."""
    rates: dict[tuple[str, str], list[float]] = {}
    for line in grid.lines_of(RESULTS / "peers.jsonl"):
        shape = (line["model"], line["workers"], line["micro_batches"])
        if shape == ("emulated", stages, stages) and "seconds" in line:
            made = line["updates"] * line["micro_batches"] / line["seconds"]
            rates.setdefault((line["who"], line["schedule"]), []).append(made)
    return {who: median(each) for who, each in rates.items()}


@main.command()
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="An SVG file.")
@click.option("--task", default="bytes", show_default=True, type=click.Choice(list(PROGRAMS)))
@click.option("--stages", default=8, show_default=True)
@click.option("--jobs", default=2, show_default=True, help="Runs at a time, one core each.")
def plot(output: Path, task: str, stages: int, jobs: int) -> None:
    """Draw the held-out loss of AdamW over time, by schedules of this project and of torch.

    The losses are those of serial runs: of plain training, which a schedule that flushes computes
    too, and of async-1f1b with its corrections. The time is that of the updates until then at the
    rates that `python -m benchmarks peers` has measured on emulated stages.
    """
    pyplot = grid.pyplot_of_svg()

    results, updates = read(), PROGRAMS[task].updates
    run = Run(
        task=task, optimizer="adamw", stages=stages, k=stages, corrections="nesterov",
        updates=updates, seeds=(0,), whole=True,
    )  # fmt: skip
    rate = best_rate(results, replace(run, whole=False))
    if rate is None:
        raise click.UsageError(f"first: python benchmarks/first_touch.py run nesterov ({task})")
    runs = {
        "async-1f1b": replace(run, rate=rate),
        "": replace(of_plain(run, [rate], updates)[0], whole=True),
    }
    for line in grid.fill(results, lambda _: list(runs.values()), done, file_of, jobs):
        print(line["stages"], line["curve"][-1], file=sys.stderr, flush=True)
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    measured = rates_measured(stages)
    for who, schedule in SHOWN:
        curve = results[runs[schedule if schedule in runs else ""].key]["curve"]
        seconds = stages / measured[who, schedule]
        points = [(number * seconds, loss) for number, loss in curve]
        style = {"linewidth": 2.5} if schedule in runs else {"linestyle": "--"}
        axes.plot(*zip(*points, strict=True), label=f"{who}, {schedule}", **style)
        print(f"{who}, {schedule}: {points[-1][1]} after {points[-1][0]:.0f} s")
    axes.set_xlabel(f"seconds, {stages} emulated stages of 30 ms for a micro-batch")
    axes.set_ylabel("held-out loss, AdamW")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(output, metadata={"Date": None})


# -- what cutting costs in time -----------------------------------------------------------------

CUTS = RESULTS / "cuts.jsonl"
COUNTS = (1, 2, 4, 8, 16, 32)


def seconds_of(name: str, k: int, count: int = 12) -> float:
    """The seconds of a processor for a mini-batch that is cut into k, all stages together."""
    program = PROGRAMS[name]
    task = program.task()
    torch.manual_seed(0)
    data = list(task.batches(count + 3, program.batch, 0))
    with Pipeline(
        task.model(),
        stages=4,
        loss_fn=task.loss_fn,
        optimizer=(torch.optim.AdamW, {"lr": 1e-3}),
        schedule="1f1b",
        micro_batches=k,
        workers="serial",
        training=Training(verify=False, check_loss=0),
    ) as pipe:
        for batch in data[:3]:
            pipe.submit(*batch)
        pipe.flush()
        start = time.process_time()
        for batch in data[3:]:
            pipe.submit(*batch)
        pipe.flush()
        return (time.process_time() - start) / count


@main.command()
@click.option("--show", is_flag=True, help="Measure nothing.")
@click.option("--repeats", default=3, show_default=True, help="Of each, in turn; the least counts.")
def cuts(show: bool, repeats: int) -> None:
    """Measure what it costs a processor to cut a mini-batch, and what a schedule makes of it."""
    torch.set_num_threads(1)
    if not show:
        lines = []
        for name in ("mlp", "pictures", "newcomer", "wide"):
            taken: dict[int, list[float]] = {k: [] for k in COUNTS}
            for _ in range(repeats):
                for k in COUNTS:
                    taken[k].append(seconds_of(name, k))
            lines.append({"task": name, "ms": {k: round(1e3 * min(taken[k]), 1) for k in COUNTS}})
        CUTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = Table("task", "schedule", *(f"k = {k}" for k in COUNTS))
    for line in map(json.loads, CUTS.read_text().splitlines()):
        cost = [line["ms"][str(k)] / line["ms"]["1"] for k in COUNTS]
        rows = {"async-1f1b": [1.0] * len(COUNTS)}
        for stages in (2, 4, 8):
            rows[f"1f1b, {stages} stages"] = [time_of_flush(stages, k) for k in COUNTS]
        for schedule, factors in rows.items():
            cells = (f"{c * f:.2f}" for c, f in zip(cost, factors, strict=True))
            shown.add_row(line["task"], schedule, *cells)
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
    plain = next((loss for number, loss in curve if number >= 0.95 * run.updates), math.nan)
    return {
        "plain_rate": rate,
        "plain_loss": round(plain, 4),
        "rate": at,
        "loss": round(loss, 4),
        "slowdown": round(slowdown(curve, run.task, loss), 3),
    }


if __name__ == "__main__":
    main()
