"""Mini-batches on their way through the pipe, and their results."""

import copy
import gc
import pickle
import weakref

import pytest
from support.models import regression
from support.small import small

from pipedream_rt.coordinator.results import PendingStep, StepResult, Steps
from pipedream_rt.errors import StageFailed
from pipedream_rt.messages.tree import flatten


def result_of(step, **changes):
    values = {"loss": 1.0, "losses": (1.0,), "versions": (3, 5, 4), "staleness": 0, "busy_s": ()}
    return StepResult(step=step, **{**values, **changes})


class Source:
    """Losses come for one mini-batch after another, oldest first."""

    def __init__(self, count):
        self.pending = [PendingStep(self, step, step, [1.0]) for step in range(count)]
        self.waits, self.arrived = 0, 0

    def collect_oldest(self):
        self.pending[self.waits].outcome = result_of(self.waits)
        self.waits += 1

    def has_losses(self, pending):
        return pending.step < self.arrived


def test_who_waits_for_a_result_takes_those_before_it_and_waits_once():
    source = Source(4)
    third = source.pending[2]
    assert third.result().step == 2
    assert source.waits == 3
    assert third.result() is third.outcome
    assert source.pending[0].result().step == 0
    assert source.waits == 3
    assert repr(source.pending[3]) == "<PendingStep 3, on its way>"
    assert repr(third) == "<PendingStep 2, ended>"


def test_a_step_is_done_once_its_losses_have_arrived_and_asking_takes_none():
    source = Source(2)
    source.arrived = 1
    assert [pending.done() for pending in source.pending] == [True, False]
    assert source.waits == 0
    source.pending[1].result()
    assert source.pending[1].done()


def test_a_failure_reaches_whoever_waits_and_leaves_no_result():
    source = Source(1)

    def fail():
        raise StageFailed("it failed", stage=1, action="F0")

    source.collect_oldest = fail
    for _ in range(2):
        with pytest.raises(StageFailed):
            source.pending[0].result()
    assert source.pending[0].outcome is None


def test_a_finished_step_asks_nobody():
    pending = PendingStep.finished(None, result_of(7, versions=(6, 5, 9)))
    assert pending.done()
    assert (pending.step, pending.result().step) == (7, 7)
    assert pending.result().version == 5  # the oldest, whichever stage read it


def test_submit_returns_a_handle_that_waits():
    data = regression(8)
    with small() as pipe:
        pending = [pipe.submit(x, y) for x, y in data]
        last = pending[-1].result()
        assert last.step == 7
        assert all(p.done() for p in pending)
        assert [p.result().step for p in pending] == list(range(8))


def test_a_number_of_steps_is_a_number_that_closes_an_update_where_it_is_called():
    class Script:
        def close(self, update):
            closed.append(update)

    closed, script = [], Script()
    steps = Steps.of(3, script.close)
    assert (steps, steps + 1, f"{steps:02}", [*range(steps)]) == (3, 4, "03", [0, 1, 2])
    steps()
    steps(update=False)
    assert closed == [True, False]
    for found in (copy.deepcopy(steps), pickle.loads(pickle.dumps(steps))):
        assert type(found) is int
        assert found == 3


def test_a_number_of_steps_may_be_an_input_of_the_model():
    """As of a model with a schedule of its own, or a hyper-parameter of the optimizer."""
    with small(loss_fn=None, stages=2) as pipe:
        pipe.optimizer.param_groups[0]["note"] = pipe.step
        flatten((pipe.step,))
        for output, _ in pipe.outputs(regression(1)):
            output.sum().backward()


def test_a_kept_number_of_steps_keeps_no_pipeline():
    pipe = small()
    kept, dropped = [pipe.step], weakref.ref(pipe)
    del pipe
    gc.collect()
    try:
        assert dropped() is None
    finally:
        if dropped() is not None:
            dropped().close()
    assert kept == [0]
