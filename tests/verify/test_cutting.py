"""A mini-batch beside its micro-batches, in plain PyTorch."""

from contextvars import ContextVar

import pytest
import torch
from support.models import Counts
from support.verified import (
    Balanced,
    LooksAround,
    Noise,
    NoisyForward,
    cut_for,
    job_of,
    training_of,
)
from torch import nn

from pipedream_rt.verify.cutting import Cutting, noise_of, whole_and_parts


class Codebook(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("codes", torch.zeros(4))

    def forward(self, x):
        output = super().forward(x) + self.codes.clone()
        if self.training:
            self.codes.copy_(0.9 * self.codes + 0.1 * x.detach().mean(0))
        return output


class KeyBias(nn.Linear):
    """Its shift has no gradient but for rounding."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.shift = nn.Parameter(torch.ones(()))

    def forward(self, x):
        output = super().forward(x) + self.shift
        return output - output.mean(1, keepdim=True)


def cutting_of(kind, batch_norm=False):
    layers = [kind(4, 4), nn.BatchNorm1d(4) if batch_norm else nn.Tanh(), nn.Linear(4, 4)]
    job = job_of(nn.Sequential(*layers))
    return whole_and_parts(training_of(job), cut_for(job))


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, KeyBias, Noise])
def test_a_mini_batch_is_what_its_micro_batches_are(kind, batch_norm):
    torch.manual_seed(0)
    if (found := cutting_of(kind, batch_norm)) is None:
        assert kind is Noise  # draws in eval mode too
    else:
        assert found == Cutting(found.losses)


@pytest.mark.parametrize(
    ("kind", "kept", "gradient", "loss"),
    [
        (Counts, ["'calls' of model.0"], "", False),
        (Codebook, ["0.codes"], "", False),
        (Balanced, [], "0.weight", False),
        (LooksAround, [], "0.weight", True),
    ],
)
def test_what_differs_in_micro_batches(kind, kept, gradient, loss):
    torch.manual_seed(0)
    found = cutting_of(kind)
    assert list(found.kept) == kept
    assert all(found.kept.values())
    assert found.gradient[:1] == gradient[:1]
    assert (found.difference > 0.01) == bool(gradient)
    assert (found.loss > 0.001) == loss


def test_what_cannot_be_compared_and_nothing_is_left_changed():
    assert cutting_of(NoisyForward) is None
    job = job_of(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()), lambda o, target: o.sum() * float("inf")
    )
    assert whole_and_parts(training_of(job), cut_for(job)) is None
    job = job_of(nn.Sequential(Codebook(4, 4), Counts(4, 4)))
    plain = training_of(job)
    before = {name: value.detach().clone() for name, value in plain.state().items()}
    whole_and_parts(plain, cut_for(job))
    assert all(torch.equal(value, before[name]) for name, value in plain.state().items())
    assert not any(p.grad is not None for p in plain.state().values())
    assert plain._model.sequence["1"].calls == 0


class TakesTwo(nn.Linear):
    def forward(self, x):
        if len(x) > 2:
            raise ZeroDivisionError
        return super().forward(x)


class Alters(nn.Linear):
    """Differs from itself, in a way that cannot be put back."""

    calls = ContextVar("calls", default=0)

    def forward(self, x):
        self.calls.set(self.calls.get() + 1)
        return super().forward(x) * self.calls.get()


def test_what_raises_as_a_whole_or_differs_from_itself_is_not_compared():
    job = job_of(nn.Sequential(TakesTwo(4, 4), nn.Linear(4, 4)))
    plain = training_of(job)
    assert whole_and_parts(plain, cut_for(job)) is None
    assert list(plain.notes) == ["whole"]
    assert cutting_of(Alters) is None


def test_noise_is_what_another_rounding_changes():
    torch.manual_seed(0)
    job = job_of(nn.Sequential(KeyBias(4, 4), nn.Linear(4, 4)))
    found = noise_of(training_of(job), cut_for(job))
    assert found["0.shift"] > 0.1
    assert all(by < 1e-5 for name, by in found.items() if name != "0.shift")
    job = job_of(nn.Sequential(Alters(4, 4), nn.Linear(4, 4)))
    assert noise_of(training_of(job), cut_for(job)) == {}
