"""What arrives at the coordinator is put somewhere; what it means, the taker finds out."""

import threading
from datetime import timedelta

import cloudpickle
import pytest
from support import messages
from support.deadlines import LATEST_S

from pipedream_rt.coordinator.recovery.coordinator_inbox import CoordinatorInbox
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import (
    MessageTimeout,
    NonFiniteLoss,
    PeerLost,
    RemoteError,
    StageFailed,
    WorkerLost,
)
from pipedream_rt.messages.inbox import Wanted
from pipedream_rt.messages.message import Failed, Ready
from pipedream_rt.schedules import COORDINATOR, plan_for

GENERATION = 3


class NamesLosses:
    """Of a cluster, what a reception needs."""

    def name_loss(self, error):
        return WorkerLost(f"named: {error}", worker=error.peer, stage=None)


@pytest.fixture
def reception():
    made = CoordinatorInbox(plan_for("1f1b", num_stages=4))
    made.begin(GENERATION)
    return made


def message(payload, sender=2, generation=GENERATION):
    return messages.message(
        payload, to=COORDINATOR, sender=sender, number=generation, generation=generation
    )


def failed(error=None, **changes):
    pickled = b"" if error is None else cloudpickle.dumps(error)
    said = {"type_name": "KeyError", "text": "'x'", "trace": "line 1\nline 2", "pickled": pickled}
    return Failed(**{"address": 2, "action": "F3", **said, **changes})


def on_a_thread(call, *arguments):
    thread = threading.Thread(target=call, args=arguments)
    thread.start()
    thread.join(LATEST_S)


def take(reception, expected):
    return reception.inbox.take(Wanted(expected.key, Deadline(timedelta(0))))


def error_of(reception, payload):
    """What the taker gets of a failure that has arrived."""
    reception.receive(message(payload))
    with pytest.raises(Exception) as e:
        take(reception, message(Ready()))
    assert reception.failure is e.value
    return e.value


def test_a_message_waits_in_the_inbox(reception):
    expected = message(Ready())
    reception.receive(expected)
    assert take(reception, expected) is expected
    assert reception.failure is None


def test_a_failure_of_a_stage_names_stage_and_action_and_has_the_remote_error_as_its_cause(
    reception,
):
    error = error_of(reception, failed(KeyError("x")))
    assert type(error) is StageFailed
    assert str(error) == "stage 2, F3: KeyError: 'x'"
    assert (error.stage, error.action, error.trace) == (2, "F3", "line 1\nline 2")
    assert type(error.__cause__) is KeyError
    assert error.__cause__.args == ("x",)
    for note in getattr(error, "__notes__", ()):  # none with Python 3.10
        assert "line 1\nline 2" in note


def test_a_loss_that_is_not_finite_arrives_with_its_own_type(reception):
    cause = NonFiniteLoss("it is nan", stage=2, action="F3")
    error = error_of(reception, failed(cause, type_name="NonFiniteLoss", text="it is nan"))
    assert type(error) is NonFiniteLoss
    assert (error.stage, error.action) == (2, "F3")


class Unloadable:
    """Raises when it is unpickled, as a class does whose module is not here."""

    def __reduce__(self):
        return (int, ("no number",))


@pytest.mark.parametrize(
    "pickled",
    [b"", b"no pickle", cloudpickle.dumps("no error"), cloudpickle.dumps(Unloadable())],
    ids=["nothing", "garbage", "no error", "unloadable"],
)
def test_an_error_that_does_not_unpickle_has_a_stand_in(reception, pickled):
    error = error_of(reception, failed(pickled=pickled))
    assert type(error) is StageFailed
    assert type(error.__cause__) is RemoteError
    assert str(error.__cause__) == "KeyError: 'x'"


def test_a_lost_peer_is_named_by_the_cluster(reception):
    reception.cluster = NamesLosses()
    error = error_of(reception, failed(PeerLost("gone", peer="worker-1")))
    assert type(error) is WorkerLost
    assert (str(error), error.worker) == ("named: gone", "worker-1")


def test_a_lost_peer_before_there_is_a_cluster_is_a_failure_of_the_stage_that_missed_it(reception):
    error = error_of(reception, failed(PeerLost("gone", peer="worker-1")))
    assert type(error) is StageFailed
    assert type(error.__cause__) is PeerLost


def test_the_first_failure_stays(reception):
    first, second = KeyError("first"), KeyError("second")
    fail = reception.fail_of(GENERATION)
    fail(first)
    fail(second)
    reception.receive(message(failed(second)))
    assert reception.failure is first
    with pytest.raises(KeyError, match="first"):
        take(reception, message(Ready()))


def test_what_came_before_a_failure_can_still_be_taken(reception):
    expected = message(Ready())
    reception.receive(expected)
    reception.fail_of(GENERATION)(KeyError("x"))
    assert take(reception, expected) is expected


def test_failures_of_a_generation_before_are_no_news(reception):
    late = reception.fail_of(GENERATION)
    reception.begin(GENERATION + 1)
    late(KeyError("late"))
    reception.receive(message(failed(KeyError("late")), generation=GENERATION))
    assert reception.failure is None
    assert reception.inbox.reason is None


def test_a_new_generation_begins_without_the_failure_and_the_cluster_of_the_one_before(reception):
    """It has the same inbox, which refuses messages of the generation before."""
    inbox = reception.inbox
    reception.cluster = NamesLosses()
    reception.fail_of(GENERATION)(KeyError("x"))
    reception.begin(GENERATION + 1)
    assert (reception.inbox, reception.generation) == (inbox, GENERATION + 1)
    assert (reception.failure, reception.cluster) == (None, None)
    reception.receive(message(Ready()))
    with pytest.raises(MessageTimeout):
        take(reception, message(Ready()))
    expected = message(Ready(), generation=GENERATION + 1)
    reception.receive(expected)
    assert take(reception, expected) is expected


@pytest.mark.threads
def test_a_failure_is_found_out_by_the_taker_not_by_the_thread_that_receives(reception):
    """To find out how a worker ended may take a while, and threads of the RPC pool must not."""
    found_out_by = []

    def find_out():
        found_out_by.append(threading.get_ident())
        return KeyError("x")

    on_a_thread(reception.fail_of(GENERATION), find_out)
    assert not found_out_by
    with pytest.raises(KeyError, match="x"):
        take(reception, message(Ready()))
    assert found_out_by == [threading.get_ident()]


@pytest.mark.threads
def test_so_is_a_failure_that_a_stage_sent_and_only_once(reception):
    named_by = []

    class Cluster(NamesLosses):
        def name_loss(self, error):
            named_by.append(threading.get_ident())
            return super().name_loss(error)

    reception.cluster = Cluster()
    on_a_thread(reception.receive, message(failed(PeerLost("gone", peer="worker-1"))))
    assert not named_by
    errors = []
    for _ in range(2):
        with pytest.raises(WorkerLost) as e:
            take(reception, message(Ready()))
        errors.append(e.value)
    assert errors == [reception.failure] * 2
    assert named_by == [threading.get_ident()]
