"""Joining the outputs of micro-batches into that of the mini-batch."""

import pytest
import torch

from pipedream_rt import ConfigError
from pipedream_rt.messages.tree import Value, flatten, unflatten
from pipedream_rt.stage.joining import Part, joined


def part(number, value, asks=None, samples=2):
    structure, tensors = flatten(value)
    flags = (True,) * len(tensors) if asks is None else tuple(asks)
    return Part(number, samples, Value(structure, tuple(tensors), flags))


def whole(*parts):
    structure, tensors, flags = joined(parts)
    return unflatten(structure, tensors), flags


def test_tensors_are_joined_along_their_samples_in_the_order_of_the_micro_batches():
    parts = [part(i, {"a": torch.full((2, 3), i), "b": [torch.full((2,), -i)]}) for i in range(3)]
    found, flags = whole(*parts)
    assert found["a"].tolist() == [[i] * 3 for i in (0, 0, 1, 1, 2, 2)]
    assert found["b"][0].tolist() == [0, 0, -1, -1, -2, -2]
    assert flags == [True, True]


def test_a_single_micro_batch_may_be_anything_and_is_copied():
    value = torch.ones(3)
    (found, number, text), _ = whole(part(0, (value, torch.tensor(2.0), "text")))
    value.zero_()
    assert found.tolist() == [1] * 3
    assert (number.item(), text) == (2.0, "text")


def test_micro_batches_may_have_different_numbers_of_samples():
    found, _ = whole(part(0, torch.zeros(2, 1)), part(1, torch.ones(1, 1), samples=1))
    assert found.tolist() == [[0], [0], [1]]


def test_what_is_joined_shares_no_memory_and_no_graph():
    leaf = torch.ones(2, 1, requires_grad=True)
    found, _ = whole(part(0, leaf * 2), part(1, leaf * 3))
    assert not found.requires_grad
    found.zero_()
    assert leaf.tolist() == [[1], [1]]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (torch.ones(2), (torch.ones(2),), "the micro-batches 4 and 5 are not of one form"),
        ((torch.ones(2), 1), (torch.ones(2), 2), "plain values that differ"),
        (torch.tensor(1.0), torch.tensor(2.0), r"of 2 samples has the shape \(\)"),
        (torch.ones(7, 2), torch.ones(7, 2), r"has the shape \(7, 2\), and only tensors of"),
        ({"a": torch.ones(2), "b": torch.ones(1)},) * 2 + (r"output\[.*b.*\] of a micro-batch",),
    ],
    ids=["form", "plain value", "no dimension", "other dimension", "its place"],
)
def test_what_cannot_be_joined_is_refused_by_its_shape_and_with_a_way_out(first, second, words):
    with pytest.raises(ConfigError, match=f"{words}[^!]*give micro_batches=1"):
        whole(part(4, first), part(5, second))


def test_outputs_of_different_lengths_are_refused_in_words_of_the_library():
    with pytest.raises(ConfigError, match="micro_batches=1"):
        whole(part(0, torch.ones(2, 3)), part(1, torch.ones(2, 4)))
