"""What is taken apart is put together again, with its class and its keys."""

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch

from pipedream_rt.containers import opened, place_in, put_together

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Frozen:
    left: int
    right: int


@dataclasses.dataclass
class Output(OrderedDict):
    """As those of transformers are."""

    left: int | None = None
    right: int | None = None
    rest: int | None = None


@pytest.mark.parametrize(
    ("value", "keys", "made", "place"),
    [
        ((1, 2), [0, 1], (10, 20), "[1]"),
        ([1, 2], [0, 1], [10, 20], "[1]"),
        (Pair(1, 2), [0, 1], Pair(10, 20), ".right"),
        ({"left": 1, 5: 2}, ["left", 5], {"left": 10, 5: 20}, "[5]"),
        (OrderedDict(a=1, b=2), ["a", "b"], OrderedDict(a=10, b=20), "['b']"),
        (Frozen(1, 2), ["left", "right"], Frozen(10, 20), ".right"),
        (Output(1, 2), ["left", "right"], Output(10, 20), ".right"),
        (torch.Size([1, 2]), [0, 1], (10, 20), "[1]"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_every_container(value, keys, made, place):
    found, parts = opened(value)
    assert list(found) == keys
    assert list(parts) == [1, 2]
    again = put_together(value, found, [10 * part for part in parts])
    assert again == made
    assert type(again) is type(made)
    assert place_in(value, keys[1]) == place


def test_a_field_that_is_not_set_is_no_part():
    value = object.__new__(Frozen)
    object.__setattr__(value, "right", 2)
    assert opened(value) == (["right"], [2])


def test_a_slice():
    keys, parts = opened(slice(1, 2))
    assert put_together(slice(1, 2), keys, [part and 10 * part for part in parts]) == slice(10, 20)


NONE = [None, 1, "ab", b"ab", {1}, torch.ones(2), Frozen, object()]


@pytest.mark.parametrize("value", NONE, ids=lambda value: type(value).__name__)
def test_what_is_none(value):
    assert opened(value) is None
