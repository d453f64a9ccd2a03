import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules import RECIPES, Kind, check, schedule_named


def drawn(name, stage, count, **kwargs):
    order = schedule_named(name, **kwargs).order(stage)
    return " ".join(map(str, itertools.islice(order, count)))


def test_async_1f1b():
    """n-1-s forwards ahead, then one forward, one backward, one update, for ever."""
    four = {"num_stages": 4}
    assert drawn("async-1f1b", 0, 11, **four) == "F0 F1 F2 F3 B0 S0 F4 B1 S1 F5 B2"
    assert drawn("async-1f1b", 2, 8, **four) == "F0 F1 B0 S0 F2 B1 S1 F3"
    assert drawn("async-1f1b", 3, 6, **four) == "F0 B0 S0 F1 B1 S1"


def test_async_1f1b_with_two_micro_batches_per_update():
    order = drawn("async-1f1b", 1, 10, num_stages=3, per_update=2)
    assert order == "F0 F1 B0 F2 B1 S0 F3 B2 F4 B3"


def test_1f1b_drains_before_every_update():
    two = {"num_stages": 3, "per_update": 4}
    assert drawn("1f1b", 0, 10, **two) == "F0 F1 F2 B0 F3 B1 B2 B3 S0 F4"
    assert drawn("1f1b", 2, 10, **two) == "F0 B0 F1 B1 F2 B2 F3 B3 S0 F4"


def test_1f1b_with_fewer_micro_batches_than_stages():
    assert drawn("1f1b", 0, 6, num_stages=5, per_update=2) == "F0 F1 B0 B1 S0 F2"


def test_gpipe_does_all_forwards_first():
    assert drawn("gpipe", 1, 8, num_stages=3, per_update=3) == "F0 F1 F2 B0 B1 B2 S0 F3"


@pytest.mark.parametrize("name", RECIPES)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12))
def test_every_schedule_obeys_the_rules(name, num_stages, per_update, updates):
    """No deadlock, in-flight and versions within what the schedule states."""
    schedule = schedule_named(name, num_stages=num_stages, per_update=per_update)
    check(schedule, updates * per_update)


@pytest.mark.parametrize("name", RECIPES)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 4), st.integers(1, 6), st.data())
def test_a_restarted_order_is_the_same_order_later(name, n, k, before, updates, data):
    """After a flush the order starts anew from the next micro-batch."""
    schedule = schedule_named(name, num_stages=n, per_update=k)
    stage = data.draw(st.integers(0, n - 1))
    fresh = schedule.order(stage, 0, updates * k)
    later = schedule.order(stage, before * k, (before + updates) * k)
    shifted = [(a.kind, a.index - (before if a.kind is Kind.STEP else before * k)) for a in later]
    assert [(a.kind, a.index) for a in fresh] == shifted


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_weight_stashing_reads_what_its_own_order_has_made(num_stages, per_update, data):
    """The formula of the table is the number of updates before the forward, in the order."""
    schedule = schedule_named("async-1f1b", num_stages=num_stages, per_update=per_update)
    stage = data.draw(st.integers(0, num_stages - 1))
    updates = 0
    for action in itertools.islice(schedule.order(stage), 120):
        if action.kind is Kind.STEP:
            updates += 1
        elif action.kind is Kind.FORWARD:
            assert schedule.reads(stage, action.index) == updates


@pytest.mark.parametrize("name", RECIPES)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 50), st.data())
def test_the_version_read_never_falls(name, num_stages, per_update, m, data):
    schedule = schedule_named(name, num_stages=num_stages, per_update=per_update)
    stage = data.draw(st.integers(0, num_stages - 1))
    assert schedule.reads(stage, m) <= schedule.reads(stage, m + 1) <= m + 1


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"unknown schedule 'zigzag'(?s:.*)async-1f1b(?s:.*)gpipe"
    ):
        schedule_named("zigzag", num_stages=2)


@pytest.mark.parametrize(("n", "k"), [(0, 1), (2, 0), (True, 1), (2, 1.5)])
def test_numbers_out_of_range_are_refused(n, k):
    with pytest.raises(ConfigError, match="at least 1"):
        schedule_named("1f1b", num_stages=n, per_update=k)


def test_credits_fill_the_pipe_or_keep_the_loop_plain():
    assert schedule_named("async-1f1b", num_stages=4).credits() == 5
    assert schedule_named("async-1f1b", num_stages=4, per_update=3).credits() == 3
    assert schedule_named("1f1b", num_stages=4, per_update=4).credits() == 1
