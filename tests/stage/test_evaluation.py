"""Eval mode for one pass, which leaves no trace; and metrics."""

import math

import pytest
import torch
from support.models import Merges
from support.oracle import assert_same
from support.stages import a_stage, content, value
from torch import nn


class Modes(nn.Module):
    """Returns its mode, and its input doubled by its weight."""

    def __init__(self, fail=False):
        super().__init__()
        self.w, self.fail = nn.Parameter(torch.tensor(2.0)), fail
        self.seen = []

    def forward(self, x):
        self.seen.append((self.training, torch.is_grad_enabled()))
        if self.fail:
            raise ZeroDivisionError
        return x * self.w


@pytest.mark.parametrize("fail", [False, True])
def test_evaluate_leaves_every_module_its_mode(fail):
    stage = a_stage([Modes(), Modes(fail)])
    stage.module[1].eval()
    modes = [module.training for module in stage.module.modules()]
    if fail:
        with pytest.raises(ZeroDivisionError):
            stage.passes.evaluate(0, [value(torch.ones(1))], None)
    else:
        assert content(stage.passes.evaluate(0, [value(torch.ones(1))], None)[0]).tolist() == [4]
    assert [module.seen for module in stage.module] == [[(False, False)]] * 2
    assert [module.training for module in stage.module.modules()] == modes


def test_evaluate_returns_the_loss_where_there_is_a_target():
    """Whatever it is: nothing is trained on it."""
    stage = a_stage([Modes()], loss_fn=lambda x, y: (x * y).sum())
    assert stage.passes.evaluate(0, [value(torch.ones(1))], value(torch.tensor(3.0))) == (6.0, {})
    nan, _ = stage.passes.evaluate(1, [value(torch.ones(1))], value(torch.tensor(math.nan)))
    assert math.isnan(nan)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_infer_runs_in_eval_mode_unless_told_otherwise(mode, training):
    stage = a_stage([Modes()])
    stage.module.train(mode)
    assert content(stage.passes.infer(0, [value(torch.ones(1))], training=training)).tolist() == [2]
    assert stage.module[0].seen == [(mode and training, False)]
    assert stage.module.training == mode


@pytest.mark.parametrize("run", ["evaluate", "infer"])
def test_modules_that_do_more_than_set_a_mode_are_called_and_put_back(run):
    stage, x = a_stage([Merges(), nn.BatchNorm1d(2)]), torch.ones(2, 2)
    stage.module[1].eval()  # a frozen one stays so
    before = {k: v.clone() for k, v in stage.module.state_dict().items()}
    if run == "evaluate":
        made, _ = stage.passes.evaluate(0, [value(x)], None)
    else:
        made = stage.passes.infer(0, [value(x)])
    assert torch.equal(content(made), stage.module[1](x * (torch.ones(2) / 3 + torch.ones(2) / 7)))
    assert_same(stage.module.state_dict(), before)
    assert (stage.module[0].training, stage.module[0].merged) == (True, False)
    assert not stage.module[1].training


class CountsInEval(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("table", None)

    def forward(self, x):
        self.calls += 1
        self.table = torch.ones(3)
        return x + self.calls


def test_an_evaluation_leaves_no_trace_in_buffers():
    stage = a_stage([CountsInEval()])
    for _ in range(2):
        assert content(stage.passes.infer(0, [value(torch.ones(1))])).tolist() == [2]
    assert stage.module[0].calls.tolist() == [0]
    assert stage.module[0].table is None
    stage.passes.infer(0, [value(torch.ones(1))], training=True)
    assert stage.module[0].calls.tolist() == [1]
