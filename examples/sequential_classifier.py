"""A sequence of layers as a classifier, split by parameter count: the first example of FairScale.

The layers are those of a plain script; the pipeline takes the place of the loop's inside::

    python examples/sequential_classifier.py
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipedream_rt import Pipeline

CLASSES, WIDTH = 10, 64


def digits(samples: int, seed: int) -> TensorDataset:
    """Noisy pictures of ten patterns: (samples, 1, 16, 16), and which pattern each shows."""
    patterns = torch.randn(CLASSES, 1, 16, 16, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (samples,), generator=generator)
    return TensorDataset(patterns[y] + torch.randn(samples, 1, 16, 16, generator=generator), y)


def layers() -> nn.Sequential:
    """A small convolutional classifier."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, WIDTH), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


@click.command()
@click.option("--stages", default=2, show_default=True)
@click.option("--workers", default="local", show_default=True)
@click.option("--epochs", default=2, show_default=True)
@click.option("--samples", default=2048, show_default=True)
def main(stages: int, workers: str, epochs: int, samples: int) -> None:
    """Train, and say how many pictures are told right."""
    model = layers()
    loader = DataLoader(digits(samples, seed=1), batch_size=64, shuffle=True)
    held_out = DataLoader(digits(512, seed=2), batch_size=128)
    with Pipeline(
        model, stages=stages, loss_fn=F.cross_entropy, workers=workers,
        optimizer=(torch.optim.AdamW, {"lr": 2e-3}),
    ) as pipe:  # fmt: skip
        print(pipe.explain())
        for epoch in range(epochs):
            losses = [result.loss for result in pipe.train_epoch(loader)]
            right = pipe.evaluate(
                held_out,
                metrics={"accuracy": lambda out, y: (out.argmax(-1) == y).float().mean()},
            )
            print(f"epoch {epoch}: {sum(losses) / len(losses):.3f}, {right}")
        model.load_state_dict(pipe.state_dict())
    with torch.no_grad():  # the same model, in this process
        x, y = digits(512, seed=2).tensors
        print(f"accuracy here: {(model.eval()(x).argmax(-1) == y).float().mean():.3f}")


if __name__ == "__main__":
    main()
