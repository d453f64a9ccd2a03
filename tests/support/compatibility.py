"""The table of what a user may write: does a pipeline do the same as plain PyTorch, or refuse it?

``python -m support.compatibility`` in the folder of the tests prints it as the page
docs/compatibility.md.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.flop_counter import FlopCounterMode

from .plain import train_plainly

STEPS = 4


@dataclass(frozen=True)
class Row:
    """One thing that a user may write.

    group, what: where it stands in the table. make: returns the model, the data and the loss.
    optimizer: makes the optimizer of parameters. script: see `train_plainly`. options: more
    arguments of Pipeline. refused: the words with which it is refused; empty if it is the same.
    """

    group: str
    what: str
    make: Callable
    optimizer: Callable = field(default=lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    script: Callable = field(default=lambda optimizer: None)
    options: dict = field(default_factory=dict)
    refused: str = ""

    @property
    def name(self):
        return f"{self.group}-{self.what}"


class Scale(nn.Module):
    """Something to train before a layer, so that gradients go through it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.9))

    def forward(self, x):
        return x * self.w


class Head(nn.Module):
    """Takes whatever a layer gives, and gives something to train on."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.1))

    def forward(self, value):
        if isinstance(value, torch.Tensor):
            value = (value,)
        found = []
        for each in value:
            if isinstance(each, tuple):
                each = each[0]
            if each is not None and each.is_floating_point():
                found.append(torch.sin(each.flatten()))
        return torch.cat(found) * self.w


class Call(nn.Module):
    """A layer that is called in another way than with one value."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x):
        return self.call(self.layer, x)


def mean_square(output, target):
    return (output * output).mean()


def batches(make_input, make_target=lambda: torch.zeros(1)):
    """Return mini-batches, of which the first decides nothing about the others."""
    torch.manual_seed(5)
    return [(make_input(), make_target()) for _ in range(STEPS)]


def around(make_layer, shape, call=None):
    """Return what makes a model of three stages with a layer in the middle."""

    def make():
        torch.manual_seed(3)
        layer = make_layer()
        model = nn.Sequential(Scale(), Call(layer, call) if call else layer, Head())
        return model, [1, 2], batches(lambda: torch.rand(shape) + 0.1), mean_square

    return make


def behind_nothing(make_layer, make_input, call=None):
    """Return what makes a model of two stages that begins with a layer."""

    def make():
        torch.manual_seed(3)
        layer = make_layer()
        model = nn.Sequential(Call(layer, call) if call else layer, Head())
        return model, [1], batches(make_input), mean_square

    return make


def with_loss(make_loss, shape, make_target, activation=None):
    """Return what makes a model of two stages that ends with a loss."""

    def make():
        torch.manual_seed(3)
        layers = [nn.Linear(shape[-1], shape[-1]), *([activation()] if activation else []), Scale()]
        data = batches(lambda: torch.randn(shape), make_target)
        return nn.Sequential(*layers), [1], data, make_loss()

    return make


def linear(**changes):
    """Return what makes a small model of two stages; changes: model, data, loss by name."""

    def make():
        torch.manual_seed(3)
        parts = {
            "model": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
            "points": [1],
            "data": lambda: batches(lambda: torch.randn(3, 4), lambda: torch.randn(3, 4)),
            "loss": lambda: F.mse_loss,
            **changes,
        }
        return parts["model"](), parts["points"], parts["data"](), parts["loss"]()

    return make


# -- layers -----------------------------------------------------------------------------------

S1, S2, S3 = (2, 4, 8), (2, 4, 6, 6), (2, 4, 4, 4, 4)
C = "a container, which has no forward"
LAYERS = {
    "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(3), S1),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(3), S2),
    "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d(3), S3),
    "AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(3), S1),
    "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d(3), S2),
    "AdaptiveMaxPool3d": (lambda: nn.AdaptiveMaxPool3d(3), S3),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.3), S1),
    "AvgPool1d": (lambda: nn.AvgPool1d(2), S1),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), S2),
    "AvgPool3d": (lambda: nn.AvgPool3d(2), S3),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), S1),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), S2),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), S3),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 3), S1, lambda layer, x: layer(x, x)),
    "CELU": (nn.CELU, S1),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), S2),
    "CircularPad1d": (lambda: nn.CircularPad1d(1), S1),
    "CircularPad2d": (lambda: nn.CircularPad2d(1), S2),
    "CircularPad3d": (lambda: nn.CircularPad3d(1), S3),
    "ConstantPad1d": (lambda: nn.ConstantPad1d(1, 0.5), S1),
    "ConstantPad2d": (lambda: nn.ConstantPad2d(1, 0.5), S2),
    "ConstantPad3d": (lambda: nn.ConstantPad3d(1, 0.5), S3),
    "Conv1d": (lambda: nn.Conv1d(4, 3, 3), S1),
    "Conv2d": (lambda: nn.Conv2d(4, 3, 3), S2),
    "Conv3d": (lambda: nn.Conv3d(4, 3, 3), S3),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 3, 3), S1),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 3, 3), S2),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 3, 3), S3),
    "CosineSimilarity": (nn.CosineSimilarity, S1, lambda layer, x: layer(x, x.flip(0))),
    "CrossMapLRN2d": (lambda: nn.CrossMapLRN2d(2), S2),
    "DataParallel": (lambda: nn.DataParallel(nn.Linear(8, 3)), S1),
    "Dropout": (lambda: nn.Dropout(0.3), S1),
    "Dropout1d": (lambda: nn.Dropout1d(0.3), S1),
    "Dropout2d": (lambda: nn.Dropout2d(0.3), S2),
    "Dropout3d": (lambda: nn.Dropout3d(0.3), S3),
    "ELU": (nn.ELU, S1),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(0.3), S2),
    "Flatten": (nn.Flatten, S1),
    "Fold": (lambda: nn.Fold((3, 3), 2), (2, 4, 4)),
    "FractionalMaxPool2d": (lambda: nn.FractionalMaxPool2d(2, output_ratio=0.6), S2),
    "FractionalMaxPool3d": (lambda: nn.FractionalMaxPool3d(2, output_ratio=0.6), S3),
    "GELU": (nn.GELU, S1),
    "GLU": (nn.GLU, S1),
    "GRU": (lambda: nn.GRU(8, 3, batch_first=True), S1),
    "GRUCell": (lambda: nn.GRUCell(8, 3), (2, 8)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), S2),
    "Hardshrink": (nn.Hardshrink, S1),
    "Hardsigmoid": (nn.Hardsigmoid, S1),
    "Hardswish": (nn.Hardswish, S1),
    "Hardtanh": (nn.Hardtanh, S1),
    "Identity": (nn.Identity, S1),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), S1),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), S2),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4), S3),
    "LPPool1d": (lambda: nn.LPPool1d(2, 2), S1),
    "LPPool2d": (lambda: nn.LPPool2d(2, 2), S2),
    "LPPool3d": (lambda: nn.LPPool3d(2, 2), S3),
    "LSTM": (lambda: nn.LSTM(8, 3, batch_first=True), S1),
    "LSTMCell": (lambda: nn.LSTMCell(8, 3), (2, 8)),
    "LayerNorm": (lambda: nn.LayerNorm(8), S1),
    "LeakyReLU": (nn.LeakyReLU, S1),
    "Linear": (lambda: nn.Linear(8, 3), S1),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), S2),
    "LogSigmoid": (nn.LogSigmoid, S1),
    "LogSoftmax": (lambda: nn.LogSoftmax(1), S1),
    "MaxPool1d": (lambda: nn.MaxPool1d(2), S1),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), S2),
    "MaxPool3d": (lambda: nn.MaxPool3d(2), S3),
    "MaxUnpool1d": (
        lambda: nn.MaxUnpool1d(2), S1, lambda f, x: f(*F.max_pool1d(x, 2, return_indices=True)),
    ),
    "MaxUnpool2d": (
        lambda: nn.MaxUnpool2d(2), S2, lambda f, x: f(*F.max_pool2d(x, 2, return_indices=True)),
    ),
    "MaxUnpool3d": (
        lambda: nn.MaxUnpool3d(2), S3, lambda f, x: f(*F.max_pool3d(x, 2, return_indices=True)),
    ),
    "Mish": (nn.Mish, S1),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True), S1,
        lambda layer, x: layer(x, x, x)[0],
    ),
    "PReLU": (nn.PReLU, S1),
    "PairwiseDistance": (nn.PairwiseDistance, (2, 8), lambda layer, x: layer(x, x.flip(0))),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), S2),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), S2),
    "RMSNorm": (lambda: nn.RMSNorm(8), S1),
    "RNN": (lambda: nn.RNN(8, 3, batch_first=True), S1),
    "RNNCell": (lambda: nn.RNNCell(8, 3), (2, 8)),
    "RReLU": (nn.RReLU, S1),
    "ReLU": (lambda: nn.ReLU(inplace=True), S1),
    "ReLU6": (nn.ReLU6, S1),
    "ReflectionPad1d": (lambda: nn.ReflectionPad1d(1), S1),
    "ReflectionPad2d": (lambda: nn.ReflectionPad2d(1), S2),
    "ReflectionPad3d": (lambda: nn.ReflectionPad3d(1), S3),
    "ReplicationPad1d": (lambda: nn.ReplicationPad1d(1), S1),
    "ReplicationPad2d": (lambda: nn.ReplicationPad2d(1), S2),
    "ReplicationPad3d": (lambda: nn.ReplicationPad3d(1), S3),
    "SELU": (nn.SELU, S1),
    "Sequential": (lambda: nn.Sequential(nn.Linear(8, 3), nn.ReLU()), S1),
    "SiLU": (nn.SiLU, S1),
    "Sigmoid": (nn.Sigmoid, S1),
    "Softmax": (lambda: nn.Softmax(1), S1),
    "Softmax2d": (nn.Softmax2d, S2),
    "Softmin": (lambda: nn.Softmin(1), S1),
    "Softplus": (nn.Softplus, S1),
    "Softshrink": (nn.Softshrink, S1),
    "Softsign": (nn.Softsign, S1),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), S2),
    "Tanh": (nn.Tanh, S1),
    "Tanhshrink": (nn.Tanhshrink, S1),
    "Threshold": (lambda: nn.Threshold(0.3, 0.1), S1),
    "Transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 8, batch_first=True), S1,
        lambda layer, x: layer(x, x.flip(1)),
    ),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8, batch_first=True), 1), S1,
        lambda layer, x: layer(x, x.flip(1)),
    ),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(8, 2, 8, batch_first=True), S1,
        lambda layer, x: layer(x, x.flip(1)),
    ),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1), S1,
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), S1,
    ),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 2)), S1),
    "Unfold": (lambda: nn.Unfold(2), S2),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), S1),
    "UpsamplingBilinear2d": (lambda: nn.UpsamplingBilinear2d(scale_factor=2), S2),
    "UpsamplingNearest2d": (lambda: nn.UpsamplingNearest2d(scale_factor=2), S2),
    "ZeroPad1d": (lambda: nn.ZeroPad1d(1), S1),
    "ZeroPad2d": (lambda: nn.ZeroPad2d(1), S2),
    "ZeroPad3d": (lambda: nn.ZeroPad3d(1), S3),
}  # fmt: skip

FIRST = {
    "Embedding": (lambda: nn.Embedding(7, 3), lambda: torch.randint(7, (2, 5))),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(7, 3), lambda: torch.randint(7, (2, 5))),
    "ParameterDict": (
        lambda: nn.ParameterDict({"a": torch.ones(3)}), lambda: torch.randn(2, 3),
        lambda layer, x: x * layer["a"],
    ),
    "ParameterList": (
        lambda: nn.ParameterList([torch.ones(3)]), lambda: torch.randn(2, 3),
        lambda layer, x: x * layer[0],
    ),
    "ModuleDict": (
        lambda: nn.ModuleDict({"a": nn.Linear(3, 3)}), lambda: torch.randn(2, 3),
        lambda layer, x: layer["a"](x),
    ),
    "ModuleList": (
        lambda: nn.ModuleList([nn.Linear(3, 3)]), lambda: torch.randn(2, 3),
        lambda layer, x: layer[0](x),
    ),
}  # fmt: skip

LAZY = {
    "LazyBatchNorm1d": (nn.LazyBatchNorm1d, S1),
    "LazyBatchNorm2d": (nn.LazyBatchNorm2d, S2),
    "LazyBatchNorm3d": (nn.LazyBatchNorm3d, S3),
    "LazyConv1d": (lambda: nn.LazyConv1d(3, 2), S1),
    "LazyConv2d": (lambda: nn.LazyConv2d(3, 2), S2),
    "LazyConv3d": (lambda: nn.LazyConv3d(3, 2), S3),
    "LazyConvTranspose1d": (lambda: nn.LazyConvTranspose1d(3, 2), S1),
    "LazyConvTranspose2d": (lambda: nn.LazyConvTranspose2d(3, 2), S2),
    "LazyConvTranspose3d": (lambda: nn.LazyConvTranspose3d(3, 2), S3),
    "LazyInstanceNorm1d": (lambda: nn.LazyInstanceNorm1d(affine=True), S1),
    "LazyInstanceNorm2d": (lambda: nn.LazyInstanceNorm2d(affine=True), S2),
    "LazyInstanceNorm3d": (lambda: nn.LazyInstanceNorm3d(affine=True), S3),
    "LazyLinear": (lambda: nn.LazyLinear(3), S1),
}


def whole(n, *shape):
    return lambda: torch.randint(n, shape)


def signs(*shape):
    return lambda: torch.randint(2, shape) * 2.0 - 1


class OfPairs(nn.Module):
    """A loss of several outputs, which are here one output and its neighbours."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, output, target):
        others = [output.roll(i, 0) for i in range(1, 1 + (self.loss_inputs() - 1))]
        return self.loss(output, *others, *([] if target.numel() == 1 else [target]))

    def loss_inputs(self):
        return 3 if "Triplet" in type(self.loss).__name__ else 2


class CTC(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.CTCLoss()

    def forward(self, output, target):
        scores = output.view(5, 2, 4).log_softmax(2)
        return self.loss(scores, target, torch.tensor([5, 5]), torch.tensor([2, 2]))


class Adaptive(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(8, 6, [2, 4])

    def forward(self, output, target):
        return self.loss(output, target).loss


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.GaussianNLLLoss()

    def forward(self, output, target):
        return self.loss(output, target, output.exp())


LOSSES = {
    "AdaptiveLogSoftmaxWithLoss": (Adaptive, (3, 8), whole(6, 3)),
    "BCELoss": (nn.BCELoss, (3, 4), lambda: torch.rand(3, 4), nn.Sigmoid),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss, (3, 4), lambda: torch.rand(3, 4)),
    "CTCLoss": (CTC, (10, 4), lambda: torch.randint(1, 4, (2, 2))),
    "CosineEmbeddingLoss": (lambda: OfPairs(nn.CosineEmbeddingLoss()), (3, 4), signs(3)),
    "CrossEntropyLoss": (nn.CrossEntropyLoss, (3, 4), whole(4, 3)),
    "GaussianNLLLoss": (Gaussian, (3, 4), lambda: torch.randn(3, 4)),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss, (3, 4), signs(3, 4)),
    "HuberLoss": (nn.HuberLoss, (3, 4), lambda: torch.randn(3, 4)),
    "KLDivLoss": (
        lambda: nn.KLDivLoss(reduction="batchmean"), (3, 4),
        lambda: torch.randn(3, 4).softmax(1), lambda: nn.LogSoftmax(1),
    ),
    "L1Loss": (nn.L1Loss, (3, 4), lambda: torch.randn(3, 4)),
    "MSELoss": (nn.MSELoss, (3, 4), lambda: torch.randn(3, 4)),
    "MarginRankingLoss": (lambda: OfPairs(nn.MarginRankingLoss()), (3, 4), signs(3, 4)),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss, (3, 4), whole(4, 3, 4)),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss, (3, 4), lambda: torch.rand(3, 4)),
    "MultiMarginLoss": (nn.MultiMarginLoss, (3, 4), whole(4, 3)),
    "NLLLoss": (nn.NLLLoss, (3, 4), whole(4, 3), lambda: nn.LogSoftmax(1)),
    "NLLLoss2d": (nn.NLLLoss, (3, 4), whole(4, 3), lambda: nn.LogSoftmax(1)),
    "PoissonNLLLoss": (nn.PoissonNLLLoss, (3, 4), lambda: torch.rand(3, 4)),
    "SmoothL1Loss": (nn.SmoothL1Loss, (3, 4), lambda: torch.randn(3, 4)),
    "SoftMarginLoss": (nn.SoftMarginLoss, (3, 4), signs(3, 4)),
    "TripletMarginLoss": (
        lambda: OfPairs(nn.TripletMarginLoss()), (3, 4), lambda: torch.zeros(1),
    ),
    "TripletMarginWithDistanceLoss": (
        lambda: OfPairs(nn.TripletMarginWithDistanceLoss()), (3, 4), lambda: torch.zeros(1),
    ),
}  # fmt: skip

if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.13
    LOSSES["LinearCrossEntropyLoss"] = (
        lambda: nn.LinearCrossEntropyLoss(8, 6),
        (3, 8),
        whole(6, 3),
    )

NOT_LAYERS = {
    "Module": "the base of all layers",
    "Container": "an old name of it",
    "RNNBase": "the base of RNN, LSTM and GRU",
    "RNNCellBase": "the base of the cells",
}
"""Classes of torch.nn that no row can train."""


def initialised(make_lazy, shape):
    def make():
        layer = make_lazy()
        layer(torch.rand(shape))
        return layer

    return make


def rows_of_layers():
    for name, (make, shape, *call) in LAYERS.items():
        yield Row("layers", f"nn.{name}", around(make, shape, *call))
    for name, (make, make_input, *call) in FIRST.items():
        yield Row("layers", f"nn.{name}", behind_nothing(make, make_input, *call))
    for name, (make, shape) in LAZY.items():
        what = f"nn.{name}, after the model was run once"
        yield Row("layers", what, around(initialised(make, shape), shape))
    yield Row(
        "layers", "nn.LazyLinear, never run", around(lambda: nn.LazyLinear(3), S1),
        refused=r"1\.weight has no shape yet.*run the model once",
    )  # fmt: skip
    for name, (make, shape, target, *activation) in LOSSES.items():
        yield Row("losses", f"nn.{name}", with_loss(make, shape, target, *activation))


# -- optimizers and schedulers ----------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms (2023)."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_((m * fast + p.grad * (1 - fast)).sign(), alpha=-group["lr"])
                m.mul_(slow).add_(p.grad, alpha=1 - slow)


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Defazio et al., The Road Less Scheduled (2024): values of its own in the groups."""

    def __init__(self, params, lr=0.05, beta=0.9, warmup=2):
        super().__init__(
            params, {"lr": lr, "beta": beta, "warmup": warmup, "k": 0, "weight_sum": 0.0}
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            rate = group["lr"] * min(1.0, group["k"] / group["warmup"])
            group["weight_sum"] += rate**2
            share = rate**2 / group["weight_sum"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["z"] = p.clone()
                x = (p - (1 - group["beta"]) * state["z"]) / group["beta"]
                state["z"].sub_(p.grad, alpha=rate)
                x.lerp_(state["z"], share)
                p.copy_(group["beta"] * x + (1 - group["beta"]) * state["z"])


class OldStyle(torch.optim.Optimizer):
    """Assigns .data, counts in an attribute, draws random numbers."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.data = p.data - group["lr"] / self.calls * p.grad


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        raise AssertionError("it is never called without one")


def groups_with(*optimizer, **options):
    """Return what makes an optimizer of two parameter groups."""
    cls, *_ = optimizer

    def make(parameters):
        half = len(parameters) // 2
        return cls(
            [{"params": parameters[:half], "lr": 0.02}, {"params": parameters[half:]}], **options
        )

    return make


def rows_of_optimizers():
    def of(cls, **options):
        return lambda parameters: cls(parameters, **options)

    matrices = linear(model=lambda: nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in "abc")))
    sparse = linear(
        model=lambda: nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Tanh()),
        data=lambda: batches(lambda: torch.randint(7, (2, 5))),
        loss=lambda: mean_square,
    )
    with_options = {
        "ASGD": {}, "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True},
        "AdamW": {}, "Adamax": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9},
        "Rprop": {}, "SGD": {"momentum": 0.9, "nesterov": True},
    }  # fmt: skip
    for name, options in with_options.items():
        cls = getattr(torch.optim, name)
        yield Row("optimizers", f"optim.{name}", linear(), of(cls, lr=0.02, **options))
    yield Row("optimizers", "optim.Muon", matrices, of(torch.optim.Muon, lr=0.02))
    yield Row("optimizers", "optim.SparseAdam", sparse, of(torch.optim.SparseAdam, lr=0.02))
    yield Row(
        "optimizers", "optim.LBFGS", linear(), of(torch.optim.LBFGS),
        refused="LBFGS evaluates the model several times in a step",
    )  # fmt: skip
    for cls in (Lion, ScheduleFreeSGD, OldStyle):
        yield Row("optimizers", f"{cls.__name__}, of one's own", linear(), of(cls))
    yield Row(
        "optimizers", "a step that needs a closure", linear(), of(NeedsClosure, lr=0.1),
        refused="step.* missing 1 required positional argument: 'closure'",
    )  # fmt: skip
    adam = torch.optim.Adam
    yield Row("optimizers", "parameter groups", linear(), groups_with(adam, lr=0.1))
    for flag in ("foreach", "fused"):
        yield Row("optimizers", f"Adam({flag}=True)", linear(), of(adam, **{flag: True}))
    tensor_rates = {
        "Adam": {}, "AdamW": {}, "NAdam": {}, "Adamax": {}, "ASGD": {}, "SGD": {}, "Adagrad": {},
    }  # fmt: skip
    for name in tensor_rates:
        cls = getattr(torch.optim, name)
        yield Row(
            "hyper-parameters", f"{name}(lr=torch.tensor(0.02))", linear(),
            lambda parameters, cls=cls: cls(parameters, lr=torch.tensor(0.02), foreach=False),
        )  # fmt: skip


def every_step(change):
    """Return a script that changes the optimizer's groups after every step."""

    def script(optimizer):
        steps = iter(range(100))

        def after_step(loss):
            for group in optimizer.param_groups:
                change(group, next(steps))

        return after_step

    return script


def scheduled(make_scheduler, with_loss=False):
    """Return a script that steps a scheduler after every step."""

    def script(optimizer):
        scheduler = make_scheduler(optimizer)
        return scheduler.step if with_loss else lambda loss: scheduler.step()

    return script


def rows_of_schedulers():
    import numpy as np

    s = lr_scheduler
    schedulers = {
        "ChainedScheduler": lambda o: s.ChainedScheduler(
            [s.ConstantLR(o), s.ExponentialLR(o, 0.9)]
        ),
        "ConstantLR": s.ConstantLR,
        "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 10),
        "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 2),
        "CyclicLR": lambda o: s.CyclicLR(o, 0.01, 0.1, 2),
        "ExponentialLR": lambda o: s.ExponentialLR(o, 0.5),
        "LambdaLR": lambda o: s.LambdaLR(o, lambda t: 1 / (t + 1)),
        "LinearLR": s.LinearLR,
        "MultiStepLR": lambda o: s.MultiStepLR(o, [1, 3]),
        "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda t: 0.7),
        "OneCycleLR": lambda o: s.OneCycleLR(o, 0.1, total_steps=10),
        "PolynomialLR": s.PolynomialLR,
        "SequentialLR": lambda o: s.SequentialLR(
            o, [s.ConstantLR(o), s.ExponentialLR(o, 0.9)], [2]
        ),
        "StepLR": lambda o: s.StepLR(o, 2),
    }

    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    for name, make in schedulers.items():
        yield Row("schedulers", f"lr_scheduler.{name}", linear(), momentum, scheduled(make))
    yield Row(
        "schedulers", "lr_scheduler.ReduceLROnPlateau", linear(), momentum,
        scheduled(lambda o: s.ReduceLROnPlateau(o, patience=0), with_loss=True),
    )  # fmt: skip
    yield Row(
        "schedulers", "a LambdaLR that returns NumPy's numbers", linear(), momentum,
        scheduled(lambda o: s.LambdaLR(o, lambda t: np.float32(0.9) ** t)),
    )  # fmt: skip
    yield Row(
        "schedulers", "an Adam with a tensor for a rate", linear(),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), foreach=False),
        scheduled(lambda o: s.ExponentialLR(o, 0.5)),
    )  # fmt: skip

    def sets(name, value):
        return every_step(lambda group, step: group.update({name: value(step)}))

    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=0.05)

    values = {
        "a float": lambda t: 0.05 / (t + 1),
        "an int": lambda t: 1,
        "np.float32": lambda t: np.float32(0.05) / np.float32(t + 1),
        "np.float64": lambda t: np.float64(0.05) / (t + 1),
        "np.int64": lambda t: np.int64(1),
        "a tensor": lambda t: torch.tensor(0.05) / (t + 1),
    }
    for what, value in values.items():
        yield Row(
            "hyper-parameters", f"group['lr'] = {what}", linear(),
            lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False), sets("lr", value),
        )  # fmt: skip

    def clips(optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return lambda loss: nn.utils.clip_grad_norm_(parameters, 1.0)

    more = nn.Parameter(torch.ones(1))
    scripts = {
        "group['betas'] = a tuple": (sets("betas", lambda t: (0.5 + t / 10, 0.9)), ""),
        "group['betas'] = a list": (sets("betas", lambda t: [0.5 + t / 10, 0.9]), ""),
        "group['weight_decay'] = a float": (sets("weight_decay", lambda t: 0.1 * t), ""),
        "group['lr'] = a function": (
            sets("lr", lambda t: print), "the hyper-parameter 'lr' is <built-in function print",
        ),
        "optimizer.add_param_group(...)": (
            lambda o: lambda loss: o.add_param_group({"params": [more]}),
            "the stages have built their optimizers, so no group can be added",
        ),
        "optimizer.step() in the script": (
            lambda o: lambda loss: o.step(), r"pipe.optimizer.step\(\) has nothing to do",
        ),
        "optimizer.register_step_pre_hook(...)": (
            lambda o: o.register_step_pre_hook(print), "a hook on the steps of pipe.optimizer",
        ),
        "optimizer.zero_grad() in the script": (lambda o: lambda loss: o.zero_grad(), ""),
        "clip_grad_norm_ over the optimizer's parameters": (
            clips, "live on workers, so they have no gradients to clip",
        ),
    }  # fmt: skip
    for what, (script, refused) in scripts.items():
        yield Row("hyper-parameters", what, linear(), adam, script, refused=refused)


# -- models -----------------------------------------------------------------------------------


def a_linear_with(change):
    """Return what makes a model whose middle layer was changed."""

    def model():
        made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        change(made)
        return made

    return linear(model=model)


class Through(nn.Module):
    """A layer that is a function."""

    def __init__(self, call):
        super().__init__()
        self.w, self.call = nn.Parameter(torch.ones(4)), call

    def forward(self, x):
        return self.call(x * self.w)


def through(call, back=lambda x: x):
    """Return what makes a model in which a value of some kind crosses a hop."""

    def model():
        return nn.Sequential(nn.Linear(4, 4), Through(call), Through(lambda x: x), nn.Linear(4, 4))

    def made():
        whole_model = model()
        whole_model[2] = Call(nn.Linear(4, 4), lambda layer, value: layer(back(value)))
        return whole_model

    return linear(model=made, points=[2])


class Conjugates(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.w, self.how = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64)), how

    def forward(self, x):
        value = x.to(torch.complex64) @ self.w
        return value.conj() if self.how == "conj" else value.conj().imag


class RealPart(nn.Module):
    def forward(self, x):
        return x.real + 2 * x.imag if x.is_complex() else x


class HoldsOther(nn.Module):
    """Holds a layer of another stage where nobody sees it."""

    def __init__(self, other, how):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if how == "tuple":
            self.other = (other,)
        else:
            self.other = lambda x: other(x)

    def forward(self, x):
        other = self.other[0] if isinstance(self.other, tuple) else self.other
        return self.linear(x) + other(x)


class Shares(nn.Module):
    """A constant buffer, as of rotary embeddings, or one that changes."""

    def __init__(self, table, changes=False):
        super().__init__()
        self.linear, self.changes = nn.Linear(4, 4), changes
        self.register_buffer("table", table)

    def forward(self, x):
        if self.changes and self.training:
            self.table += 1
        return self.linear(x) * self.table


class LearnedLoss(nn.Module):
    """A loss with a weight and a buffer, as of uncertainty weighting."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, output, target):
        if self.training:
            self.seen += 1
        return F.mse_loss(output, target) * torch.exp(-self.w) + self.w + 0 * self.seen.sum()


def closes_over(stage):
    def make():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        layer = model[0 if stage == 0 else 2]
        data = batches(lambda: torch.randn(3, 4), lambda: torch.randn(3, 4))
        return model, [1], data, lambda o, t: F.mse_loss(o, t) + layer.weight.square().mean()

    return make


def rows_of_models():
    def hooked(model):
        model[1].register_forward_hook(lambda module, args, output: output * 1.5)
        model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model[2].register_full_backward_hook(lambda module, given, got: (given[0] * 2,))

    def clamps(model):
        model[1].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))

    def after(p):
        p.grad.mul_(0.5)

    def reads_other(model):
        other = model[0].weight
        model[2].weight.register_hook(lambda g: g + other.sum())

    yield Row("hooks", "hooks of modules", a_linear_with(hooked))
    yield Row("hooks", "Parameter.register_hook", a_linear_with(clamps))
    yield Row(
        "hooks", "Parameter.register_post_accumulate_grad_hook",
        a_linear_with(lambda m: m[0].weight.register_post_accumulate_grad_hook(after)),
    )  # fmt: skip
    yield Row(
        "hooks", "Parameter.register_hook, zero-bubble", a_linear_with(clamps),
        options={"schedule": "zero-bubble"},
        refused="1.weight has a hook on its gradient, and zero-bubble computes gradients in two",
    )  # fmt: skip
    yield Row(
        "hooks", "a hook that reads a weight of another stage", a_linear_with(reads_other),
        refused=r"the hook of 2.weight of stage 1 refers to 0.weight of stage 0",
    )  # fmt: skip

    def ties(model):
        model[2].weight = model[1].weight

    def copies(model):
        model[2].weight = nn.Parameter(model[1].weight)

    def copies_across(model):
        model[1].weight = nn.Parameter(model[0].weight)

    def ties_across(model):
        model[1].weight = model[0].weight

    yield Row("weights", "tied weights within a stage", a_linear_with(ties))
    yield Row("weights", "tied weights across stages", a_linear_with(ties_across))
    for what, change in (("within a stage", copies), ("across stages", copies_across)):
        yield Row(
            "weights", f"nn.Parameter(other.weight) {what}", a_linear_with(change),
            refused="two tensors over the same memory",
        )  # fmt: skip
    yield Row(
        "weights", "some frozen parameters", a_linear_with(lambda m: m[1].requires_grad_(False))
    )
    yield Row(
        "weights", "all parameters frozen", a_linear_with(lambda m: m.requires_grad_(False)),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        refused="no parameter of the model requires a gradient",
    )  # fmt: skip
    for name in ("weight_norm", "spectral_norm", "orthogonal"):
        change = getattr(nn.utils.parametrizations, name)
        yield Row("weights", f"parametrizations.{name}", a_linear_with(lambda m, f=change: f(m[1])))
    for how in ("tuple", "closure"):
        yield Row(
            "weights", f"a layer of another stage in a {how}",
            a_linear_with(lambda m, how=how: m.__setitem__(2, HoldsOther(m[0], how))),
            refused=r"layer 2 of stage 1 refers to 0\.\w+ of stage 0, by a closure, a tuple",
        )  # fmt: skip
    yield Row(
        "weights", "torch.jit.script",
        a_linear_with(lambda m: m.__setitem__(1, torch.jit.script(nn.Linear(4, 4)))),
        refused=r"layer 1 \(.*\) cannot be pickled.*give the module as it was before",
    )  # fmt: skip
    edits = linear(
        model=lambda: nn.Sequential(nn.Embedding(7, 4, max_norm=0.5), nn.Linear(4, 4), Head()),
        data=lambda: batches(lambda: torch.randint(7, (3, 2))),
        loss=lambda: mean_square,
    )
    yield Row("weights", "nn.Embedding(max_norm=...), 1f1b", edits)
    yield Row(
        "weights", "nn.Embedding(max_norm=...), async-1f1b", edits,
        options={"schedule": "async-1f1b"},
        refused="has max_norm, which changes its weight in forward",
    )  # fmt: skip

    def constant(model):
        table = torch.tensor([1.0, 2.0, 3.0, 4.0])
        model[0], model[2] = Shares(table), Shares(table)

    def changing(model):
        table = torch.zeros(4)
        model[0], model[2] = Shares(table, changes=True), Shares(table)

    yield Row("buffers", "a constant buffer shared by two stages", a_linear_with(constant))
    yield Row(
        "buffers", "a buffer shared by two stages that a forward changes", a_linear_with(changing),
        refused=r"a forward changed the buffer '0.table', which layers of other stages share",
    )  # fmt: skip
    yield Row("losses", "a loss with a weight and a buffer", linear(loss=LearnedLoss))
    yield Row("losses", "a loss that reads a layer of the last stage", closes_over(1))
    yield Row(
        "losses", "a loss that reads a layer of another stage", closes_over(0),
        refused=r"loss_fn of stage 1 refers to 0\.\w+ of stage 0",
    )  # fmt: skip
    yield Row(
        "losses", "a class that was not instantiated", linear(loss=lambda: nn.MSELoss),
        refused=r"loss_fn is the class MSELoss; give an instance, MSELoss\(\)",
    )  # fmt: skip
    yield Row(
        "losses", "a loss that is no scalar",
        linear(loss=lambda: lambda o, t: o - t),
        refused="loss_fn must return a tensor with one element",
    )  # fmt: skip


def rows_of_values():
    for how in ("conj", "neg"):
        yield Row(
            "values between stages", f"a view that is {how}",
            linear(model=lambda how=how: nn.Sequential(
                nn.Linear(4, 4), Conjugates(how), RealPart(), nn.Linear(4, 4)
            ), points=[2]),
        )  # fmt: skip
    kinds = {
        "a tuple": (lambda x: (x, x * 2), lambda v: v[0] + v[1]),
        "a list": (lambda x: [x, x * 2], lambda v: v[0] + v[1]),
        "a dict": (lambda x: {"a": x, "b": 2.0}, lambda v: v["a"] * v["b"]),
        "a nested value": (lambda x: {"a": (x, [x, None, "text"])}, lambda v: v["a"][0]),
        "a transposed tensor": (lambda x: x.t(), lambda v: v.t()),
        "an expanded tensor": (lambda x: x[:, :1].expand(-1, 4), lambda v: v),
        "a tensor twice": (lambda x: (x, x), lambda v: v[0] * v[1]),
        "a detached tensor beside": (lambda x: (x, x.detach()), lambda v: v[0] * v[1]),
        "float64": (lambda x: x.double(), lambda v: v.float()),
        "bfloat16": (lambda x: x.bfloat16(), lambda v: v.float()),
        "float16": (lambda x: x.half(), lambda v: v.float()),
        "int64 beside": (lambda x: (x, x.argmax(1)), lambda v: v[0] + v[1][:, None]),
        "bool beside": (lambda x: (x, x > 0), lambda v: v[0] * v[1]),
        "complex128 beside": (
            lambda x: (x, torch.ones(2, dtype=torch.complex128)), lambda v: v[0] + v[1].real.sum(),
        ),
        "an empty tensor beside": (lambda x: (x, x[:0]), lambda v: v[0] + v[1].sum()),
        "a tensor without dimensions": (lambda x: (x, x.mean()), lambda v: v[0] + v[1]),
    }  # fmt: skip
    for what, (there, back) in kinds.items():
        yield Row("values between stages", what, through(there, back))
    refused = {
        "a set": (lambda x: {1, 2}, "builtins.set, which cannot cross stages"),
        "a sparse tensor": (lambda x: x.to_sparse(), r"torch\.sparse_coo.*cannot cross stages"),
        "a nested tensor": (
            lambda x: torch.nested.as_nested_tensor([x, x[:1]], layout=torch.jagged),
            r"torch\.jagged.*cannot cross stages",
        ),
        "a function": (lambda x: print, "builtin_function_or_method, which cannot cross"),
    }
    for what, (there, words) in refused.items():
        yield Row("values between stages", what, through(there), refused=words)

    def batch(make_input, make_target=lambda: torch.randn(3, 4), first=None, loss=F.mse_loss):
        def model():
            layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
            if first is not None:
                layers[0] = Call(layers[0], first)
            return nn.Sequential(*layers)

        return linear(model=model, data=lambda: batches(make_input, make_target), loss=lambda: loss)

    x = lambda: torch.randn(3, 4)  # noqa: E731
    yield Row(
        "mini-batches", "a tuple", batch(lambda: (x(), x()), first=lambda f, v: f(v[0] + v[1]))
    )
    yield Row(
        "mini-batches", "a dict", batch(lambda: {"a": x(), "n": 3}, first=lambda f, v: f(v["a"]))
    )
    yield Row("mini-batches", "a transposed input", batch(lambda: torch.randn(4, 3).t()))
    yield Row("mini-batches", "a view with gaps", batch(lambda: torch.randn(6, 4)[::2]))
    yield Row(
        "mini-batches", "a target in a tuple",
        batch(x, lambda: (x(), x()), loss=lambda o, t: F.mse_loss(o, t[0] + t[1])),
    )  # fmt: skip

    def made_in_inference_mode():
        with torch.inference_mode():
            return torch.randn(3, 4)

    yield Row("mini-batches", "made in inference_mode", batch(made_in_inference_mode))
    yield Row(
        "mini-batches", "that requires a gradient", batch(lambda: x().requires_grad_()),
    )  # fmt: skip
    yield Row(
        "mini-batches", "of different sizes",
        linear(data=lambda: [(torch.randn(n, 4), torch.randn(n, 4)) for n in (3, 1, 5, 2)]),
    )  # fmt: skip
    yield Row(
        "mini-batches", "three items, and a loss of one tensor",
        linear(data=lambda: [(x(), x(), x())]),
        refused=r"must yield pairs \(x, y\), dicts .*; this item is a tuple of 3, .*takes 1",
    )  # fmt: skip
    yield Row(
        "mini-batches", "a dict alone", linear(data=lambda: [{"a": x()}]),
        refused=r"a sequence of layers has one input, .*: prepare=.*: \(\(a, b\), {}, y\)",
    )  # fmt: skip
    yield Row(
        "mini-batches", "a layer that takes two arguments",
        linear(
            model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 4)),
            data=lambda: batches(x, x),
        ),
        refused=r"in layer '1' \(Bilinear\), whose input was a float32 tensor \(3, 4\)",
    )  # fmt: skip


# -- what stands around the loop --------------------------------------------------------------


class Around:
    """A context around plain PyTorch and around the pipeline."""

    def __init__(self, enter, leave):
        self.enter, self.leave = enter, leave

    def __enter__(self):
        self.before = self.enter()

    def __exit__(self, *exception):
        self.leave(self.before)


def setting(read, write, value):
    def enter():
        before = read()
        write(value)
        return before

    return lambda: Around(enter, write)


def rows_of_settings():
    t, b = torch, torch.backends
    attention = linear(
        model=lambda: nn.Sequential(
            nn.Linear(4, 4),
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
            nn.Linear(4, 4),
        ),
        data=lambda: batches(lambda: t.randn(3, 5, 4), lambda: t.randn(3, 5, 4)),
    )
    flags = b.mkldnn
    settings = {
        "set_default_dtype": (t.get_default_dtype, t.set_default_dtype, t.float64, None),
        "use_deterministic_algorithms": (
            t.get_deterministic_debug_mode, t.set_deterministic_debug_mode, "error", None,
        ),
        "set_float32_matmul_precision": (
            t.get_float32_matmul_precision, t.set_float32_matmul_precision, "medium", None,
        ),
        "set_flush_denormal": (lambda: False, t.set_flush_denormal, True, None),
        "backends.mkldnn.enabled": (
            lambda: flags.enabled, lambda on: flags.set_flags(on), False, None,
        ),
        "backends.cuda.enable_flash_sdp": (
            b.cuda.flash_sdp_enabled, b.cuda.enable_flash_sdp, False, attention,
        ),
        "backends.cuda.enable_mem_efficient_sdp": (
            b.cuda.mem_efficient_sdp_enabled, b.cuda.enable_mem_efficient_sdp, False, attention,
        ),
        "backends.mha.set_fastpath_enabled": (
            b.mha.get_fastpath_enabled, b.mha.set_fastpath_enabled, False, attention,
        ),
        "autograd.set_detect_anomaly": (
            t.is_anomaly_enabled, lambda on: t.autograd.set_detect_anomaly(on), True, None,
        ),
    }  # fmt: skip
    for name, (read, write, value, make) in settings.items():
        yield Row(
            "settings", f"torch.{name}", make or linear(),
            options={"around": setting(read, write, value)},
        )  # fmt: skip
    later = {
        "set_default_dtype": (
            lambda on: t.set_default_dtype(t.float64 if on else t.float32), "get_default_dtype",
        ),
        "backends.mha.set_fastpath_enabled": (
            lambda on: b.mha.set_fastpath_enabled(not on), "get_fastpath_enabled",
        ),
        "set_flush_denormal": (t.set_flush_denormal, "set_flush_denormal"),
        "autograd.set_detect_anomaly": (t.autograd.set_detect_anomaly, "is_anomaly_enabled"),
    }  # fmt: skip
    for name, (change, words) in later.items():
        yield Row(
            "settings", f"torch.{name}, after the start", linear(),
            options={
                "within": lambda change=change: Around(
                    lambda: change(True), lambda _: change(False)
                )
            },
            refused=f"{words}.* when the pipeline started and is .* now",
        )  # fmt: skip
    contexts = {
        "torch.autocast('cpu')": (lambda: t.autocast("cpu"), "torch.autocast is on around"),
        "torch.no_grad()": (t.no_grad, r"training inside torch.no_grad\(\)"),
        "torch.inference_mode()": (t.inference_mode, r"training inside torch.no_grad\(\)"),
        "saved_tensors_hooks": (
            t.autograd.graph.save_on_cpu, r"saved_tensors_hooks \(or save_on_cpu\) are on",
        ),
        "a dispatch mode": (
            lambda: FlopCounterMode(display=False),
            "the mode .* is on around the pipeline",
        ),
    }  # fmt: skip
    for name, (context, words) in contexts.items():
        yield Row("contexts", f"{name} around the loop", linear(),
                  options={"within": context}, refused=words)  # fmt: skip
    yield Row(
        "contexts", "torch.autocast inside a layer",
        through(lambda x: _autocast(x), lambda v: v.float()),
    )  # fmt: skip


def _autocast(x):
    with torch.autocast("cpu"):
        return x @ x.t() @ x


def all_rows():
    rows = [
        *rows_of_layers(), *rows_of_optimizers(), *rows_of_schedulers(), *rows_of_models(),
        *rows_of_values(), *rows_of_settings(),
    ]  # fmt: skip
    assert len({row.name for row in rows}) == len(rows)
    return rows


ROWS = all_rows()


# -- judging ----------------------------------------------------------------------------------


class Whole(nn.Module):
    """A model that is no sequence for a pipeline, with the layers of one."""

    def __init__(self, sequence):
        super().__init__()
        self.training = sequence.training
        for name, layer in sequence._modules.items():
            self.add_module(name, layer)
        # So that random numbers are seeded for the same layers as in a sequence.
        self._no_split_modules = [type(layer).__name__ for layer in sequence._modules.values()]

    def forward(self, x):
        for layer in self._modules.values():
            x = layer(x)
        return x


OF_WHOLE = {
    "layers-nn.DataParallel": "The stateless API can't be used with nn.DataParallel",
    "weights-torch.jit.script": "is a module of torch.jit, which keeps its weights where",
    "values between stages-a set": "must be Tensor, not set",
    "values between stages-a sparse tensor": "returns a sparse tensor, which cannot pass",
    "values between stages-a nested tensor": "returns a nested tensor, which cannot pass",
    "values between stages-a function": "must be Tensor, not builtin_function_or_method",
    "mini-batches-a dict alone": "does not take the example .* unexpected keyword argument 'a'",
    "mini-batches-a layer that takes two arguments": "missing 1 required positional argument",
}
"""The words with which a model given whole is refused, by name of the row, where they are others
than those for a sequence."""


def train_in_pipeline(row, workers, whole=False):
    """Train as `train_plainly` does, with a pipeline; return losses, weights and the loss."""
    from contextlib import nullcontext

    from support.pinned import Pipeline

    model, points, data, loss_fn = row.make()
    options = {k: v for k, v in row.options.items() if k not in ("around", "within")}
    defaults = {"schedule": "1f1b", "credits": 1}
    if whole:
        points = [list(model._modules)[p] if isinstance(p, int) else p for p in points]
        model, defaults["example"] = Whole(model), data[0]
    parameters = list(model.parameters())
    if isinstance(loss_fn, nn.Module):
        parameters += loss_fn.parameters()
    with Pipeline(
        model, stages=points, loss_fn=loss_fn, optimizer=row.optimizer(parameters),
        workers=workers, **{**defaults, **options},
    ) as pipe, row.options.get("within", nullcontext)():  # fmt: skip
        after_step = row.script(pipe.optimizer) or (lambda loss: None)
        losses = []
        for result in pipe.train_epoch(data):
            losses.append(result.loss)
            after_step(result.loss)
        loss = pipe.loss_module() if isinstance(loss_fn, nn.Module) else None
        return losses, pipe.state_dict(), loss


def judge(row, workers, whole=False):
    """Compare a pipeline with plain PyTorch; raises AssertionError where they differ."""
    import contextlib

    import pytest

    from pipedream_rt import PipelineError

    around = row.options.get("around", contextlib.nullcontext)
    with around():
        refused = OF_WHOLE.get(row.name, row.refused) if whole else row.refused
        if refused:
            with pytest.raises((PipelineError, Exception)) as caught:
                train_in_pipeline(row, workers, whole)
            text = str(caught.value)
            assert isinstance(caught.value, PipelineError), repr(caught.value)
            assert re.search(refused, text, re.DOTALL), text
            return
        model, _, data, loss_fn = row.make()
        losses = train_plainly(model, data, loss_fn, row.optimizer, script=row.script)
        found, weights, found_loss = train_in_pipeline(row, workers, whole)
        assert [math.isfinite(loss) for loss in losses] == [True] * len(losses), losses
        assert found == losses
        same(weights, model.state_dict())
        if isinstance(loss_fn, nn.Module):
            same(found_loss.state_dict(), loss_fn.state_dict())
        before = row.make()[0].state_dict()
        trained = any(not torch.equal(weights[k], before[k]) for k in weights)
        assert trained, "nothing was trained, so the row says nothing"


def same(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), f"{key} differs in some bit"


def page():
    """Return the table as a page of the documentation."""
    lines = [
        "# Compatibility",
        "",
        "<!-- Made by `python -m support.compatibility` in the folder `tests`. -->",
        "",
        "What a script may write, and what a pipeline does with it. Each row is tested with a",
        "sequence, on processes too, and with a model given whole, whose forward is",
        "recorded. **Same** means: the losses and the weights of a training are those of plain",
        "PyTorch, bit for bit, with the schedule `1f1b`, given in both ways. **Refused** means:",
        "`ConfigError`, or `StageFailed` for what only a forward shows, with these words, before",
        "anything is trained otherwise than it was written.",
    ]
    for group in dict.fromkeys(row.group for row in ROWS):
        rows = [row for row in ROWS if row.group == group]
        same_rows = [
            f"`{row.what}`" if "." in row.what else row.what
            for row in rows
            if not (row.refused or row.name in OF_WHOLE)
        ]
        lines += ["", f"## {group[0].upper()}{group[1:]}", ""]
        if same_rows:
            lines += [f"Same: {'; '.join(same_rows)}."]
        refused = [row for row in rows if row.refused or row.name in OF_WHOLE]
        if refused:
            lines += ["", "| Refused | In a sequence | In a model given whole |", "|---|---|---|"]
        for row in refused:
            alike = "the same words" if row.refused else "same"
            whole = _words(OF_WHOLE[row.name]) if row.name in OF_WHOLE else alike
            lines.append(f"| {row.what} | {_words(row.refused) or 'same'} | {whole} |")
    lines += ["", "## Not in the table", "", "| Class of `torch.nn` | Why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in NOT_LAYERS.items()]
    return "\n".join(lines) + "\n"


def _words(pattern):
    """A pattern as people read it."""
    return (
        re.sub(r"\\(.)", r"\1", pattern).replace(".*", " … ").replace("w+", "…").replace("  ", " ")
    )


if __name__ == "__main__":
    print(page(), end="")
