"""A profile: the numbers of layers, and the edges between them."""

import math

import pytest

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.profile import NUMBERS, LayerCosts, Profile


def layers(*names):
    return tuple(LayerCosts(name=name, forward=1.0) for name in names)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, True, "1", None, 1e16], ids=repr)
def test_every_number_of_a_layer_is_checked(name, value):
    with pytest.raises(ConfigError, match=f"{name} of layer 'a' must be a number from 0 to 1e.15"):
        LayerCosts(**{"name": "a", "forward": 1.0, name: value})


def test_a_name_in_an_error_writes_nothing_into_a_terminal():
    with pytest.raises(ConfigError) as found:
        LayerCosts(name="\x1b[2J" * 99, forward=-1)
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 200


def test_layers_without_edges_are_a_chain():
    profile = Profile(layers=layers("a", "b", "c"))
    assert profile.edges == ((0, 1), (1, 2))
    assert profile.is_chain
    assert not Profile(layers=layers("a", "b", "c"), edges=((0, 2), (1, 2), (0, 1))).is_chain
    assert Profile(layers=layers("a", "b", "c"), edges=((1, 2), (0, 1), (1, 2))).is_chain
    assert not Profile(layers=layers("a", "b"), edges=()).is_chain
    assert Profile(layers=layers("a"), edges=()).is_chain


def test_sizes_stay_with_their_edges_when_these_are_sorted():
    profile = Profile(
        layers=layers("a", "b", "c"), edges=((1, 2), (0, 2), (0, 1)), edge_bytes=(12.0, 2.0, 1.0)
    )
    assert profile.edges == ((0, 1), (0, 2), (1, 2))
    assert profile.edge_bytes == (1.0, 2.0, 12.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": ()}, "there is no layer"),
        ({"layers": layers("a", "b", "a")}, "two layers are called 'a'"),
        ({"edges": ((0, 0),)}, "not from 0 to 0 of 3"),
        ({"edges": ((2, 1),)}, "not from 2 to 1 of 3"),
        ({"edges": ((0, 3),)}, "not from 0 to 3 of 3"),
        ({"edges": ((-1, 1),)}, "not from -1 to 1 of 3"),
        ({"edge_bytes": (1.0,)}, "a size for each of different edges"),
        ({"edge_bytes": (1.0, 2.0, 3.0)}, "a size for each of different edges"),
        ({"edges": ((0, 1), (0, 1)), "edge_bytes": (1.0, 2.0)}, "each of different edges"),
        ({"edge_bytes": (1.0, -1.0)}, "edge_bytes must be from 0 to"),
        ({"edge_bytes": (1.0, math.nan)}, "edge_bytes must be from 0 to"),
    ],
)
def test_what_is_no_graph_of_layers_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Profile(**{"layers": layers("a", "b", "c"), **options})


def test_the_time_of_a_model_is_that_of_its_layers_without_their_updates():
    costs = {"backward_input": 0.2, "backward_weight": 0.3, "step": 5.0}
    one = LayerCosts(name="a", forward=0.1, **costs)
    assert one.compute == pytest.approx(0.6)
    many = Profile(layers=tuple(LayerCosts(name=str(i), forward=0.1) for i in range(10)))
    assert many.compute == 1.0  # exactly, whereas a plain sum of tenths is not
