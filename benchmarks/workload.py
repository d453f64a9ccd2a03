"""What every program of a comparison trains: one model, one set of mini-batches, one optimizer.

Torch and the standard library are all that is needed here, so that a peer's process has nothing of
this project in it. The transformer has the weights of the one in ``examples/train_charlm.py``; the
emulated layers are those of ``emulated.py``, and both are told again here for that reason.

Letters in shapes: B samples, T positions, D width, V byte values (256).
"""

from __future__ import annotations

import itertools
import json
import sysconfig
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256
WARM_UP = 2
_NEVER = threading.Event()
# One lock for each emulated device of this process: it does one thing at a time, however many
# threads ask. By number and not in the layer, so that layers can be pickled.
_DEVICES = tuple(threading.Lock() for _ in range(1024))


@dataclass(frozen=True)
class Workload:
    """What is trained, and how it is cut.

    Args:
        model: "transformer", "emulated", or "linear": one small layer for each stage.
        stages: Parts of the model; virtual stages, where a process has several.
        micro_batches: Per update.
        updates: Mini-batches that are timed.
        samples: Per micro-batch.
        width: Of the vectors between layers.
        context: Positions of the transformer.
        layers: Blocks of the transformer, equally many for each stage.
        forward_s, backward_s: Seconds of an emulated stage for a micro-batch.
    """

    model: str
    stages: int
    micro_batches: int
    updates: int
    samples: int
    width: int
    context: int = 128
    layers: int = 8
    forward_s: float = 0.0
    backward_s: float = 0.0

    def __post_init__(self) -> None:
        if self.model not in ("transformer", "emulated", "linear"):
            raise ValueError(f"model is {self.model!r}; give 'transformer', 'emulated' or 'linear'")
        if self.model == "transformer" and self.layers % self.stages:
            raise ValueError(
                f"{self.layers} layers do not divide into {self.stages} equal stages; "
                "give a multiple"
            )

    def to_json(self) -> str:
        """Return one line that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """Read what ``to_json`` wrote."""
        return cls(**json.loads(text))


class Embedding(nn.Module):
    """Bytes and their positions to vectors: (B, T) -> (B, T, D)."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)

    def forward(self, bytes_BT: Tensor) -> Tensor:  # noqa: N803
        """Return the sum of both vectors."""
        return self.byte(bytes_BT) + self.position[: bytes_BT.size(1)]


class Block(nn.Module):
    """Attention and a feed-forward layer, both after a norm and beside a residual."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:  # noqa: N803
        """Return as many vectors as are given."""
        x_BTD = x_BTD + self.attend(self.norm1(x_BTD))  # noqa: N806
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))

    def attend(self, x_BTD: Tensor) -> Tensor:  # noqa: N803
        """Return what each position reads from itself and those before it."""
        b, t, d = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, d))


def occupy(device: int, seconds: float) -> None:
    """Keep an emulated device and this thread, not the processor, for a time."""
    with _DEVICES[device]:
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0:
            _NEVER.wait(left)


class _Timed(torch.autograd.Function):
    """Identity that takes a time forward and another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: int, forward_s: float, backward_s: float) -> Tensor:
        ctx.device, ctx.backward_s = device, backward_s
        occupy(device, forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        occupy(ctx.device, ctx.backward_s)
        return gradients[0], None, None, None


class EmulatedLayer(nn.Module):
    """``x * w`` in a given time; half of the backward is for the input, half for the weight.

    Where the input wants no gradient the weight takes the whole time, so all stages are alike.

    Args:
        device: The number of the device that it keeps busy.
        width: Of its input, (B, width), and of its weight.
        forward_s, backward_s: Seconds of a forward, of a whole backward.
    """

    def __init__(self, device: int, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(width))
        self.device, self.forward_s, self.backward_s = device, forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * w``, some time later."""
        half = self.backward_s / 2
        of_weight = half if x.requires_grad else self.backward_s
        w = _Timed.apply(self.w, self.device, 0.0, of_weight)  # type: ignore[no-untyped-call]
        x = _Timed.apply(x, self.device, self.forward_s, half)  # type: ignore[no-untyped-call]
        return x * w


def parts(w: Workload) -> list[nn.Sequential]:
    """Build the model in as many parts as stages, with the same weights every time."""
    torch.manual_seed(0)
    if w.model == "linear":
        return [nn.Sequential(nn.Linear(w.width, w.width)) for _ in range(w.stages)]
    if w.model == "emulated":
        times = (w.width, w.forward_s, w.backward_s)
        return [nn.Sequential(EmulatedLayer(i, *times)) for i in range(w.stages)]
    # Made in the example's order, which decides what each weight gets from the generator.
    blocks = [Block(w.width) for _ in range(w.layers)]
    head = nn.Sequential(nn.LayerNorm(w.width), nn.Linear(w.width, BYTES))
    layers: list[nn.Module] = [Embedding(w.width, w.context), *blocks, head]
    each = w.layers // w.stages
    # The embedding is before the first block, and the head is after the last.
    cuts = [0, *(1 + each * i for i in range(1, w.stages)), len(layers)]
    return [nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise(cuts)]


def whole(w: Workload) -> nn.Sequential:
    """Build the model in one piece."""
    return nn.Sequential(*(layer for part in parts(w) for layer in part))


def batches(w: Workload) -> list[tuple[Tensor, Tensor]]:
    """Make the mini-batches of a run: those to warm up first, then those that are timed."""
    generator = torch.Generator().manual_seed(0)
    count, size = WARM_UP + w.updates, w.micro_batches * w.samples
    if w.model != "transformer":
        return [
            (
                torch.randn(size, w.width, generator=generator),
                torch.randn(size, w.width, generator=generator),
            )
            for _ in range(count)
        ]
    text, out = _text(), []
    for _ in range(count):
        starts = torch.randint(len(text) - w.context - 1, (size,), generator=generator)
        windows = torch.stack([text[s : s + w.context + 1] for s in starts.tolist()]).long()
        out.append((windows[:, :-1].contiguous(), windows[:, 1:].contiguous()))
    return out


def _text() -> Tensor:
    """Return the source of the standard library's own modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(source), dtype=torch.uint8)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Mean loss: cross-entropy of bytes, squared error of other models."""
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer_choice(w: Workload) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the optimizer's class and its options."""
    if w.model != "transformer":
        return torch.optim.SGD, {"lr": 1e-3}
    return torch.optim.AdamW, {"lr": 1e-3, "fused": True}


def optimizer_of(w: Workload, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of some parameters."""
    kind, options = optimizer_choice(w)
    return kind(parameters, **options)
