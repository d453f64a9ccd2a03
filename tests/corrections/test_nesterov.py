"""Nesterov's form of momentum: what it makes of the optimizers of torch, and what it is not for."""

import pytest
import torch
from torch import nn

from pipedream_rt import ConfigError
from pipedream_rt.corrections import StalenessNesterov
from pipedream_rt.stage.correction import Moment

GRADIENTS = [torch.tensor([float(g), -2.0 * g]) for g in (1, 3, -2, 5)]


def stepped(make, correction=None, staleness=1, gradients=GRADIENTS):
    """A weight after steps with some gradients, and its optimizer."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = make([weight])
    if correction is not None:
        correction.state, correction.parameters = {}, {"w": weight}
    for number, gradient in enumerate(gradients):
        weight.grad = gradient.clone()
        before, kept = {"w": weight.detach().clone()}, [dict(g) for g in optimizer.param_groups]
        at = Moment(stage=0, num_stages=4, micro_batches=4, update=number, read=number - staleness)
        with torch.no_grad():
            if correction is not None:
                correction.before_step(at, optimizer)
            optimizer.step()
            if correction is not None:
                correction.after_step(at, {"w": weight.detach()}, before)
        for group, options in zip(optimizer.param_groups, kept, strict=True):
            group.update(options)
    return weight.detach(), optimizer


def sgd(**options):
    return lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.5, **options)


def test_with_the_momentum_for_strength_it_is_torchs_nesterov():
    """Once the velocity is there: the first step, which has nothing to look back at, is plain."""
    kept = StalenessNesterov(strength=0.5, memory=1.0)
    found, _ = stepped(sgd(), kept)
    # v + mu (v - v_before) = g + mu v, less mu times what v_before was too much: by hand.
    velocity, weight = torch.zeros(2), torch.ones(2)
    for number, gradient in enumerate(GRADIENTS):
        before, velocity = velocity, 0.5 * velocity + gradient
        change = velocity - before if number else torch.zeros(2)
        weight = weight - 0.01 * velocity - 0.5 * 0.01 * change
    torch.testing.assert_close(found, weight)


def test_a_shorter_memory_leaves_the_way_of_a_steady_gradient():
    """A momentum of a half of the memory is 0: SGD without one, at twice the rate."""
    same = [torch.ones(2)] * 6
    found, _ = stepped(sgd(), StalenessNesterov(strength=0.0), gradients=same)
    torch.testing.assert_close(found, torch.ones(2) - 6 * 0.02)


@pytest.mark.parametrize("momentum", [0.1, 0.3, 0.5])
def test_where_the_memory_is_too_short_to_be_halved_the_rate_is_that_of_no_momentum(momentum):
    """Steps of a steady gradient are as long as they were."""
    same = [torch.ones(2)] * 40

    def make(p):
        return torch.optim.SGD(p, lr=0.01, momentum=momentum)

    found, _ = stepped(make, StalenessNesterov(), gradients=same)
    torch.testing.assert_close(found, torch.ones(2) - 40 * 0.01 / (1 - momentum))


def test_a_rate_may_be_a_tensor():
    def make(p):
        return torch.optim.SGD(p, lr=torch.tensor([0.01]), momentum=0.9)

    def plain(p):
        return torch.optim.SGD(p, lr=0.01, momentum=0.9)

    found, expected = stepped(make, StalenessNesterov()), stepped(plain, StalenessNesterov())
    torch.testing.assert_close(found[0], expected[0])


def test_sgd_that_has_the_form_by_itself_is_refused():
    with pytest.raises(ConfigError, match="has by itself; leave one of both out"):
        StalenessNesterov().require_fit(torch.optim.SGD, {"momentum": 0.9, "nesterov": True})


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_second_moments_and_decay_are_the_optimizers_own(kind):
    def make(p, **options):
        return kind(p, lr=0.1, weight_decay=0.1, **options)

    _, plain = stepped(make)
    _, corrected = stepped(make, StalenessNesterov())
    one, other = (next(iter(o.state.values())) for o in (plain, corrected))
    if kind is torch.optim.AdamW:  # Adam's decay is in the gradient, and so depends on the weight
        assert torch.equal(one["exp_avg_sq"], other["exp_avg_sq"])
    shorter, _ = stepped(lambda p: make(p, betas=(0.8, 0.999)))
    found, _ = stepped(make, StalenessNesterov(strength=0.0))
    torch.testing.assert_close(found, shorter)


def test_a_fresh_step_is_the_optimizers():
    correction = StalenessNesterov()
    assert torch.equal(stepped(sgd(), correction, staleness=0)[0], stepped(sgd())[0])
    assert not correction.state  # nor does it keep anything for a checkpoint


def test_weights_that_are_not_its_own_are_left_alone():
    """Tied weights, which other stages have too."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = sgd()([weight])
    correction = StalenessNesterov()
    correction.state, correction.parameters = {}, {}
    weight.grad = torch.ones(2)
    at = Moment(stage=0, num_stages=2, micro_batches=1, update=1, read=0)
    correction.before_step(at, optimizer)
    optimizer.step()
    correction.after_step(at, {}, {})


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        (torch.optim.NAdam, {}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"momentum": 0.0}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
    ],
)
def test_an_optimizer_without_a_rule_is_named(kind, group):
    with pytest.raises(ConfigError, match=rf"no rule for {kind.__name__}: use SGD with momentum"):
        StalenessNesterov().require_fit(kind, group)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strength": -1.0}, "strength must be a number of at least 0"),
        ({"memory": 0.0}, "above 0, and at most 1"),
        ({"memory": 1.5}, "above 0, and at most 1"),
        ({"memory": "half"}, "memory must be a number"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        StalenessNesterov(**options)
