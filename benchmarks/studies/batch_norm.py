"""What a small convolutional network with BatchNorm learns in the schedules that one may choose.

Pictures of ten classes are learned by SGD, in five epochs of 100 mini-batches of 32, at a rate that
falls along a cosine. There are as many micro-batches as stages, which is the default where there is
BatchNorm. Shown is the held-out loss after the first and after the last epoch, its mean and that of
each seed. All stages are in this thread, which gives the bits of worker processes; plain training
is one stage.

    python benchmarks/studies/batch_norm.py
    python benchmarks/studies/batch_norm.py --rate 0.1 --momentum 0
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pipedream_rt import Pipeline, Training

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from learning import textures

EPOCHS, UPDATES, BATCH, NOISE = 5, 100, 32, 1.5
CASES = (
    ("plain", 1), *((schedule, stages) for stages in (2, 4) for schedule in
                    ("1f1b", "gpipe", "async-1f1b")),
)  # fmt: skip


def pictures(count: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pictures with less noise than those of `learning.py`, so that an epoch teaches something."""
    return textures(count, batch, seed, NOISE)


def model() -> nn.Sequential:
    """The network, as people write it."""

    def block(before: int, after: int) -> list[nn.Module]:
        convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(after), nn.ReLU()]

    return nn.Sequential(
        *block(1, 16), nn.MaxPool2d(2), *block(16, 32), *block(32, 32), nn.MaxPool2d(2),
        *block(32, 32), *block(32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def learned(schedule: str, stages: int, optimizer: dict[str, Any], seed: int) -> list[float]:
    """Train; return the held-out loss after each epoch."""
    torch.manual_seed(seed)
    held_out, updates = list(pictures(8, 128, 10**6)), EPOCHS * UPDATES
    losses = []
    with Pipeline(
        model(),
        stages=stages,
        loss_fn=F.cross_entropy,
        optimizer=(torch.optim.SGD, optimizer),
        schedule="1f1b" if schedule == "plain" else schedule,  # type: ignore[arg-type]
        micro_batches=stages,
        seed=seed,
        workers="serial",
        training=Training(verify=False),
    ) as pipe:
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            pipe.optimizer, lambda s: 0.05 + 0.95 * (1 + math.cos(math.pi * s / updates)) / 2
        )
        for number, item in enumerate(pictures(updates, BATCH, seed), 1):
            pipe.submit(*item)
            scheduler.step()
            if number % UPDATES == 0:
                losses.append(pipe.evaluate(held_out))
        pipe.state_dict()
    return losses


@click.command()
@click.option("--rate", default=0.05, show_default=True)
@click.option("--momentum", default=0.9, show_default=True)
@click.option("--seeds", default=3, show_default=True)
def main(rate: float, momentum: float, seeds: int) -> None:
    """Train all cases with all seeds, and show a table."""
    torch.set_num_threads(1)
    head = (f"SGD {rate:g}, momentum {momentum:g}", "stages", "first epoch", "last epoch", "seeds")
    table = Table(*head)
    for schedule, stages in CASES:
        optimizer = {"lr": rate, "momentum": momentum}
        runs = [learned(schedule, stages, optimizer, seed) for seed in range(seeds)]
        first, last = ([run[i] for run in runs] for i in (0, -1))
        each = ", ".join(f"{a:.3f} {b:.4f}" for a, b in zip(first, last, strict=True))
        table.add_row(schedule, str(stages), f"{mean(first):.3f}", f"{mean(last):.4f}", each)
    Console().print(table)


if __name__ == "__main__":
    main()
