"""Stages of equal time rather than of equal size: balance by measured cost, as in torchgpipe.

Layers of this model cost very different times for their sizes. It is cut by parameter count, then
by what was measured, and both are trained::

    python examples/balance.py
"""

from __future__ import annotations

import time

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream_rt import Pipeline


class Repeated(nn.Module):
    """A layer that is applied several times: few parameters, much time."""

    def __init__(self, width: int, times: int) -> None:
        """Make the layer."""
        super().__init__()
        self.layer, self.times = nn.Linear(width, width), times

    def forward(self, x: Tensor) -> Tensor:
        """Return x after all applications: (B, width)."""
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


def layers(width: int) -> nn.Sequential:
    """Two large layers that are fast, and six small ones that are slow."""
    torch.manual_seed(0)
    slow = [Repeated(width, 12) for _ in range(6)]
    return nn.Sequential(
        nn.Linear(width, 8 * width), nn.ReLU(), nn.Linear(8 * width, width), *slow,
        nn.Linear(width, 4),
    )  # fmt: skip


def rate(model: nn.Module, data: list[tuple[Tensor, Tensor]], workers: str, **how: object) -> float:
    """Return the mini-batches per second of a split, after some to warm up."""
    with Pipeline(
        model, loss_fn=F.cross_entropy, optimizer=(torch.optim.SGD, {"lr": 0.01}),
        workers=workers, **how,  # type: ignore[arg-type]
    ) as pipe:  # fmt: skip
        print(pipe.explain())
        warm = len(data) // 4
        list(pipe.train_epoch(data[:warm]))
        start = time.perf_counter()
        list(pipe.train_epoch(data[warm:]))
        return (len(data) - warm) / (time.perf_counter() - start)


@click.command()
@click.option("--stages", default=2, show_default=True)
@click.option("--width", default=128, show_default=True)
@click.option("--steps", default=80, show_default=True)
@click.option("--workers", default="local", show_default=True)
def main(stages: int, width: int, steps: int, workers: str) -> None:
    """Train with both splits, and compare."""
    x = torch.randn(steps * 64, width)
    y = torch.randint(4, (len(x),))
    data = list(zip(x.split(64), y.split(64), strict=True))
    by_size = rate(layers(width), data, workers, stages=stages)
    by_time = rate(layers(width), data, workers, stages="auto", example=data[0])
    print(f"by size {by_size:.1f}, by time {by_time:.1f} mini-batches/s: {by_time / by_size:.2f}x")


if __name__ == "__main__":
    main()
