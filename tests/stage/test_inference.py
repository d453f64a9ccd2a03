"""Kept versions are read by a module in the place of its weights, and leave nothing behind."""

import torch
from torch import nn

from pipedream_rt.stage.inference import KeptVersions


def test_a_layer_that_stands_twice_has_its_own_weights_again():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    weight = layer.weight
    kept = KeptVersions(model)
    kept.keep(1, {})
    with torch.no_grad():
        weight.add_(1)
    with kept.read(1):
        assert model[0].weight is model[2].weight
        assert torch.equal(model[0].weight + 1, weight)
    assert model[0].weight is weight
