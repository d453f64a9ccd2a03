"""Modules that do not follow the mode of their model."""

import pytest
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.modes import Modes, modes_of, own_methods


class Model(nn.Module):
    """As models for detection, BatchNorm keeps its statistics; and dropout goes on in eval mode."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()) for _ in range(2)
        )

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
            if isinstance(module, nn.Dropout):
                module.train()
        return self


FOUND = Modes(("blocks.0.1", "blocks.1.1"), ("blocks.0.2", "blocks.1.2"))


def modes(model):
    return [module.training for module in model.modules()]


class Merges(nn.Linear):
    """A layer that stays whole is not even asked, for those of adapters merge weights."""

    def train(self, mode=True):
        raise AssertionError


def test_those_that_deviate_are_named_and_the_model_is_left_as_it_was():
    model = Model()
    model.blocks[1].eval()
    model.blocks[0][0] = Merges(2, 2)
    before = modes(model)
    assert modes_of(model, model.blocks) == FOUND
    assert modes(model) == before
    assert all("train" not in vars(module) for module in model.modules())


def test_a_model_with_the_methods_of_torch_has_none():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    assert modes_of(model, model) == Modes()
    assert own_methods(model, nn.Module, ("train", "eval")) == []
    assert own_methods(Model(), nn.Module, ("train", "eval")) == ["train"]
    model.eval = model.train
    assert own_methods(model, nn.Module, ("train", "eval")) == ["eval"]


class Counts(Model):
    def train(self, mode=True):
        self.calls = getattr(self, "calls", 0) + 1
        return super().train(mode)


class Fills(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", nn.Parameter().new_zeros(1))

    def eval(self):
        self.seen.add_(1)
        return super().eval()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Counts, r"the model, a Counts, has a method train\(\) .* changes 'calls'"),
        (Fills, r"the model, a Fills, has a method train\(\) .* changes 'seen'"),
    ],
)
def test_a_mode_that_changes_something_else_is_refused_by_name(make, words):
    model = make()
    with pytest.raises(ConfigError, match=words):
        modes_of(model, model.blocks)


def test_a_part_of_the_model_is_set_with_what_deviates_in_it():
    """What is on another stage is left out."""
    model = Model()
    part = nn.Module()
    part.blocks = nn.Module()
    part.blocks.add_module("1", model.blocks[1])
    FOUND.set(part, training=True)
    assert [module.training for module in model.blocks[1]] == [True, False, True]
    FOUND.set(part, training=False)
    assert [module.training for module in model.blocks[1]] == [False, False, True]
    Modes().set(part, training=True)
    assert all(modes(part))
    Modes(in_training=("",)).set(part, training=True)
    assert modes(part)[0] is False
