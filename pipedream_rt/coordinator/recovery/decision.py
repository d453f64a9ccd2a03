"""The decision whether a run goes on after a failure, without any clock or process."""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass

from pipedream_rt.errors import (
    ConfigError,
    NonFiniteLoss,
    PipelineError,
    PoisonedMicroBatch,
    RemoteError,
    RendezvousTimeout,
    ScheduleError,
    StageFailed,
    TransportError,
    WorkerLost,
)
from pipedream_rt.schedules import Action, Plan
from pipedream_rt.schedules.actions import OF_UPDATES

_MOST_OF_ONE = 3
"""The number of failures of one action from which on it is not tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One recovery.

    Attributes:
        generation: Number of the generation that the recovery began.
        reason: The failure, in one line.
        seconds: Time from when the coordinator noticed the failure until it had fed the new
            workers all that was fed before.
        replayed: Number of micro-batches that were fed again.
    """

    generation: int
    reason: str
    seconds: float
    replayed: int


class Grown(Exception):
    """No failure: workers have come, and the work is divided anew."""


def is_passing(error: BaseException) -> bool:
    """Whether new workers can help: not if the same action must fail again on the same input."""
    if isinstance(error, StageFailed):
        deterministic = isinstance(error, NonFiniteLoss)
        cause = error.__cause__
        # A `RemoteError` stands for one that did not survive pickling, as those of ours do.
        ours = isinstance(cause, PipelineError) and not isinstance(cause, RemoteError)
        return not deterministic and (not ours or _is_of_others(cause))
    return isinstance(error, WorkerLost) or _is_of_others(error)


def is_passing_at_start(error: BaseException) -> bool:
    """Whether new workers can help where the first ones have failed while the pipeline opens.

    A stage would raise the same error again: nothing was fed yet. Workers that nobody has started
    will not come either, and a refusal is an answer.
    """
    if isinstance(error, StageFailed):
        return _is_of_others(error.__cause__)
    refused = isinstance(error, ConfigError) or isinstance(error.__cause__, ConfigError)
    return is_passing(error) and not refused and not isinstance(error, RendezvousTimeout)


def _is_of_others(error: BaseException | None) -> bool:
    """Whether an error says nothing of the run: a broken connection, or a refusal by the system."""
    if isinstance(error, PipelineError):
        cause = error.__cause__
        return isinstance(error, TransportError) or isinstance(cause, OSError) or _is_short(cause)
    return _is_short(error)


_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC}
"""The system's error numbers while descriptors, memory, processes or disk are used up."""


def _is_short(error: BaseException | None) -> bool:
    """Whether the system had run out of a resource that others may give back."""
    if isinstance(error, OSError):
        return error.errno in _SHORT
    # Python says so of a thread that the system does not start.
    return isinstance(error, MemoryError) or "can't start new thread" in str(error)


def _is_evidence(error: BaseException, action: Action | None) -> bool:
    """Whether a micro-batch may have caused a failure: an exception in its action, or a crash."""
    if isinstance(error, WorkerLost):
        return error.crashed  # a worker killed from outside says nothing of the micro-batch
    # Nor does one that hears nothing from another.
    return action is not None and not isinstance(error.__cause__, TransportError)


class Failures:
    """The failures of a run so far, which decide whether it recovers from the next one."""

    def __init__(self, most: int, plan: Plan) -> None:
        self._left = self._most = most
        self._plan = plan
        self._by_action: Counter[Action] = Counter()
        self._unexplained: list[range] = []

    def note(self, error: BaseException, open_micro_batches: range) -> None:
        """Count a failure; raise it, or `PoisonedMicroBatch`, if the run cannot go on."""
        if not is_passing(error) or not self._most:
            raise error
        action = action_of(error, self._plan)
        if action is not None:
            self._forget_passed(action)
        if _is_evidence(error, action):
            if action is None:
                # It may have been any micro-batch whose loss had not come.
                self._unexplained.append(open_micro_batches)
                if not open_micro_batches.stop and len(self._unexplained) == _MOST_OF_ONE:
                    raise error  # nothing was fed yet: it is what every worker does at its start
            else:
                self._by_action[action] += 1
                self._refuse_poison(action, error)
        if not self._left:
            raise error
        self._left -= 1

    def _forget_passed(self, action: Action) -> None:
        """Forget failures of earlier actions of the same kind on that stage: they have passed."""
        passed = [
            other
            for other in self._by_action
            if (other.stage, other.kind) == (action.stage, action.kind)
            and other.index < action.index
        ]
        for other in passed:
            del self._by_action[other]

    def _refuse_poison(self, action: Action, error: BaseException) -> None:
        """Raise `PoisonedMicroBatch` if an action has failed too often."""
        number = self.micro_batch_of(action)
        # All failures whose action is unknown count as one here, if one may have been this action.
        unexplained = sum(number in micro_batches for micro_batches in self._unexplained)
        times = self._by_action[action] + min(unexplained, 1)
        if times >= _MOST_OF_ONE:
            raise PoisonedMicroBatch(
                f"micro-batch {number} has failed {times} times, the last time in {action}; it is "
                "not tried again. Look at its data and at the layers of that stage: the last "
                f"failure was: {error}",
                micro_batch=number,
                stage=action.stage or 0,
            ) from error

    def micro_batch_of(self, action: Action) -> int:
        """Return the micro-batch of an action; of an update, its last one."""
        if action.kind in OF_UPDATES:
            return (action.index + 1) * self._plan.per_update - 1
        return action.index

    @property
    def left(self) -> int:
        """The number of failures that the run still recovers from."""
        return self._left


def action_of(error: BaseException, plan: Plan) -> Action | None:
    """Return the action in which a worker failed, with its stage; None if it is not known."""
    if isinstance(error, StageFailed):
        text = error.action
    elif isinstance(error, WorkerLost):
        text = error.doing
    else:
        return None
    try:
        kind, index, address = Action.parse(text)
    except ScheduleError:
        return None
    # Workers name addresses in actions; of a replica, the stage counts.
    stage = error.stage if address is None else plan.stage_of(address)
    return Action(kind, index, stage)
