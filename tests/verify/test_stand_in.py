"""What stands for the loss that a script computes, and the first update beside plain PyTorch."""

import logging
import os

import pytest
import torch
from support.models import mlp, regression
from support.outside import train_by_hand, train_outputs
from support.verified import LooksAround
from torch import nn
from torch.nn import functional as F

from pipedream_rt import ConfigError, Pipeline
from pipedream_rt.verify.stand_in import GivenGradients, MeanOfOutputs

ADAM = (torch.optim.Adam, {"lr": 0.01})


def leaves(*shapes):
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def test_given_gradients_are_the_gradients_of_the_outputs():
    one, two, count = *leaves((3, 2), (3,)), torch.arange(3)
    target = (torch.randn(3, 2), None, None)
    loss_fn = GivenGradients()
    loss = loss_fn({"one": one, "two": two, "count": count}, target)
    loss.backward()
    assert torch.equal(one.grad, target[0])
    assert two.grad is None
    assert [each.tolist() for each in loss_fn.outputs] == [o.tolist() for o in (one, two, count)]


def test_their_loss_is_a_sum_in_which_nothing_cancels_out():
    output = torch.tensor([[1.0], [1.0]], requires_grad=True)
    gradient = torch.tensor([[2.0], [-2.0]])
    assert GivenGradients()(output, (gradient,)).item() == 4
    assert GivenGradients()(output, (None,)).item() == 0


def test_a_mean_of_outputs_is_one_over_samples():
    output = {"a": torch.randn(6, 4), "b": torch.randn(6), "c": torch.arange(6)}
    parts = [{k: v[i : i + 3] for k, v in output.items()} for i in (0, 3)]
    loss_fn = MeanOfOutputs()
    parted = sum(loss_fn(part, None) for part in parts) / 2
    torch.testing.assert_close(loss_fn(output, None), parted)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="pipedream_rt")
    return lambda text: [m for m in caplog.messages if text in m]


@pytest.mark.parametrize("train", [train_outputs, train_by_hand])
@pytest.mark.parametrize(
    ("options", "with_weights"),
    [
        ({"micro_batches": 4}, True),
        ({"micro_batches": 1}, True),
        ({"schedule": "async-1f1b"}, False),
    ],
)
def test_the_first_update_is_computed_in_plain_pytorch_too(said, train, options, with_weights):
    with Pipeline(mlp(), stages=2, optimizer=ADAM, workers="serial", **options) as pipe:
        train(pipe, regression(2, samples=8), F.mse_loss)
    (text,) = said("what plain PyTorch computes")
    assert "the first mini-batch is what" in text
    assert (int(text.rpartition("in ")[2].split()[0]) > 4) == with_weights


class OfProcess(nn.Linear):
    """Goes by the process that it is in."""

    def forward(self, x):
        return super().forward(x) * (1 if os.environ.get("OF_TEST") == str(os.getpid()) else 2)


@pytest.mark.processes
@pytest.mark.parametrize("train", [train_outputs, train_by_hand])
def test_workers_that_compute_something_else_are_refused_at_the_first_update(monkeypatch, train):
    monkeypatch.setenv("OF_TEST", str(os.getpid()))
    model = nn.Sequential(nn.Linear(8, 8), OfProcess(8, 8))
    parts = pytest.raises(ConfigError, match="the output of the model, micro-batch 0 of mini-b")
    with Pipeline(model, stages=2, optimizer=ADAM, workers="local") as pipe, parts:
        train(pipe, regression(1, samples=4), F.mse_loss)


def test_samples_that_depend_on_each_other_are_refused_where_nobody_asked_for_micro_batches(said):
    model = nn.Sequential(nn.Linear(8, 8), LooksAround(8, 8))
    options = {"stages": 2, "optimizer": ADAM, "workers": "serial"}
    parts = pytest.raises(ConfigError, match="a layer lets samples depend on each other")
    with Pipeline(model, **options) as pipe, parts:
        train_outputs(pipe, regression(1, samples=16), F.mse_loss)
    with Pipeline(model, micro_batches=2, **options) as pipe:
        train_outputs(pipe, regression(1, samples=16), F.mse_loss)
    assert said("the output of two micro-batches as one and one by one differs")


def test_a_pipeline_can_be_asked_about_all_but_the_loss_of_the_script():
    with Pipeline(mlp(), stages=2, optimizer=ADAM, workers="serial", micro_batches=2) as pipe:
        found = pipe.verify(regression(2, samples=8), steps=2)
    assert found.same
    assert found.values > 20
    assert any("the script computes the loss" in note for note in found.notes)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (train_outputs, "the same as plain PyTorch: "),
        (train_by_hand, "the first update by hand is that of plain PyTorch, in "),
    ],
)
def test_a_run_that_is_to_be_verified_says_what_was_compared(monkeypatch, capsys, train, words):
    monkeypatch.setenv("PIPEDREAM_RT_VERIFY", "2")
    with Pipeline(mlp(), stages=2, optimizer=ADAM, workers="serial", micro_batches=2) as pipe:
        train(pipe, regression(3, samples=8), F.mse_loss)
    assert f"verified: {words}" in capsys.readouterr().err
