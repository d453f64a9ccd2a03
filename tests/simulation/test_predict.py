import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.costs import random_costs, unit
from support.shapes import schedules
from support.written import LaterBackward

from pipedream_rt.errors import ConfigError, TraceError
from pipedream_rt.schedules import plan_for
from pipedream_rt.simulation.costs import Costs, costs_of
from pipedream_rt.simulation.predict import changes_of, fit, predict, what_if
from pipedream_rt.simulation.simulator import simulate
from pipedream_rt.tracing.spans import SPAN
from pipedream_rt.tracing.summary import summarize

COSTS = costs_of(
    {
        "forward": [["10ms", "12ms"], "20ms", "15ms", "10ms"],
        "backward": "30ms",
        "step": "2ms",
        "latency": "1ms",
        "activation_bytes": "1MB",
        "weight_bytes": "8MB",
    }
)


def run(name="1f1b", updates=10, **changes):
    schedule = plan_for(name, num_stages=4, per_update=4)
    return simulate(schedule, COSTS.changed(**changes), updates * 4)


@given(schedules(most=4), random_costs())
def test_what_is_fitted_to_a_simulation_gives_it_again(schedule, costs):
    """Without a bandwidth, whose queues are no longer there to be seen, the very same spans."""
    costs = costs.changed(bandwidth=float("inf"), overhead=0.0)
    trace = simulate(schedule, costs, 6 * schedule.per_update)
    again = simulate(schedule, fit(trace), 6 * schedule.per_update, credits=trace.credits)
    names = ("stage", "kind", "index", "version")
    assert (again.spans[list(names)] == trace.spans[list(names)]).all()
    end, found = trace.spans["end"].max(), again.spans["end"].max()
    if schedule.shape.workers > 1 or not costs.latency:  # else no hop shows the latency
        assert abs(int(found) - int(end)) <= 0.03 * end + 1_000_000 * 6


def test_a_prediction_of_its_own_trace():
    for name in ("async-1f1b", "1f1b", "zero-bubble", "2bw"):
        prediction = predict(run(name))
        assert abs(prediction.error) < 0.01
        assert prediction.trace.simulated


def test_costs_are_found_again():
    costs = fit(run())
    assert [round(samples[0] * 1000) for samples in costs.forward] == [10, 20, 15, 10]
    assert round(costs.forward[0][1] * 1000) == 12
    assert costs.backward[2][0] == pytest.approx(0.03)
    assert costs.latency == pytest.approx(0.001)
    assert costs.activation_bytes == (1e6, 1e6, 1e6, 0)
    assert costs.gradient_bytes == (0, 1e6, 1e6, 1e6)


def test_another_schedule_is_predicted_from_this_one():
    """What the simulator says of it with the costs themselves."""
    expected = summarize(run("async-1f1b", updates=30)).throughput
    found = summarize(what_if(run("1f1b"), {"schedule": "async-1f1b"})).throughput
    assert found == pytest.approx(expected, rel=0.02)


def rate(changes, name="1f1b"):
    return summarize(what_if(run(name), changes_of(changes))).throughput


def test_what_if():
    base = rate("schedule=1f1b")
    # Twice the stages, each with half of the work, and a larger bubble.
    assert 1.2 * base < rate("stages=8,micro-batches=16") < 2.4 * base
    # 1 MB takes 80 ms.
    assert rate("bandwidth=100Mbit") < 0.7 * base
    assert rate("latency=50ms") < 0.8 * base
    assert rate("speed=2") > 1.8 * base
    assert rate("latency=50ms,slack=2") > 1.1 * rate("latency=50ms")
    assert rate("latency=50ms,slack=2:2:2") == rate("latency=50ms,slack=2")
    assert rate("speed=1:1:0.5:1") < 0.7 * base
    assert rate("schedule=interleaved-1f1b,micro_batches=8") > 1.1 * base
    # The workers stay as many.
    assert what_if(run(), {"schedule": "interleaved-1f1b"}).plan.workers == 4
    interleaved = plan_for("interleaved-1f1b", num_stages=4, per_update=4)
    back = what_if(simulate(interleaved, COSTS, 40), {"schedule": "1f1b"})
    assert back.plan.workers == 2
    same = what_if(run("async-1f1b"), {})
    assert same.credits == run("async-1f1b").credits


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stages", "'stages' has no ="),
        ("colour=red", "'colour' cannot be changed"),
        ("stages=0", "at least 1"),
        ("stages=many", "at least 1"),
        ("stages=²", "at least 1"),
        ("", "'' has no ="),
        ("schedule=zigzag", "unknown schedule"),
        ("schedule=2bw,micro_batches=2", "at least as many micro-batches"),
        ("bandwidth=fast", "is no bandwidth"),
        ("speed=1:2", "speed has 2 entries"),
        ("latency=-1ms", "latency must be"),
    ],
)
def test_what_cannot_be(text, words):
    with pytest.raises(ConfigError, match=words):
        what_if(run(), changes_of(text))


def test_a_written_schedule_is_replayed_and_not_changed():
    schedule = plan_for(LaterBackward(), num_stages=3, per_update=4)
    trace = simulate(schedule, unit(), 24)
    assert abs(predict(trace).error) < 0.01
    with pytest.raises(ConfigError, match="is no built-in schedule"):
        what_if(trace, {"stages": 6})


def test_a_trace_that_is_too_short():
    with pytest.raises(TraceError, match="fewer than two updates"):
        predict(run(updates=1))
    empty = dataclasses.replace(run(), spans=np.zeros(0, SPAN))
    with pytest.raises(TraceError, match="no action"):
        predict(empty)
    forwards = run()
    only = dataclasses.replace(forwards, spans=forwards.spans[forwards.spans["kind"] == ord("F")])
    with pytest.raises(TraceError, match="no backward"):
        fit(only)


@given(st.integers(1, 9))
def test_work_is_spread_evenly(stages):
    from pipedream_rt.simulation.predict import evenly

    full = COSTS.for_stages(4, 4)
    spread = evenly(full, stages)
    assert sum(spread.forward[0]) / 2 * stages == pytest.approx(0.011 + 0.02 + 0.015 + 0.01)
    assert isinstance(spread, Costs)
    assert spread.weight_bytes[0] * stages == pytest.approx(32e6)


def test_an_update_that_waits_for_its_norm_has_its_time_in_the_action_that_applies_it():
    plan = plan_for("async-1f1b+vertical-sync", num_stages=3).with_norms()
    costs = Costs(forward=((0.002,),), backward=((0.003,),), step=((0.001,),))
    trace = simulate(plan, costs, 30)
    for stage, spans in enumerate(trace.by_stage()):
        kinds = {chr(k): spans[spans["kind"] == k] for k in set(spans["kind"].tolist())}
        took = kinds["A" if stage else "S"]
        assert set((took["end"] - took["start"]).tolist()) == {1_000_000}
        assert ("A" in kinds) is bool(stage)
    assert fit(trace).step[1][0] == pytest.approx(0.001)
