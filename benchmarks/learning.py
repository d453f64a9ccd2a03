"""What staleness costs in samples, and what corrections give back.

Small models are trained with many methods, schedules and numbers of stages, all stages in one
thread (``workers="serial"``), which gives the bits of a distributed run. The protocol is the same
for all: the rate rises over the first 10 % of the updates and falls along a cosine to 10 %; the
gradients are clipped to a norm of 1; rates, each twice the one before, are tried with seed 0 until
the loss rises on both sides of the best one, which is then run with the other seeds too. Every run
is a line of JSON in ``benchmarks/results/``, and is not done again.

    python benchmarks/learning.py run SET [--jobs 2]     do the runs of a set
    python benchmarks/learning.py table SET              what they gave
    python benchmarks/learning.py plot SET -o FILE       losses over samples, as a picture
    python benchmarks/learning.py plot trend -o FILE --over stages
                                                         slowdowns over the number of stages
    python benchmarks/learning.py sets                   which sets there are
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pipedream_rt import Clip, Layout, Pipeline, Training
from pipedream_rt.codecs import BFloat16, Int8, Projection, TopK, learned_projection
from pipedream_rt.corrections import (
    Correction,
    DelayCompensation,
    ErrorFeedback,
    Extrapolation,
    Moment,
    StalenessDamping,
    StalenessMomentum,
    StalenessNesterov,
    StalenessRate,
    StalenessRefresh,
    WeightPrediction,
)
from pipedream_rt.optimizers import Muon, RotatedAdamW, hidden_matrices
from pipedream_rt.schedules import plan_for
from pipedream_rt.simulation import costs_of, simulate
from pipedream_rt.tracing import summarize

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import grid
from benchmarks.grid import Line, Results

RESULTS = grid.RESULTS / "learning.jsonl"


# -- what is trained ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model with its data.

    Attributes:
        model: Makes the model, of layers that are called one after another.
        batches: Yields mini-batches to train on, by number of them, size and seed.
        validation: The mini-batches to validate on.
        loss_fn: The loss.
    """

    model: Any
    batches: Any
    validation: Any
    loss_fn: Any


def _head(width: int) -> nn.Sequential:
    """What makes logits of bytes: (..., D) -> (..., 256)."""
    from train_charlm import BYTES

    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))


def transformer_layers(blocks: int, width: int, context: int) -> nn.Sequential:
    """The byte-level transformer of the example, whose blocks are cut in halves."""
    from train_charlm import Embedding

    halves = [half for _ in range(blocks) for half in (Attention(width), FeedForward(width))]
    head = _head(width)
    return nn.Sequential(Embedding(width, context), *halves, head)


class Attention(nn.Module):
    """Attention after a norm, beside a residual: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm: nn.Module = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, causally."""
        b, t, d = x.shape
        qkv = self.qkv(self.norm(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.placed(q), self.placed(k), v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(b, t, d))

    def placed(self, x: Tensor) -> Tensor:
        """Put places into queries or keys (B, H, T, D / H); here an embedding has them."""
        return x


class FeedForward(nn.Module):
    """A feed-forward layer after a norm, beside a residual: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Feed forward."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Window(nn.Module):
    """Vectors of bytes by their place, added up: (B, T) -> (B, D)."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        from train_charlm import BYTES

        self.table = nn.Embedding(context * BYTES, width)
        self.register_buffer("first", BYTES * torch.arange(context))

    def forward(self, x: Tensor) -> Tensor:
        """Look up."""
        return self.table(x + self.first).sum(1)


class Narrow(nn.Module):
    """One matrix after a norm and a GELU, beside a residual: (B, D) -> (B, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return x + self.linear(F.gelu(self.norm(x)))


class Recurrent(nn.Module):
    """An LSTM layer beside a residual: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Recur."""
        return x + self.lstm(x)[0]


class Convolution(nn.Module):
    """A convolution with BatchNorm beside a residual: (B, C, H, W) -> (B, C, H, W)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve."""
        return x + F.relu(self.norm(self.conv(x)))


def _text(context: int) -> Task:
    """A task over the corpus of the example, without a model."""
    from train_charlm import Corpus, loss_fn

    corpus = Corpus.load()
    return Task(
        model=None,
        batches=lambda count, batch, seed: corpus.batches(batch, context, count, seed),
        validation=lambda: list(corpus.validation_batches(32, context, 16)),
        loss_fn=loss_fn,
    )


def _last_byte(context: int, width: int, layers: int) -> Task:
    """The byte after a window, by a network without attention."""
    from train_charlm import Corpus

    corpus = Corpus.load()

    def model() -> nn.Sequential:
        head = _head(width)
        return nn.Sequential(Window(width, context), *(Narrow(width) for _ in range(layers)), head)

    def batches(count: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return ((x, y[:, -1]) for x, y in corpus.batches(batch, context, count, seed))

    def validation() -> list[tuple[Tensor, Tensor]]:
        return [(x, y[:, -1]) for x, y in corpus.validation_batches(1024, context, 16)]

    return Task(model=model, batches=batches, validation=validation, loss_fn=F.cross_entropy)


def _lstm(width: int, layers: int) -> nn.Sequential:
    from train_charlm import BYTES

    head = _head(width)
    recurrent = [Recurrent(width) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(BYTES, width), *recurrent, head)


def _conv(channels: int, layers: int) -> nn.Sequential:
    first = nn.Sequential(nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return nn.Sequential(first, *(Convolution(channels) for _ in range(layers)), head)


def textures(
    count: int, batch: int, seed: int, noise: float = 4.0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pictures (B, 1, 16, 16) of ten classes: sums of class waves, moved, under noise."""
    waves = torch.Generator().manual_seed(12345)
    numbers = torch.randn(10, 3, 2, generator=waves)
    generator = torch.Generator().manual_seed(seed)
    grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"))
    for _ in range(count):
        classes = torch.randint(10, (batch,), generator=generator)
        moved = 6.3 * torch.rand(batch, 3, 1, 1, generator=generator)
        phase = torch.einsum("bwd,dij->bwij", numbers[classes], grid) + moved
        added = noise * torch.randn(batch, 16, 16, generator=generator)
        yield (phase.sin().sum(1) + added)[:, None], classes


def task_named(name: str) -> Task:
    """A task by its name."""
    if name == "transformer":
        return replace(_text(64), model=lambda: transformer_layers(8, 64, 64))
    if name == "narrow":  # 34 layers for up to 32 stages, quick enough for 10,000 updates
        return _last_byte(16, 48, 32)
    if name == "lstm":
        return replace(_text(32), model=lambda: _lstm(64, 8))
    if name == "conv":
        return Task(
            model=lambda: _conv(16, 8),
            batches=textures,
            validation=lambda: list(textures(16, 64, 10**6)),
            loss_fn=F.cross_entropy,
        )
    raise click.UsageError(f"there is no task {name!r}")


class DampedVectors(Correction):
    """An idea: `StalenessDamping` of what AdamW steps beside Muon, and not of matrices."""

    def before_step(self, at: Moment, optimizer: torch.optim.Optimizer) -> None:
        """See `Correction.before_step`."""
        for group in optimizer.param_groups:
            if not group.get("matrices"):
                group["lr"] = group["lr"] / math.sqrt(1 + at.staleness)


# -- what crosses -------------------------------------------------------------------------------


CODECS: dict[str, Any] = {
    "": None,
    "bfloat16": BFloat16(),
    "int8": Int8(),
    "int8 with feedback": Int8(feedback=True),
    "top 10 % with feedback": TopK(0.1),
    "20 of 64 columns, bfloat16": Projection(64, 20, dtype=torch.bfloat16),
    "36 of 64 columns, int8": [Projection(64, 36), Int8()],
    "20 of 64 columns, learned, bfloat16": BFloat16(),
}
"""The codecs of the transformer, whose values have 64 columns of 4 bytes for each token."""


def coded(name: str, model: nn.Sequential, stages: int) -> tuple[nn.Sequential, Any, Any]:
    """Return a model, its stages, and what crosses between them.

    A learned projection is two layers of the model, beside each split point.
    """
    codec = CODECS[name]
    if "learned" not in name:
        return model, stages, codec
    embedding, *halves, head = model
    layers: list[nn.Module] = [embedding]
    points = []
    for number in range(stages):
        if number:
            narrow, wide = learned_projection(64, 20, seed=number)
            points.append(len(layers) + 1)
            layers += [narrow, wide]
        layers += halves[2 * number : 2 * number + 2]
    return nn.Sequential(*layers, head), points, codec


# -- how ----------------------------------------------------------------------------------------


def method_named(name: str, model: nn.Module) -> tuple[Any, list[Correction]]:
    """Return the optimizer and the corrections of a method: names joined by ``+``.

    The first is the optimizer, the others are corrections.
    """
    first, *others = name.split("+")
    is_matrix = hidden_matrices(model)
    there = any(is_matrix(name, p) for name, p in model.named_parameters())
    matrices = [(is_matrix, {"matrices": True})] if there else []
    all_matrices = [name for name, p in model.named_parameters() if p.ndim == 2][:-1]
    decay = {"lr": 1.0, "weight_decay": 0.1}
    optimizer: Any = {
        "sgd": (torch.optim.SGD, {"lr": 1.0, "momentum": 0.9}),
        "adamw": (torch.optim.AdamW, {**decay, "betas": (0.9, 0.99), "fused": True}),
        "adamw95": (torch.optim.AdamW, {**decay, "betas": (0.95, 0.99), "fused": True}),
        "nadam": (
            torch.optim.NAdam,
            {**decay, "betas": (0.99, 0.999), "decoupled_weight_decay": True},
        ),
        "muon": (Muon, decay, matrices),
        "muon90": (Muon, {**decay, "momentum": 0.9}, matrices),
        "muon-all": (  # embeddings too
            Muon,
            decay,
            [(lambda name, _: name in all_matrices, {"matrices": True})],
        ),
        "muon98": (Muon, {**decay, "momentum": 0.98}, matrices),
        "rotated": (RotatedAdamW, decay, matrices),
    }[first]
    made: dict[str, Callable[[], Correction]] = {
        "ef": ErrorFeedback,
        "ef05": lambda: ErrorFeedback(limit=0.5),
        "ef2": lambda: ErrorFeedback(limit=2.0),
        "prediction": WeightPrediction,
        "extrapolation": Extrapolation,
        "extrapolation15": lambda: Extrapolation(strength=1.5),
        "velocity50": lambda: Extrapolation(decay=0.5),
        "velocity80": lambda: Extrapolation(decay=0.8),
        "half-prediction": lambda: WeightPrediction(strength=0.5),
        "rate": lambda: StalenessRate(updates=400),
        "momentum": StalenessMomentum,
        "nesterov": StalenessNesterov,
        "nesterov-long": lambda: StalenessNesterov(memory=1.0),
        "nesterov2": lambda: StalenessNesterov(strength=2.0, memory=2 / 3),
        "dc": lambda: DelayCompensation(strength=0.1, adaptive=True),
        "refresh": StalenessRefresh,
        "damped": StalenessDamping,
        "damped-vectors": DampedVectors,
    }
    return optimizer, [made[other]() for other in others]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        task: What is trained.
        method: How; see `method_named`.
        stages: The number of stages; 1 for synchronous training.
        k: The number of micro-batches per update.
        schedule: The schedule.
        rate: The highest learning rate.
        updates: The number of updates.
        batch: The samples of an update.
        seed: Of the model and the data.
        synchronous: The number of updates at the start that flush the pipe.
        options: Other options of the `Layout`.
        codec: What crosses between the stages; see `coded`.
    """

    task: str
    method: str
    stages: int = 1
    k: int = 1
    schedule: str = "async-1f1b"
    rate: float
    updates: int = 1200
    batch: int = 16
    seed: int = 0
    synchronous: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    codec: str = ""

    @property
    def key(self) -> str:
        """A short digest of the run."""
        return grid.key_of(self, later=("synchronous", "options", "codec"))

    @property
    def title(self) -> str:
        """The method, with the options of the schedule."""
        options = (f"{name}={value}" for name, value in self.options)
        return ", ".join([self.method, *options, *([self.codec] if self.codec else [])])

    def over(self) -> Run:
        """The run without what is tuned and averaged."""
        return replace(self, rate=0.0, seed=0)


def trained(
    run: Any,
    task: Task,
    batch: int,
    factor: Callable[[int], float],
    evaluated: Callable[[int], bool],
    **options: Any,
) -> Line:
    """Train by a pipeline in this thread; return the line of a run.

    Args:
        run: Says the schedule, the number of updates, and the seed.
        task: What is trained.
        batch: The samples of an update.
        factor: What a rate is multiplied by at an update.
        evaluated: Tells after which updates the held-out loss is taken.
        options: Of the pipeline.
    """
    validation = task.validation()
    curve: list[tuple[int, float]] = []
    start = time.process_time()
    with Pipeline(
        loss_fn=task.loss_fn, schedule=run.schedule, seed=run.seed, workers="serial", **options
    ) as pipe:
        scheduler = torch.optim.lr_scheduler.LambdaLR(pipe.optimizer, factor)
        for number, item in enumerate(task.batches(run.updates, batch, run.seed), 1):
            pipe.submit(*item)
            scheduler.step()
            if evaluated(number):
                curve.append((number, pipe.evaluate(validation)))
                if not math.isfinite(curve[-1][1]):
                    break
    return {
        **asdict(run), "key": run.key, "curve": curve,
        "processor_s": round(time.process_time() - start, 2), "torch": torch.__version__,
    }  # fmt: skip


def done(run: Run) -> Line:
    """Do a run; return its results. A run whose loss is not finite has a final loss of None."""
    from train_charlm import learning_rate_factor

    torch.set_num_threads(1)
    task = task_named(run.task)
    torch.manual_seed(run.seed)
    model, stages, codecs = coded(run.codec, task.model(), run.stages)
    optimizer, corrections = method_named(run.method, model)
    line = trained(
        run, task, run.batch,
        lambda step: run.rate * learning_rate_factor(step, run.updates, 10),
        lambda number: number % max(1, run.updates // 8) == 0,
        model=model, stages=stages, optimizer=optimizer, micro_batches=run.k,
        corrections=corrections,
        layout=Layout(synchronous_updates=run.synchronous, codecs=codecs, **dict(run.options)),
        training=Training(clip=Clip(norm=1.0), on_nan="ignore"),
    )  # fmt: skip
    final = line["curve"][-1][1]
    return {**line, "final": final if math.isfinite(final) else None}


# -- sets of runs -------------------------------------------------------------------------------

AT_ONE = {"stages": 2, "k": 2, "schedule": "2bw"}
"""A delay of one update everywhere, as at any number of stages with this schedule."""

NARROW = {"task": "narrow", "batch": 64}
"""The smallest model, with as many samples per update as suit it."""

FORWARD_S, BACKWARD_S, HOP_S = 0.020, 0.040, 0.001
"""What a stage and a hop take for a micro-batch, if an update has as many as there are stages."""

GRID = tuple(1.5e-3 * 2.0**power for power in range(-3, 5))
"""The rates that may be tried; tuning begins in the middle, and goes on while it gets better."""

FIRST = (5, 6)
"""The places in the grid of the rates that are tried first."""

SEEDS = (0, 1, 2)


def all_sets() -> dict[str, list[Run]]:
    """The runs of every set, with the seed left open, and the rate where none is given."""

    def some(*methods: str, **options: Any) -> list[Run]:
        given = {"task": "transformer", "rate": 0.0, **options, "method": [*methods]}
        return [Run(**each) for each in grid.combinations(**given)]

    plain, at_8, at_k = {"schedule": "1f1b"}, {"stages": 8}, {"stages": 8, "k": 8}
    at_32, long = {"stages": 32, "updates": 1500}, {**NARROW, "updates": 10_000}
    recipe = "muon+ef+extrapolation"
    damped = "muon+ef2+extrapolation+damped"  # the recipe where an update has one micro-batch
    return {
        "synchronous": some("rotated", "muon", "adamw", "nadam", **plain),
        "horizons": some("muon", **plain, rate=0.012, updates=[900, 600, 300]),
        # With 2bw the delay is 1 at any number of stages, so two stages stand for all of them.
        "delay-1": some(
            *("rotated+ef", "muon+ef", "rotated", "muon", "adamw+ef", "adamw"),
            "rotated+prediction", **AT_ONE,
        ),
        "async-k": some("rotated+ef", "rotated", "muon+ef", "adamw+ef", **at_k),
        "stages-8": some(
            *("rotated+ef", "rotated", "muon+ef", "nadam", "adamw", "rotated+ef05"),
            *("rotated+prediction", "rotated+refresh+ef", "adamw+rate", "adamw+prediction"),
            **at_8,
        ),
        "check-8": some("rotated+ef", **at_k, schedule="2bw"),
        # Ideas beyond the list of corrections, at one rate and seed.
        "ideas": [
            *some(
                *("muon+extrapolation", "muon+prediction", "muon", "muon98+ef", "muon+ef05"),
                "rotated+extrapolation", **AT_ONE, rate=0.012,
            ),
            *some("muon+ef", **AT_ONE, synchronous=120, rate=0.012),
            *some("muon+ef", "muon", "rotated+ef", **at_k, rate=0.012),
            *some("muon", **plain, updates=[900, 600], rate=0.012),
        ],
        "ideas-8": [
            *some("muon+ef", "nadam", "adamw", "adamw+ef", **at_8, rate=0.003),
            *some(
                *("muon", "muon+ef", "rotated", "rotated+ef", "muon98+ef", "muon+extrapolation"),
                *(recipe, "muon+ef+extrapolation15", "muon+velocity80", "muon+ef+velocity80"),
                *("muon+ef+velocity50", "muon+velocity80+ef", "muon90+ef+extrapolation"),
                *("muon+ef2+extrapolation", "muon-all+ef2+extrapolation"),
                "muon+ef2+extrapolation+damped-vectors", **at_8, rate=0.006,
            ),
            *some("muon+ef", recipe, **at_8, rate=0.006, synchronous=120),
            *some(recipe, **at_8, rate=0.012),
            *some(damped, **at_8, rate=[0.012, 0.024]),
        ],
        # For the picture of docs/results.md.
        "figure": [
            *some("adamw", **plain, rate=0.006),
            *some("muon", **plain, rate=0.012),
            *some(recipe, **AT_ONE, rate=0.012),
            *some(damped, **at_8, rate=0.012),
            *some("muon", **at_8, rate=0.006),
            *some("adamw", **at_8, rate=0.003),
        ],
        # The recipe: Muon with error feedback and extrapolation, beside what it is made of.
        "main": [
            *some("muon", **plain, rate=0.012),
            *some("muon+ef", recipe, **at_k, rate=0.012),
            *some("muon+ef", **AT_ONE, synchronous=120, rate=0.012),
            *some(
                recipe, "muon+ef", "muon", "rotated+ef+extrapolation", **AT_ONE, rate=0.012
            ),
            *some("adamw+ef+extrapolation", **AT_ONE, rate=0.006),
            *some(damped, **at_8, rate=0.012),
            *some("adamw+ef2+extrapolation+damped", **at_8, rate=0.006),
        ],
        "long": [
            *some("muon", **plain, **long, rate=0.003),
            *some("nadam", "muon", **plain, **long, rate=0.006),
            *some("nadam", "muon", "rotated", "adamw", **plain, **long, rate=0.012),
            *some("nadam", **plain, **NARROW, rate=0.006, updates=8_000),
            *some("muon", **plain, **NARROW, rate=0.006, updates=[8_000, 5_000, 3_000, 1_500]),
            *some("nadam", recipe, **AT_ONE, **long, rate=0.006),
            *some("nadam", recipe, **long, **at_8, rate=0.006),
            *some("nadam", **long, stages=32, rate=[0.006, 0.012]),
            *some(recipe, **long, stages=32, rate=0.003),
            *some(damped, **long, stages=32, rate=0.006),
        ],
        # Which rate and corrections to take for 32 stages, in runs that are not as long.
        "ideas-32": [
            *some(damped, "muon+ef+velocity80+damped", **NARROW, **at_32, rate=0.006),
            *some(recipe, **NARROW, **at_32, rate=[0.003, 0.0015]),
        ],
        "other-models": [
            run
            for task in ("lstm", "conv")
            for run in (
                *some("adamw", task=task, **plain, updates=[600, 300]),
                *some(
                    "adamw", "adamw+ef", "adamw+ef+extrapolation", task=task, **AT_ONE, updates=600
                ),
                *some("adamw", "nadam", "adamw+ef+extrapolation", task=task, **at_8, updates=600),
            )
        ],
        "trend": some(
            "adamw", "nadam", "rotated", **NARROW, stages=[1, 2, 4, 8, 16, 32], updates=600
        ),
        # What crosses between stages in fewer bytes; see benchmarks/wire.py.
        "codecs": [
            *some(recipe, **at_k, rate=0.012, codec=[*CODECS]),
            *some("muon", **plain, **at_k, rate=0.012, codec=[*CODECS][2:4]),
            *some("muon", **plain, rate=0.012, updates=[1200, 900, 600, 300]),
        ],
        "trend-horizons": some("rotated", **NARROW, updates=[150, 300]),
    }  # fmt: skip


def runs_of(name: str, quick: bool = False) -> list[Run]:
    """The runs of a set, with seed left open, and the rate unless the set has one.

    Args:
        name: Name of the set.
        quick: Whether the runs have a tenth of the updates.
    """
    sets = all_sets()
    if name not in sets:
        raise click.UsageError(f"there is no set {name!r}; there are {', '.join(sets)}")
    if not quick:
        return sets[name]
    return [
        replace(run, updates=run.updates // 10, synchronous=run.synchronous // 10)
        for run in sets[name]
    ]


def final(results: Results, run: Run) -> float:
    """The final loss of a run; infinite if it is not done or has diverged."""
    value = results.get(run.key, {}).get("final")
    return math.inf if value is None else value


def tuned(results: Results, run: Run) -> tuple[float | None, list[float]]:
    """The rate with the lowest loss at seed 0, and the rates to try before it is known.

    These are the first two of the grid, and then neighbours of the best one so far. A run that has
    a rate already is tried with that alone.
    """
    if run.rate:
        return (run.rate, []) if replace(run, seed=0).key in results else (None, [run.rate])
    runs = [replace(run, rate=rate, seed=0) for rate in GRID]
    tried = [i for i, each in enumerate(runs) if each.key in results]
    if missing := [GRID[i] for i in FIRST if i not in tried]:
        return None, missing
    best = min(tried, key=lambda i: final(results, runs[i]))
    beside = [i for i in (best - 1, best + 1) if 0 <= i < len(GRID) and i not in tried]
    return (None, [GRID[i] for i in beside]) if beside else (GRID[best], [])


def left(results: Results, runs: Sequence[Run], seeds: int) -> list[Run]:
    """The runs that can be done now: first all rates, then the other seeds at the best rate."""
    found = []
    for run in runs:
        rate, missing = tuned(results, run)
        if rate is None:
            found += [replace(run, rate=each, seed=0) for each in missing]
        else:
            found += [replace(run, rate=rate, seed=seed) for seed in SEEDS[1:seeds]]
    return found


@click.group(help=__doc__)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS,
              help="The file of results.")  # fmt: skip
def main(results: Path) -> None:
    """Parse the command."""
    global RESULTS
    RESULTS = results


@main.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--jobs", default=2, show_default=True, help="Runs at a time, one core each.")
@click.option("--seeds", default=3, show_default=True, help="1: tune alone.")
@click.option("--quick", is_flag=True, help="A tenth of the updates.")
def run(names: tuple[str, ...], jobs: int, seeds: int, quick: bool) -> None:
    """Do the runs of sets that are not done yet."""
    grid.end_by_signals()
    kept = grid.by_key(RESULTS)
    for name in names:
        wanted = functools.partial(left, runs=runs_of(name, quick), seeds=seeds)
        for line in grid.fill(kept, wanted, done, lambda _: RESULTS, jobs):
            shown = {k: line[k] for k in ("method", "rate", "seed", "final", "processor_s")}
            print(name, shown, flush=True)


@main.command()
def sets() -> None:
    """List the sets of runs."""
    for name, found in all_sets().items():
        print(f"{name}: {len(found)} methods, about 4 rates, {len(SEEDS)} seeds")


def losses(results: Results, run: Run) -> tuple[float | None, list[float]]:
    """The best rate of a run, and its final losses there by seed; no rate if it is not tuned."""
    rate, _ = tuned(results, run)
    if rate is None:
        return None, []
    there = [final(results, replace(run, rate=rate, seed=seed)) for seed in SEEDS]
    return rate, [loss for loss in there if math.isfinite(loss)]


def synchronous_curve(results: Results, like: Run) -> list[tuple[int, float]]:
    """The lowest loss of synchronous training by number of updates, over all optimizers."""
    names, best = asdict(like).keys(), {}
    lines = (
        Run(**{k: v for k, v in line.items() if k in names and k != "options"})
        for line in results.values()
        if not line.get("options")
    )
    of_task = {r.over() for r in lines if (r.task, r.stages, r.batch) == (like.task, 1, like.batch)}
    for run in of_task:
        rates = [replace(run, rate=rate) for rate in GRID]
        at_best = min(rates, key=lambda each: final(results, each))
        found = losses(results, at_best)[1]
        if found:
            best[run.updates] = min(mean(found), best.get(run.updates, math.inf))
    return sorted(best.items())


def slowdown(curve: Sequence[tuple[float, float]], updates: int, loss: float) -> float | None:
    """How many times the updates of synchronous training were needed for a loss.

    Between two lengths of synchronous runs, the loss is taken for linear in the logarithm of the
    length, and likewise beyond the last two; each run has a schedule of rates of its own length.
    """
    if len(curve) < 2 or not math.isfinite(loss):
        return None
    pairs = list(pairwise(curve))
    (t0, l0), (t1, l1) = next((p for p in pairs if p[1][1] <= loss), pairs[-1])
    needed = math.exp(math.log(t0) + (loss - l0) / (l1 - l0) * (math.log(t1) - math.log(t0)))
    return updates / needed


@functools.cache
def updates_per_s(schedule: str, stages: int, k: int) -> float:
    """The updates per second of a schedule, by the simulator, with the samples cut into k."""
    share = stages / k
    costs = costs_of({"forward": share * FORWARD_S, "backward": share * BACKWARD_S})
    chosen = plan_for(schedule, num_stages=stages, per_update=k)
    made = simulate(chosen, costs.changed(latency=HOP_S), 20 * k)
    return summarize(made).throughput / k


def sooner(run: Run, factor: float) -> float:
    """How many times sooner than by 1f1b a loss is reached: throughput ratio over slowdown.

    1f1b has the same samples per update, and as many micro-batches as stages. Two stages of 2bw
    stand for 8, on which the delay is the same.
    """
    stages, k = (8, 8) if run.schedule == "2bw" else (run.stages, run.k)
    ratio = updates_per_s(run.schedule, stages, k) / updates_per_s("1f1b", stages, stages)
    return ratio / factor


@main.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--quick", is_flag=True, help="Of the runs with a tenth of the updates.")
def table(names: tuple[str, ...], quick: bool) -> None:
    """Print the final losses of sets: the mean over seeds at the best rate, and their spread.

    The slowdown is in samples, against the best synchronous training. "sooner" is how many times
    sooner than by 1f1b the loss is reached, with the throughput of both by the simulator: each
    stage computes for 60 ms if an update has as many micro-batches as stages, and a hop takes 1 ms.
    """
    results = grid.by_key(RESULTS)
    columns = ("set", "method", "schedule", "stages", "k", "updates", "flushed", "rate", "loss")
    shown = Table(*columns, "spread", "seeds", "slowdown", "sooner")
    for name in names:
        for run in runs_of(name, quick):
            rate, found = losses(results, run)
            if rate is None:
                continue
            curve = synchronous_curve(results, run)
            factor = slowdown(curve, run.updates, mean(found)) if found else None
            shown.add_row(
                *(name, run.title, run.schedule, str(run.stages), str(run.k), str(run.updates)),
                *(str(run.synchronous), f"{rate:g}"),
                f"{mean(found):.4f}" if found else "diverged",
                f"{max(found) - min(found):.4f}" if found else "",
                str(len(found)),
                f"{factor:.2f}" if factor else "",
                f"{sooner(run, factor):.2f}" if factor and run.stages > 1 else "",
            )
    Console(width=170).print(shown)


@main.command()
@click.argument("names", nargs=-1, required=True)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="An SVG file.")
@click.option("--over", type=click.Choice(["samples", "stages"]), default="samples",
              show_default=True, help="Losses over samples, or slowdowns over stages.")  # fmt: skip
def plot(names: tuple[str, ...], output: Path, over: str) -> None:
    """Draw sets: validation loss over samples, or the slowdown over the number of stages."""
    pyplot = grid.pyplot_of_svg()

    results = grid.by_key(RESULTS)
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    lines: dict[str, list[tuple[float, float]]] = {}
    for run in (run for name in names for run in runs_of(name)):
        rate, found = losses(results, run)
        if rate is None or not found:
            continue
        if over == "samples":
            line = results[replace(run, rate=rate, seed=0).key]
            stages = f"{run.stages} stage" + "s" * (run.stages > 1)
            text = f"{run.title}, {run.schedule}, {stages}, k = {run.k}"
            lines[text] = [(number * run.batch, loss) for number, loss in line["curve"]]
        else:
            factor = slowdown(synchronous_curve(results, run), run.updates, mean(found))
            lines.setdefault(run.method, []).append((run.stages, factor or math.nan))
    for text, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=text)
    axes.set_xlabel("samples" if over == "samples" else "stages")
    axes.set_ylabel("validation loss" if over == "samples" else "slowdown in samples")
    if over == "stages":
        axes.set_xscale("log", base=2)
        ticks = sorted({stages for points in lines.values() for stages, _ in points})
        axes.set_xticks(ticks, [f"{stages:g}" for stages in ticks])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(output, metadata={"Date": None})


if __name__ == "__main__":
    main()
