"""Events of a run that never was, for tests of what shows them."""

from __future__ import annotations

import math

from pipedream_rt import Costs, plan_for, simulate
from pipedream_rt.observers import Begun, Ended, Evaluated, Recovered, Saved, Stepped, Warned
from pipedream_rt.observers.run_record import RunRecord


def plan_of(stages=3, schedule="async-1f1b", **options):
    """Return a plan with names of layers."""
    return plan_for(schedule, num_stages=stages, **options)


def counters(stage):
    """Return the counters of a stage, as `Pipeline.statistics` has them."""
    return {
        "stage": stage, "updates": 0, "versions_kept": 1, "versions_kept_most": 2,
        "weight_bytes": 4096, "parameters": 1024, "peak_memory_bytes": 200 << 20, "device": "cpu",
    }  # fmt: skip


def begun(step=0, at=1000.0, stages=3, pid=1, host="elsewhere", **options):
    """Return the beginning of a run."""
    plan = plan_of(stages, **options)
    return Begun(
        time=at,
        step=step,
        plan=plan.packed(),
        credits=2,
        how="cut between the layers of a sequence",
        workers=tuple(f"worker-{worker}" for worker in range(plan.workers)),
        stages=tuple(map(counters, range(len(plan.addresses)))),
        settings={"stages": str(stages), "layout.slack": "1"},
        software={"versions": "torch 2.13.0"},
        pid=pid,
        host=host,
    )


def stepped(step, loss=None, at=None, stages=3, samples=8, busy=None):
    """Return the result of a mini-batch."""
    return Stepped(
        time=1000.0 + 0.1 * (step + 1) if at is None else at,
        step=step,
        loss=2.0 / (1 + step) if loss is None else loss,
        rates=(0.1,),
        staleness=min(step, stages - 1),
        versions=tuple(max(0, step - (stages - 1 - s)) for s in range(stages)),
        busy_s=tuple(0.05 * (step + 1) for _ in range(stages)) if busy is None else busy,
        samples=samples,
        micro_batches=1,
    )


def traced(stages=3, micro_batches=40):
    """Return the trace of a run that was simulated."""
    costs = Costs(forward=((0.001,),), backward=((0.002,),), latency=1e-4)
    return simulate(plan_of(stages), costs, micro_batches)


def whole_run(steps=40, stages=3):
    """Return the events of a run in which all kinds of things happen."""
    events = [begun(stages=stages), *(stepped(i, stages=stages) for i in range(steps))]
    events[5:5] = [Warned(time=1000.3, text="a <b>bold</b> warning\nof two lines & more")]
    events[9:9] = [
        Recovered(time=1000.6, step=6, generation=2, reason="worker-1 was killed by SIGKILL",
                  seconds=0.12, replayed=7),
        Saved(time=1000.7, step=8, folder="/tmp/run/step-00000008"),
        Evaluated(time=1000.75, step=8, values={"loss": 1.5, "accuracy": 0.25}),
        Evaluated(time=1000.8, step=9, values={"loss": math.nan}),
    ]  # fmt: skip
    at = 1000.0 + 0.1 * (steps + 1)
    ended = tuple(map(counters, range(stages)))
    return [*events, Ended(time=at, step=steps, stages=ended, trace=traced(stages))]


def told(observer, events):
    """Tell an observer of some events."""
    for event in events:
        observer(event)


def record_of(events):
    """Return the record of a run that was told of some events."""
    record = RunRecord()
    told(record, events)
    return record
