import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.shapes import made, schedules

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules import RECIPES, Kind, check, describe_schedules, plan_for
from pipedream_rt.schedules.actions import OF_UPDATES
from pipedream_rt.schedules.orders import most_in_flight


def drawn(name, stage, count, **kwargs):
    order = plan_for(name, **kwargs).order(stage)
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


def test_interleaved_goes_round_in_groups_of_as_many_as_workers():
    four = {"num_stages": 4, "per_update": 4, "stages_per_worker": 2}
    assert drawn("interleaved-1f1b", 0, 9, **four) == (
        "0:F0 0:F1 2:F0 2:F1 0:F2 2:B0 0:F3 2:B1 2:F2"
    )
    assert drawn("interleaved-1f1b", 1, 5, **four) == "1:F0 1:F1 3:F0 3:B0 3:F1"
    # With one stage on each worker it is 1F1B.
    one = {"num_stages": 3, "per_update": 3}
    for stage in range(3):
        interleaved = drawn("interleaved-1f1b", stage, 14, **one, stages_per_worker=1)
        assert interleaved.replace(f"{stage}:", "") == drawn("1f1b", stage, 14, **one)


def test_zero_bubble_puts_weight_halves_off():
    three = {"num_stages": 3, "per_update": 4}
    assert drawn("zero-bubble", 0, 13, **three) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 S0"
    assert drawn("zero-bubble", 2, 13, **three) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 S0"


@settings(max_examples=200)
@given(schedules(), st.integers(1, 8), st.data())
def test_every_schedule_obeys_the_rules(schedule, updates, data):
    """No deadlock, in-flight and versions within what is stated; flushes change nothing."""
    k = schedule.per_update
    check(schedule, updates * k)
    flushes = data.draw(st.sets(st.integers(0, updates), max_size=3))
    check(schedule, updates * k, flushes=[t * k for t in sorted(flushes)])


@given(schedules())
def test_the_stated_in_flight_is_reached(schedule):
    """The bound is no larger than it must be."""
    shape = schedule.shape
    updates = max(2, -(-2 * shape.num_stages // shape.per_update)) + shape.synchronous
    stop = shape.per_update * updates
    for stage in range(shape.num_stages):
        actions = schedule.order(shape.worker_of(stage), 0, stop)
        assert most_in_flight(actions, stage) == min(
            schedule.in_flight(stage), stop - shape.first_asynchronous
        )


@given(schedules(), st.integers(0, 4), st.integers(1, 6), st.data())
def test_a_restarted_order_is_the_same_order_later(schedule, before, updates, data):
    """After a flush the order starts anew from the next micro-batch."""
    assume(not schedule.shape.synchronous)
    k = schedule.per_update
    worker = data.draw(st.integers(0, schedule.shape.workers - 1))
    fresh = schedule.order(worker, 0, updates * k)
    later = schedule.order(worker, before * k, (before + updates) * k)
    shifted = [
        a._replace(index=a.index - (before if a.kind in OF_UPDATES else before * k)) for a in later
    ]
    assert list(fresh) == shifted


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_weight_stashing_reads_what_its_own_order_has_made(num_stages, per_update, data):
    """The formula of the table is the number of updates before the forward, in the order."""
    schedule = plan_for("async-1f1b", num_stages=num_stages, per_update=per_update)
    stage = data.draw(st.integers(0, num_stages - 1))
    updates = 0
    for action in itertools.islice(schedule.order(stage), 120):
        if action.kind is Kind.STEP:
            updates += 1
        elif action.kind is Kind.FORWARD:
            assert schedule.reads(stage, action.index) == updates


@given(schedules(), st.integers(0, 50), st.data())
def test_the_version_read_never_falls(schedule, m, data):
    stage = data.draw(st.integers(0, schedule.num_stages - 1))
    assert schedule.reads(stage, m) <= schedule.reads(stage, m + 1) <= m + 1


def test_the_table_of_versions():
    """The table of docs/concepts/schedules.md."""
    n, k = 4, 5
    for m in range(60):
        for s in range(n):
            assert made("async-1f1b", n, k).reads(s, m) == max(0, (m - (n - 1 - s)) // k)
            assert made("async-1f1b+vertical-sync", n, k).reads(s, m) == max(0, (m - (n - 1)) // k)
            assert made("2bw", n, k).reads(s, m) == max(0, m // k - 1)
            for name in ("1f1b", "gpipe", "zero-bubble", "interleaved-1f1b"):
                schedule = made(name, n, k)
                assert schedule.reads(s, m) == m // schedule.per_update
    assert [made("async-1f1b", n, 1).kept(s) for s in range(n)] == [4, 3, 2, 1]
    assert [made("async-1f1b+vertical-sync", n, 1).kept(s) for s in range(n)] == [4] * 4
    assert [made("2bw", n, k).kept(s) for s in range(n)] == [2] * 4


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("2bw", {"num_stages": 4, "per_update": 3}, "at least as many micro-batches per update"),
        ("interleaved-1f1b", {"num_stages": 5, "per_update": 4}, "5 stages cannot be dealt"),
        ("interleaved-1f1b", {"num_stages": 8, "per_update": 6}, "must be a multiple of 4, not 6"),
        ("interleaved-1f1b", {"num_stages": 4, "stages_per_worker": 0}, "at least 1, not 0"),
        ("1f1b", {"num_stages": 4, "stages_per_worker": 2}, "one stage on each worker, not 2"),
    ],
)
def test_what_does_not_fit_is_refused(name, numbers, words):
    with pytest.raises(ConfigError, match=words):
        plan_for(name, **numbers)


def test_help_has_a_line_for_each_schedule():
    text = describe_schedules()
    for name, recipe in RECIPES.items():
        assert sum(line.split()[0] == name for line in text.splitlines()) == 1
        assert recipe.bubble_text in text
    for word in ("versions kept", "bubble", "staleness"):
        assert all(word in line for line in text.splitlines()[: len(RECIPES)])


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"unknown schedule 'zigzag'(?s:.*)async-1f1b(?s:.*)gpipe"
    ):
        plan_for("zigzag", num_stages=2)


@pytest.mark.parametrize(("n", "k"), [(0, 1), (2, 0), (True, 1), (2, 1.5)])
def test_numbers_out_of_range_are_refused(n, k):
    with pytest.raises(ConfigError, match="at least 1"):
        plan_for("1f1b", num_stages=n, per_update=k)


def test_credits_fill_the_pipe_or_keep_the_loop_plain():
    assert plan_for("async-1f1b", num_stages=4).credits() == 5
    assert plan_for("async-1f1b", num_stages=4, per_update=3).credits() == 3
    assert plan_for("1f1b", num_stages=4, per_update=4).credits() == 1
