"""Models of two or three layers, between which something happens, and their recorded forwards."""

import torch
from torch import nn

from pipedream_rt.models.cut import find_layers
from pipedream_rt.models.recording import record


class Base(nn.Module):
    """Two layers; what happens in between is up to the test."""

    def __init__(self, between=lambda self, x: x):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))
        self.between = between

    def forward(self, x, **options):
        return self.b(self.between(self, self.a(x), **options))


class Forward(nn.Module):
    """Three layers, of which the forward is up to the test."""

    def __init__(self, does):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.does = does

    def forward(self, *args, **kwargs):
        return self.does(self, *args, **kwargs)


def recorded(model, *args, **kwargs):
    options = {k: kwargs.pop(k) for k in ("training", "grad") if k in kwargs}
    return record(model, find_layers(model), args, kwargs, **options)


X = torch.randn(3, 4)
