"""Mini-batches with labels, some of which are ignored, and a model that learns them."""

import torch
from torch import nn

CLASSES, IGNORED = 5, -100


def classifier():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def labelled(count=3, samples=8, ignored=True, seed=0):
    """Mini-batches in which the first samples have few labels that count, or none."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        y = torch.randint(CLASSES, (samples,), generator=generator)
        if ignored:
            y[: samples // 2 - 1] = IGNORED
        made.append((torch.randn(samples, 8, generator=generator), y))
    return made


class Counts(nn.Module):
    """A loss that keeps something, and has a weight."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, y):
        self.calls += 1
        return (self.scale * output).pow(2).mean()
