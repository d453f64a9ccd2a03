"""Layers that are built on their workers: as if one process had built all of them."""

import random

import pytest
import torch
from torch import nn

from pipedream_rt import ConfigError, LayerSpec
from pipedream_rt.models.layer_spec import Blueprint


def blueprint(*specs, seed=0):
    return Blueprint({str(number): spec for number, spec in enumerate(specs)}, seed)


class Numbered(nn.Linear):
    made = 0

    def __init__(self, *sizes):
        super().__init__(*sizes)
        Numbered.made += 1
        self.number = Numbered.made

    def forward(self, x):
        return super().forward(x) / self.number


def drawn():
    layer = nn.Linear(8, 8)
    layer.scale = random.random()
    return layer


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda: Numbered(8, 8), "given 'number' the value"),
        (drawn, "draws random numbers of Python"),
    ],
)
def test_factories_that_count_or_draw_are_refused(factory, words):
    with pytest.raises(ConfigError, match=f"the factory of layer 0 .*{words}"):
        blueprint(LayerSpec(factory), LayerSpec(nn.Linear, 8, 8)).on_meta()


@pytest.mark.parametrize(
    ("tied", "words"),
    [
        ({"weight": "1.weight"}, "layer 1 ties 'weight' to '1.weight', but '1' is not the name of"),
        ({"weight": "0.wait"}, "there is no parameter '0.wait' to tie another one to"),
        ({"wait": "0.weight"}, "layer 1 has no parameter 'wait', which tied= names"),
        ({"weight": "0.weight"}, r"'weight' of shape \(20, 4\) to '0.weight' of shape \(20, 8\)"),
    ],
)
def test_wrong_ties_of_layers_that_workers_build_are_refused(tied, words):
    head = LayerSpec(nn.Linear, 4, 20, bias=False, tied=tied)
    with pytest.raises(ConfigError, match=words):
        blueprint(LayerSpec(nn.Embedding, 20, 8), head).on_meta()


HEAD = LayerSpec(nn.Linear, 4, 20, bias=False, tied={"weight": "0.weight"})
ALL = [LayerSpec(nn.Embedding, 20, 4), *[LayerSpec(nn.Linear, 4, 4) for _ in range(3)], HEAD]


@pytest.mark.parametrize("wanted", [["0"], ["2"], ["1", "3"], ["4"], ["0", "4"], list("01234")])
def test_any_part_has_the_values_of_the_whole(wanted):
    torch.manual_seed(5)
    whole = [spec.build() for spec in ALL]
    whole[4].weight = whole[0].weight
    built = blueprint(*ALL, seed=5).build(wanted)
    assert list(built) == wanted
    for name, layer in built.items():
        for key, value in whole[int(name)].state_dict().items():
            assert torch.equal(layer.state_dict()[key], value)
    if wanted[0] == "0" and "4" in built:
        assert built["4"].weight is built["0"].weight


def test_no_more_is_built_than_what_comes_before_the_last_and_the_rest_is_dropped():
    made, dropped = [], []

    def factory(number):
        made.append(number)
        return nn.Linear(1, 1)

    specs = blueprint(*[LayerSpec(factory, number) for number in range(5)])
    specs.build(["2"], lambda: dropped.append(len(made)))
    assert made == [0, 1, 2]
    assert dropped == [1, 2]


def test_on_the_meta_device_layers_are_tied_and_have_no_values():
    layers = blueprint(*ALL).on_meta()
    assert layers["4"].weight is layers["0"].weight
    assert all(p.is_meta for layer in layers.values() for p in layer.parameters())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LayerSpec(3), "needs a class or a function that makes a layer, not 3"),
        (lambda: LayerSpec(dict, a=1).build(), r"LayerSpec\(dict, a=1\) has built a dict"),
        (
            lambda: blueprint(LayerSpec(nn.Linear, 2)).on_meta(),
            r"layer 0, LayerSpec\(Linear, 2\), cannot be built: .*out_features",
        ),
    ],
)
def test_what_makes_no_layer_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
