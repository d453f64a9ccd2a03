"""A schedule that repeats a trace: it does the same, and refuses what it cannot repeat."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.costs import asynchronous as run
from support.costs import unit
from support.shapes import schedules

from pipedream_rt import Replay
from pipedream_rt.errors import ConfigError, TraceError
from pipedream_rt.schedules import plan_for
from pipedream_rt.simulation.simulator import simulate
from pipedream_rt.tracing.trace import WorkerFacts


@settings(max_examples=40)
@given(schedules(most=4), st.integers(1, 4))
def test_a_replay_does_the_same(schedule, updates):
    trace = simulate(schedule, unit(), updates * schedule.per_update)
    replay = plan_for(
        Replay(trace),
        num_stages=schedule.num_stages,
        per_update=schedule.per_update,
        stages_per_worker=schedule.shape.stages_per_worker,
        slack=schedule.shape.slack,
    )
    again = simulate(replay, unit(), updates * schedule.per_update, credits=trace.credits)
    # Where nothing is read after the end, versions may go earlier.
    spans, found = trace.spans.copy(), again.spans.copy()
    assert (found["kept"] <= spans["kept"]).all()
    spans["kept"] = found["kept"] = 0
    assert spans.tobytes() == found.tobytes()


def test_a_replay_needs_everything():
    trace = run()
    lost = dataclasses.replace(trace, workers=(WorkerFacts(name="a", dropped=2),) * 3)
    with pytest.raises(TraceError, match="first 6 spans were overwritten"):
        Replay(lost)
    late = dataclasses.replace(trace, spans=trace.spans[trace.spans["index"] > 0])
    with pytest.raises(TraceError, match="do not count from 0"):
        Replay(late)
    with pytest.raises(ConfigError, match="the trace was made with Shape"):
        plan_for(Replay(trace), num_stages=4)


def test_a_replay_ends_where_the_trace_ends():
    trace = run(updates=4)
    replay = plan_for(Replay(trace), num_stages=3)
    with pytest.raises(Exception, match="ends before it has done all of 9 micro-batches"):
        simulate(replay, unit(), 9)


def test_a_replay_goes_on_in_the_middle_and_keeps_the_names_of_its_trace():
    replay = Replay(run("1f1b", 2, 2, updates=3))
    shape = plan_for("1f1b", num_stages=2, per_update=2).shape
    assert (replay.name, replay.micro_batches) == ("replay of 1f1b", 6)
    assert " ".join(map(str, replay.order(1, shape, 4))) == "F4 B4 F5 B5 S2"
    versions = replay.versions
    assert [versions.reads(1, shape, m) for m in range(8)] == [0, 0, 1, 1, 2, 2, 4, 4]
    assert versions.kept(1, shape) == 1


def test_a_replay_of_synchronous_updates_flushes_where_the_trace_did():
    """Its own order says so, and the shape that it asks for has none."""
    plan = plan_for("async-1f1b", num_stages=3, synchronous=2)
    trace = simulate(plan, unit(), 6)
    again = simulate(plan_for(Replay(trace), num_stages=3), unit(), 6, credits=trace.credits)
    assert again.spans["version"].tolist() == trace.spans["version"].tolist()


def test_replicas_cannot_be_replayed():
    plan = plan_for("async-1f1b", num_stages=2, replicas=[2, 1])
    with pytest.raises(TraceError, match="cannot be replayed: its stages have replicas"):
        Replay(simulate(plan, unit(), 6))
