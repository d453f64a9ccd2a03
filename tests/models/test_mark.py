"""A mark differs once its value was changed, and is equal before."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from pipedream_rt.models.mark import (
    GENERATORS,
    WITH_STATE,
    mark_of_code,
    mark_of_content,
    mark_of_draws,
    mark_of_draws_outside,
    mark_of_memory,
    mark_of_modules,
    mark_of_tensor,
    mark_of_tensors,
    mark_of_value,
    mark_of_writes,
    quick_mark_of_draws_outside,
    state_of,
    writes_of,
)


def inference_tensor():
    with torch.inference_mode():
        return torch.zeros(2)


# -- by the writes ---------------------------------------------------------------------------------


def replaces(module):
    module.running_mean = module.running_mean.clone()


@pytest.mark.parametrize(
    "change",
    [lambda m: m.running_mean.add_(0), replaces, lambda m: setattr(m, "running_mean", None)],
    ids=["in place", "replaced", "none"],
)
def test_a_buffer_that_is_written_to_or_replaced_has_another_mark(change):
    module = nn.BatchNorm1d(2)
    one, many = mark_of_tensor(module.running_mean), mark_of_tensors(module._buffers.items())
    assert mark_of_tensors(module.named_buffers()) == many
    change(module)
    assert mark_of_tensor(module.running_mean) != one
    now = mark_of_tensors(module._buffers.items())
    assert [name for name in many if now[name] != many[name]] == ["running_mean"]


def test_no_tensor_has_a_mark_too():
    assert mark_of_tensor(None) == mark_of_tensor(None)
    assert mark_of_tensors([("a", None), ("b", torch.zeros(1))]).keys() == {"a", "b"}


def test_an_inference_tensor_counts_no_writes_and_has_no_mark_in_a_place():
    """A constant in place of the count would hide a change."""
    assert writes_of(inference_tensor()) == 0
    with pytest.raises(RuntimeError, match="Inference tensors do not track version counter"):
        mark_of_tensor(inference_tensor())


def test_of_tensors_that_stay_the_writes_are_counted():
    tensors = [torch.zeros(2), torch.zeros(2)]
    before = mark_of_writes(tensors)
    assert mark_of_writes(tensors) == before
    tensors[1].add_(1)
    after = mark_of_writes(tensors)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]
    assert after == [*map(writes_of, tensors)]


@pytest.mark.parametrize("change", [lambda t: t.add_(0), lambda t: setattr(t, "data", t.clone())])
def test_a_tensor_that_gets_other_memory_has_another_mark(change):
    tensor = torch.zeros(2)
    before = mark_of_memory(tensor)
    assert mark_of_memory(tensor) == before
    change(tensor)
    assert mark_of_memory(tensor) != before


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.rate = nn.Linear(2, 2), 1.0
        self.register_buffer("sum", torch.zeros(2))
        self.register_buffer("late", None)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m.train(False), []),
        (lambda m: setattr(m, "linear", nn.Linear(2, 2)), []),  # it has marks of its own
        (lambda m: setattr(m, "rate", 2.0), ["block.rate"]),
        (lambda m: setattr(m, "new", 2.0), ["block.new"]),
        (lambda m: delattr(m, "rate"), ["block.rate"]),
        (lambda m: m.sum.add_(1), ["block.sum"]),
        (lambda m: setattr(m, "late", torch.zeros(1)), ["block.late"]),
        (lambda m: m.linear.weight.data.add_(1), []),
        (lambda m: nn.init.zeros_(m.linear.weight), ["block.linear.weight"]),
    ],
)
def test_of_modules_each_attribute_has_a_mark_but_the_mode(change, expected):
    block = Block()
    named = [("block", block), ("block.linear", block.linear), ("", nn.Linear(2, 2))]
    before = mark_of_modules(named)
    assert {"weight", "bias", "in_features"} <= before.keys()
    change(block)
    after = mark_of_modules(named)
    assert [*{name: None for name, _ in before.items() ^ after.items()}] == expected


# -- by the content --------------------------------------------------------------------------------


def sparse():
    return torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3), torch.ones(3, 2).T, torch.ones(100_000), torch.ones(400, 300).T,
     torch.ones(3, dtype=torch.complex64).conj(), torch.ones(3, dtype=torch.bool),
     torch.ones(()), torch.ones(0), inference_tensor()],
    ids=["small", "turned", "large", "large and turned", "conjugate", "bool", "scalar", "empty",
         "inference"],
)  # fmt: skip
def test_the_same_values_have_the_same_mark_in_another_tensor(tensor):
    mark = mark_of_content(tensor)
    assert mark_of_content(copy.deepcopy(tensor)) == mark
    assert mark_of_content(tensor[None]) != mark
    if tensor.numel():
        assert mark_of_content(torch.zeros_like(tensor)) != mark or not tensor.any()


def test_another_dtype_of_the_same_bits_is_another_mark():
    assert mark_of_content(torch.zeros(2, dtype=torch.int32)) != mark_of_content(torch.zeros(2))


@pytest.mark.parametrize(
    "tensor", [sparse(), torch.zeros(2, device="meta")], ids=["sparse", "meta"]
)
def test_of_a_tensor_that_is_not_dense_the_writes_count(tensor):
    before = mark_of_content(tensor)
    assert mark_of_content(tensor) == before
    tensor.mul_(2)
    assert mark_of_content(tensor) != before


def test_a_subclass_without_memory_of_its_own_goes_by_dtype_and_shape():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (2,))

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise RuntimeError("there is no memory")

    assert mark_of_content(Wrapper()) == ("torch.float32", (2,))


def functions():
    def one(x):
        return x + 1

    def same(x):
        return x + 1

    def other(x):
        return x + 2

    def inner(x):
        return (lambda: x + 1)()

    def other_inner(x):
        return (lambda: x + 2)()

    return one, same, other, inner, other_inner


def test_functions_that_do_the_same_have_the_same_mark():
    one, same, other, inner, other_inner = (mark_of_code(each.__code__) for each in functions())
    assert one == same
    assert len({one, other, inner, other_inner}) == 4


# -- by the state ----------------------------------------------------------------------------------


def made():
    """One object of each kind that has a state, with what changes it."""
    return [
        (torch.zeros(2), lambda it: it.add_(1)),
        (np.zeros(2), lambda it: it.fill(1)),
        (np.zeros(100_000), lambda it: it.fill(1)),
        (np.array([1, None]), lambda it: it.put(1, 3)),
        (torch.Generator().manual_seed(3), lambda it: torch.rand(1, generator=it)),
        (np.random.default_rng(3), lambda it: it.random()),
        (np.random.RandomState(3), lambda it: it.rand()),
        (random.Random(3), lambda it: it.random()),
        (itertools.count(), next),
    ]


@pytest.mark.parametrize("number", range(len(made())))
def test_what_changes_the_state_changes_the_mark(number):
    value, change = made()[number]
    before = mark_of_value(value)
    assert isinstance(value, WITH_STATE)
    assert mark_of_value(value) == before
    assert mark_of_value(made()[number][0]) == before
    change(value)
    assert mark_of_value(value) != before


def test_every_kind_of_object_that_has_a_state_is_tried():
    assert all(any(isinstance(value, kind) for value, _ in made()) for kind in WITH_STATE)


def changes_within(generator):
    """Set a number of the state that no text of a shortened array has."""
    put, state = state_of(generator)
    key = state["state"]["key"] if isinstance(state, dict) else state[1]
    key[300] ^= 1
    put(state)


@pytest.mark.parametrize(
    "generator",
    [np.random.RandomState(3), np.random.Generator(np.random.MT19937(3))],
    ids=["RandomState", "Generator"],
)
def test_numpy_may_print_arrays_as_it_likes(generator):
    with np.printoptions(threshold=5):
        before = mark_of_value(generator)
        changes_within(generator)
        assert mark_of_value(generator) != before


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_can_be_put_back(kind):
    (generator, draw), *_ = [each for each in made() if isinstance(each[0], kind)]
    put, state = state_of(generator)
    before = mark_of_value(generator)
    drawn = draw(generator)
    put(state)
    assert mark_of_value(generator) == before
    assert draw(generator) == drawn


@pytest.mark.parametrize(
    ("draws", "outside"),
    [(torch.rand, False), (np.random.rand, True), (lambda n: random.random(), True)],
    ids=["torch", "numpy", "python"],
)
def test_whether_numbers_were_drawn_can_be_seen(draws, outside):
    marks = (mark_of_draws, mark_of_draws_outside, quick_mark_of_draws_outside)
    before = [mark() for mark in marks]
    assert [mark() for mark in marks] == before
    draws(1)
    after = [mark() for mark in marks]
    assert [a != b for a, b in zip(after, before, strict=True)] == [True, outside, outside]


def test_what_other_generators_draw_can_be_seen():
    given = [value for value, _ in made() if isinstance(value, GENERATORS)]
    before = mark_of_draws(given)
    for number, draw in enumerate(draw for value, draw in made() if isinstance(value, GENERATORS)):
        draw(given[number])
        after = mark_of_draws(given)
        assert [a == b for a, b in zip(after, before, strict=True)].count(False) == 1
        before = after
