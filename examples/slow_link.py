"""A small GPT whose stages lie at the ends of a slow link, as in training over the internet.

It is trained here, on this machine, with a trace. Then the simulator, with the times that were
measured, says what the same run takes where a link of some bandwidth and latency joins the stages,
in several schedules and with slack::

    python examples/slow_link.py --bandwidth 200Mbit --latency 30ms
"""

from __future__ import annotations

import click
import torch
from torch import Tensor, nn
from train_charlm import BYTES, Corpus

from pipedream_rt import Observe, Pipeline, Trace
from pipedream_rt.observe import summarize
from pipedream_rt.simulation.predict import what_if


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        """Make attention and the layers after it."""
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden states: (B, T, width)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        y = self.first(x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.second(x))


def loss(logits: Tensor, y: Tensor) -> Tensor:
    """The mean cross entropy of the next byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


@click.command()
@click.option("--bandwidth", default="200Mbit", show_default=True)
@click.option("--latency", default="30ms", show_default=True)
@click.option("--stages", default=4, show_default=True)
@click.option("--steps", default=30, show_default=True)
@click.option("--workers", default="local", show_default=True)
def main(bandwidth: str, latency: str, stages: int, steps: int, workers: str) -> None:
    """Train, and tabulate what the link would make of it."""
    torch.manual_seed(0)
    width = 64
    layers = [nn.Embedding(BYTES, width), *(Block(width, 4) for _ in range(2 * stages - 2))]
    with Pipeline(
        [*layers, nn.LayerNorm(width), nn.Linear(width, BYTES)], stages=stages, loss_fn=loss,
        schedule="async-1f1b",
        optimizer=(torch.optim.AdamW, {"lr": 1e-3}), workers=workers, observe=Observe(trace=True),
    ) as pipe:  # fmt: skip
        batches = Corpus.load().batches(16, 64, steps, seed=1)
        losses = [result.loss for result in pipe.train_epoch(batches)]
        trace = pipe.trace()
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
    link = {"bandwidth": bandwidth, "latency": latency}
    print(f"{'schedule':24}micro-batches/s over {bandwidth}, {latency}")
    for name, changes in (
        ("1f1b", {"schedule": "1f1b"}),
        ("async-1f1b", {}),
        ("async-1f1b, slack 1", {"slack": ["1"]}),
        ("async-1f1b, slack 2", {"slack": ["2"]}),
    ):
        print(f"{name:24}{rate(trace, {**link, **changes}):.1f}")


def rate(trace: Trace, changes: dict[str, object]) -> float:
    """Return the throughput of a run with changes, simulated."""
    return summarize(what_if(trace, changes)).throughput


if __name__ == "__main__":
    main()
