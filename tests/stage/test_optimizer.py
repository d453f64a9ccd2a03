"""The optimizer of a stage: its groups, its state, and what of it goes into checkpoints."""

import pytest
import torch
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.state_keys import StateKey, by_text
from pipedream_rt.stage.hyper import pack_hyper
from pipedream_rt.stage.optimizer import GroupSpec, OptimizerSpec, StageOptimizer


def spec(*groups, cls=torch.optim.AdamW, **kwargs):
    return OptimizerSpec(optimizer_class=cls, kwargs=kwargs, groups=groups)


def step(optimizer, hyper):
    prepared = optimizer.prepare(hyper)
    if prepared is not None:
        prepared.step()


class Counts(torch.optim.SGD):
    """Keeps a count in its groups and one in itself, and uses both."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.calls = 0
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"] / (group["k"] + self.calls))


def test_what_an_optimizer_keeps_in_groups_and_attributes_is_part_of_its_state():
    def made():
        weight = nn.Parameter(torch.ones(1))
        return weight, StageOptimizer(spec(GroupSpec(names=("w",)), cls=Counts), {"w": weight})

    def steps(weight, optimizer, numbers):
        for number in numbers:
            weight.grad = torch.ones(1)
            step(optimizer, [{"lr": 0.3}] if number else [{}])

    weight, optimizer = made()
    steps(weight, optimizer, range(3))
    state = optimizer.state()
    # Not the rate, which the script has set.
    assert by_text(state) == {
        "group/0/#0/k": 3, "attribute/0/calls": 3, "split/0": ["w"]
    }  # fmt: skip
    again, other = made()
    with torch.no_grad():
        again.copy_(weight)
    other.load_state(state)
    steps(weight, optimizer, [3])
    steps(again, other, [3])
    assert torch.equal(weight, again)


def test_an_attribute_that_cannot_be_saved_is_named():
    weight = nn.Parameter(torch.ones(1))
    optimizer = StageOptimizer(spec(GroupSpec(names=("w",)), cls=Counts), {"w": weight})
    optimizer.torch_optimizer.odd = {1, 2}
    with pytest.raises(ConfigError, match=r"'odd' is \{1, 2\}"):
        optimizer.state()


def test_groups_keep_their_numbers_on_a_stage_that_has_only_some():
    weight = nn.Parameter(torch.ones(1))
    groups = (GroupSpec(names=("elsewhere",)), GroupSpec(names=("weight",), options={"lr": 2.0}))
    optimizer = StageOptimizer(spec(*groups, cls=torch.optim.SGD), {"weight": weight})
    weight.grad = torch.ones(1)
    step(optimizer, [{"lr": 100.0}, {"lr": 0.25}])
    assert weight.item() == 0.75


def test_packed_hyper_parameters_are_set():
    weight = nn.Parameter(torch.ones(1))
    optimizer = StageOptimizer(spec(GroupSpec(names=("w",))), {"w": weight})
    weight.grad = torch.ones(1)
    step(optimizer, [{"betas": pack_hyper((0.5, 0.5), "betas"), "lr": 0.1}])
    assert optimizer.torch_optimizer.param_groups[0]["betas"] == (0.5, 0.5)


def test_a_stage_without_parameters_has_nothing_to_do():
    optimizer = StageOptimizer(spec(GroupSpec(names=("elsewhere",))), {})
    step(optimizer, [{}])
    optimizer.load_state({})
    assert optimizer.state() == {}


def test_state_by_name_goes_round():
    def made():
        weights = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
        return weights, StageOptimizer(spec(GroupSpec(names=("b", "a"))), weights)

    weights, optimizer = made()
    weights["a"].grad = torch.tensor([1.0, 2.0])
    step(optimizer, [{}])
    state = optimizer.state()
    assert {key.name for key in state if key.part == "optimizer"} == {"a"}
    others, other = made()
    other.load_state(state)
    assert torch.equal(
        other.torch_optimizer.state[others["a"]]["exp_avg"],
        state[StateKey("optimizer", "a", ("exp_avg",))],
    )
