"""A codec of one's own: one bit for each element of a gradient, and a size for each row.

    python examples/own_codec.py

Four stages train in the thread of this script (workers="serial"), with the bits that four
processes would give.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream_rt import Layout, Pipeline
from pipedream_rt.codecs import ByteCodec


class Signs(ByteCodec):
    """The sign of each element, eight of them in a byte, times the mean size of its row."""

    direction = "backward"  # gradients alone
    feedback = True

    def pack(self, tensor: Tensor) -> tuple[Tensor, ...]:
        rows = tensor.reshape(-1, tensor.shape[-1])
        signs = np.packbits((rows >= 0).numpy(), axis=1)
        return torch.from_numpy(signs), rows.abs().mean(1, keepdim=True)

    def unpack(self, parts: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        signs, sizes = parts
        bits = np.unpackbits(signs.numpy(), axis=1, count=shape[-1])
        return ((2.0 * torch.from_numpy(bits) - 1) * sizes).to(dtype).reshape(shape)


def trained(codec: ByteCodec | None) -> tuple[float, str]:
    """Train for 300 updates; return the last loss, and what stage 1 sends."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    x = torch.randn(64, 64)
    y = x[:, :4].prod(1, keepdim=True)
    with Pipeline(
        nn.Sequential(*layers, nn.Linear(64, 1)),
        stages=4,
        loss_fn=F.mse_loss,
        optimizer=(torch.optim.AdamW, {"lr": 2e-3}),
        micro_batches=4,
        layout=Layout(codecs=codec),
        workers="serial",
    ) as pipe:
        losses = [result.loss for result in pipe.train_epoch([(x, y)] * 300)]
        sent = [line.strip() for line in pipe.explain().splitlines() if "stage 1 sends" in line]
    return losses[-1], sent[0] if sent else "everything crosses as it is"


if __name__ == "__main__":
    for codec in (None, Signs()):
        loss, sent = trained(codec)
        print(f"{type(codec).__name__}: loss {loss:.4f} at last; {sent}")
