"""Programs for any sizes of the inputs: what they hold for, and that they are those recorded."""

import logging
import numbers
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from support.between import Forward
from torch import nn

from pipedream_rt.models.any_sizes import any_sizes
from pipedream_rt.models.cut import find_layers
from pipedream_rt.models.program import Number, found, numbered
from pipedream_rt.models.recording import record
from pipedream_rt.torch_private import SymbolicShapes


def learned(does, *several):
    """What is learned of a forward from several lists of inputs, and the recorded programs."""
    torch.manual_seed(0)
    model = Forward(does)
    model.positions = nn.Parameter(torch.randn(64, 4))
    layers = find_layers(model)

    def recorded(inputs, symbols=None):
        return record(model, layers, inputs, {}, symbols=symbols)

    examples = [([tuple(t.shape) for t in inputs], recorded(inputs)) for inputs in several]
    return any_sizes(lambda symbols: recorded(several[-1], symbols), examples), recorded


def between(self, x):
    """Views, a mask, a slice of a parameter, and sizes computed of sizes."""
    samples, length, _ = x.shape
    h = self.a(x) + self.positions[:length]
    mask = torch.tril(torch.ones(length, length, dtype=torch.bool))
    q = h.view(samples, length, 2, 2).transpose(1, 2)
    h = F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2)
    h = self.b(h.reshape(samples * length, 4)) / length
    return torch.cat([h, h.new_zeros(length // 2 + 1, 4)])


def x_of(*shape):
    return [torch.randn(*shape)]


def test_one_program_for_all_sizes_is_the_program_that_is_recorded_for_each():
    made, recorded = learned(between, x_of(3, 5, 4), x_of(3, 8, 4), x_of(2, 6, 4))
    assert sorted(made.places) == [(0, 0), (0, 1)]
    assert made.fixed == {(0, 2): 4}
    assert found(made.program, Number)
    for shape in ((7, 9, 4), (2, 2, 4), (64, 33, 4)):
        assert made.agrees_with([shape], recorded(x_of(*shape)))
        assert made.numbers([shape]) is not None
    assert made.numbers([(7, 9, 5)]) is None  # a size that none of the examples had
    assert made.numbers([(1, 9, 4)]) is None  # torch treats 0 and 1 apart


def test_what_a_forward_decides_by_a_size_is_a_condition():
    def by_size(self, x):
        h = self.a(x)
        return self.b(h) if x.shape[0] > 10 else h

    made, recorded = learned(by_size, x_of(3, 4), x_of(5, 4), x_of(4, 4))
    assert made.numbers([(10, 4)]) is not None
    assert made.numbers([(11, 4)]) is None
    longer, _ = learned(by_size, x_of(13, 4), x_of(15, 4))
    assert longer.numbers([(10, 4)]) is None
    assert longer.agrees_with([(99, 4)], recorded(x_of(99, 4)))
    assert made.agrees_with([(99, 4)], recorded(x_of(99, 4))) is None
    assert made.agrees_with([(6, 4)], recorded(x_of(99, 4))) is False


@pytest.mark.parametrize(
    "uses",
    [
        lambda x: range(x.shape[0])[-1],
        lambda x: len(x),
        lambda x: int(x.shape[0]) + 0,
        lambda x: [1] * x.shape[0],
        lambda x: {3: 0, 5: 0}.get(int(x.size(0)), 0),
        lambda x: x.shape[0] / 2,
        lambda x: x.shape[0] ** 0.5,
        lambda x: f"{x.shape[0]}" == "3",
    ],
)
def test_a_size_that_python_takes_is_as_recorded(uses):
    """Or nothing is learned: in no case another number is taken for it."""

    def forward(self, x):
        value = uses(x)
        return self.a(x) * (sum(value) if isinstance(value, list) else value)

    made, _ = learned(forward, x_of(3, 4), x_of(5, 4))
    assert made is None


def test_values_that_were_read_are_guards_of_it_too():
    def pooled(self, x, batch):
        count = int(batch.max()) + 1
        return self.b(x.new_zeros(count, 4).index_add(0, batch, self.a(x)))

    def graph(nodes, graphs):
        return [torch.randn(nodes, 4), torch.arange(nodes) % graphs]

    made, recorded = learned(pooled, graph(7, 3), graph(9, 3))
    shapes = [(12, 4), (12,)]
    found_numbers = made.numbers(shapes)
    assert made.program.holds_for(graph(12, 3), found_numbers)
    assert not made.program.holds_for(graph(12, 4), found_numbers)
    assert made.agrees_with(shapes, recorded(graph(12, 3)))
    assert made.agrees_with(shapes, recorded(graph(12, 4))) is None
    assert learned(pooled, graph(8, 4), graph(7, 3), graph(9, 3))[0] is not None
    assert learned(pooled, graph(7, 3), graph(9, 3), graph(8, 4))[0] is None


def test_numbers_are_values_beside_those_of_the_slots():
    assert numbered([5, 7]) == {-1: 5, -2: 7}


def test_a_forward_that_asks_for_the_class_of_a_size_is_found_out_and_nothing_said(caplog):
    caplog.set_level(logging.INFO)

    def by_class(self, x):
        return self.a(x) if type(x.shape[0]) is int else self.b(x)

    assert learned(by_class, x_of(3, 4), x_of(5, 4))[0] is None
    assert not [each for each in caplog.records if each.levelno >= logging.INFO]


@pytest.mark.parametrize("kind", [int, numbers.Integral], ids=["int", "Integral"])
def test_to_the_code_of_a_forward_a_size_is_an_int(kind):
    def by_class(self, x):
        longer = isinstance(x.shape[0], kind) and x.shape[0] > 7
        return self.a(x) if longer else self.b(x)

    made, recorded = learned(by_class, x_of(3, 4), x_of(5, 4))
    assert made.agrees_with([(6, 4)], recorded(x_of(6, 4)))
    assert made.numbers([(9, 4)]) is None
    assert "__getattribute__" not in vars(torch.SymInt)


@pytest.mark.parametrize(
    ("forward", "there", "none"),
    [
        (lambda self, x: self.a(x) + 24 // (x.shape[0] - 2), 8, 2),  # the forward will say so
        (lambda self, x: self.a(x) + 2 ** x.shape[0], 62, 63),
    ],
    ids=["divided by zero", "too large"],
)
def test_numbers_that_cannot_be_computed_or_sent_are_none(forward, there, none):
    made, _ = learned(forward, x_of(3, 4), x_of(5, 4))
    assert made.numbers([(there, 4)]) is not None
    assert made.numbers([(none, 4)]) is None


def test_a_condition_on_a_fraction_teaches_nothing():
    def by_fraction(self, x):  # 5 * 0.1 * 3 is 1.5, and 5 * (0.1 * 3), as torch has it, is more
        return self.a(x) if x.shape[0] * 0.1 * 3.0 != 1.5 else self.b(x)

    assert learned(by_fraction, x_of(3, 4), x_of(4, 4))[0] is None


def test_without_what_torch_has_for_it_nothing_is_learned(monkeypatch):
    monkeypatch.setattr(SymbolicShapes, "of_torch", lambda: None)
    assert learned(between, x_of(3, 5, 4), x_of(3, 8, 4))[0] is None


def test_examples_of_equal_shapes_teach_nothing():
    assert learned(between, x_of(3, 5, 4), x_of(3, 5, 4))[0] is None


def test_what_is_patched_for_a_recording_is_as_before_also_with_several_threads():
    """Two pipelines in threads of one script may learn at once."""
    before = torch._subclasses.FakeTensor
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: learned(between, x_of(3, 5, 4), x_of(3, 8, 4)), range(3)))
    assert torch._subclasses.FakeTensor is before
    assert "__getattribute__" not in vars(torch.SymInt)
