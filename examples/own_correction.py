"""A correction for staleness of one's own: smaller steps where gradients are stale.

    python examples/own_correction.py

Eight stages train in the thread of this script (workers="serial"), with the bits that eight
processes would give.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt import Pipeline, Training
from pipedream_rt.corrections import Correction, Moment


class Damped(Correction):
    """Divides the rate of a step by one more than its staleness."""

    def before_step(self, at: Moment, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / (1 + at.staleness)


def final_loss(corrections: list[Correction]) -> float:
    """Train eight stages for 300 updates with a rate that is too high for stale gradients."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    x = torch.randn(64, 16)
    y = x[:, :4].prod(1, keepdim=True)
    with Pipeline(
        model,
        stages=8,
        loss_fn=F.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 0.4}),
        corrections=corrections,
        workers="serial",
        training=Training(on_nan="ignore"),
    ) as pipe:
        return [result.loss for result in pipe.train_epoch([(x, y)] * 300)][-1]


if __name__ == "__main__":
    print(f"without: {final_loss([]):.4f}")
    print(f"damped:  {final_loss([Damped()]):.4f}")
