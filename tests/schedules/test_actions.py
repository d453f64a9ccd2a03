import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream_rt.errors import ScheduleError
from pipedream_rt.schedules.actions import Action, Kind, until
from pipedream_rt.schedules.orders import one_forward_one_backward

numbers = st.integers(min_value=0, max_value=10**9)


@given(st.sampled_from(Kind), numbers, st.none() | numbers)
def test_the_text_form_parses_back(kind, index, stage):
    action = Action(kind, index, stage)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "3", "f3", "F-1", "X3", "2:", ":F3", "F3 ", "1:2:F3"])
def test_other_texts_are_refused(text):
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


def test_until_leaves_the_drain():
    """Two warm-up forwards, three micro-batches."""
    endless = one_forward_one_backward(2, 1, 0)
    drawn = "F0 F1 F2 B0 S0 B1 S1 B2 S2"
    assert " ".join(map(str, until(endless, 3, 1, 6))) == drawn


def test_until_goes_on_in_the_middle_of_an_order():
    """As a stage does when a flush comes: four forwards and two backwards are done."""
    endless = one_forward_one_backward(2, 2, 0)
    done = list(itertools.islice(endless, 7))
    assert " ".join(map(str, done)) == "F0 F1 F2 B0 F3 B1 S0"
    assert " ".join(map(str, until(endless, 4, 2, 3))) == "B2 B3 S1"


def test_until_of_an_order_that_ends_too_early():
    with pytest.raises(ScheduleError, match="ends before it has done all of 3 micro-batches"):
        list(until(iter([Action(Kind.FORWARD, 0)]), 3, 1, 6))
