"""What is said of stages that take unequal times."""

import dataclasses

from pipedream_rt.coordinator.results import StepResult
from pipedream_rt.coordinator.views import speed_notices as balance_module
from pipedream_rt.coordinator.views.speed_notices import (
    BalanceNotice,
    SizeNotice,
    about_balance,
    about_size,
)
from pipedream_rt.schedules import plan_for


def plan(schedule="async-1f1b", per_update=None, stages=4, **options):
    return plan_for(schedule, num_stages=stages, per_update=per_update, **options)


def result(step, *busy_s, processor_s=(), process_s=()):
    return StepResult(
        step=step, loss=0.0, losses=(0.0,), versions=(0,) * len(busy_s), staleness=0,
        busy_s=busy_s, processor_s=processor_s, process_s=process_s, fingerprint=None,
    )  # fmt: skip


def test_stages_of_which_a_fifth_of_the_throughput_is_lost_are_told_of():
    assert about_balance(plan(), [1.0, 0.8, 0.8, 0.7]) == []
    (said,) = about_balance(plan(stages=2), [0.36, 5.9])
    assert "stage 1 has computed 5.9 s, and stage 0 0.36 s" in said
    assert "1.9 times as fast" in said
    assert "pipedream-rt profile -o model.profile SCRIPT" in said
    assert "pipedream-rt plan model.profile --workers 2" in said
    assert 'stages="auto"' in said


def test_a_stage_of_one_layer_cannot_be_cut():
    layers = (("a", "b"), ("c",))
    uneven = dataclasses.replace(plan(stages=2), layers=layers)
    (said,) = about_balance(uneven, [0.3, 5.0])
    assert "its one layer, c, takes several workers by Layout(replicas=" in said
    (said,) = about_balance(uneven, [5.0, 0.3])
    assert "its one layer" not in said


def test_stages_of_one_worker_are_counted_together():
    interleaved = plan("interleaved-1f1b", per_update=2, stages=4)
    assert interleaved.workers == 2
    assert about_balance(interleaved, [2.0, 1.0, 0.1, 1.0]) == []
    assert len(about_balance(interleaved, [2.0, 0.5, 2.0, 0.5])) == 1


def test_replicas_share_what_their_stage_computes():
    replicated = plan(stages=2, replicas=(3, 1))
    assert about_balance(replicated, [1.0, 1.0]) == []
    assert len(about_balance(replicated, [1.0, 4.0])) == 1


def test_the_balance_is_told_once_when_enough_was_measured():
    said = []
    balance = BalanceNotice(plan(stages=2), said.append)
    for step in range(3):  # of which the first takes long
        balance(result(step, 100.0, 1.0))
    balance(result(3, 100.0, 1.0))
    for step in range(4, 13):
        balance(result(step, 100.0, 1.0 + step))
    assert said == []  # not enough updates yet
    balance(result(13, 100.5, 14.0))
    assert len(said) == 1
    balance(result(14, 100.5, 100.0))
    assert len(said) == 1


def test_short_runs_are_not_judged():
    said = []
    balance = BalanceNotice(plan(stages=2), said.append)
    for step in range(200):
        balance(result(step, 0.0, step * 0.001))
    assert said == []


# -- the whole ----------------------------------------------------------------------------------


def test_what_one_process_would_do_as_fast_is_too_small():
    assert about_size(plan(stages=2), [1.0, 0.9], 1.0, 100) == []
    assert about_size(plan(stages=1), [0.1], 1.0, 100) == []
    (said,) = about_size(plan(stages=2), [0.2, 0.3], 1.0, 100)
    assert "too small for 2 workers: all stages together compute 5 ms for a micro-batch" in said
    assert "One process would be at least 2.0 times as fast." in said
    assert "One process would be as fast." in about_size(plan(stages=2), [0.5, 0.5], 1.0, 9)[0]


class Time:
    now = own = 0.0

    @classmethod
    def monotonic(cls):
        return cls.now

    @classmethod
    def process_time(cls):
        return cls.own * cls.now


def size_told(
    monkeypatch, busy, waited, steps=40, *, shared=1.0, takes=1.0, own=0.1, cores=2, threads=1
):
    """What is told of a run in which each update takes 0.1 s, on cores that are shared so much."""
    monkeypatch.setattr(balance_module, "time", Time)
    monkeypatch.setattr(Time, "own", own)
    said = []
    size = SizeNotice(plan(stages=2), said.append, cores=cores, threads=threads)
    for step in range(steps):
        Time.now = 0.1 * step
        computed, clock, process = ((each * Time.now,) * 2 for each in (busy, busy * shared, takes))
        size(result(step, *clock, processor_s=computed, process_s=process), waited * Time.now)
    return said


def test_it_is_told_once_where_the_pipe_sets_the_pace(monkeypatch):
    (said,) = size_told(monkeypatch, 0.25, 0.9)
    assert "at least 2.0 times as fast" in said
    assert size_told(monkeypatch, 0.25, 0.9, steps=12) == []  # not long enough
    assert size_told(monkeypatch, 0.25, 0.3) == []  # the loader does
    assert size_told(monkeypatch, 0.8, 0.9) == []


def test_a_run_that_waits_while_others_use_the_cores_is_not_told_that_it_is_too_small(monkeypatch):
    assert size_told(monkeypatch, 0.25, 0.9, takes=0.3, shared=1.5) == []
    (said,) = size_told(monkeypatch, 0.25, 0.9, takes=0.3)
    assert "at least 2.0 times as fast" in said
    # Here the script has no pause, whoever uses the cores.
    (said,) = size_told(monkeypatch, 0.25, 0.9, takes=0.3, own=0.6, shared=1.5)
    assert "at least 1.2 times as fast" in said


def test_workers_that_share_cores_take_the_time_of_all_and_threads_theirs(monkeypatch):
    (said,) = size_told(monkeypatch, 0.25, 0.9, takes=0.3, shared=2.0, cores=1)
    assert "at least 1.2 times as fast" in said
    assert size_told(monkeypatch, 0.25, 0.9, takes=0.9, shared=2.0, cores=4, threads=2) == []
