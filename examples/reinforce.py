"""REINFORCE: what the model gets next depends on what it has said, and its loss comes at the end.

Walkers stand in a corridor with a flag at one end, and draw each move from what the model says.
The eight moves of a walk are eight forwards of one update. The rewards of the walk make the loss,
whose backward reaches the outputs of all eight (Williams, Machine Learning 8, 1992)::

    python examples/reinforce.py
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream_rt import Pipeline

CELLS, MOVES, WALKERS = 9, 8, 64


def policy() -> nn.Sequential:
    """Make logits of a step to the left and to the right, of where a walker and its flag are."""
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(n, 64), nn.Tanh()) for n in (CELLS + 2, 64, 64)]
    return nn.Sequential(*hidden, nn.Linear(64, 2))


def shown(places: Tensor, flags: Tensor) -> Tensor:
    """What the model is shown: the cell of each walker, and the end at which its flag is."""
    return torch.cat([F.one_hot(places, CELLS), F.one_hot(flags, 2)], dim=1).float()


def walk(pipe: Pipeline, draw: torch.Generator) -> float:
    """Let all walkers make their moves, and update the model; return the share at their flag."""
    places = torch.full((WALKERS,), CELLS // 2)
    flags = torch.randint(2, (WALKERS,), generator=draw)
    said = torch.zeros(WALKERS)  # the logarithm of the probability of all moves
    for _ in range(MOVES):
        chances = pipe.forward(shown(places, flags)).log_softmax(1)
        moves = torch.multinomial(chances.detach().exp(), 1, generator=draw)
        said = said + chances.gather(1, moves).squeeze(1)
        places = (places + 2 * moves.squeeze(1) - 1).clamp(0, CELLS - 1)
    rewards = (places == flags * (CELLS - 1)).float()
    loss = -(said * (rewards - rewards.mean())).mean()
    loss.backward()
    pipe.step()
    return rewards.mean().item()


@click.command()
@click.option("--stages", default=2, show_default=True)
@click.option("--workers", default="local", show_default=True)
@click.option("--updates", default=40, show_default=True)
def main(stages: int, workers: str, updates: int) -> None:
    """Train, and say how many walkers reach their flags."""
    draw = torch.Generator().manual_seed(1)
    with Pipeline(
        policy(), stages=stages, optimizer=(torch.optim.Adam, {"lr": 2e-3}),
        schedule="gpipe", micro_batches=MOVES, workers=workers,
    ) as pipe:  # fmt: skip
        for update in range(updates):
            reached = walk(pipe, draw)
            if update % 8 == 0 or update == updates - 1:
                print(f"update {update}: {reached:.0%} of the walkers reach their flags")
        cell, ends = torch.full((2,), CELLS // 2), torch.arange(2)
        way = pipe(shown(cell, ends)).softmax(1)
        print(f"from the middle to the flag on the left: {way[0, 0]:.0%} go left")
        print(f"from the middle to the flag on the right: {way[1, 1]:.0%} go right")


if __name__ == "__main__":
    main()
