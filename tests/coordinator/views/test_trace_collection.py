"""The spans of all workers are one trace: of real runs, on threads and processes."""

import contextlib
import functools
import json
import os
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.events import check_trace_events
from support.inside import kill, pids
from support.models import OPTIMIZERS, POINTS, Raises, batches, kitchen_sink, mlp, regression
from support.oracle import assert_same
from support.pinned import Pipeline
from support.small import small

from pipedream_rt import ConfigError, Replay, StageFailed, Trace, TraceError
from pipedream_rt.coordinator.views.trace_collection import put_together
from pipedream_rt.schedules import Kind, plan_for
from pipedream_rt.serial.cluster import SerialCluster
from pipedream_rt.simulation.predict import predict
from pipedream_rt.tracing import timeline
from pipedream_rt.tracing.clock import Reading
from pipedream_rt.tracing.spans import NOBODY, SPAN, Recorder
from pipedream_rt.tracing.summary import describe, summarize


def open_pipe(**kwargs):
    defaults = {
        "stages": POINTS[3][1:], "loss_fn": F.cross_entropy, "optimizer": OPTIMIZERS["adamw"],
        "workers": "serial", "trace": True,
    }  # fmt: skip
    return Pipeline(kitchen_sink(), **{**defaults, **kwargs})


@pytest.fixture
def path(tmp_path):
    """Where a trace is to be written, in a folder that is there to be removed."""
    (tmp_path / "traces").mkdir()
    return tmp_path / "traces" / "run.trace"


def actions_of(trace, stage):
    return [
        f"{chr(s['kind'])}{s['index']}" for s in trace.of_stage(stage) if chr(s["kind"]) in "FBIWS"
    ]


@pytest.mark.threads
@pytest.mark.parametrize(
    ("schedule", "k", "stages"),
    [("async-1f1b", 1, 3), ("1f1b", 4, 3), ("zero-bubble", 4, 3), ("2bw", 4, 3),
     ("interleaved-1f1b", 4, 4)],
)  # fmt: skip
def test_a_trace_is_what_the_order_says(schedule, k, stages):
    with open_pipe(schedule=schedule, micro_batches=k, stages=POINTS[stages][1:]) as pipe:
        results = list(pipe.train_epoch(batches(4, samples=8)))
        trace = pipe.trace()
        planned = pipe.plan
    for worker in range(planned.workers):
        order = planned.order(worker, 0, 4 * k)
        assert list(trace.actions(worker)) == [a for a in order if a.kind is not Kind.DRAIN]
    for stage in range(stages):
        spans = trace.of_stage(stage)
        for span in spans:
            assert span["ready"] <= span["end"]
            assert span["start"] <= span["end"]
            assert span["arrived"] <= span["start"]
        forwards = spans[spans["kind"] == ord("F")]
        assert forwards["version"].tolist() == [planned.reads(stage, m) for m in range(4 * k)]
        assert forwards["waited_for"].tolist() == [stage - 1] * 4 * k
        assert spans["kept"].max() <= planned.kept(stage)
        assert spans["in_flight"].max() <= planned.in_flight(stage)
        assert (forwards["bytes"] > 0).all() == (stage < stages - 1)
    assert [chr(s["kind"]) for s in trace.of_stage(-1)].count("L") == 4 * k
    summary = summarize(trace)
    assert summary.micro_batches == 4 * k
    assert max(summary.staleness) == max(r.staleness for r in results)
    assert "one clock for all workers" in describe(trace)
    check_trace_events(json.loads(timeline.perfetto(trace)))


@pytest.mark.threads
def test_a_replayed_run_gives_the_same_bits():
    """With a flush in the middle, where the order of the trace drains and starts anew."""
    data = batches(10)
    states = []
    schedule = "async-1f1b"
    for _ in range(2):
        with open_pipe(
            schedule=schedule, workers=functools.partial(SerialCluster, shuffle_seed=4)
        ) as pipe:
            list(pipe.train_epoch(data[:6]))
            pipe.evaluate(data[:2])
            list(pipe.train_epoch(data[6:]))
            trace = pipe.trace()
            states.append(pipe.state_dict())
        schedule = Replay(trace)
    assert_same(states[1], states[0])


@pytest.mark.threads
def test_a_run_longer_than_its_replay_is_refused():
    with open_pipe() as pipe:
        list(pipe.train_epoch(batches(4)))
        trace = pipe.trace()
    with (
        open_pipe(schedule=Replay(trace)) as pipe,
        pytest.raises(StageFailed, match=r"ends with micro-batch 3, but|ends before"),
    ):
        list(pipe.train_epoch(batches(6)))


@pytest.mark.threads
def test_what_does_not_train_is_in_the_trace_too():
    with open_pipe() as pipe:
        list(pipe.train_epoch(batches(3)))
        pipe.evaluate(batches(2))
        pipe(batches(1)[0][0])
        trace = pipe.trace()
    kinds = [chr(s["kind"]) for s in trace.of_stage(2)]
    assert kinds.count("E") == 3
    assert "C" in kinds
    assert "D" in kinds


@pytest.mark.threads
def test_a_file_is_written_at_the_end(path):
    with open_pipe(trace=path) as pipe:
        list(pipe.train_epoch(batches(5)))
        assert not path.exists()
    assert summarize(Trace.load(path)).micro_batches == 5
    with contextlib.suppress(ZeroDivisionError), open_pipe(trace=path) as pipe:
        list(pipe.train_epoch(batches(7)))
        raise ZeroDivisionError  # the caller's own: the run so far is worth having
    assert summarize(Trace.load(path)).micro_batches == 7


@pytest.mark.threads
def test_after_a_failure_and_after_ctrl_c_nothing_is_written(path):
    model = torch.nn.Sequential(*mlp(), Raises())
    with pytest.raises(StageFailed), small(model, stages=2, trace=path) as pipe:
        list(pipe.train_epoch(regression(9)))
    with pytest.raises(KeyboardInterrupt), open_pipe(trace=path):
        raise KeyboardInterrupt
    assert not list(path.parent.iterdir())


@pytest.mark.threads
def test_a_trace_that_can_no_longer_be_written_ends_everything_and_hides_no_error(path, caplog):
    pipe, other = open_pipe(trace=path), open_pipe(trace=path)
    path.parent.rmdir()
    with pytest.raises(TraceError, match="cannot be written"):
        pipe.close()
    pipe.close()
    with contextlib.suppress(ZeroDivisionError), other:
        raise ZeroDivisionError  # the caller's own
    assert "no trace is left" in caplog.text


@pytest.mark.threads
def test_a_forked_child_writes_no_trace(path):
    """It would wait for messages that go to its parent."""
    with open_pipe(trace=path) as pipe:
        list(pipe.train_epoch(batches(2)))
        child = os.fork()
        if child == 0:
            try:
                pipe.close()
            finally:
                os._exit(7 if path.exists() else 0)
        assert os.waitpid(child, 0)[1] == 0
    assert path.exists()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("none/run.trace", "there is no folder "),
        ("", "is a folder"),
        (7, "must be a file, True or False"),
    ],
)
def test_a_file_that_cannot_be_is_refused_at_once(tmp_path, where, words):
    with pytest.raises(ConfigError, match=words):
        open_pipe(trace=tmp_path / where if isinstance(where, str) else where)


@pytest.mark.threads
def test_without_a_trace_there_is_none():
    with open_pipe(trace=None) as pipe, pytest.raises(ConfigError, match="nothing is recorded"):
        pipe.trace()


@pytest.mark.threads
def test_old_spans_are_overwritten(monkeypatch):
    monkeypatch.setattr("pipedream_rt.job.job.SPANS_KEPT", 32)
    with open_pipe() as pipe:
        list(pipe.train_epoch(batches(40)))
        trace = pipe.trace()
    assert [w.dropped > 60 for w in trace.workers] == [True] * 3
    assert all(len(trace.of_stage(s)) == 32 for s in range(3))
    assert f"oldest {trace.dropped} spans" in describe(trace)
    assert predict(trace).measured > 0
    with pytest.raises(TraceError, match="overwritten"):
        Replay(trace)


@pytest.mark.processes
def test_processes(path):
    """One clock, and messages that arrive after they were sent."""
    with open_pipe(workers="local", trace=path) as pipe:
        list(pipe.train_epoch(batches(20)))
        planned = pipe.plan
    trace = Trace.load(path)
    assert [w.clock_error_ns for w in trace.workers] == [0, 0, 0]
    assert all(w.peak_memory_bytes > 2**26 for w in trace.workers)
    for stage in range(3):
        *expected, drain = map(str, planned.order(stage, 0, 20))
        assert actions_of(trace, stage) == expected
        assert drain == "D20"
    assert trace.stage_bytes[0] > 0
    summary = summarize(trace)
    assert summary.hops[-1] > 0  # most may be noted as arrived before the end of their action
    prediction = predict(trace)
    assert prediction.predicted > 0
    assert {kind.value for kind in Kind} >= {a[0] for a in actions_of(trace, 0)}


def test_the_environment_may_ask_for_a_trace(tmp_path, monkeypatch):
    """As `pipedream-rt run --trace` does; each pipeline of the script leaves one."""
    monkeypatch.setattr("pipedream_rt.coordinator.script_environment._taken", Counter())
    monkeypatch.setenv("PIPEDREAM_RT_TRACE", str(tmp_path / "run.trace"))
    for _ in range(2):
        with open_pipe(trace=None) as pipe:
            list(pipe.train_epoch(batches(16)))
    assert sorted(os.listdir(tmp_path)) == ["run-2.trace", "run.trace"]
    for name in os.listdir(tmp_path):
        assert summarize(Trace.load(tmp_path / name)).micro_batches == 16


@pytest.mark.processes
def test_a_worker_that_is_killed_while_the_trace_is_collected(path):
    pipe = open_pipe(workers="local", trace=path)
    list(pipe.train_epoch(batches(3)))
    kill(pipe, next(iter(pids(pipe))))
    with pytest.raises(Exception, match="worker-0"):
        pipe.close()
    assert not path.exists()


# -- without workers ------------------------------------------------------------------------------


def recorded(stage, *starts):
    """What a stage replies of its spans, each as long as 5 ns."""
    spans = np.zeros(len(starts), SPAN)
    spans["stage"], spans["start"], spans["end"] = stage, starts, [start + 5 for start in starts]
    spans["kind"], spans["waited_for"] = ord("F"), NOBODY
    data = torch.frombuffer(bytearray(spans.tobytes()), dtype=torch.uint8)
    return {
        "spans": data, "device_spans": data[:0], "dropped": 10 + stage,
        "peak_memory_bytes": 100 + stage, "parameter_bytes": 1000 + stage,
    }  # fmt: skip


def test_spans_of_all_workers_are_on_the_clock_of_the_coordinator():
    """Two stages a worker: each has the clock of its worker, and the facts of the first stage."""
    plan = plan_for("interleaved-1f1b", num_stages=4, per_update=2, stages_per_worker=2)
    workers = [plan.worker_of(stage) for stage in range(4)]
    ahead = {0: 0, 1: 5_000}  # the clock of worker 1
    trace = put_together(
        plan, 2, ["a", "b"],
        [recorded(stage, 10_000 + ahead[worker]) for stage, worker in enumerate(workers)],
        Recorder(8),
        [(Reading(at, at + 2 + ahead[w], at + 4), Reading(at, at + 2 + ahead[w], at + 4))
         for w, at in ((0, 1_000), (1, 1_000))],
    )  # fmt: skip
    assert [int(trace.of_stage(stage)["start"][0]) for stage in range(4)] == [10_000] * 4
    assert [int(trace.of_stage(stage)["end"][0]) for stage in range(4)] == [10_005] * 4
    assert [each.name for each in trace.workers] == ["a", "b"]
    assert [each.clock_error_ns for each in trace.workers] == [2, 2]
    firsts = [workers.index(worker) for worker in (0, 1)]
    assert [each.dropped for each in trace.workers] == [10 + first for first in firsts]
    assert trace.stage_bytes == (1000, 1001, 1002, 1003)
