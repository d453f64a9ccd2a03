"""The offset of a worker's clock from the coordinator's, for traces."""

from __future__ import annotations

import queue
import time
from datetime import timedelta

from pipedream_rt.cluster.members import Member
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout
from pipedream_rt.tracing.clock import Reading, best

_TIMEOUT = timedelta(seconds=5)
"""For one worker to answer all rounds."""

_ROUNDS = 16
"""How often a clock is read; the reading with the shortest round trip counts."""


def clock_of(member: Member) -> Reading:
    """Read a worker's clock several times, and keep the reading with the shortest round trip."""
    deadline = Deadline(_TIMEOUT)
    readings = []
    for _ in range(_ROUNDS):
        sent = time.monotonic_ns()
        member.control.send({"type": "clock"})
        try:
            # Put there by the thread of `Watch`, which must be running.
            answered, received = member.clock.get(timeout=deadline.remaining_s())
        except queue.Empty:
            raise MessageTimeout(
                f"worker {member.name!r} does not answer when asked for its clock"
            ) from None
        readings.append(Reading(sent, answered, received))
    found = best(readings)
    # Processes of one kernel share the monotonic clock, unless a container has its own time
    # namespace: then the offset is larger than the error of the reading.
    if member.same_clock and abs(found.offset) <= found.error:
        return Reading(found.answered, found.answered, found.answered)
    return found
