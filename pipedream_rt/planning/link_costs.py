"""The costs of links between workers, measured over a running pipeline, and of codecs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.options import Observe, Workers
from pipedream_rt.pipeline import Pipeline
from pipedream_rt.planning.machines import LinkCodec
from pipedream_rt.stage.codec import ByteCodec, Codec, GraphCodec, OutsideGraph
from pipedream_rt.tracing.summary import hop_times, hops_between

_SMALL = 256
"""Elements of the small tensor, 4 bytes each; its message costs little more than the latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts:
    """The costs of a message from one worker to the next, in the planner's terms.

    Attributes:
        latency: The seconds that a small message is under way.
        bandwidth: Bytes per second; the size of a message over it comes on top of the latency.
    """

    latency: float
    bandwidth: float


def measure_codec(
    codec: Codec, *, shape: tuple[int, ...] = (1024, 1024), repeats: int = 15
) -> LinkCodec:
    """Measure what a codec makes of a value, for `Machines`, in the calling thread.

    Args:
        codec: The codec.
        shape: The shape of a value, of random numbers in float32.
        repeats: The number of times that it is coded.

    Returns:
        The share of the bytes that is sent, and the median time of both ends together.

    Raises:
        ConfigError: The codec leaves such values as they are, or a number makes no sense.
    """
    value = torch.randn(shape)
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, not {repeats}")
    if not codec.takes(value):
        raise ConfigError(
            f"{codec!r} leaves a {value.dtype} value of shape {shape} as it is, so there is "
            "nothing to measure; give a shape that it codes"
        )
    used = OutsideGraph(codec) if isinstance(codec, GraphCodec) else codec
    assert isinstance(used, ByteCodec)
    ends = 2 if used.feedback else 1  # for the feedback the sender unpacks too
    seconds = []
    with torch.no_grad():
        for _ in range(repeats + 1):
            start = time.perf_counter()
            parts = used.pack(value)
            for _ in range(ends):
                used.unpack(parts, value.shape, value.dtype)
            seconds.append(time.perf_counter() - start)
    sent = sum(part.nbytes for part in parts)
    taken = float(np.median(seconds[1:]))  # the first one warms up
    return LinkCodec(ratio=sent / value.nbytes, seconds_per_byte=taken / value.nbytes)


class _Scaled(nn.Module):
    """A layer that takes no time, whose output is as large as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        # A weight, so that the output needs a gradient: messages are to go both ways.
        return x * self.factor


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def measure_links(
    workers: Workers = None, *, count: int = 2, size: int = 1 << 24, repeats: int = 15
) -> LinkCosts:
    """Measure what messages between neighbouring workers cost, with a pipeline of empty layers.

    Args:
        workers: Where the workers are, as for `Pipeline`. With ``"HOST:PORT"`` workers of other
            machines come, and the links between those are measured.
        count: The number of workers, at least 2.
        size: The bytes of the large tensor; a small one has 1 KiB.
        repeats: The number of messages of each size in each direction.

    Returns:
        Medians over all neighbours and both directions.

    Raises:
        ConfigError: A number makes no sense, or the workers have no links.
    """
    if count < 2:
        raise ConfigError(f"count must be at least 2, not {count}")
    if size < 1 << 16:
        raise ConfigError(f"size must be at least {1 << 16}, not {size}")
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, not {repeats}")
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
    # By hop and direction, size, and message. The first of each size warms connections and memory.
    seconds = np.stack(hops).reshape(len(hops), 2, repeats + 1)[:, :, 1:] / 1e9
    latency, slow = (float(np.median(seconds[:, number])) for number in range(2))
    return LinkCosts(latency=latency, bandwidth=size / max(slow - latency, 1e-9))
