"""The clock of a worker against the coordinator's, for traces."""

from __future__ import annotations

import queue
import time
from datetime import timedelta

from pipedream_rt.cluster.members import Member
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout
from pipedream_rt.observe.clock import Reading, best

_TIMEOUT = timedelta(seconds=5)
"""For one worker to answer all questions for its clock."""

_ROUNDS = 16
"""Number of questions for a clock, of which the one that is answered soonest counts."""


def clock_of(member: Member) -> Reading:
    """Ask a worker for its clock several times, and keep the answer that came soonest.

    The thread of `Watch` must be running: it reads the answers.
    """
    deadline = Deadline(_TIMEOUT)
    readings = []
    for _ in range(_ROUNDS):
        sent = time.monotonic_ns()
        member.control.send({"type": "clock"})
        try:
            answered, received = member.clock.get(timeout=deadline.remaining_s())
        except queue.Empty:
            raise MessageTimeout(
                f"worker {member.name!r} does not answer when asked for its clock"
            ) from None
        readings.append(Reading(sent, answered, received))
    found = best(readings)
    # On one machine the clock is one; containers with a time namespace of their own differ.
    if member.same_clock and abs(found.offset) <= found.error:
        return Reading(found.answered, found.answered, found.answered)
    return found
