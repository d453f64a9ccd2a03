"""The runner of a stage: steps in their order, each with its seed, and no value kept too long."""

import copy

import pytest
import torch
from support.models import Raises
from support.stages import specs_of, value
from torch import nn

from pipedream_rt.devices.device import Host
from pipedream_rt.stage.runner import Runner


class Skip(nn.Module):
    """A model that is no sequence: its last layer takes two values."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.noise = nn.Dropout(0.5)

    def forward(self, x, scale=2.0):
        a = self.first(x)
        return self.last(self.noise(self.second(a)) + a * scale)


def runner_of(model, index=0, **options):
    return Runner(specs_of(model, **options)[index])


def ran(runner, inputs, number=3, way="run"):
    values = runner.entered([value(x) for x in inputs], 0)
    return getattr(runner, way)(0, values, number)


X = torch.arange(8.0).view(2, 4)


def test_a_sequence_is_called_layer_by_layer():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    (found,) = ran(runner_of(model), [X])
    assert torch.equal(found, model(X))


def test_stages_give_what_the_next_ones_take():
    model = Skip().eval()
    first, last = (
        runner_of(model, index, stages=["second"], example=X, loss_fn=None) for index in (0, 1)
    )
    given = ran(first, [X])
    assert len(given) == 1  # one consumer
    assert torch.equal(given[0], model.first(X))
    assert list(last.sources) == [0]
    (found,) = ran(last, given)
    assert torch.equal(found, model(X))


def test_each_step_draws_from_its_own_seed():
    """So neither another layer nor another stage changes what a dropout draws."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
    runner = runner_of(model, seed=7)
    one, again, other = (ran(runner, [X], number)[0] for number in (3, 3, 4))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    first, last = (runner_of(model, index, seed=7, stages=[2]) for index in (0, 1))
    assert torch.equal(ran(last, ran(first, [X]))[0], one)


def test_values_that_no_later_step_needs_go_at_once():
    runner = runner_of(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))))
    values = runner.entered([value(X)], 0)
    kept = []
    for layer in runner._module.children():
        layer.register_forward_hook(lambda *_: kept.append(len(values)))
    runner.run(0, values, 0)
    assert max(kept) <= 2


@pytest.mark.parametrize("recompute", [False, True])
def test_a_recomputed_stage_has_the_same_gradients_and_buffers(recompute):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    runner = runner_of(copy.deepcopy(model), recompute=recompute)
    (found,) = ran(runner, [X], way="train")
    found.sum().backward()
    module = runner._module
    expected = runner_of(model)
    (wanted,) = ran(expected, [X])
    wanted.sum().backward()
    for one, other in zip(module.parameters(), expected._module.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(module.buffers(), expected._module.buffers(), strict=True):
        assert torch.equal(one, other)


class Near(Host):
    """The host, beside an accelerator or not, that says what it was asked to bring back."""

    def __init__(self, has_others):
        self.has_others, self.brought = has_others, []

    def brings_back(self):
        return self.has_others

    def brought_back(self, value):
        self.brought.append(value)
        return value + 1


@pytest.mark.parametrize("has_others", [False, True])
def test_outputs_are_brought_back_where_they_may_be_on_another_device(has_others):
    model, device = nn.Sequential(nn.Linear(4, 4)), Near(has_others)
    (found,) = ran(Runner(specs_of(model)[0], device), [X])
    assert len(device.brought) == has_others
    assert torch.equal(found, model(X) + has_others)


def test_where_it_stands_is_known_while_a_step_is_done_and_after_it_failed():
    runner = runner_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    assert runner.at is None
    ran(runner, [X])
    assert runner.at is None
    broken = runner_of(nn.Sequential(nn.Linear(4, 4), Raises(0)))
    with pytest.raises(ZeroDivisionError):
        ran(broken, [X])
    step, given = broken.at
    assert step.name == "1"
    assert given.shape == (2, 4)
