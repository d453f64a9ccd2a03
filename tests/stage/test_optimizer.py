import torch
from torch import nn

from pipedream_rt.stage.optimizer import GroupSpec, OptimizerSpec, StageOptimizer, plain_hyper


def spec(*groups, cls=torch.optim.AdamW, **kwargs):
    return OptimizerSpec(optimizer_class=cls, kwargs=kwargs, groups=groups)


def test_plain_hyper_leaves_out_what_cannot_travel():
    group = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5)).param_groups[0]
    hyper = plain_hyper(group)
    assert hyper["lr"] == 0.5
    assert hyper["betas"] == (0.9, 0.999)
    assert "params" not in hyper


def test_groups_keep_their_numbers_on_a_stage_that_has_only_some():
    weight = nn.Parameter(torch.ones(1))
    groups = (GroupSpec(names=("elsewhere",)), GroupSpec(names=("weight",), options={"lr": 2.0}))
    optimizer = StageOptimizer(spec(*groups, cls=torch.optim.SGD), {"weight": weight})
    weight.grad = torch.ones(1)
    optimizer.step([{"lr": 100.0}, {"lr": 0.25}])
    assert weight.item() == 0.75


def test_lists_become_tuples_again_as_after_msgpack():
    weight = nn.Parameter(torch.ones(1))
    optimizer = StageOptimizer(spec(GroupSpec(names=("w",))), {"w": weight})
    weight.grad = torch.ones(1)
    optimizer.step([{"betas": [0.5, 0.5], "lr": 0.1}])
    assert optimizer.torch_optimizer.param_groups[0]["betas"] == (0.5, 0.5)


def test_a_stage_without_parameters_has_nothing_to_do():
    optimizer = StageOptimizer(spec(GroupSpec(names=("elsewhere",))), {})
    optimizer.step([{}])
    optimizer.load_state({})
    assert optimizer.state() == {}


def test_state_by_name_goes_round():
    def made():
        weights = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
        return weights, StageOptimizer(spec(GroupSpec(names=("b", "a"))), weights)

    weights, optimizer = made()
    weights["a"].grad = torch.tensor([1.0, 2.0])
    optimizer.step([{}])
    state = optimizer.state()
    assert state.keys() == {"a"}
    others, other = made()
    other.load_state(state)
    assert torch.equal(other.torch_optimizer.state[others["a"]]["exp_avg"], state["a"]["exp_avg"])
