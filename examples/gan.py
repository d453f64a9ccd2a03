"""A generator and a discriminator, each a pipeline: gradients flow through one into the other.

The discriminator is called on true points and on made ones, and `step` closes its update. For the
generator's update the made points go through the discriminator again, and the gradient flows on to
them: that update of the discriminator is dropped by ``step(update=False)``. The loop is that of
plain PyTorch; at the end it runs over the same two models in one process, for the same weights::

    python examples/gan.py
"""

from __future__ import annotations

from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream_rt import Pipeline

PLACES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
ADAM = {"lr": 5e-3, "betas": (0.0, 0.9)}


class Plain:
    """A model in one process, with what the loop asks of a pipeline."""

    def __init__(self, model: nn.Module) -> None:
        self.forward, self.optimizer = model, torch.optim.Adam(model.parameters(), **ADAM)

    def step(self, *, update: bool = True) -> None:
        if update:
            self.optimizer.step()
        self.optimizer.zero_grad()


def layers(inputs: int, outputs: int) -> nn.Sequential:
    """Make a small model of four linear layers."""
    torch.manual_seed(inputs)
    hidden = [nn.Sequential(nn.Linear(n, 64), nn.LeakyReLU(0.2)) for n in (inputs, 64, 64)]
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


def true_points(count: int, draw: torch.Generator) -> Tensor:
    """Draw points (count, 2) around four places."""
    points = PLACES[torch.randint(4, (count,), generator=draw)]
    return points + 0.1 * torch.randn(count, 2, generator=draw)


def train(generator: Pipeline | Plain, discriminator: Pipeline | Plain, steps: int) -> None:
    """Let the generator learn to make points that the discriminator takes for true ones."""
    draw = torch.Generator().manual_seed(1)
    yes, no, loss_fn = torch.ones(128, 1), torch.zeros(128, 1), F.binary_cross_entropy_with_logits
    for _ in range(steps):
        made = generator.forward(torch.randn(128, 8, generator=draw))
        of_true = loss_fn(discriminator.forward(true_points(128, draw)), yes)
        of_made = loss_fn(discriminator.forward(made.detach()), no)
        (of_true + of_made).backward()
        discriminator.step()
        loss_fn(discriminator.forward(made), yes).backward()  # and on, into the generator
        discriminator.step(update=False)
        generator.step()


def told(points: Tensor) -> str:
    """Say how far points are from the nearest place, and how many are at each."""
    near = torch.cdist(points, PLACES).min(1)
    counts = near.indices.bincount(minlength=4).tolist()
    return f"{near.values.mean():.3f} from the nearest place, at each of which are {counts}"


@click.command()
@click.option("--workers", default="local", show_default=True)
@click.option("--steps", default=300, show_default=True)
def main(workers: str, steps: int) -> None:
    """Train both, and say how near the made points are to the places of the true ones."""
    torch.set_num_threads(1)  # as many as each stage has, for the comparison at the end
    draw = torch.Generator().manual_seed(2)
    noise = torch.randn(1000, 8, generator=draw)
    given: dict[str, Any] = {"stages": 2, "optimizer": (torch.optim.Adam, ADAM), "workers": workers}
    with (
        Pipeline(layers(8, 2), schedule="gpipe", micro_batches=1, **given) as generator,
        # Its updates are of two forwards: of true points, and of made ones.
        Pipeline(layers(2, 1), schedule="gpipe", micro_batches=2, **given) as discriminator,
    ):
        print("made, at first:", told(generator(noise)))
        train(generator, discriminator, steps)
        print("made, at last: ", told(generator(noise)))
        print("true:          ", told(true_points(1000, draw)))
        trained = [*generator.state_dict().values(), *discriminator.state_dict().values()]
    models = layers(8, 2), layers(2, 1)
    train(*map(Plain, models), steps)
    plain = [value for model in models for value in model.state_dict().values()]
    print("the same weights as in one process:", all(map(torch.equal, trained, plain)))


if __name__ == "__main__":
    main()
