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
    """``x * w``, in the time of a layer; the backward takes its time half for each gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, times: tuple[float, float]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.times = times
        occupy(times[0])
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        for_input, for_weight, _ = ctx.needs_input_grad
        occupy(ctx.times[1] / 2 * (for_input + for_weight))
        to_input = gradients[0] * w if for_input else None
        to_weight = (gradients[0] * x).sum(0) if for_weight else None
        return to_input, to_weight, None


class EmulatedLayer(nn.Module):
    """A layer that takes a given time.

    Args:
        width: Of its input, (B, width), and of its weight.
        forward_s, backward_s: Seconds of a forward, of a whole backward.
    """

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(width))
        self.times = (forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * w``, some time later."""
        output: Tensor = _Timed.apply(x, self.w, self.times)  # type: ignore[no-untyped-call]
        return output


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
