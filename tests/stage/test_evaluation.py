"""Eval mode for one pass, which leaves no trace; and metrics."""

import copy
import math

import pytest
import torch
from support.messages import head
from support.models import Merges
from support.oracle import assert_same
from support.stages import ASYNC, a_stage, content, value
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.shipping import range_of
from pipedream_rt.stage.evaluation import (
    EvaluationBuffers,
    changes_modes,
    measured,
    packed_metrics,
    refuse_bad_metrics,
    same_buffers,
    unpacked,
)


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


class Counts(nn.Module):
    """A count in extra state, and a frozen weight that eval mode changes."""

    def __init__(self):
        super().__init__()
        self.linear, self.base, self.n = nn.Linear(8, 8), nn.Linear(8, 8), 0
        self.base.requires_grad_(False)

    def train(self, mode=True):
        if mode is not self.training:
            self.base.weight.data += (self.linear.weight * (-0.1 if mode else 0.1)).data
        return super().train(mode)

    def forward(self, x):
        self.n += 1
        return self.linear(x) * (1 + 0.01 * self.n) + self.base(x)

    def get_extra_state(self):
        return [self.n]

    def set_extra_state(self, state):
        (self.n,) = state


def test_an_evaluation_leaves_no_trace_in_frozen_weights_and_extra_state():
    stage, x = a_stage([Counts()], ASYNC, 0), torch.ones(1, 8)
    stage.forward(head(0), [value(x)])
    before = copy.deepcopy(stage.module.state_dict())
    data = stage.module[0].base.weight.data_ptr()
    stage.passes.evaluate(0, [value(x)], None)
    stage.passes.infer(0, [value(x)])
    after = stage.module.state_dict()
    assert after.pop("0._extra_state") == before.pop("0._extra_state") == [1]
    assert_same(after, before)
    assert stage.module[0].base.weight.data_ptr() == data


def test_a_module_that_overrides_train_or_eval_is_found_inside_of_others():
    class Evaluates(nn.Linear):
        def eval(self):
            return super().eval()

    assert changes_modes(nn.Sequential(nn.Linear(1, 1), nn.Sequential(Merges())))
    assert changes_modes(nn.Sequential(Evaluates(1, 1)))
    assert not changes_modes(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))


# -- buffers ----------------------------------------------------------------------------------


def test_buffers_are_the_same_tensors_names_and_values_after_an_error():
    layer = CountsInEval()
    before = layer.calls

    def fails():
        with same_buffers(layer):
            layer(torch.ones(1))
            layer.calls = torch.zeros(5)
            layer.register_buffer("more", torch.ones(1))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert layer.calls is before
    assert before.tolist() == [0]
    assert layer._buffers.keys() == {"calls", "table"}
    assert layer.table is None


def test_buffers_go_on_from_pass_to_pass_of_one_evaluation_and_not_into_another():
    layer = CountsInEval()
    shared = nn.Sequential(layer, CountsInEval())
    shared[1].calls = layer.calls
    buffers, seen = EvaluationBuffers(shared), []
    for number in (1, 2, 1, 1, 2):
        with buffers.of(number, kept=False):
            shared(torch.zeros(1))
            seen.append(layer.calls.item())
            assert shared[1].calls is layer.calls
    assert seen == [2, 2, 4, 6, 4]
    assert layer.calls.item() == 0
    buffers.end(1)
    assert [number in buffers for number in (1, 2)] == [False, True]
    with buffers.of(1, kept=False):
        assert layer.calls.item() == 0


def test_an_evaluation_keeps_no_buffers_until_a_pass_changes_one():
    layer = CountsInEval()
    buffers = EvaluationBuffers(layer)
    with buffers.of(1, kept=False):
        pass
    assert 1 not in buffers
    with buffers.of(1, kept=False):
        layer(torch.ones(1))
    assert 1 in buffers


def test_a_pass_may_be_by_itself_or_change_the_stages_own_buffers():
    layer = CountsInEval()
    buffers = EvaluationBuffers(layer)
    with buffers.of(0, kept=False):
        layer(torch.ones(1))
    assert layer.calls.item() == 0
    with buffers.of(3, kept=True):
        layer(torch.ones(1))
    assert layer.calls.item() == 1
    assert 3 not in buffers


# -- metrics ----------------------------------------------------------------------------------


X, Y = torch.tensor([1.0, 2.0, 4.0]), value({"y": torch.tensor([1.0, 2.0, 3.0])})


def test_metrics_get_what_the_loss_gets_and_give_numbers():
    def largest(output, target):
        assert not torch.is_grad_enabled()
        return output.max()

    def hits(output, target):
        return (output == target["y"]).sum().item()

    found = measured(packed_metrics({"largest": largest, "hits": hits}), X, Y)
    assert found == {"largest": 4.0, "hits": 2.0}
    assert all(type(each) is float for each in found.values())


def test_without_metrics_nothing_is_packed_and_nothing_measured():
    assert packed_metrics({}) == b""
    assert measured(b"", X, Y) == {}


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda output, y: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda output, y: output, "Error: "),
        (lambda output, y: None, "TypeError"),
    ],
    ids=["raises", "several numbers", "nothing"],
)
def test_a_metric_that_gives_no_number_says_why_and_the_others_count(metric, words):
    found = measured(packed_metrics({"bad": metric, "one": lambda output, y: 1}), X, Y)
    assert found["one"] == 1.0
    with pytest.raises(ConfigError, match=rf'the metric "bad" must return a number .*{words}'):
        refuse_bad_metrics(found)


def test_a_metric_that_collects_is_refused_at_each_pass():
    seen = []

    def collects(output, y):
        seen.append(output)
        return 0.0

    packed = packed_metrics({"collects": collects})
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"it changes .*, as to collect something"):
            refuse_bad_metrics(measured(packed, X, Y))
    assert seen == []


@pytest.mark.parametrize(
    "metrics",
    [{"bad": 3}, {"loss": lambda output, y: 1}, {1: lambda output, y: 1}, [lambda output, y: 1]],
    ids=["no function", "loss", "no text", "no names"],
)
def test_what_are_no_metrics_is_refused_before_anything_is_sent(metrics):
    with pytest.raises(ConfigError, match="metrics must be functions of output and target by name"):
        packed_metrics(metrics)


def test_a_metric_that_does_not_pickle_is_refused():
    class Stays:
        def __call__(self, output, y):
            return 0.0

        def __reduce__(self):
            raise ValueError("it stays here")

    words = r" \(Stays\) cannot be pickled, so it cannot reach a worker: it stays here"
    with pytest.raises(ConfigError, match=rf"the metric 'stays'{words}"):
        packed_metrics({"stays": Stays()})
    with pytest.raises(ConfigError, match=rf"^loss_fn{words}"):
        packed_metrics({}, Stays())


def test_a_function_that_holds_a_weight_of_the_model_is_refused():
    """Sent along, it would be that of the start."""
    layer = nn.Linear(2, 2)
    weights = {id(layer.weight): (range_of(layer.weight), "0.weight")}
    part = layer.weight.detach()[0]
    for held, words in ((layer, r"^loss_fn refers to 0\.weight"), (part, r"pipe\.module\(\)")):
        for given in (({}, lambda output, y, held=held: 0.0), ({"m": lambda o, y, h=held: 0.0},)):
            match = words if len(given) == 2 else "the metric 'm' refers to 0.weight"
            with pytest.raises(ConfigError, match=match):
                packed_metrics(*given, weights=weights)
    other = nn.Linear(2, 2)
    assert packed_metrics({}, lambda output, y: other, weights)


def test_another_loss_comes_in_eval_mode_with_the_metrics():
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    found = unpacked(packed_metrics({"one": lambda output, y: 1}, loss))
    assert isinstance(found.loss_fn, nn.CrossEntropyLoss)
    assert not found.loss_fn.training
    assert loss.training
    assert found.metrics.keys() == {"one"}
    assert unpacked(packed_metrics({"one": mean})).loss_fn is None
    assert unpacked(b"").loss_fn is None


def mean(output, y):
    return output.mean()


def test_evaluate_computes_another_loss_and_refuses_one_that_collects():
    stage = a_stage([Modes()], loss_fn=lambda x, y: (x * y).sum())
    given = [value(torch.ones(1))], value(torch.tensor(3.0))
    other = packed_metrics({"mean": mean}, lambda x, y: {"loss": (x - y).sum(), "part": 2})
    assert stage.passes.evaluate(0, *given, metrics=other) == (-1.0, {"part": 2.0, "mean": 2.0})
    assert stage.passes.evaluate(1, *given) == (6.0, {})
    seen = []

    def collects(output, y):
        seen.append(output)
        return output.sum()

    with pytest.raises(ConfigError, match="of an evaluation changes 0 of 'seen', which"):
        stage.passes.evaluate(2, *given, metrics=packed_metrics({}, collects))
