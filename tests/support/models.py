"""Models, data and optimizers for the tests."""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, CLASSES = 11, 6, 4


class Of(nn.Module):
    """Computes its output of its input and of its parts, layers or weights."""

    def __init__(self, function, *parts):
        super().__init__()
        self.function, self.names = function, [f"part{i}" for i in range(len(parts))]
        for name, part in zip(self.names, parts):
            setattr(self, name, part)

    def forward(self, x):
        return self.function(x, *(getattr(self, name) for name in self.names))


def tied(width):
    """Two linear layers that share their weight."""
    first, second = nn.Linear(width, width), nn.Linear(width, width)
    second.weight = first.weight
    return first, second


class Transpose(nn.Module):
    """A layer (B, T, D) -> (B, D, T) and back, whose output is not contiguous."""

    def forward(self, x):
        return x.transpose(1, 2)


class Scale(nn.Module):
    """The layer x * w + b, whose weight autograd saves by reference."""

    def __init__(self, width):
        super().__init__()
        self.w = nn.Parameter(torch.ones(width))
        self.b = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x * self.w + self.b


def kitchen_sink():
    """Return twelve layers, one of every kind that treats its weights differently."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 8),
        nn.LayerNorm(8),
        Transpose(),
        nn.Conv1d(8, 8, 3, padding=1),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(8 * LENGTH, 16),
        Scale(16),
        nn.Dropout(0.1),
        nn.Linear(16, CLASSES),
    )


POINTS = {1: [0], 2: [0, 6], 3: [0, 3, 8], 4: [0, 3, 5, 9], 5: [0, 1, 4, 8, 10]}
"""Split points of the kitchen sink, some of them behind Transpose or before the in-place ReLU."""


def batches(count, samples=6, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(VOCABULARY, (samples, LENGTH), generator=generator),
            torch.randint(CLASSES, (samples,), generator=generator),
        )
        for _ in range(count)
    ]


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 3e-3}),
    "adamw": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1, "foreach": False}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1, "fused": True}),
}


def mlp(width=8, layers=6):
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def regression(count, samples=4, width=8):
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(samples, width, generator=generator),
            torch.randn(samples, width, generator=generator),
        )
        for _ in range(count)
    ]


class Counts(nn.Linear):
    """A layer that counts its calls."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Raises(nn.Module):
    """A layer that raises in the forward or backward of one micro-batch, its ``at``-th call."""

    def __init__(self, at=3, where="forward", error=ZeroDivisionError):
        super().__init__()
        self.at, self.where, self.error, self.calls = at, where, error, 0

    def forward(self, x):
        if self.calls == self.at and self.where == "forward":
            raise self.error("the layer's own words")
        if self.calls == self.at and self.where == "backward":
            x.register_hook(self._raise)
        self.calls += 1
        return x

    def _raise(self, gradient):
        raise self.error("the layer's own words")


class Noisy(nn.Module):
    """A layer that draws random numbers in its backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        output = self.linear(x)
        output.register_hook(lambda g: g + 0.1 * torch.randn_like(g))
        return output


class NoisySGD(torch.optim.SGD):
    """SGD that draws random numbers in its step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad += 0.1 * torch.randn_like(p.grad)
        super().step()


class Stalls(nn.Module):
    """A layer that stalls after ``at`` calls, as a deadlock in a user's code does."""

    def __init__(self, at=2):
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > self.at:
            threading.Event().wait(60)
        return x


class Unpicklable(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x):
        return x


@dataclass
class Pair:
    """A value that crosses stages: tensors with and without a gradient, a text, None and a dict."""

    hidden: Tensor
    mask: Tensor
    name: str
    nothing: None
    extra: dict


class MakePair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        hidden = self.linear(x)
        return Pair(hidden, hidden > 0, "pair", None, {"both": (hidden * 2, [hidden.half()])})


class UsePair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair):
        assert isinstance(pair, Pair)
        assert pair.name == "pair"
        assert pair.nothing is None
        twice, (half,) = pair.extra["both"]
        assert half.dtype == torch.float16
        return self.linear(pair.hidden * pair.mask) + twice


class Blocks(torch.autograd.Function):
    """Gives no gradient back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


class Blocked(nn.Module):
    def forward(self, x):
        return Blocks.apply(x)


class RunsBackwardInside(nn.Module):
    """As reversible layers do: its weights get their gradients past the graph."""

    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return Inside.apply(x, self.inner) if x.requires_grad else self.inner(x)


class Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(x)
        torch.autograd.backward(output, gradient)
        return x.grad, None


class Recomputes(nn.Module):
    """BatchNorm inside a checkpoint: its backward changes the statistics once more."""

    def __init__(self, width=8):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False)


class Noise(torch.autograd.Function):
    """The identity, whose backward adds random numbers."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.randn_like(gradient)


class NoisyEverywhere(torch.nn.Linear):
    """A layer whose backward draws for the gradients of its input and of its weight."""

    def forward(self, x):
        weight = Noise.apply(self.weight)
        return torch.nn.functional.linear(Noise.apply(x), weight, self.bias)


class Merges(nn.Module):
    """As adapters do: in eval mode it adds to the weight what it has learned beside it."""

    def __init__(self):
        super().__init__()
        self.weight, self.beside = nn.Parameter(torch.ones(2) / 3), nn.Parameter(torch.ones(2) / 7)
        self.merged = False

    def train(self, mode=True):
        if mode is self.merged:
            with torch.no_grad():
                self.weight.add_(self.beside, alpha=-1 if self.merged else 1)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return x * (self.weight if self.merged else self.weight + self.beside)
