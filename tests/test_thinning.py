"""The mark `thinned` leaves out cases of a test, and no value of its parameters."""

import itertools

from support.thinning import thinned_out

LETTERS, NUMBERS = "abcdef", (1, 2, 3)


def cases(*names):
    axes = {"letter": LETTERS, "number": NUMBERS}
    return [
        dict(zip(names, each, strict=True))
        for each in itertools.product(*(axes[name] for name in names))
    ]


def test_of_one_parameter_every_nth_value_stays():
    assert thinned_out(cases("letter"), 2) == {1, 3, 5}


def test_of_several_parameters_every_value_stays():
    both = cases("letter", "number")
    assert thinned_out(both, 5) == set(range(18)) - {0, 5, 10, 15} - {6, 12}
    left = [each for place, each in enumerate(both) if place not in thinned_out(both, 3)]
    assert {each["letter"] for each in left} == set(LETTERS)
    assert {each["number"] for each in left} == set(NUMBERS)


def test_parameters_that_are_given_together_are_one():
    together = [{"letter": letter, "upper": letter.upper()} for letter in LETTERS]
    assert thinned_out(together, 3) == {1, 2, 4, 5}
