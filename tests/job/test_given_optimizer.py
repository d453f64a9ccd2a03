"""The optimizer of a script: checked, and taken apart by the names of its parameters."""

import functools

import pytest
import torch
from torch import nn

from pipedream_rt import ConfigError
from pipedream_rt.job.given_optimizer import GivenOptimizer, grouped_names, state_by_name

SGD, ADAM = torch.optim.SGD, torch.optim.AdamW


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def parts(argument, net=None):
    named = dict((net or model()).named_parameters())
    return grouped_names(
        argument, {id(p): name for name, p in named.items() if p.requires_grad}, named
    )


def test_without_rules_all_parameters_are_one_group():
    found = parts((SGD, {"lr": 0.1}))
    assert found[:2] == (SGD, {"lr": 0.1})
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert found.groups == [(names, {})]
    assert parts(None) is None


def test_the_first_rule_that_fits_counts_and_the_rest_has_the_defaults():
    rules = [
        ("*.bias", {"weight_decay": 0.0}),
        (lambda name, parameter: parameter.dim() < 2, {"lr": 0.5}),
        ("2.*", {"lr": 0.001}),
    ]
    assert parts((ADAM, {}, rules)).groups == [
        (["0.bias", "1.bias", "2.bias"], {"weight_decay": 0.0}),
        (["1.weight"], {"lr": 0.5}),
        (["2.weight"], {"lr": 0.001}),
        (["0.weight"], {}),
    ]
    assert [names for names, _ in parts((ADAM, {}, [("*", {})])).groups] == [
        [name for name, _ in model().named_parameters()]
    ]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("adam", r"optimizer must be \(class, dict"),
        ((SGD,), r"optimizer must be \(class, dict"),
        (SGD, r"as optimizer=\(SGD, {}\), not"),
        (functools.partial(SGD, lr=0.1), r"as optimizer=\(SGD, {'lr': 0.1}\), not"),
        ((SGD, None), "arguments of the optimizer must be a dict"),
        ((SGD, {"params": []}), "have 'params'; for parameter groups give rules"),
        ((SGD, {"lr": "x"}), "SGD refused its arguments"),
        ((SGD, {"lr": -1}), "SGD refused its arguments: Invalid learning"),
        ((SGD, {"speed": 1}), "SGD refused its arguments"),
        ((nn.Linear, {}), "no subclass of torch.optim.Optimizer"),
        ((torch.optim.LBFGS, {}), "LBFGS evaluates the model several times"),
        (SGD(nn.Linear(1, 1).parameters()), "not one of the model's"),
        ((ADAM, {}, [("*.weights", {})]), r"the rule '\*.weights' fits no parameter"),
        (
            (ADAM, {}, [("*", {}), ("*.bias", {})]),
            r"'\*.bias' fits no parameter that earlier rules have left",
        ),
        ((ADAM, {}, ["*.bias"]), "is a pair of a pattern"),
        ((ADAM, {}, [("*.bias", 0.1)]), "is a pair of a pattern"),
        ((ADAM, {}, [(3, {})]), "3 is neither a pattern"),
    ],
)
def test_what_is_no_optimizer_of_the_model_is_refused(argument, words):
    with pytest.raises(ConfigError, match=words):
        parts(argument)


def test_a_model_without_anything_to_train_is_told_so():
    with pytest.raises(ConfigError, match=r"nothing to step; unfreeze some, or .*optimizer=None"):
        parts((SGD, {}), model().requires_grad_(False))


class Halves(SGD):
    share = 1.0


def test_an_optimizer_is_taken_apart_by_names():
    """With the attributes that were set on it, and without parameters that are frozen."""
    net = model()
    net[1].requires_grad_(False)
    given = Halves(
        [{"params": net[0].parameters(), "lr": 0.5}, {"params": [*net[1:].parameters()]}], lr=0.1
    )
    given.share = 0.5
    found = parts(given, net)
    assert [(names, options["lr"]) for names, options in found.groups] == [
        (["0.weight", "0.bias"], 0.5),
        (["2.weight", "2.bias"], 0.1),
    ]
    assert found.optimizer_class is Halves
    assert found.attributes["share"] == 0.5


def test_a_rate_that_is_a_tensor_is_copied():
    """A scheduler changes it in place."""
    net = model()
    rate = torch.tensor(0.1)
    found = parts(ADAM(net.parameters(), lr=rate), net)
    rate.fill_(9.0)
    assert found.groups[0][1]["lr"].item() == pytest.approx(0.1)


def test_a_step_or_hooks_that_the_stages_would_not_have_are_refused():
    net = model()
    given = SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(given, 0.5)
    assert parts(given, net)  # although a scheduler has wrapped the step
    given.step = lambda: None
    with pytest.raises(ConfigError, match="step was replaced on the object"):
        parts(given, net)
    given = SGD(net.parameters(), lr=0.1)
    given.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"the optimizer has hooks \(optimizer_step_pre_hooks\)"):
        parts(given, net)


def test_a_change_of_the_optimizer_that_was_given_is_refused_by_name():
    net = model()
    given = SGD([{"params": net[0].parameters()}, {"params": net[1].parameters()}], lr=0.1)
    watched = GivenOptimizer(given)
    watched.refuse_changes()
    given.param_groups[1]["lr"] = 0.2
    with pytest.raises(ConfigError, match="'lr' of group 1 was changed"):
        watched.refuse_changes()
    given.param_groups[1]["lr"] = 0.1
    watched.refuse_changes()
    given.add_param_group({"params": net[2].parameters()})
    with pytest.raises(ConfigError, match="a parameter group was added"):
        watched.refuse_changes()
    GivenOptimizer((SGD, {"lr": 0.1})).refuse_changes()


def test_state_that_an_optimizer_already_has_goes_by_names():
    net = model()
    given = SGD(net.parameters(), lr=0.1, momentum=0.9)
    names = {id(p): name for name, p in net.named_parameters()}
    assert state_by_name(given, names) == state_by_name((SGD, {}), names) == {}
    net[0](torch.ones(1, 2)).sum().backward()
    given.step()
    state = state_by_name(given, names)
    assert state.keys() == {"0.weight", "0.bias"}
    assert torch.equal(state["0.bias"]["momentum_buffer"], torch.ones(3))


def test_several_optimizers_are_answered_with_how_to_write_one():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    each = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    for several in (each, tuple(each), {"a": each[0], "b": each[1]}):
        with pytest.raises(ConfigError, match="optimizer must be one, and not several"):
            grouped_names(several, {1: "weight"}, {})
