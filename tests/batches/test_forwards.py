"""What the forwards of a model do: of a sequence, and what is asked of any model."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipedream_rt import ConfigError
from pipedream_rt.batches.forwards import (
    Cache,
    SequenceForwards,
    default_example,
    without_cache,
)
from pipedream_rt.batches.items import Batch
from pipedream_rt.messages.head import Mode
from pipedream_rt.messages.tree import flat_copy, unflatten

X = torch.ones(2, 4)


def test_the_first_layer_of_a_sequence_takes_what_there_is_of_x():
    forwards = SequenceForwards()
    named = {"x": X, "scale": 2}
    assert forwards.inputs(Batch((named,), {}, None)) is named
    value = flat_copy(named)
    ((stage, structure, tensors),) = forwards.shares(0, value)
    assert stage == 0
    assert unflatten(structure, tensors)["scale"] == 2
    assert tuple(forwards.follow(value, Mode.TRAIN, None)) == (0, None, False, ())


@pytest.mark.parametrize(
    "batch",
    [Batch((X, X), {}, None), Batch((), {"x": X}, None), Batch((X,), {"mask": X}, None)],
    ids=["two", "named", "one and a mask"],
)
def test_a_sequence_is_called_with_one_value(batch):
    with pytest.raises(ConfigError, match=r"takes pairs \(x, y\), of which x goes to the first"):
        SequenceForwards().inputs(batch)


def test_a_sequence_cannot_generate():
    with pytest.raises(ConfigError, match="has no cache, so it cannot generate"):
        SequenceForwards().cached(flat_copy(X), Cache("past_key_values", None), 1)


class Bare(nn.Module):
    def forward(self, x):
        return x


class Named(nn.Module):
    def forward(self, x, use_cache=None):
        return x


class Anything(nn.Module):
    def forward(self, x, **kwargs):
        return x


@pytest.mark.parametrize(
    ("cls", "config", "expected"),
    [
        (Named, {"use_cache": True}, {"use_cache": False}),
        (Anything, {"use_cache": True}, {"use_cache": False}),
        (Bare, {"use_cache": True}, {}),  # its forward would not take it
        (Named, {}, {}),
        (Named, None, {}),
    ],
    ids=["named", "anything", "not taken", "not configured", "no config"],
)
def test_a_model_with_a_cache_is_told_not_to_fill_it(cls, config, expected):
    model = cls()
    if config is not None:
        model.config = SimpleNamespace(**config)
    assert without_cache(model) == expected


@pytest.mark.parametrize(
    ("inputs", "is_one"),
    [({"ids": X, "n": 3}, True), ({"ids": "text"}, False), ([X], False), (None, False)],
    ids=["inputs", "a text", "a list", "none"],
)
def test_a_model_may_bring_its_example(inputs, is_one):
    model = Bare()
    model.dummy_inputs = inputs
    assert default_example(model) == (Batch((), inputs, None) if is_one else None)
    assert default_example(Bare()) is None


def test_a_cache_grows_by_the_positions_of_a_forward():
    """Where a layer has keys already; a first forward gives it some."""

    class Layer:
        def __init__(self, length):
            self.keys = self.values = None if length is None else torch.zeros(2, 3, length, 5)

        def update(self, keys, values):
            self.keys = torch.cat([self.keys, keys], -2)
            self.values = torch.cat([self.values, values], -2)

    layers = [Layer(4), Layer(None)]
    Cache("past_key_values", SimpleNamespace(layers=layers)).grow(3)
    assert (layers[0].keys.shape, layers[0].values.shape) == ((2, 3, 7, 5), (2, 3, 7, 5))
    assert layers[1].keys is None
