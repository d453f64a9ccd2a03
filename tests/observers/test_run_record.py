"""The record of a run: bounded, and right after a script that goes on."""

import math
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recorded import begun, record_of, stepped, whole_run

from pipedream_rt.observers import Ended, Saved, Warned
from pipedream_rt.observers.run_record import Buckets, RunRecord


@given(
    losses=st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=300), most=st.integers(1, 40)
)
def test_buckets_lose_no_mini_batch_and_stay_few(losses, most):
    buckets = Buckets(most)
    for step, loss in enumerate(losses):
        buckets.add(stepped(step, loss=loss))
    found = list(buckets)
    assert sum(b.count for b in found) == len(losses)
    assert len(found) <= 2 * most
    assert sum(b.samples for b in found) == 8 * len(losses)
    real = [loss for loss in losses if not math.isnan(loss)]
    if real:
        assert min(b.low for b in found if not math.isnan(b.low)) == min(real)
        assert max(b.high for b in found if not math.isnan(b.high)) == max(real)
    if losses:
        assert found[-1].last.step == len(losses) - 1
    assert [b.last.step for b in found] == sorted(b.last.step for b in found)


def test_the_mean_of_a_bucket_is_that_of_its_losses():
    buckets = Buckets(2)
    for step in range(64):
        buckets.add(stepped(step, loss=float(step)))
    total = sum(b.loss * b.count for b in buckets)
    assert total == pytest.approx(sum(range(64)))


def test_everything_is_noted():
    record = record_of(whole_run(40))
    assert len(list(record.steps)) == 40
    assert [len(each) for each in (record.warned, record.recovered, record.saved)] == [1, 1, 1]
    assert len(record.evaluations) == 2
    assert record.ended is not None
    assert record.trace is not None
    assert record.plan.name == "async-1f1b"
    assert record.last_time == pytest.approx(1004.1)


def test_a_script_that_goes_on_forgets_what_is_done_again():
    """The first script got to 20, its checkpoint is from 10: the second one does 10 to 20 again."""
    saved = Saved(time=1001.0, step=10, folder="step-00000010")
    first = [begun(), *map(stepped, range(10)), saved, *map(stepped, range(10, 20))]
    record = record_of([*first, begun(step=10, at=2000.0)])
    assert [b.last.step for b in record.steps] == list(range(10))
    assert record.saved == [saved]
    assert record.scripts == 2
    assert record.first == 1000.0
    record(stepped(10, loss=7.0))
    assert [b.last.step for b in record.steps] == list(range(11))


def test_a_new_run_in_the_same_folder_is_a_new_run():
    record = record_of([*whole_run(5), begun(at=5000.0)])
    assert list(record.steps) == record.warned == record.recovered == record.saved == []
    assert record.scripts == 1
    assert record.first == 5000.0
    assert record.ended is None
    assert record.trace is None


def test_old_warnings_are_forgotten_where_there_are_too_many():
    record = record_of([begun()])
    for i in range(1500):
        record(Warned(time=float(i), text=str(i)))
    assert len(record.warned) == 1000
    assert record.warned[-1].text == "1499"


def test_whether_a_run_may_go_on():
    assert not RunRecord().may_run
    here = {"host": socket.gethostname()}
    assert record_of([begun(pid=os.getpid(), **here)]).may_run
    gone = record_of([begun(pid=2**22 - 1, **here)])  # no process has that number
    assert not gone.may_run
    assert record_of([begun(pid=2**22 - 1)]).may_run  # nobody knows, from here
    assert not record_of([begun(), Ended(time=1.0, step=0)]).may_run
