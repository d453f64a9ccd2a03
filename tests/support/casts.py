"""Modules that cast their weights once for a mini-batch, as those of Transformer Engine do."""

import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt import Pipeline

MEMORY = {}
"""What the modules keep, by the number of each; the tests run in one process."""


class Product(torch.autograd.Function):
    """A product whose backward reads what its forward has used, whatever has become of it."""

    @staticmethod
    def forward(ctx, x, weight, cast):
        ctx.x, ctx.cast = x, cast
        return x @ cast.float().t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.cast.float(), gradient.t() @ ctx.x, None


class Cast(nn.Module):
    """A layer with weights in bfloat16, which it may keep from one call to the next."""

    def __init__(self, number):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.number = number

    def forward(self, x, is_first_microbatch=None):
        said, casts = MEMORY.setdefault(self.number, ([], {}))
        said.append(is_first_microbatch)
        new = self.weight.detach().to(torch.bfloat16)
        if is_first_microbatch is None:
            cast = new
        elif is_first_microbatch and "kept" in casts:
            cast = casts["kept"].copy_(new)  # in place, as the workspaces there
        elif is_first_microbatch:
            cast = casts["kept"] = new.clone()
        else:
            cast = casts["kept"]
        return Product.apply(x, self.weight, cast)


class Plain(Cast):
    """The same layer, which casts in every call."""

    def forward(self, x):
        return Product.apply(x, self.weight, self.weight.detach().to(torch.bfloat16))


class Block(nn.Module):
    """A layer with another one inside, which nobody tells anything."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return torch.relu(self.inside(x))


def train(cls, **options):
    torch.manual_seed(0)
    MEMORY.clear()
    model = nn.Sequential(*(Block(cls(n)) for n in range(3)))
    data = [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(9)]
    with Pipeline(
        model, stages=3, loss_fn=F.mse_loss, workers="serial", corrections=(),
        optimizer=(torch.optim.SGD, {"lr": 0.05}), **options,
    ) as pipe:  # fmt: skip
        losses = [result.loss for result in pipe.train_epoch(data)]
        said = [list(MEMORY[n][0]) for n in MEMORY]
        pipe.evaluate(data[:2])
        return losses, pipe.state_dict(), said
