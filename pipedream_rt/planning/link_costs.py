"""What the links between workers cost, measured while the workers are up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.options import Observe, Workers
from pipedream_rt.observe.summary import hop_times, hops_between
from pipedream_rt.pipeline import Pipeline

_SMALL = 256
"""Elements of the small tensor, of 4 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts:
    """What a message from one worker to the next costs, as the planner takes it.

    Attributes:
        latency: The seconds that a message without tensors is under way.
        bandwidth: The bytes per second that come on top.
    """

    latency: float
    bandwidth: float


class _Scaled(nn.Module):
    """A layer that takes no time, whose output is as large as its input."""

    def __init__(self) -> None:
        """Begin as the identity."""
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input times a weight."""
        return x * self.factor


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss of the output that takes little time."""
    return output.mean()


def measure_links(
    workers: Workers = None, *, count: int = 2, size: int = 1 << 24, repeats: int = 15
) -> LinkCosts:
    """Measure what messages between neighbouring workers cost, with a pipeline of empty layers.

    Args:
        workers: Where the workers are, as for `Pipeline`: ``"HOST:PORT"`` waits for those of other
            machines, with which the measured links are those between them.
        count: The number of workers, at least 2.
        size: The bytes of the large tensor; a small one has 1 KiB.
        repeats: The number of messages of each size and way.

    Returns:
        Medians over all neighbours, and both ways.

    Raises:
        ConfigError: A number makes no sense, or the workers have no links.
    """
    if count < 2 or size < 1 << 16 or repeats < 1:
        raise ConfigError("measure_links needs 2 workers, 64 KiB and 1 repeat at least")
    if workers == "serial":
        raise ConfigError(f"there are no links between workers that are {workers!r}")
    shapes = [(_SMALL,)] * (repeats + 1) + [(size // 4,)] * (repeats + 1)
    layers = [_Scaled() for _ in range(count)]
    with Pipeline(
        layers,
        stages=count,
        loss_fn=_loss,
        optimizer=(torch.optim.SGD, {"lr": 0.0}),
        schedule="1f1b",  # one micro-batch at a time, so that no message waits for another one
        workers=workers,
        observe=Observe(trace=True),
    ) as pipe:
        list(pipe.train_epoch((torch.ones(1, *shape), torch.zeros(1)) for shape in shapes))
        trace = pipe.trace()
    spans = trace.by_stage()
    hops = [hop_times(e, spans[e.source], spans[e.target]) for e in hops_between(trace.plan)]
    # By way, size, and message; the first of each size warms connections and memory.
    seconds = np.stack(hops).reshape(len(hops), 2, repeats + 1)[:, :, 1:] / 1e9
    latency, slow = (float(np.median(seconds[:, number])) for number in range(2))
    return LinkCosts(latency=latency, bandwidth=size / max(slow - latency, 1e-9))
