"""The split of a model into stages: a sequence by its layers, any other by its forward."""

import logging

import pytest
import torch
from torch import nn

from pipedream_rt import ConfigError
from pipedream_rt.job.splitting import ForwardOptions, split_model, units_of
from pipedream_rt.job.unsplit_model import UnsplitModel

X = torch.ones(2, 4)


class Skips(nn.Module):
    """Layers that are called in another order than they stand, and what lies beside them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.spare = nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x):
        first = self.layers[0](x)
        x = self.layers[1](first.relu()) * self.scale
        return self.head(self.layers[2](x) + first + self.shift)


def split(model, stages, example=(X, X), **options):
    return split_model(UnsplitModel(model), stages, example, ForwardOptions(**options))


def sequence(count=4):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def test_a_sequence_is_a_chain_of_its_layers_and_needs_no_example():
    found = split(sequence(), [1, 3], example=None)
    assert found.layers == (("0",), ("1", "2"), ("3",))
    assert found.links is None
    assert found.entries == ()
    assert found.programs(1) == ()


def test_any_other_model_is_split_in_the_order_of_its_forward():
    """What nothing uses goes where its neighbour is; the value of stage 0 goes straight to 2."""
    found = split(Skips(), ["layers.1", "layers.2"])
    assert found.layers == (
        ("layers.0",),
        ("scale", "layers.1"),
        ("shift", "head", "layers.2", "spare"),
    )
    assert set(found.links) == {(0, 1), (0, 2), (1, 2)}
    assert found.entries in ((), (0,))


def test_points_are_names_or_numbers_of_layers_in_the_order_of_their_calls():
    assert split(Skips(), [1, "head"]).layers == split(Skips(), ["layers.1", "head"]).layers


def test_stages_of_a_number_have_about_as_many_parameters():
    found = split(Skips(), 2)
    assert [len([n for n in names if n[:4] in ("laye", "head")]) for names in found.layers] == [
        2,
        2,
    ]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (0, "from 1 to the number of layers that the forward calls, 4, not 0; the layers are lay"),
        (5, "calls, 4, not 5"),
        (True, "calls, 4, not True"),
        ([0], "split points lie between 1 and 3, found 0"),
        ([4], "split points lie between 1 and 3, found 4"),
        (["layers.2", "layers.1"], "must rise in the order in which the forward calls"),
        (["layers.0"], "must rise"),
        (["spare"], "no stage can begin at 'spare'"),
        (["lairs.1"], "no module 'lairs.1'; did you mean"),
    ],
)
def test_points_that_make_no_stages_are_refused(stages, words):
    with pytest.raises(ConfigError, match=words):
        split(Skips(), stages)


def test_without_an_example_a_forward_is_not_known():
    with pytest.raises(ConfigError, match=r"the forward of Skips must be run once .* example="):
        split(Skips(), 2, example=None)


class Reads(nn.Module):
    """Reads values between its layers, so that it cannot be cut there."""

    def __init__(self):
        super().__init__()
        self.layers = sequence(3)

    def forward(self, x):
        x = self.layers[0](x)
        return self.layers[1](x) if x.sum() > 0 else self.layers[2](x)


def test_a_layer_that_cannot_be_recorded_inside_is_kept_whole_and_told(caplog):
    caplog.set_level(logging.INFO, logger="pipedream_rt")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Reads(), nn.Linear(4, 2)])

        def forward(self, x):
            return self.parts[1](self.parts[0](x))

    assert split(Model(), 2).layers == (("parts.0",), ("parts.1",))
    assert "a layer that holds most of the model is not cut inside" in caplog.text
    with pytest.raises(ConfigError, match="the model cannot be cut into stages"):
        split(Model(), ["parts.0.layers.1"])


def test_a_forward_is_recorded_in_the_modes_that_will_be_used():
    """And once more in the first of them, to find a forward that changes from call to call."""
    calls = []

    class Counted(Skips):
        def forward(self, x):
            calls.append(self.training)
            return super().forward(x)

    split(Counted(), 2, trains=True)
    assert calls == [True, False, True]
    calls.clear()
    split(Counted(), 2, trains=False)
    assert calls == [False, False]


def test_units_are_named_once_in_the_order_of_the_model():
    model = Skips()
    model.again = model.layers[1]
    layers = {"head": model.head, **{f"layers.{i}": each for i, each in enumerate(model.layers)}}
    assert units_of(model, layers) == [
        "scale",
        "shift",
        "head",
        "layers.0",
        "layers.1",
        "layers.2",
        "spare.weight",
        "spare.bias",
    ]
