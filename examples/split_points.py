"""A model with branches, cut where its author says: the split points of torch's pipelining.

The forward is recorded on one mini-batch, so the model stays as it is; a stage begins at each of
the layers that are named::

    python examples/split_points.py
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream_rt import Pipeline


class Block(nn.Module):
    """A residual block that also looks at the input of the whole model."""

    def __init__(self, width: int) -> None:
        """Make two layers."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        """Return x and what the layers add to it: (B, width)."""
        return x + torch.tanh(self.mix(torch.cat([self.norm(x), first], -1)))


class Net(nn.Module):
    """Blocks that all read the embedding, so that every stage needs it."""

    def __init__(self, width: int = 32, blocks: int = 6) -> None:
        """Make the blocks."""
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return two logits of each sample: (B, 2)."""
        first = self.embed(x)
        hidden = first
        for block in self.blocks:
            hidden = block(hidden, first)
        return self.head(hidden)


@click.command()
@click.option("--split-before", multiple=True, default=["blocks.2", "blocks.4"], show_default=True)
@click.option("--schedule", default="1f1b", show_default=True)
@click.option("--workers", default="local", show_default=True)
@click.option("--steps", default=100, show_default=True)
def main(split_before: tuple[str, ...], schedule: str, workers: str, steps: int) -> None:
    """Train on a task of parity, and show what goes from stage to stage."""
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(steps * 64, 8)
    y = ((x > 0).sum(1) % 2).long()
    loader = list(zip(x.split(64), y.split(64), strict=True))
    with Pipeline(
        model, stages=list(split_before), example=loader[0], loss_fn=F.cross_entropy,
        optimizer=(torch.optim.AdamW, {"lr": 3e-3}), schedule=schedule, micro_batches=4,
        workers=workers,
    ) as pipe:  # fmt: skip
        print(pipe.explain(program=True))
        losses = [result.loss for result in pipe.train_epoch(loader)]
        tenth = max(len(losses) // 10, 1)
        first, last = losses[:tenth], losses[-tenth:]
        print(f"loss {sum(first) / len(first):.3f} at first, {sum(last) / len(last):.3f} at last")


if __name__ == "__main__":
    main()
