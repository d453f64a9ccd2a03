import itertools

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.shapes import schedules

from pipedream_rt.schedules import check, plan_for
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
