"""What a forward keeps outside of layers: a table that goes by shapes, and nothing else."""

import functools

import pytest
import torch
from support.between import Base
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.cut import find_layers
from pipedream_rt.models.kept import Kept, content_of
from pipedream_rt.models.recording import record


def of_length(n):
    return torch.arange(n, dtype=torch.float32)[:, None] / 10


def in_an_attribute(self, x):
    if getattr(self, "table", None) is None or len(self.table) != len(x):
        self.table = of_length(len(x))
    return x + self.table


def in_a_longer_one(self, x):
    if getattr(self, "table", None) is None or len(self.table) < len(x):
        self.table = of_length(len(x))
    return x + self.table[: len(x)]


def in_a_dict(self, x):
    if len(x) not in self.tables:
        self.tables[len(x)] = of_length(len(x))
    return x + self.tables[len(x)]


def in_a_buffer(self, x):
    if getattr(self, "kept", 0) != len(x):
        self.kept = len(x)
        self.register_buffer("table", of_length(len(x)), persistent=False)
    return x + self.table


def anew(self, x):
    self.table = of_length(len(x))
    return x + self.table


def looked_at(between, lengths=(3,)):
    """What is recorded of forwards of some lengths."""
    model, kept = Base(between), Kept()
    model.tables = {}
    before = dict(vars(model)), dict(model._buffers)
    try:
        return [
            record(model, find_layers(model), (torch.randn(n, 4),), {}, kept=kept) for n in lengths
        ]
    finally:
        assert (dict(vars(model)), dict(model._buffers), model.tables) == (*before, {})


@pytest.mark.parametrize(
    "between", [in_an_attribute, in_a_longer_one, in_a_dict, in_a_buffer, anew]
)
def test_a_table_that_goes_by_shapes_is_computed_in_each_forward(between):
    for program in looked_at(between, [3, 5, 2, 3]):
        steps = [step for step in program.steps if "arange" in step.name]
        assert [step.free for step in steps] == [True]


def first_mean(self, x):
    if not self.tables:
        self.tables["mean"] = x.mean(0)
    return x - self.tables["mean"]


def first_input(self, x, mask):
    if not self.tables:
        self.tables["mask"] = mask * 2
    return x * self.tables["mask"]


def counts(self, x):
    self.count = getattr(self, "count", 0) + 1
    return x


def only_at_first(self, x):
    if not self.tables:
        self.tables["done"] = True
        return x * 2
    return x


def scaled_by_the_first(self, x):
    if not self.tables:
        self.tables["length"] = len(x)
    return x * self.tables["length"]


def scaled_by_the_longest(self, x):
    self.length = max(len(x), getattr(self, "length", 0))
    return x * self.length


def in_a_saved_buffer(self, x):
    self.shift = of_length(4)[:, 0]
    return x + self.shift


def keeps_a_module(self, x):
    self.tables["layer"] = nn.ReLU()
    return self.tables["layer"](x)


@pytest.mark.parametrize(
    ("between", "lengths", "words"),
    [
        (first_mean, [3], r"'tables' of the model to what it computes of its inputs or layers"),
        (counts, [3], "'count' of the model to something else in each call"),
        (only_at_first, [3], "'tables' of the model and does something else with it than without"),
        (scaled_by_the_first, [3, 5], "and goes by the one of inputs of another shape"),
        (scaled_by_the_longest, [5, 3], "'length' .* and goes by the one of inputs of another"),
        (scaled_by_the_longest, [3, 5], "'length' .* and goes by the one of inputs of another"),
        (in_a_saved_buffer, [3], "'shift' of the model, and no stage has"),
        (keeps_a_module, [3], "'tables' of the model, and no stage has"),
    ],
)
def test_anything_else_is_refused_by_name_with_a_way_out(between, lengths, words):
    with pytest.raises(ConfigError, match=rf"{words}.* A table that goes by shapes alone may be"):
        looked_at(between, lengths)


def test_a_table_of_inputs_is_refused():
    model = Base(first_input)
    model.tables = {}
    with pytest.raises(ConfigError, match="'tables' of the model to what it computes of its"):
        record(model, find_layers(model), (torch.ones(3, 4),), {"mask": torch.ones(3, 1)})


def test_values_with_the_same_content_have_one_text():
    made = functools.partial(torch.arange, 4)
    value = {"a": [made(), (1, "x")], "b": {2, 1}, "c": torch.eye(2).to_sparse()}
    same = {"a": [made(), (1, "x")], "b": {1, 2}, "c": torch.eye(2).to_sparse()}
    assert content_of(value) == content_of(same)
    for other in ({**same, "b": {1}}, {**same, "c": torch.eye(2)}, {**same, "a": [made() + 1]}):
        assert content_of(other) != content_of(value)
