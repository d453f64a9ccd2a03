import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.split import (
    balanced,
    balanced_firsts,
    elements_of,
    is_sequence,
    layers_of,
    split_points,
    ties_of,
)
from pipedream_rt.schedules.placement import Tie


def layers(count=5):
    return layers_of(elements_of([nn.Linear(2, 2) for _ in range(count)]))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_the_largest_part_is_as_small_as_it_can_be(sizes, data):
    parts = data.draw(st.integers(1, len(sizes)))

    def largest(points):
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise([*points, len(sizes)]))

    cuts = itertools.combinations(range(1, len(sizes)), parts - 1)
    points = balanced(sizes, parts)
    assert len(points) == parts
    assert sorted(set(points)) == points
    assert points[0] == 0
    assert largest(points) == min(largest([0, *cut]) for cut in cuts)


def test_layers_without_parameters_are_spread():
    assert balanced([0] * 6, 3) == [0, 2, 4]


def test_names_of_a_sequential_are_kept():
    model = nn.Sequential()
    model.add_module("first", nn.Linear(1, 1))
    model.add_module("second", nn.Linear(1, 1))
    assert list(elements_of(model)) == ["first", "second"]
    assert split_points(elements_of(model), ["second"]) == [0, 1]
    assert list(elements_of(nn.ModuleList([nn.ReLU(), nn.ReLU()]))) == ["0", "1"]


def test_explicit_points():
    assert split_points(layers(), [1, 4]) == [0, 1, 4]
    assert split_points(layers(), []) == [0]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (0, "from 1 to the number of layers, 5, not 0"),
        (6, "from 1 to the number of layers, 5, not 6"),
        (True, "from 1 to the number"),
        ([3, 2], "must rise"),
        ([0], "between 1 and 4"),
        ([5], "between 1 and 4"),
        (["x"], "no layer is called 'x'"),
        ("3", "a number or a list"),
        (2.0, "a number or a list"),
    ],
)
def test_impossible_splits_are_refused(stages, words):
    with pytest.raises(ConfigError, match=words):
        split_points(layers(), stages)


def hooked(made):
    made.register_forward_hook(lambda *_: None)
    return made


LINEAR = nn.Linear(4, 4)
HOLDERS = {
    "a method": LINEAR.forward,
    "a global": lambda x: LINEAR(x),
    "a default": lambda x, layer=LINEAR: layer(x),
    "a partial": functools.partial(nn.functional.linear, weight=LINEAR.weight),
}
"""Functions with weights, which nobody would train."""


def with_buffer(made):
    made.register_buffer("scale", None)
    return made


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(1, 1), r"the model is a Linear; .*nn.Sequential"),
        ([], "no layers"),
        ([nn.ReLU(), 3], r"layer 1 is a int; a layer is an nn.Module or a function"),
        ([nn.ReLU], r"layer 0 is the class ReLU; give .* ReLU\(...\)"),
        *(([nn.ReLU(), f], "layer 1 is a function that holds weights") for f in HOLDERS.values()),
        (
            hooked(with_buffer(nn.Sequential(nn.Linear(1, 1)))),
            "has parameters or buffers and hooks of its own",
        ),
    ],
)
def test_what_has_no_layers_or_would_lose_something_is_refused(model, words):
    with pytest.raises(ConfigError, match=words):
        elements_of(model)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (functools.partial(torch.flatten, start_dim=1), "functools.partial"),
        (torch.relu, "relu"),
        (lambda x: x.flatten(1), "lambda"),
    ],
)
def test_a_function_in_a_list_is_a_layer_without_weights(function, name):
    made = elements_of([nn.Linear(4, 4), function])
    assert list(made) == ["0", "1"]
    assert not made["1"].state_dict()
    assert name in repr(made["1"])
    x = torch.randn(2, 3, 4)
    assert torch.equal(made["1"](x), function(x))


INNER = {"1": "0.norm", "2": "0.norm", "4": "3.norm"}


def test_a_number_of_stages_begins_where_a_stage_may():
    sizes = dict.fromkeys("012345", 1)
    assert balanced_firsts(sizes, 2, INNER) == ["0", "3"]
    assert balanced_firsts(sizes, 3, INNER) == ["0", "3", "5"]
    with pytest.raises(
        ConfigError, match=r"into 3 stages, not 4: the buffer 0.norm .*\['3', '5'\]"
    ):
        balanced_firsts(sizes, 4, INNER)
    with pytest.raises(ConfigError, match=r"into 1 stage, not 2: .* Give stages=1"):
        balanced_firsts({"0": 1, "1": 1}, 2, {"1": "0.norm"})


def test_a_point_at_which_no_stage_can_begin_is_refused():
    assert split_points(layers(6), [3, 5], inner=INNER) == [0, 3, 5]
    with pytest.raises(ConfigError, match=r"no stage can begin at '4': the buffer 3.norm"):
        split_points(layers(6), [4], inner=INNER)


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Listed(nn.ModuleList):
    def forward(self, x):
        return x


def test_a_sequence_that_is_called_in_a_way_of_its_own_is_none():
    plain = nn.Sequential(nn.Linear(1, 1))
    assert is_sequence(plain)
    assert is_sequence(nn.ModuleList())
    assert is_sequence([nn.Linear(1, 1)])
    assert not is_sequence(nn.Linear(1, 1))
    assert not is_sequence(Residual(nn.Linear(1, 1)))
    assert not is_sequence(Listed())
    plain.forward = lambda x: x
    assert not is_sequence(plain)


def test_a_layer_may_stand_there_twice():
    relu = nn.ReLU()
    twice = elements_of(nn.Sequential(nn.Linear(1, 1), relu, nn.Linear(1, 1), relu))
    assert list(layers_of(twice)) == list("0123")


class Body(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


class Frozen(Body):
    def train(self, mode=True):
        return super().train(False)


def with_own(name):
    made = Body()
    setattr(made, name, lambda x: x)
    return made


def test_sequences_in_a_sequence_are_opened():
    elements = elements_of([Body(), nn.Linear(2, 2), nn.Sequential(nn.Tanh())])
    assert list(layers_of(elements)) == ["0.0", "0.1.0", "0.1.1", "1", "2.0"]
    assert list(layers_of(elements, {"0"})) == ["0", "1", "2.0"]


@pytest.mark.parametrize(
    "made",
    [Frozen(), hooked(Body()), with_own("forward"), with_own("train"), Residual(nn.ReLU()),
     nn.Sequential(), Listed([nn.ReLU()])],
)  # fmt: skip
def test_what_would_be_missed_when_it_is_opened_stays_whole(made):
    assert list(layers_of({"0": made})) == ["0"]


def test_points_in_sequences():
    elements = elements_of([nn.ReLU(), Body(), nn.Linear(2, 2)])
    opened, names = layers_of(elements), list(elements)
    assert list(opened) == ["0", "1.0", "1.1.0", "1.1.1", "2"]
    # A number is the place in the model, as in model[1]; a name may be that of a sequence.
    assert split_points(opened, [1, 2], names) == [0, 1, 4]
    assert split_points(opened, ["1", "1.1", "1.1.1", 2], names) == [0, 1, 2, 3, 4]
    assert split_points(opened, 3, names) == [0, 2, 3]
    for wrong, words in (
        ([3], "lie between 1 and 2, found 3"),
        ([-1], "lie between 1 and 2, found -1"),
        (["1", "1.0"], "must rise: '1.0' begins at layer 1.0, which does not come after 1.0,"),
        (["1.1", 1], "must rise: 1 begins at layer 1.0, which does not come after 1.1.0,"),
        (["0"], "must rise: '0' begins at layer 0, which does not come after 0,"),
    ):
        with pytest.raises(ConfigError, match=words):
            split_points(opened, wrong, names)
    with pytest.raises(ConfigError, match=r"no layer is called '1.2'"):
        split_points(opened, ["1.2"], names)


def test_weights_of_several_stages_are_tied_to_the_first_of_them():
    """A frozen one has no versions; each stage has a copy of it."""
    first, second, third = (nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
    second[0].weight = third[0].weight = first[0].weight
    third[0].bias = second[0].bias.requires_grad_(False)
    named = [nn.ModuleDict({name: part}) for name, part in zip("abc", (first, second, third))]
    names = {id(first[0].weight): "c.0.weight"}  # where the model has registered it first
    assert ties_of(named, names) == (Tie("c.0.weight", (0, 1, 2)),)
    assert ties_of(named[:1], names) == ()
