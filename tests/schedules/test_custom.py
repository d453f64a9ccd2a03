"""Schedules that a user wrote: what is refused of them, before and while they run."""

import itertools

import pytest
from support.written import LaterBackward, RisingSteps

from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.schedules import Action, Kind, check, plan_for
from pipedream_rt.schedules.actions import apply, drain, inject
from pipedream_rt.schedules.policies import Flushed


def test_a_written_schedule_is_checked_and_taken():
    schedule = plan_for(LaterBackward(), num_stages=3, per_update=4)
    assert schedule.name == "LaterBackward"
    assert [schedule.in_flight(s) for s in range(3)] == [4, 3, 2]
    assert schedule.kept(0) == 1
    assert schedule.reads(0, 7) == 1
    assert schedule.credits() == 1


def test_a_written_schedule_takes_no_synchronous_updates():
    with pytest.raises(ConfigError, match="synchronous_updates is an option of built-in schedules"):
        plan_for(LaterBackward(), num_stages=2, per_update=2, synchronous=1)


def test_a_written_schedule_that_starts_anew_at_the_wrong_place():
    class Forgets(LaterBackward):
        def order(self, worker, shape, start):
            return super().order(worker, shape, 0)

    with pytest.raises(ScheduleError, match=r"goes forward twice|ends before"):
        plan_for(Forgets(), num_stages=2, per_update=2)


class Odd:
    """Yields what it is given."""

    def __init__(self, *actions, endless=None, **attributes):
        self.actions, self.endless = actions, endless
        self.__dict__.update(attributes)

    def order(self, worker, shape, start):
        yield from self.actions
        yield from self.endless or ()


class Raising:
    def order(self, worker, shape, start):
        yield Action(Kind.FORWARD, start)
        raise KeyError("the user's own")


class NoIterator:
    def order(self, worker, shape, start):
        return 3


F, B, S = Kind.FORWARD, Kind.BACKWARD, Kind.STEP


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (Odd("F0"), "yielded 'F0', which is no Action"),
        (Odd((F, 0, None)), "which is no Action"),
        (Odd(Action(F, -1)), "whose index must be an int"),
        (Odd(Action(F, "0")), "whose index must be an int"),
        (Odd(Action(F, 0, 1)), "yielded 1:F0, but the worker hosts stages"),
        (Odd(Action(F, 0, 99)), "yielded 99:F0, but the worker hosts stages"),
        (Odd(Action(F, 0, -1)), "but the worker hosts stages"),
        (Odd(None), "ends before it has done all"),
        (Odd(endless=(Action(F, m) for m in itertools.count())), "never ends all"),
        (Odd(endless=(Action(S, m + 10**6) for m in itertools.count())), "never ends all"),
        (Odd(endless=itertools.repeat(Action(F, 0))), "goes forward twice"),
        (Raising(), r"the order of worker \d raised KeyError"),
        (NoIterator(), "cannot be iterated: TypeError"),
    ],
)
def test_what_is_no_order_is_refused(written, words):
    with pytest.raises(ScheduleError, match=words):
        plan_for(written, num_stages=2)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"versions": 3}, "versions of a schedule must be an object"),
        ({"versions": Flushed}, "versions of a schedule must be an object"),
        ({"micro_batches": 0}, "must do one update at least"),
        ({"micro_batches": -5}, "must do one update at least"),
        ({"micro_batches": "x"}, "must do one update at least"),
    ],
)
def test_attributes_that_make_no_sense(attributes, words):
    written = LaterBackward()
    written.__dict__.update(attributes)
    with pytest.raises(ConfigError, match=words):
        plan_for(written, num_stages=2)


def test_bounds_are_asked_for_once():
    """Counting them takes as long as a run; 768 micro-batches would take minutes."""
    plan_for(LaterBackward(), num_stages=4, per_update=256)


class EightLate:
    def reads(self, stage, shape, micro_batch):
        return micro_batch // 8 * 8

    def kept(self, stage, shape):
        return 9

    def require(self, shape):
        pass


def test_a_written_schedule_with_several_stages_on_a_worker():
    schedule = plan_for(RisingSteps(), num_stages=4, per_update=8, stages_per_worker=2)
    assert schedule.in_flight(3) == 8
    check(schedule, 16, credits=1)


class WaitsAhead:
    """Worker 0 does two mini-batches before it passes anything through its second stage."""

    versions = EightLate()

    def in_flight(self, stage, shape):
        return 99

    def order(self, worker, shape, start):
        for first in itertools.count(start, 8):
            mini = range(first, first + 8)
            for stage in shape.stages_of(worker):
                for m in mini:
                    yield Action(F, m, stage)
            for stage in shape.stages_of(worker)[::-1]:
                for m in mini:
                    yield Action(B, m, stage)
                    yield Action(S, m, stage)


def test_too_few_credits_are_found():
    schedule = plan_for(WaitsAhead(), num_stages=4, stages_per_worker=2)
    assert schedule.credits() == 100
    with pytest.raises(ScheduleError, match="with 3 mini-batches injected ahead"):
        plan_for(WaitsAhead(), num_stages=4, stages_per_worker=2, credits=3)


@pytest.mark.parametrize("what", [3, None, object(), LaterBackward])
def test_what_is_no_schedule_is_refused(what):
    with pytest.raises((ConfigError, TypeError), match="order"):
        plan_for(what, num_stages=2)


def test_a_proof_is_as_long_as_slack_makes_the_pipe():
    """With little more than the stages it would end before the pipe is full."""

    class Eager:
        takes_slack = True

        def order(self, worker, shape, start):
            w, k = shape.warm_up(worker), shape.per_update
            for m in itertools.count(start):
                if m == start:
                    yield from (Action(F, start + i) for i in range(w))
                yield from (Action(F, m + w), Action(B, m))
                if (m + 1) % k == 0:
                    yield Action(S, m // k)

        class Versions(EightLate):
            def reads(self, stage, shape, micro_batch):
                return max(0, micro_batch - shape.warm_up(stage) + 1)

        versions = Versions()

    for slack in (0, 7, 20):
        with pytest.raises(ScheduleError, match="version"):
            plan_for(Eager(), num_stages=2, slack=slack)


def test_a_written_schedule_with_a_built_in_name_is_refused():
    """A trace would be read with the order of the other."""
    schedule = LaterBackward()
    schedule.name = "async-1f1b"
    with pytest.raises(ConfigError, match="'async-1f1b'"):
        plan_for(schedule, proved=False, num_stages=2, per_update=2)


def test_the_plan_itself_puts_applies_drains_and_injections_in():
    for action in (apply(0), drain(1), inject(0)):

        class Writes(LaterBackward):
            made = action

            def order(self, worker, shape, start):
                yield self.made
                yield from super().order(worker, shape, start)

        with pytest.raises(ScheduleError, match=r"the plan itself puts A, D and N where they bel"):
            plan_for(Writes(), num_stages=2)
