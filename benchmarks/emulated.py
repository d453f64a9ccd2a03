"""A device that computes nothing, and a link that is slow: both take their time, no processor.

So 8 to 32 stages run at their own speed on 2 cores, and what is measured is the runtime: its
messages, its waits, its schedule. Kernels that compete for memory or caches are not emulated.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.cluster.in_process import InProcessCluster
from pipedream_rt.messages.message import Message
from pipedream_rt.transport.memory import MemoryTransport

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


class SlowLinks(MemoryTransport):
    """An in-memory transport on which messages between some stages arrive later.

    Args:
        latency_s: Seconds under way, by pair of stages, for both directions.
    """

    def __init__(self, latency_s: Mapping[tuple[int, int], float]) -> None:
        super().__init__()
        self._latency_s = latency_s
        self._on_their_way: list[tuple[float, int, Message]] = []
        self._numbers = itertools.count()
        self._sent = threading.Condition()
        self._over = False
        self._carrier = threading.Thread(target=self._carry, name="slow-links", daemon=True)
        self._carrier.start()

    def deliver(self, message: Message) -> None:
        """Let a message arrive, at once or after the latency of its link."""
        ends = sorted((message.sender, message.to))
        latency_s = self._latency_s.get((ends[0], ends[1]), 0.0)
        if not latency_s:
            super().deliver(message)
            return
        with self._sent:
            due = time.monotonic() + latency_s
            heapq.heappush(self._on_their_way, (due, next(self._numbers), message))
            self._sent.notify()

    def _carry(self) -> None:
        """Deliver what is due, until closed."""
        while True:
            with self._sent:
                while not self._over and not self._is_due():
                    wait_s = (
                        self._on_their_way[0][0] - time.monotonic() if self._on_their_way else None
                    )
                    self._sent.wait(wait_s)
                if self._over:
                    return
                message = heapq.heappop(self._on_their_way)[2]
            super().deliver(message)

    def _is_due(self) -> bool:
        """Whether a message has been under way for long enough."""
        return bool(self._on_their_way) and self._on_their_way[0][0] <= time.monotonic()

    def close(self) -> None:
        """Stop; what is under way is lost."""
        super().close()
        with self._sent:
            self._over = True
            self._sent.notify()
        self._carrier.join()


def slow_links(latency_s: Mapping[tuple[int, int], float]) -> Callable[..., InProcessCluster]:
    """Return what ``Pipeline(workers=...)`` takes: emulated stages as threads, with slow links."""

    def start(plan: Any, **options: Any) -> InProcessCluster:
        transport = SlowLinks(latency_s)
        return InProcessCluster(plan, transport=transport, exclusive=False, **options)

    return start
