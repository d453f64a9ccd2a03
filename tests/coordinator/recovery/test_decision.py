"""Which failures a run goes on from, and which micro-batch is poison."""

import errno

import pytest
from support.faults import of_system

from pipedream_rt import (
    CheckpointError,
    ConfigError,
    MessageTimeout,
    NonFiniteLoss,
    PeerLost,
    PoisonedMicroBatch,
    RendezvousTimeout,
    StageFailed,
    WorkerLost,
)
from pipedream_rt.coordinator.recovery.decision import (
    Failures,
    action_of,
    is_passing,
    is_passing_at_start,
)
from pipedream_rt.schedules import Action, plan_for

PLAN = plan_for("async-1f1b", num_stages=4)


def failed(stage=1, action="F7", cause=None, cls=StageFailed):
    error = cls("it failed", stage=stage, action=action)
    error.__cause__ = cause or ZeroDivisionError()
    return error


def lost(doing="", crashed=True):
    return WorkerLost("it is gone", worker="w", stage=1, doing=doing, crashed=crashed)


def unfit():
    """A worker that has refused to join, as for want of --bind."""
    error = lost(crashed=False)
    error.__cause__ = ConfigError("m")
    return error


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (lost(), True),
        (PeerLost("m", peer="w"), True),
        (MessageTimeout("m"), True),
        (failed(), True),
        (failed(cause=PeerLost("m", peer="w")), True),
        (failed(cause=ConfigError("m")), False),
        (failed(cause=CheckpointError("m")), False),
        (failed(cause=of_system()), True),
        (of_system(), True),
        (failed(cls=NonFiniteLoss), False),
        (ConfigError("m"), False),
        (KeyError("m"), False),
        (OSError(errno.EMFILE, "m"), True),
        (OSError(errno.EAGAIN, "m"), True),
        (OSError(errno.ENOENT, "m"), False),
        (MemoryError(), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("m"), False),
    ],
)
def test_what_fails_again_with_the_same_input_is_not_tried_again(error, passing):
    assert is_passing(error) == passing


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (lost(), True),
        (PeerLost("m", peer="w"), True),
        (OSError(errno.ENFILE, "m"), True),
        (failed(cause=PeerLost("m", peer="w")), True),
        (failed(cause=OSError(errno.ENOMEM, "m")), True),
        (failed(), False),
        (failed(cause=ConfigError("m")), False),
        (of_system(ConfigError), False),
        (RendezvousTimeout("m"), False),
        (KeyError("m"), False),
        (unfit(), False),
    ],
)
def test_at_the_start_it_is_tried_again_what_others_have_caused(error, passing):
    """A stage that cannot be built raises again, and who was not started will not come."""
    assert is_passing_at_start(error) == passing


def test_workers_that_all_end_before_anything_was_fed_are_started_three_times():
    failures = Failures(50, PLAN)
    failures.note(lost(), range(0))
    failures.note(lost(crashed=False), range(0))  # from outside
    failures.note(lost(), range(0))
    with pytest.raises(WorkerLost):
        failures.note(lost(), range(0))


def test_the_action_of_a_failure():
    assert action_of(failed(2, "B5"), PLAN) == Action.parse("2:B5")
    assert action_of(failed(2, "3:B5"), PLAN) == Action.parse("3:B5")
    assert action_of(failed(2, "state"), PLAN) is None
    assert action_of(lost("0:S4"), PLAN) == Action.parse("0:S4")
    assert action_of(lost(), PLAN) is None
    assert action_of(MessageTimeout("m"), PLAN) is None


def test_an_action_of_a_replica_is_one_of_its_stage():
    """Whether it raised or died, so that what ends it again and again is counted as one."""
    plan = plan_for("async-1f1b", num_stages=2, replicas=[3, 1])
    assert action_of(lost("2:F5"), plan) == Action.parse("0:F5")
    assert action_of(failed(0, "2:F5"), plan) == Action.parse("0:F5")
    assert action_of(failed(0, "F5"), plan) == Action.parse("0:F5")
    assert action_of(lost("3:F5"), plan) == Action.parse("1:F5")


def test_restarts_run_out():
    failures = Failures(2, PLAN)
    failures.note(lost(), range(3))
    failures.note(failed(action="F8"), range(3))
    with pytest.raises(WorkerLost):
        failures.note(lost(), range(3))
    with pytest.raises(WorkerLost):
        Failures(0, PLAN).note(lost(), range(3))


def test_the_third_failure_in_one_action_is_poison():
    failures = Failures(100, PLAN)
    for _ in range(2):
        failures.note(failed(), range(5, 9))
        failures.note(failed(2, action="F8"), range(5, 9))
    with pytest.raises(PoisonedMicroBatch, match="micro-batch 7 has failed 3 times") as e:
        failures.note(failed(), range(5, 9))
    assert (e.value.micro_batch, e.value.stage) == (7, 1)


def test_what_has_gone_well_since_is_no_poison():
    failures = Failures(100, PLAN)
    for later in range(8, 12):
        failures.note(failed(action="F7"), range(5, 9))
        failures.note(failed(action=f"F{later}"), range(5, 9))


def test_a_failure_without_a_word_counts_where_it_may_have_been_the_same():
    failures = Failures(100, plan_for("async-1f1b", num_stages=4, per_update=2))
    failures.note(lost(), range(5, 9))
    failures.note(lost(), range(5, 9))  # both count as one
    failures.note(lost("1:F7"), range(5, 9))
    failures.note(lost("0:F20"), range(5, 9))
    failures.note(lost("0:F20"), range(5, 9))
    with pytest.raises(PoisonedMicroBatch):
        failures.note(lost("1:F7"), range(5, 9))
    assert failures.micro_batch_of(Action.parse("1:S3")) == 7


@pytest.mark.parametrize(
    "failure",
    [lost("1:F7", crashed=False), failed(cause=MessageTimeout("m")), failed(action="start")],
)
def test_only_exceptions_and_crashes_are_evidence_of_poison(failure):
    """A worker may be killed from outside, or wait in vain, in the same action again and again."""
    failures = Failures(100, PLAN)
    for _ in range(9):
        failures.note(failure, range(5, 9))
    failures.note(failed(), range(5, 9))
    failures.note(failed(), range(5, 9))
    with pytest.raises(PoisonedMicroBatch, match="micro-batch 7 has failed 3 times"):
        failures.note(failed(), range(5, 9))
