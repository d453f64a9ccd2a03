"""Layers that move a clock of the tests, for whatever measures them."""

from types import SimpleNamespace

import torch
from torch import nn

_TIME = SimpleNamespace(now=0.0)


class _Telling(type):
    """Lets the class tell a time that is none of its attributes, which stages may not change."""

    @property
    def now(cls):
        return _TIME.now

    @now.setter
    def now(cls, value):
        _TIME.now = value


class Clock(metaclass=_Telling):
    """What the profiler takes for the time."""

    @classmethod
    def perf_counter(cls):
        return cls.now

    thread_time = perf_counter


class Ticks(torch.autograd.Function):
    """Identity that moves the clock."""

    @staticmethod
    def forward(ctx, x, before, after):
        ctx.after = after
        Clock.now += before
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        Clock.now += ctx.after
        return gradient, None, None


BATCH = torch.ones(6, 4), torch.zeros(6, 4)
"""A mini-batch for such layers."""


class Layer(nn.Module):
    """``x * w``, which takes three times of its own."""

    def __init__(self, forward_s, input_s, weight_s):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.times = forward_s, input_s, weight_s

    def forward(self, x):
        forward_s, input_s, weight_s = self.times
        return Ticks.apply(x, forward_s, input_s) * Ticks.apply(self.w, 0.0, weight_s)


def ticking(*seconds):
    """A sequence of layers, each of which takes so long for each of its three times."""
    return nn.Sequential(*(Layer(s, s, s) for s in seconds))
