"""Two trainings are compared in the order in which the plain one has computed."""

import math

import pytest
import torch

from pipedream_rt.verify.compare import (
    MOST,
    Place,
    Verification,
    cause_of,
    compared,
    lacking,
    sampled,
)

LOSS = Place(0, 1, "loss")
WEIGHT = Place(0, -1, "state", "0.weight")
INPUT = Place(2, 5, "input", "0#2", 1)


def test_places_in_words():
    assert str(LOSS) == "the loss, micro-batch 1 of mini-batch 0"
    assert str(WEIGHT) == "0.weight after the update, mini-batch 0"
    assert str(INPUT) == "the input (tensor 1) of layer 0#2, micro-batch 5 of mini-batch 2"


def test_the_same_bits():
    one = {LOSS: 1.5, WEIGHT: torch.tensor([1.0, math.nan]), INPUT: torch.arange(3)}
    assert compared(one, dict(one)) == (3, None)
    assert compared(one, {LOSS: 1.5}) == (1, None)  # what is not there is not compared


@pytest.mark.parametrize(
    ("one", "other", "rounds"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), False),
        (torch.tensor([1.0]), torch.tensor([math.nan]), False),
        (torch.tensor([math.inf]), torch.tensor([1.0]), False),
        (torch.tensor([0.0]), torch.tensor([-1.0]), False),
        (torch.zeros(2), torch.zeros(3), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), False),
        (torch.tensor([1]), torch.tensor([2]), False),
        (torch.tensor([100]), torch.tensor([101]), False),
        (True, False, False),
        ("one", "other", False),
        ((1.0, torch.ones(1)), (1.0, torch.zeros(1)), False),
        ((torch.ones(2),), (torch.ones(2), 1.0), False),
        (1.0, 1.0000001, True),
    ],
)
def test_a_difference(one, other, rounds):
    plain = {LOSS: 1.0, WEIGHT: one, INPUT: 1.0}
    count, parted = compared(plain, {**plain, WEIGHT: other})
    assert (parted.place, parted.before, parted.rounds) == (WEIGHT, 1, rounds)
    assert parted.difference > 0
    assert count == (3 if rounds else 1)


def test_rounding_may_be_more_where_one_says_so():
    one, other = {LOSS: 1.0, WEIGHT: 2.0}, {LOSS: 1.5, WEIGHT: 3.0}
    _, parted = compared(one, other, lambda place, apart: place == LOSS and apart < 0.5)
    assert (parted.place, parted.rounds) == (WEIGHT, False)
    count, parted = compared(one, other, lambda place, apart: True)
    assert (count, parted.place, parted.rounds) == (2, LOSS, True)


def test_of_a_large_tensor_some_elements_of_all_rows_and_columns_are_compared():
    value = torch.arange(512.0 * 512).view(512, 512)
    some = sampled(value)
    assert MOST / 2 < len(some) <= MOST
    assert len((some // 512).unique()) == len((some % 512).unique()) == 512
    small = torch.eye(2)
    assert torch.equal(sampled(small.to_sparse()), small)
    assert sampled(small).data_ptr() != small.data_ptr()


def test_what_is_no_rounding_counts_before_what_is():
    one = {LOSS: 1.0, WEIGHT: torch.ones(1)}
    _, parted = compared(one, {LOSS: 1.0000001, WEIGHT: torch.zeros(1)})
    assert parted.place == WEIGHT


def test_a_gradient_that_one_lacks():
    gradient = Place(0, -1, "gradient", "0.weight")
    one = {LOSS: 1.0, gradient: torch.ones(1)}
    assert lacking(one, {LOSS: 1.0}, ("gradient",)) == gradient
    assert lacking({LOSS: 1.0}, one, ("gradient",)) == gradient
    assert lacking(one, {gradient: torch.ones(1)}, ("gradient",)) is None


@pytest.mark.parametrize("kind", ["input", "output", "loss", "gradient", "state"])
def test_every_kind_has_a_cause(kind):
    first, later = cause_of(Place(0, 0, kind, "x")), cause_of(Place(1, 3, kind, "x"))
    assert first.endswith(".")
    assert (
        later
        == f"{first} It parts in a later micro-batch alone, so something has changed meanwhile."
    )


def test_what_was_found_in_words():
    good = Verification(True, 7, 2, notes=("left out: codecs",))
    assert good
    assert str(good) == "the same as plain PyTorch: 7 values of 2 mini-batches\n- left out: codecs"
    bad = Verification(False, 3, 1, str(LOSS), 0.5, "It is the loss.")
    assert not bad
    assert "the loss, micro-batch 1 of mini-batch 0 differs by 0.5 of" in str(bad)
    assert str(bad).endswith("after 3 values that are the same. It is the loss.")
