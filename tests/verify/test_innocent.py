"""Of programs that train as plain PyTorch does, `verify` says so; and of others where they part."""

import random
from contextvars import ContextVar
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from support.models import batches as token_batches
from support.models import kitchen_sink
from support.pinned import Flat as Pipeline
from support.verified import Balanced, LooksAround
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from pipedream_rt import Clip, ConfigError, Layout, Training, Whole
from pipedream_rt.codecs import BFloat16

DATA = [torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(i)).unbind() for i in range(3)]
CLASSES = [(x, torch.arange(8) % 4) for x, _ in DATA]
MASKED = [(x, torch.where(torch.arange(8) < 3, -100, y)) for x, y in CLASSES]
TOKENS = [(torch.randint(12, (8, 5)), torch.randn(8, 5, 8)) for _ in range(3)]
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAM = (torch.optim.AdamW, {"lr": 0.01})


def linear(*layers):
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 8))


def beside(kind):
    return {"model": lambda: linear(kind(8, 8))}


# -- models ---------------------------------------------------------------------------------------


def tied():
    one = nn.Linear(8, 8)
    return nn.Sequential(one, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), one)


class Attention(nn.Module):
    """The bias of its keys has no gradient but for rounding."""

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        heads = (layer(x).view(-1, 4, 2) for layer in (self.query, self.key, self.value))
        return x + F.scaled_dot_product_attention(*heads).reshape(x.shape)


def shared():
    block = Attention()
    return nn.Sequential(nn.Linear(8, 8), block, nn.Tanh(), block, nn.Tanh(), block)


class Cells(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.one, self.two = kind, kind(2, 8), kind(8, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        one = two = torch.zeros(x.size(0), 8)
        if self.kind is nn.LSTMCell:
            one, two = (one, one), (two, two)
        outputs = []
        for step in x.split(2, dim=1):
            one = self.one(step, one)
            two = self.two(one[0] if isinstance(one, tuple) else one, two)
            outputs.append(self.out(two[0] if isinstance(two, tuple) else two))
        return torch.cat(outputs, 1)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.rnn, self.out = (
            nn.Embedding(12, 8),
            kind(8, 8, batch_first=True),
            nn.Linear(8, 8),
        )

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        y = torch.tanh(self.one(x))
        return self.three(self.two(y) + x) + y


class Between(nn.Module):
    """Dropout between its layers, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8)

    def forward(self, x):
        x = F.dropout(torch.tanh(self.drop(self.one(x))), 0.2, self.training)
        return self.two(self.drop(x))


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        y = self.one(x)
        return {"a": self.two(y), "b": self.three(torch.tanh(y))}


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, labels=None, scale=2.0):
        made = self.two(torch.tanh(self.one(x)) * scale)
        return {"loss": F.mse_loss(made, labels), "made": made}


class Complex(nn.Linear):
    def forward(self, x):
        return torch.fft.ifft(torch.fft.fft(super().forward(x)) * 1.5).real


class ComplexWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


class Double(nn.Linear):
    def __init__(self):
        super().__init__(8, 8, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x.double()).float()


class Checkpointed(nn.Linear):
    def __init__(self, reentrant):
        super().__init__(8, 8)
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Scaled(torch.autograd.Function):
    """Multiplies the gradient by what a function returns in the backward."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor(), None


class HalvedBackward(nn.Linear):
    def forward(self, x):
        return Scaled.apply(super().forward(x), lambda: 0.5)


class WithHooks(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.weight.register_hook(lambda gradient: gradient * 0.5)
        self.register_forward_hook(lambda module, args, output: output * 2)
        self.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))


class CountsInItsClass(nn.Linear):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x) / type(self).calls


class ListsInItsClass(nn.Linear):
    seen: ClassVar = []

    def forward(self, x):
        self.seen.append(float(x.detach().mean()))
        return super().forward(x) + len(self.seen) * 0.01 + self.seen[0]


COUNT = ContextVar("count", default=0)  # which nobody can see from outside, or put back
GENERATOR = torch.Generator().manual_seed(1)
DICE = random.Random(1)


class DrawsByGenerator(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0.1 * torch.randn(8, generator=GENERATOR)


class DrawsByDice(nn.Linear):
    def forward(self, x):
        return super().forward(x) * DICE.uniform(0.5, 1.5)


class WarmsUp(nn.Linear):
    """Counts in an attribute, and keeps a mean in another."""

    calls, mean = 0, 0.0

    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return super().forward(x) * min(1, self.calls / 10) - self.mean


class WithTable(nn.Linear):
    def forward(self, given):
        x, table = given
        return super().forward(x) + table.mean(0)


class Clipped(nn.Linear):
    """Keeps its weights in bounds, in its forward."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


def frozen():
    model = linear(nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    model[2].requires_grad_(False)
    return model


def embedding():
    return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8))


# -- losses ---------------------------------------------------------------------------------------


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return F.cross_entropy(output * self.scale.exp(), target)


class Margin(nn.Module):
    """Has a weight, and a buffer that it changes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output, target):
        self.seen += 1
        return ((output - target) ** 2 * self.weight).mean()


class MovingMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.calls = 1.0, 0

    def forward(self, output, target):
        loss = F.mse_loss(output, target)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return loss / self.mean + self.calls


def closure_loss():
    mean, calls = 1.0, [0]

    def loss_fn(output, target):
        nonlocal mean
        loss = F.mse_loss(output, target)
        mean = 0.9 * mean + 0.1 * loss.item()
        calls[0] += 1
        return loss / mean * (1 + 0.1 * calls[0])

    return loss_fn


def dict_loss(output, target):
    one, two = F.mse_loss(output["a"], target), F.l1_loss(output["b"], target)
    return {"loss": one + two, "one": one, "two": two}


HISTORY = {"calls": 0, "mean": torch.zeros(())}


def loss_with_a_global(output, target):
    HISTORY["calls"] += 1
    HISTORY["mean"] += output.detach().mean()
    return F.mse_loss(output, target) * (1 + 0.1 * HISTORY["calls"]) + HISTORY["mean"]


def smoothed():
    return nn.CrossEntropyLoss(label_smoothing=0.1)


def masked(output, target):
    return F.cross_entropy(output, target, ignore_index=-100)


# -- optimizers -----------------------------------------------------------------------------------


class Changing(torch.optim.SGD):
    """Changes gradients in its step."""

    def change(self, parameter):
        raise NotImplementedError

    def step(self, closure=None):
        with torch.no_grad():
            for parameter in (p for group in self.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    self.change(parameter)
        return super().step(closure)


class Centralized(Changing):
    def change(self, parameter):
        if parameter.dim() > 1:
            parameter.grad -= parameter.grad.mean(1, keepdim=True)


class Larc(Changing):
    def change(self, parameter):
        ratio = 0.01 * parameter.norm().clamp(min=1e-3) / (parameter.grad.norm() + 1e-6)
        parameter.grad *= ratio.clamp(max=1.0)


class Noisy(Changing):
    def change(self, parameter):
        parameter.grad += torch.randn_like(parameter.grad)


class NoisyByGenerator(Changing):
    def change(self, parameter):
        parameter.grad += torch.randn(parameter.shape, generator=GENERATOR)


class NoisyByPython(Changing):
    def change(self, parameter):
        parameter.grad *= random.random()


class Lion(torch.optim.Optimizer):
    """Steps by signs, which rounding turns round."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    held = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                    parameter -= group["lr"] * (0.9 * held + 0.1 * parameter.grad).sign()
                    held.lerp_(parameter.grad, 0.01)


# -- innocent -------------------------------------------------------------------------------------

INNOCENT = {
    "plain": {},
    "tied": {"model": tied},
    "tied, by signs": {"model": tied, "optimizer": (Lion, {})},
    "tied, clipped": {"model": tied, "training": Training(clip=Clip(norm=0.1), verify=False)},
    "shared attention": {"model": shared},
    "LSTM cells": {"model": lambda: Cells(nn.LSTMCell)},
    "RNN cells, one micro-batch": {"model": lambda: Cells(nn.RNNCell), "micro_batches": 1},
    "LSTM": {"model": lambda: Recurrent(nn.LSTM), "data": TOKENS},
    "RNN": {"model": lambda: Recurrent(nn.RNN), "data": TOKENS},
    "dropout": {"model": lambda: linear(nn.Dropout(0.5), nn.Linear(8, 8), nn.AlphaDropout(0.1))},
    "batch norm": {"model": lambda: linear(nn.BatchNorm1d(8), nn.Linear(8, 8))},
    "other norms": {"model": lambda: linear(nn.GroupNorm(2, 8), nn.LayerNorm(8), nn.RMSNorm(8))},
    "spectral norm": {
        "model": lambda: linear(parametrizations.spectral_norm(nn.Linear(8, 8))),
    },
    "weight norm": {"model": lambda: linear(parametrizations.weight_norm(nn.Linear(8, 8)))},
    "orthogonal": {"model": lambda: linear(parametrizations.orthogonal(nn.Linear(8, 8)))},
    "hooks": {"model": lambda: linear(WithHooks())},
    "an autograd function": beside(HalvedBackward),
    "checkpointed": {"model": lambda: linear(Checkpointed(reentrant=False))},
    "checkpointed, reentrant": {"model": lambda: linear(Checkpointed(reentrant=True))},
    "computed again": {"training": Training(recompute=True, verify=False)},
    "a residual": {"model": Skip},
    "dropout between layers": {"model": Between},
    "layers of many kinds": {
        "model": kitchen_sink, "data": token_batches(3), "loss_fn": F.cross_entropy, "stages": 4,
    },
    "several outputs": {"model": TwoOutputs, "loss_fn": dict_loss},
    "its own loss": {
        "model": OwnLoss, "loss_fn": None, "data": [{"x": x, "labels": y} for x, y in DATA],
    },
    "frozen": {"model": frozen},
    "an embedding": {"model": embedding, "data": TOKENS},
    "complex numbers": beside(Complex),
    "complex weights": {"model": lambda: linear(ComplexWeight())},
    "double precision": {"model": lambda: linear(Double())},
    "weights kept in bounds": beside(Clipped),
    "a count in a class": beside(CountsInItsClass),
    "a list in a class": {**beside(ListsInItsClass), "micro_batches": 1},
    "a generator of the script": beside(DrawsByGenerator),
    "a generator of Python": beside(DrawsByDice),
    "a warm-up in an attribute": {**beside(WarmsUp), "micro_batches": 1},
    "a table": {
        "model": lambda: [WithTable(8, 8), nn.Linear(8, 8)],
        "data": [((x, Whole(torch.ones(8, 8))), y) for x, y in DATA],
    },
    "momentum": {"optimizer": SGD},
    "Adafactor": {"optimizer": (torch.optim.Adafactor, {"lr": 0.01})},
    "groups": {"optimizer": (*SGD, [("*.bias", {"weight_decay": 0.1})])},
    "centralized gradients": {"optimizer": (Centralized, {"lr": 0.1})},
    "LARC": {"optimizer": (Larc, {"lr": 0.1})},
    "noise on gradients": {"optimizer": (Noisy, {"lr": 0.1})},
    "noise by a generator": {"optimizer": (NoisyByGenerator, {"lr": 0.1})},
    "noise by Python": {"optimizer": (NoisyByPython, {"lr": 0.1})},
    "clipped by the norm of a stage": {
        "training": Training(clip=Clip(norm=0.1, over="stage"), verify=False),
    },
    "clipped by value": {"training": Training(clip=Clip(value=0.01), verify=False)},
    "bfloat16": {"training": Training(autocast=torch.bfloat16, verify=False)},
    "a temperature": {"loss_fn": Temperature, "data": CLASSES},
    "a margin": {"loss_fn": Margin},
    "smoothed labels": {"loss_fn": smoothed, "data": CLASSES},
    "masked labels": {
        "loss_fn": masked, "data": MASKED,
        "training": Training(weigh=lambda x, y: (y != -100).sum(), verify=False),
    },
    "a loss with a mean": {"loss_fn": MovingMean, "micro_batches": 1},
    "a loss with a closure": {"loss_fn": closure_loss, "micro_batches": 1},
    "a loss with a global": {"loss_fn": loss_with_a_global},
    "a short last micro-batch": {"micro_batches": 3},
    "one micro-batch": {"micro_batches": 1},
    "async-1f1b": {"schedule": "async-1f1b"},
    "async-1f1b, tied": {"schedule": "async-1f1b", "model": tied},
    "async-1f1b, a count in a class": {
        "schedule": "async-1f1b", **beside(CountsInItsClass),
    },
    "async-1f1b, a generator": {
        "schedule": "async-1f1b", **beside(DrawsByGenerator),
    },
    "async-1f1b, dropout between layers": {"schedule": "async-1f1b", "model": Between},
    "2bw": {"schedule": "2bw"},
    "2bw, dropout between layers": {"schedule": "2bw", "model": Between},
    "zero-bubble, tied": {"schedule": "zero-bubble", "model": tied},
    "an average of weights": {"training": Training(ema=0.9)},
    "scaled losses": {"training": Training(autocast=torch.float16)},
    "interleaved": {
        "model": lambda: linear(nn.Tanh(), nn.Linear(8, 8)),
        "stages": 4, "schedule": "interleaved-1f1b",
    },
    "replicas": {"layout": Layout(replicas=2)},
    "a codec": {"layout": Layout(codecs=BFloat16())},
}  # fmt: skip

_MADE = (smoothed, Temperature, Margin, MovingMean, closure_loss)


def opened(options, verify=False):
    """Return a pipeline and its mini-batches, of a script that begins anew."""
    torch.manual_seed(0)
    random.seed(0)
    DICE.seed(1)
    GENERATOR.manual_seed(1)
    COUNT.set(0)
    CountsInItsClass.calls = CountsSteps.steps = 0
    ListsInItsClass.seen.clear()
    HISTORY.update(calls=0, mean=torch.zeros(()))
    options = {
        "loss_fn": F.mse_loss, "optimizer": ADAM, "schedule": "1f1b", "micro_batches": 2,
        "model": linear, "data": DATA, "stages": 2, "training": Training(), **options,
    }  # fmt: skip
    options["training"] = replace(options["training"], verify=verify)
    model, data, loss_fn = options.pop("model")(), options.pop("data"), options.pop("loss_fn")
    loss_fn = loss_fn() if loss_fn in _MADE else loss_fn
    options = {"example": data[0], "loss_fn": loss_fn, "workers": "serial", **options}
    return Pipeline(model, **options), data


def run(options, asks=False, verify=False):
    """Return what a script has found and trained."""
    pipe, data = opened(options, verify)
    with pipe:
        losses = [result.loss for result in pipe.train_epoch(data)]
        found = pipe.verify(data) if asks else None
        losses += [result.loss for result in pipe.train_epoch(data)]
        return found, losses, pipe.fingerprint().digest


@pytest.mark.parametrize("name", INNOCENT)
def test_an_innocent_program_is_the_same_and_has_the_bits_of_one_without_it(name):
    _, *expected = run(INNOCENT[name])
    found, *trained = run(INNOCENT[name], asks=True, verify=True)
    assert found, str(found)
    assert trained == expected
    if name in ("plain", "tied"):  # of which the second adds in another order
        assert ("rounding" in str(found)) == (name == "tied")


@pytest.mark.processes
@pytest.mark.parametrize("name", ["tied", "a count in a class", "a loss with a closure", "2bw"])
def test_it_is_the_same_where_stages_are_processes(name):
    options = {**INNOCENT[name], "workers": "local"}
    _, *expected = run(options)
    found, *trained = run(options, asks=True, verify=True)
    assert found, str(found)
    assert trained == expected


# -- guilty ---------------------------------------------------------------------------------------


def counted():
    COUNT.set(COUNT.get() + 1)
    return COUNT.get()


class CountsOutside(nn.Linear):
    def forward(self, x):
        return super().forward(x) / counted()


class DrawsByPython(nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.uniform(0.5, 1.5)


class ScaledBackward(nn.Linear):
    def forward(self, x):
        return Scaled.apply(super().forward(x), counted)


class ClampsGradients(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class CountsSteps(torch.optim.SGD):
    """Counts in its class, which serial stages share with the script."""

    steps = 0

    def step(self, closure=None):
        CountsSteps.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / CountsSteps.steps
        return super().step(closure)


class WholeNorm(torch.optim.SGD):
    """Goes by the norm of all gradients, of which a stage has some."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.01)
        return super().step(closure)


def loss_that_draws(output, target):
    return F.mse_loss(output, target) * random.uniform(0.5, 1.5)


def loss_that_counts(output, target):
    return F.mse_loss(output, target) * counted()


def loss_over_pairs(output, target):
    return F.mse_loss(output @ output.T, target @ target.T)


GUILTY = {
    "a count outside": (beside(CountsOutside), "the output of layer 1", "Its input is"),
    "Python's random": (
        beside(DrawsByPython), "the output of layer 1, micro-batch 0 of mini-batch 0", "Its input",
    ),
    "a loss that counts": ({"loss_fn": loss_that_counts}, "the loss, micro-batch 0", "is the loss"),
    "a loss that draws": ({"loss_fn": loss_that_draws}, "the loss, micro-batch 0", "is the loss"),
    "a backward": (beside(ScaledBackward), "the gradient of 0.weight, m", "it is in the backward"),
    "steps that count": (
        {"optimizer": (CountsSteps, {"lr": 0.1})}, "after the update", "step of the optimizer",
    ),
    "a norm of all": (
        {"optimizer": (WholeNorm, {"lr": 0.1})}, "after the update", "step of the optimizer",
    ),
    "looking around": (
        beside(LooksAround), "the loss of two micro-batches as one", "depend on each other",
    ),
    "clamped gradients": (
        beside(ClampsGradients), "the gradient of 1.weight", "a hook that clamps or norms",
    ),
    "gradients put in": (beside(Balanced), "the gradient of", "a hook that clamps or norms"),
    "a table that is cut": (
        {
            "model": lambda: [WithTable(8, 8), nn.Linear(8, 8)],
            "data": [((x, torch.randn(8, 8)), y) for x, y in DATA],
        },
        "the loss of two", "depend on each other",
    ),
    "pairs of samples": (
        {"loss_fn": loss_over_pairs, "training": Training(check_loss=0, verify=False)},
        "the loss of two", "depend on each other",
    ),
}  # fmt: skip
"""With where they part, and the cause that is named."""


@pytest.mark.parametrize("name", GUILTY)
def test_a_guilty_program_is_not_the_same_and_the_place_is_right(name):
    options, place, cause = GUILTY[name]
    pipe, data = opened(options)
    with pipe:
        found = pipe.verify(data)
    assert not found
    assert place in found.parted
    assert cause in found.cause
    assert found.difference > 1e-4
    assert found.parted in str(found)


def test_a_guilty_program_is_refused_at_its_first_mini_batch():
    with pytest.raises(ConfigError, match="the first mini-batch is not what plain PyTorch"):
        run(GUILTY["steps that count"][0], verify=True)
