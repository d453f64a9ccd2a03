"""Weight prediction: the step to expect of each optimizer, and the weights that are read."""

import pytest
import torch
from torch import nn

from pipedream_rt import ConfigError
from pipedream_rt.corrections import Extrapolation, WeightPrediction
from pipedream_rt.corrections.prediction import expected_step
from pipedream_rt.stage.correction import Moment


def test_the_expected_step_of_complex_weights_is_that_of_their_parts():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))
    parts = nn.Parameter(torch.view_as_real(weight.detach()).clone())
    both = [torch.optim.AdamW([each], lr=0.1) for each in (weight, parts)]
    for _ in range(5):
        weight.grad = torch.randn(3, 3, dtype=torch.complex64)
        parts.grad = torch.view_as_real(weight.grad).clone()
        for optimizer in both:
            optimizer.step()
    found = expected_step(both[0], both[0].param_groups[0], weight)
    expected = expected_step(both[1], both[1].param_groups[0], parts)
    torch.testing.assert_close(torch.view_as_real(found), expected)


def stepped(make, updates=4):
    """A weight and its optimizer after some steps."""
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(3, 4))
    optimizer = make([weight])
    for _ in range(updates):
        weight.grad = torch.randn(3, 4)
        optimizer.step()
    return weight, optimizer


RULES = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=1.0),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.99), weight_decay=0.3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1, betas=(0.9, 0.99)),
    "decoupled NAdam": lambda p: torch.optim.NAdam(
        p, lr=0.1, betas=(0.9, 0.99), weight_decay=0.3, decoupled_weight_decay=True
    ),
}


def by_hand(optimizer, weight):
    """The step of table 1 of PipeOptim, written out."""
    group, state = optimizer.param_groups[0], optimizer.state[weight]
    if "momentum_buffer" in state:
        return group["lr"] * state["momentum_buffer"]
    (b1, b2), t = group["betas"], state["step"].item()
    bias = 1 - (state["mu_product"].item() if "mu_product" in state else b1**t)
    second = state.get("max_exp_avg_sq", state["exp_avg_sq"]) / (1 - b2**t)
    step = state["exp_avg"] / bias / (second.sqrt() + group["eps"])
    return group["lr"] * (step + group["weight_decay"] * weight)


@pytest.mark.parametrize("name", RULES)
@torch.no_grad()
def test_the_expected_step_follows_the_moments_of_its_optimizer(name):
    weight, optimizer = stepped(RULES[name])
    found = expected_step(optimizer, optimizer.param_groups[0], weight)
    torch.testing.assert_close(found, by_hand(optimizer, weight))


@torch.no_grad()
def test_with_momentum_it_is_the_step_that_a_gradient_of_zero_would_make():
    weight, optimizer = stepped(RULES["momentum"])
    step = expected_step(optimizer, optimizer.param_groups[0], weight)
    before = weight.clone()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(before - weight, step)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.SGD])
def test_an_optimizer_without_a_rule_is_refused_by_name(kind):
    """SGD too, where it has no momentum."""
    with pytest.raises(ConfigError, match=f"WeightPrediction has no rule for {kind.__name__}"):
        WeightPrediction().require_fit(kind, {"lr": 0.1})


def test_an_optimizer_says_its_expected_step_itself():
    class Own(torch.optim.SGD):
        def expected_step(self, parameter, group):
            return torch.full_like(parameter, 2.0)

    WeightPrediction().require_fit(Own, {"lr": 0.1})
    weight, optimizer = stepped(lambda p: Own(p, lr=0.1))
    assert expected_step(optimizer, optimizer.param_groups[0], weight).eq(2.0).all()


def at(staleness):
    return Moment(stage=0, num_stages=4, micro_batches=1, update=staleness, read=0)


@torch.no_grad()
def test_a_prediction_goes_as_many_steps_as_the_version_is_stale():
    weight, optimizer = stepped(RULES["Adam"])
    correction = WeightPrediction(strength=0.5)
    correction.parameters, correction.state = {"w": weight}, {}
    read = {"w": weight.clone()}
    correction.before_forward(at(3), read, optimizer)
    torch.testing.assert_close(read["w"], weight - 1.5 * by_hand(optimizer, weight))


def test_a_parameter_without_a_gradient_so_far_is_read_as_it_is():
    weight, optimizer = stepped(RULES["Adam"], updates=0)
    correction = WeightPrediction()
    correction.parameters, correction.state = {"w": weight}, {}
    read = {"w": weight.detach().clone()}
    correction.before_forward(at(3), read, optimizer)
    assert torch.equal(read["w"], weight)


def test_an_extrapolation_follows_the_average_of_the_updates():
    correction, optimizer = Extrapolation(strength=2.0, decay=0.75), None
    correction.state = {}
    read = {"w": torch.zeros(1)}
    correction.before_forward(at(3), read, optimizer)
    assert read["w"].item() == 0.0  # nothing was updated so far
    for update in (4.0, 8.0):
        correction.after_step(at(3), {"w": torch.tensor([update])}, {"w": torch.zeros(1)})
    correction.before_forward(at(3), read, optimizer)
    assert read["w"].item() == 2.0 * 3 * (0.75 * 4.0 + 0.25 * 8.0)
    correction = Extrapolation()
    correction.state = {}
    for update in (4.0, 8.0):
        correction.after_step(at(3), {"w": torch.tensor([update])}, {"w": torch.zeros(1)})
    correction.before_forward(at(2), read, optimizer)
    assert read["w"].item() == 30.0 + 2 * 8.0
