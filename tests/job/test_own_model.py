"""The script's own model has the weights of the start, or those that the pipeline gave it."""

import logging

import pytest
import torch
from torch import nn

from pipedream_rt import ConfigError
from pipedream_rt.job.own_model import OwnModel
from pipedream_rt.job.unsplit_model import UnsplitModel


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x) * self.scale


def made():
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), nn.BatchNorm1d(2), nn.Linear(2, 2))
    return model, OwnModel(UnsplitModel(model))


def given(model):
    """A state dict as the stages have it after some updates."""
    state = {k: v + 1 if v.dtype.is_floating_point else v for k, v in model.state_dict().items()}
    return state | {"0.scale": model.state_dict()["0.scale"]}


def test_weights_of_the_start_and_those_that_were_given_may_be_there():
    model, own = made()
    first = {k: v.clone() for k, v in model.state_dict().items()}
    state = given(model)
    own.gave(state)
    for each in (state, first, state):
        model.load_state_dict(each)
        own.require_known()
    model.load_state_dict({**first, "2.weight": state["2.weight"]})
    own.require_known()


@pytest.mark.parametrize("synchronised", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m[2].weight.data.clamp_(-0.1, 0.1), "weight '2.weight' was changed"),
        (lambda m: [p.data.zero_() for p in m.parameters()], "weight '0.weight' was changed"),
        (lambda m: m[0].scale.mul_(0.5), "buffer '0.scale' was changed"),
        (lambda m: setattr(m[2], "weight", nn.Parameter(torch.ones(2, 2))), "'2.weight' was rep"),
        (lambda m: m.__setitem__(2, nn.ReLU()), "'2' was replaced"),
        (lambda m: m[0].register_forward_hook(print), "a hook of the model"),
        (lambda m: m[0].weight.requires_grad_(False), "requires_grad of '0.weight'"),
    ],
)
def test_anything_else_is_refused_by_name(change, words, synchronised):
    model, own = made()
    if synchronised:
        state = given(model)
        own.gave(state)
        model.load_state_dict(state)
    own.require_known()
    change(model)
    with pytest.raises(ConfigError, match=words):
        own.require_known()


def test_a_model_with_weights_that_were_given_may_be_used_and_frozen_as_a_whole():
    model, own = made()
    state = given(model)
    own.gave(state)
    model.load_state_dict(state)
    model.requires_grad_(False).eval()
    model.train()(torch.randn(4, 2))  # moves the statistics of both layers
    own.require_known()


def test_weights_from_a_checkpoint_are_asked_for_where_nobody_knows_them():
    model, own = made()
    state, asked = given(model), []
    own.saved = lambda: asked.append(1) or [state]
    own.require_known()
    assert not asked
    model.load_state_dict(state)
    own.require_known()
    own.require_known()
    assert asked == [1]


def test_of_gradients_it_is_said_once_that_they_reach_no_stage(caplog):
    caplog.set_level(logging.WARNING)
    model, own = made()
    model.eval()(torch.randn(4, 2)).sum().backward()
    model.load_state_dict(made()[0].state_dict())
    own.require_known()
    own.require_known()
    assert caplog.text.count("the script's own model has gradients") == 1
