import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.costs import random_costs, unit
from support.shapes import made, replicated, schedules
from support.slow_simulator import slow_simulation

from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.schedules import Action, Kind, plan_for
from pipedream_rt.simulation.costs import Costs
from pipedream_rt.simulation.simulator import simulate
from pipedream_rt.tracing import describe, summarize


def drawn(trace, scale=1_000_000):
    """``stage: F0 0-1, ...`` in milliseconds."""
    lines = []
    for stage, spans in enumerate(trace.by_stage()):
        parts = (
            f"{chr(s['kind'])}{s['index']} {s['start'] // scale}-{s['end'] // scale}"
            for s in spans
            if chr(s["kind"]) != "D"
        )
        lines.append(f"{stage}: " + ", ".join(parts))
    return lines


def plain(**changes):
    return Costs(**{"forward": ((0.001,),), "backward": ((0.001,),), **changes})


# Seven cases, computed by hand.


def test_one_stage_adds_up():
    costs = plain(forward=((0.002,),), backward=((0.003,),), step=((0.001,),))
    trace = simulate(plan_for("async-1f1b", num_stages=1), costs, 3)
    assert drawn(trace) == [
        "0: F0 0-2, B0 2-5, S0 5-6, F1 6-8, B1 8-11, S1 11-12, F2 12-14, B2 14-17, S2 17-18"
    ]


def test_two_stages_with_a_latency():
    """Every hop takes 1 ms, from the coordinator too."""
    costs = plain(backward=((0.002,),), latency=0.001)
    trace = simulate(plan_for("async-1f1b", num_stages=2), costs, 2)
    assert drawn(trace) == [
        "0: F0 1-2, F1 2-3, B0 7-9, S0 9-9, B1 10-12, S1 12-12",
        "1: F0 3-4, B0 4-6, S0 6-6, F1 6-7, B1 7-9, S1 9-9",
    ]


def test_messages_queue_for_a_link():
    """100 bytes at 50 bytes a millisecond: the second waits until the first has left."""
    costs = plain(activation_bytes=(100.0,), bandwidth=50_000.0)
    trace = simulate(plan_for("gpipe", num_stages=2, per_update=2), costs, 2)
    assert drawn(trace) == [
        "0: F0 0-1, F1 1-2, B0 9-10, B1 11-12, S0 12-12",
        "1: F0 3-4, F1 5-6, B0 6-7, B1 7-8, S0 8-8",
    ]


def test_a_slow_worker():
    costs = plain(speed=(1.0, 0.5))
    trace = simulate(plan_for("1f1b", num_stages=2, per_update=2), costs, 2)
    assert drawn(trace) == [
        "0: F0 0-1, F1 1-2, B0 5-6, B1 9-10, S0 10-10",
        "1: F0 1-3, B0 3-5, F1 5-7, B1 7-9, S0 9-9",
    ]


def test_two_stages_on_each_of_two_workers():
    trace = simulate(plan_for("interleaved-1f1b", num_stages=4, per_update=2), plain(), 2)
    assert drawn(trace) == [
        "0: F0 0-1, F1 1-2, B0 8-9, B1 9-10, S0 10-10",
        "1: F0 1-2, F1 2-3, B0 7-8, B1 8-9, S0 9-9",
        "2: F0 2-3, F1 3-4, B0 5-6, B1 7-8, S0 10-10",
        "3: F0 3-4, B0 4-5, F1 5-6, B1 6-7, S0 9-9",
    ]


def test_split_backwards_fill_the_bubble():
    trace = simulate(plan_for("zero-bubble", num_stages=2, per_update=2), unit(), 2)
    assert drawn(trace) == [
        "0: F0 0-1, F1 1-2, I0 3-4, W0 4-5, I1 5-6, W1 6-7, S0 7-7",
        "1: F0 1-2, I0 2-3, F1 3-4, I1 4-5, W0 5-6, W1 6-7, S0 7-7",
    ]


def test_the_coordinator_takes_its_time():
    """One credit: the second injection begins 2 ms after the first loss and takes 1 ms."""
    costs = plain(injection=0.001, turnaround=0.002, overhead=0.001)
    trace = simulate(plan_for("async-1f1b", num_stages=1), costs, 2, credits=1)
    assert drawn(trace) == ["0: F0 1-3, B0 3-4, S0 4-4, F1 6-8, B1 8-9, S1 9-9"]
    assert [(chr(s["kind"]), s["index"], s["end"] // 1_000_000) for s in trace.of_stage(-1)] == [
        ("N", 0, 1),
        ("L", 0, 3),
        ("N", 1, 6),
        ("L", 1, 8),
    ]


def test_samples_are_taken_in_turn():
    costs = plain(forward=((0.001, 0.003),))
    trace = simulate(plan_for("async-1f1b", num_stages=1), costs, 3)
    assert drawn(trace) == [
        "0: F0 0-1, B0 1-2, S0 2-2, F1 2-5, B1 5-6, S1 6-6, F2 6-7, B2 7-8, S2 8-8"
    ]


# Properties.


@settings(max_examples=150)
@given(schedules(most=4) | replicated(), random_costs(), st.integers(1, 4), st.integers(1, 4))
def test_it_equals_a_simulation_by_events(schedule, costs, updates, credits):
    """Which takes the earliest possible action next, and knows nothing of this one's order."""
    micro_batches = updates * schedule.per_update
    trace = simulate(schedule, costs, micro_batches, credits=credits)
    found = sorted(
        (int(s["stage"]), chr(s["kind"]), int(s["index"]), int(s["start"]), int(s["end"]))
        for s in trace.spans
        if s["stage"] >= 0
    )
    assert found == slow_simulation(schedule, costs, micro_batches, credits)


@given(schedules(), random_costs(), st.integers(1, 5))
def test_it_ends_within_the_stated_bounds(schedule, costs, updates):
    summary = summarize(simulate(schedule, costs, updates * schedule.per_update))
    for stage in summary.stages:
        assert stage.in_flight <= schedule.in_flight(stage.stage)
        assert stage.versions <= schedule.kept(stage.stage)
    assert summary.micro_batches == updates * schedule.per_update


milliseconds = st.integers(1, 9)


@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 9),
    st.integers(1, 12),
    milliseconds,
    milliseconds,
)
def test_the_bubble_of_gpipe_and_1f1b(name, n, k, f, b):
    """(n-1)/(M+n-1), whatever forward and backward take."""
    costs = Costs(forward=((f / 1000,),), backward=((b / 1000,),))
    trace = simulate(plan_for(name, num_stages=n, per_update=k), costs, k)
    summary = summarize(trace)
    assert round(summary.makespan * 1000) == (k + n - 1) * (f + b)
    assert summary.bubble == pytest.approx([(n - 1) / (k + n - 1)] * n)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), milliseconds, milliseconds)
def test_the_bubble_of_interleaving(n, groups, v, f, b):
    """(n-1)/(vM+n-1)."""
    schedule = made("interleaved-1f1b", n, n * groups, v)
    costs = Costs(forward=((f / 1000,),), backward=((b / 1000,),))
    summary = summarize(simulate(schedule, costs, n * groups))
    m = n * groups
    assert round(summary.makespan * 1000) == (v * m + n - 1) * (f + b)
    assert summary.bubble == pytest.approx([(n - 1) / (v * m + n - 1)] * n)


@given(st.integers(2, 6), st.integers(0, 5))
def test_the_bubble_of_zero_bubble(n, more):
    """n-1 of the 3(n-1) units of 1F1B: a third, if there are enough micro-batches to fill with."""
    k = 2 * n + more
    zero = simulate(plan_for("zero-bubble", num_stages=n, per_update=k), unit(), k)
    assert round(summarize(zero).makespan * 1000) == 3 * k + n - 1
    whole = Costs(forward=((0.001,),), backward=((0.002,),))
    plain_1f1b = simulate(plan_for("1f1b", num_stages=n, per_update=k), whole, k)
    assert round(summarize(plain_1f1b).makespan * 1000) == 3 * k + 3 * (n - 1)


@given(
    st.sampled_from(["async-1f1b", "2bw", "async-1f1b+vertical-sync"]),
    st.integers(1, 6),
    st.integers(1, 8),
    milliseconds,
    milliseconds,
)
def test_asynchronous_schedules_have_no_bubble_in_steady_state(name, n, k, f, b):
    schedule = made(name, n, k)
    costs = Costs(forward=((f / 1000,),), backward=((b / 1000,),))
    count = max(3 * n, 3 * schedule.per_update) // schedule.per_update * schedule.per_update
    trace = simulate(schedule, costs, count)
    spans = trace.of_stage(n - 1)
    assert (spans["ready"][1:] == spans["start"][1:]).all()


@given(
    schedules(most=4),
    random_costs(),
    st.sampled_from(["latency", "overhead", "injection", "turnaround"]),
)
def test_what_costs_more_takes_no_less_time(schedule, costs, name):
    slower = costs.changed(**{name: getattr(costs, name) + 0.003})
    count = 3 * schedule.per_update

    def end(c):
        return simulate(schedule, c, count).spans["end"].max()

    assert end(slower) >= end(costs)


def test_the_order_of_a_dictionary_changes_nothing():
    from pipedream_rt.simulation.costs import costs_of

    given = {"forward": ["1ms", "3ms", "2ms"], "backward": "2ms", "latency": "0.1ms",
             "activation_bytes": "1kB", "bandwidth": "8Mbit"}  # fmt: skip
    schedule = plan_for("1f1b", num_stages=3, per_update=4)
    one = simulate(schedule, costs_of(given), 8)
    other = simulate(schedule, costs_of(dict(reversed(given.items()))), 8)
    assert one.spans.tobytes() == other.spans.tobytes()


# Bad input.


@pytest.mark.parametrize("count", [0, -4, 6])
def test_a_count_that_is_no_multiple_is_refused(count):
    with pytest.raises(ConfigError, match="must be a multiple of 4"):
        simulate(plan_for("gpipe", num_stages=2, per_update=4), plain(), count)


def test_times_beyond_all_measure():
    costs = plain(forward=((1e14,),), speed=(1e-9,))
    with pytest.raises(ConfigError, match="exceeds 292 years"):
        simulate(plan_for("async-1f1b", num_stages=1), costs, 1)
    costs = plain(activation_bytes=(1e15,), bandwidth=1e-14)
    with pytest.raises(ConfigError, match="exceeds 292 years"):
        simulate(plan_for("async-1f1b", num_stages=2), costs, 1)


def test_what_costs_nothing():
    costs = Costs(forward=((0.0,),), backward=((0.0,),))
    trace = simulate(plan_for("1f1b", num_stages=2, per_update=2), costs, 4)
    assert summarize(trace).makespan == summarize(trace).throughput == 0
    assert "0 s" in describe(trace)


class HalfSplit:
    """1F1B whose backward is split on worker 1 alone."""

    def order(self, worker, shape, start):
        for first in itertools.count(start, shape.per_update):
            for m in range(first, first + shape.per_update):
                yield Action(Kind.FORWARD, m)
            for m in range(first, first + shape.per_update):
                for kind in (Kind.INPUT, Kind.WEIGHT) if worker else (Kind.BACKWARD,):
                    yield Action(kind, m)
            yield Action(Kind.STEP, first // shape.per_update)


def test_no_span_is_lost_where_some_workers_split():
    trace = simulate(plan_for(HalfSplit(), num_stages=2, per_update=4), unit(), 40)
    assert [len(spans) for spans in trace.by_stage()] == [91, 131]  # and the end of the flush


def test_costs_of_other_stages_are_refused():
    with pytest.raises(ConfigError, match="forward has 3 entries, there are 2 stages"):
        simulate(plan_for("async-1f1b", num_stages=2), plain(forward=((0.1,),) * 3), 2)
    with pytest.raises(ConfigError, match="speed has 3 entries, there are 2 workers"):
        simulate(plan_for("async-1f1b", num_stages=2), plain(speed=(1.0,) * 3), 2)


def test_a_deadlock_is_no_result():
    class Deadlocks:
        """Never checked: put together by hand."""

        def order(self, worker, shape, start):
            first = Kind.BACKWARD if worker == 0 else Kind.FORWARD
            yield Action(first, 0)
            yield Action(Kind.FORWARD if worker == 0 else Kind.BACKWARD, 0)
            yield Action(Kind.STEP, 0)

    import dataclasses

    from pipedream_rt.schedules import RECIPES

    schedule = plan_for("gpipe", num_stages=2)
    recipe = dataclasses.replace(RECIPES["gpipe"], order=Deadlocks())
    with pytest.raises(ScheduleError, match="does not end; deadlock: stage 0 waits in B0"):
        simulate(dataclasses.replace(schedule, recipe=recipe), plain(), 1)
