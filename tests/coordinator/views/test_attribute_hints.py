"""What people look for on a pipeline because a module has it."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from support.models import mlp, regression
from support.pinned import Flat as Pipeline
from torch import nn

from pipedream_rt import ConfigError
from pipedream_rt.coordinator.views.attribute_hints import ADVICE


@pytest.fixture
def pipe():
    options = {"stages": 2, "loss_fn": F.mse_loss, "workers": "serial"}
    with Pipeline(mlp(), optimizer=(torch.optim.SGD, {"lr": 0.1}), **options) as made:
        yield made


@pytest.mark.parametrize("name", ADVICE)
def test_what_is_not_there_says_what_to_do_instead(pipe, name):
    with pytest.raises(AttributeError) as caught:
        getattr(pipe, name)
    assert str(caught.value) == f"a Pipeline has no attribute {name!r}: {ADVICE[name]}"
    assert not hasattr(pipe, name)


def test_a_word_that_is_misspelt_is_suggested(pipe):
    with pytest.raises(AttributeError, match="has no attribute 'train_epochs'") as caught:
        pipe.train_epochs  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("train_epochs", pipe)  # Python makes one of it


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_can_be_neither_pickled_nor_copied(pipe, copied):
    with pytest.raises(ConfigError, match=r"neither pickled nor copied: pipe\.save"):
        copied(pipe)
    list(pipe.train_epoch(regression(2)))


def test_parameters_are_those_of_now_and_those_of_the_model(pipe):
    list(pipe.train_epoch(regression(2)))
    state = pipe.state_dict()
    named = dict(pipe.named_parameters())
    assert list(named) == [name for name, _ in mlp().named_parameters()]
    assert all(torch.equal(parameter, state[name]) for name, parameter in named.items())
    assert all(type(p).__mro__[1] is nn.Parameter and p.requires_grad for p in named.values())
    assert sum(p.numel() for p in pipe.parameters()) == sum(p.numel() for p in mlp().parameters())
    with torch.no_grad():
        next(pipe.parameters()).zero_()
    assert torch.equal(pipe.state_dict()["0.weight"], state["0.weight"])


def test_frozen_parameters_are_among_them():
    model = mlp()
    model[0].requires_grad_(False)
    with Pipeline(model, stages=2, workers="serial") as pipe:
        assert [p.requires_grad for p in pipe.parameters()] == [False] * 2 + [True] * 10


def test_whoever_wants_the_gradients_of_copies_is_told_where_they_are(pipe):
    list(pipe.train_epoch(regression(1)))
    with pytest.raises(ConfigError, match=r"gradient is on its stage alone.*Clip\(\.\.\.\)"):
        nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="gradient is on its stage alone"):
        optimizer.zero_grad()
    with pytest.raises(ConfigError, match="gradient is on its stage alone"):
        optimizer.step()


def test_it_is_on_the_cpu(pipe):
    assert pipe.to("cpu") is pipe.cpu() is pipe.to(torch.device("cpu")) is pipe.to(device="cpu")
    for other in ("cuda", torch.device("cuda:1"), "meta"):
        with pytest.raises(ConfigError, match=r"pipe\.to\('.*'\) does not move .*devices="):
            pipe.to(other)
    with pytest.raises(ConfigError, match=r"64\) does not convert .* in that dtype"):
        pipe.to(torch.float64)
    with pytest.raises(ConfigError, match=r"pipe\.to\(tensor\) does not convert"):
        pipe.to(torch.ones(2))


@pytest.mark.parametrize("loader", [5, None, len, nn.Linear(1, 1)])
def test_a_loader_that_yields_nothing_is_refused_and_the_pipeline_goes_on(pipe, loader):
    calls = {
        "train_epoch": lambda: list(pipe.train_epoch(loader)),
        "evaluate": lambda: pipe.evaluate(loader),
        "predict": lambda: list(pipe.predict(loader)),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=f"{name} takes a loader, something that yields"):
            call()
    list(pipe.train_epoch(regression(2)))
    assert pipe.epoch == 1
