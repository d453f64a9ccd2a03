"""Recurrent layers leave their weights where they are, and are afterwards as they were."""

from torch import nn

from pipedream_rt.models.recurrent import (
    allow_flattening,
    flattening_forbidden,
    forbid_flattening,
    recurrent_layers,
)


def test_layers_are_left_apart_in_the_body_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2))
    with flattening_forbidden(model):
        assert "flatten_parameters" in model[1].__dict__
        assert model[1].flatten_parameters() is None
        with flattening_forbidden(model):
            pass
        assert "flatten_parameters" in model[1].__dict__  # the outer one goes on
    assert "flatten_parameters" not in model[1].__dict__


def test_a_way_of_the_users_own_stays():
    layer, calls = nn.LSTM(2, 2), []
    layer.flatten_parameters = lambda: calls.append(1)
    found = recurrent_layers(layer)
    forbid_flattening(found)
    layer.flatten_parameters()
    allow_flattening(found)
    assert calls == [1]
    assert "flatten_parameters" in layer.__dict__
