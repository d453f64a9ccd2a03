"""The numbers that a schedule is for: their bounds, slack, and what follows from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules.shape import Shape, parse_slack, slack_of


@given(st.data(), st.integers(1, 7))
def test_the_warm_up_is_the_hops_to_the_end_and_their_slack(data, n):
    """w(s) = (n-1-s) + sum of e_j for j >= s."""
    slack = tuple(data.draw(st.lists(st.integers(0, 4), min_size=n - 1, max_size=n - 1)))
    shape = Shape(workers=n, slack=slack)
    for s in range(n):
        assert shape.warm_up(s) == (n - 1 - s) + sum(slack[j] for j in range(s, n - 1))


def test_slack_that_is_none_makes_no_difference():
    assert Shape(workers=3, slack=(0, 0)) == Shape(workers=3)
    assert Shape(workers=2, stages_per_worker=2, slack=(0, 0, 0)).slack == ()


@pytest.mark.parametrize(
    ("slack", "stages", "expected"),
    [
        (0, 3, (0, 0)),
        (2, 3, (2, 2)),
        ((), 3, (0, 0)),
        ([1, 2], 3, (1, 2)),
        (1, 1, ()),
        ((), 1, ()),
    ],
)
def test_slack_is_one_number_for_all_hops_or_one_for_each(slack, stages, expected):
    assert slack_of(slack, stages) == expected


@pytest.mark.parametrize(
    ("slack", "stages", "words"),
    [
        (-1, 3, "slack .*-1"),
        (True, 3, "slack .*True"),
        (-1, 1, "slack .*-1"),  # also where there is no hop
        ((1, -2), 3, "slack .*-2"),
        ((1, 1.0), 3, r"slack .*1\.0"),
        ((1, False), 3, "slack .*False"),
        ((1,), 3, "slack has 1 .*2 hops"),
        ((1, 1, 1), 3, "slack has 3 .*2 hops"),
        ((1,), 1, "slack has 1 .*0 hops"),
    ],
)
def test_slack_that_cannot_be_is_refused(slack, stages, words):
    with pytest.raises(ConfigError, match=words):
        slack_of(slack, stages)


def test_slack_is_read_as_a_person_writes_it():
    assert parse_slack(["2"]) == 2
    assert parse_slack(["1", " 0 ", "3"]) == (1, 0, 3)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "one", "²", "٣", "1_0"])
def test_slack_that_is_no_number_of_forwards_is_refused(text):
    with pytest.raises(ConfigError, match=r"slack .*at least 0"):
        parse_slack(["1", text])


@pytest.mark.parametrize(
    "numbers",
    [
        {"workers": 1 << 17},
        {"workers": 1 << 10, "stages_per_worker": 1 << 10},
        {"workers": 2, "per_update": 1 << 30},
        {"workers": 2, "slack": (1 << 30,)},
    ],
)
def test_shapes_beyond_all_bounds_are_refused(numbers):
    with pytest.raises(ConfigError, match="at the most"):
        Shape(**numbers)
