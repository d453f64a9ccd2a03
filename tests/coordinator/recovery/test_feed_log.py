"""The log of the feed since the restore points."""

from pathlib import Path

import pytest

from pipedream_rt.coordinator.recovery.feed_log import FedCommand, FeedLog, RestorePoint, Role
from pipedream_rt.messages.message import Command, CommandName, Gradient

START = RestorePoint()


def entry(position):
    return FedCommand(Command(position=position, name=CommandName.FLUSH), (), Role.EVERY)


def fed(count):
    log = FeedLog(on=True)
    for position in range(count):
        log.append(entry(position))
    return log


def positions(log, since=START):
    return [each.position for each in log.since(since)]


def test_the_feed_is_kept_since_the_last_two_origins():
    log = fed(10)
    log.begin(RestorePoint(position=4))
    assert positions(log, log.restore_points[0]) == list(range(10))
    assert positions(log, log.restore_points[-1]) == list(range(4, 10))
    log.begin(RestorePoint(position=8))
    assert [o.position for o in log.restore_points] == [4, 8]
    assert positions(log) == list(range(4, 10))


def test_what_was_kept_is_forgotten_where_nothing_is_recovered_any_more():
    log = fed(3)
    log.stop()
    assert not log.on
    assert positions(log) == []


@pytest.mark.parametrize("gone", [0, 2, 4])
def test_what_left_no_trace_is_forgotten_and_the_order_of_the_others_stays(gone):
    log = fed(5)
    log.forget(9)  # it was never kept
    log.forget(gone)
    log.append(entry(5))
    assert positions(log) == [each for each in range(6) if each != gone]


def test_while_something_is_held_no_newer_restore_point_is_added():
    log = fed(10)
    log.hold()
    log.release()  # none came meanwhile
    assert list(log.restore_points) == [START]
    log.hold()
    log.hold()
    for position in (4, 8):
        log.begin(RestorePoint(position=position, folder=Path(f"step-{position}")))
    log.release()
    assert list(log.restore_points) == [START]
    assert positions(log) == list(range(10))
    log.release()  # the last one: the newest that came meanwhile is added, and no other
    assert [o.position for o in log.restore_points] == [0, 8]
    log.begin(RestorePoint(position=9))
    assert positions(log) == [8, 9]


def given(log, *positions):
    for position in positions:
        log.gradients[position] = Gradient(present=[]), ()


def test_gradients_of_the_script_are_kept_as_long_as_their_micro_batches():
    log = fed(10)
    given(log, 2, 5, 8)
    log.begin(RestorePoint(position=4))
    assert list(log.gradients) == [2, 5, 8]
    log.begin(RestorePoint(position=6))
    assert list(log.gradients) == [5, 8]
    log.begin(RestorePoint(position=9))
    assert list(log.gradients) == [8]
    log.stop()
    assert log.gradients == {}
