"""A device that computes nothing: it takes its time, and leaves the processor to others.

So 8 to 32 stages run at their own speed on 2 cores, and what is measured is the runtime: its
messages, its waits, its schedule. Kernels that compete for memory or caches are not emulated.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

_NEVER = threading.Event()


def occupy(seconds: float) -> None:
    """Keep this thread, not the processor, for a time."""
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        _NEVER.wait(left)


class _Timed(torch.autograd.Function):
    """Identity that takes a time forward and another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        occupy(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        occupy(ctx.backward_s)
        return gradients[0], None, None


class EmulatedLayer(nn.Module):
    """``x * w`` in a given time; half of the backward is for the input, half for the weight.

    Two nodes of autograd, because a node that is written in Python computes all its gradients
    whenever it runs. Where the input wants no gradient the weight takes the whole time, so that
    all stages of a model are alike.

    Args:
        width: Of its input, (B, width), and of its weight.
        forward_s, backward_s: Seconds of a forward, of a whole backward.
    """

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(width))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * w``, some time later."""
        half = self.backward_s / 2
        of_weight = half if x.requires_grad else self.backward_s
        w = _Timed.apply(self.w, 0.0, of_weight)  # type: ignore[no-untyped-call]
        x = _Timed.apply(x, self.forward_s, half)  # type: ignore[no-untyped-call]
        return x * w


def emulated_model(stages: int, width: int, forward_s: float, backward_s: float) -> nn.Sequential:
    """One layer for each stage, all alike."""
    return nn.Sequential(*(EmulatedLayer(width, forward_s, backward_s) for _ in range(stages)))


def emulated_data(count: int, samples: int, width: int) -> list[tuple[Tensor, Tensor]]:
    """Mini-batches for it."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(samples, width, generator=generator),
            torch.randn(samples, width, generator=generator),
        )
        for _ in range(count)
    ]
