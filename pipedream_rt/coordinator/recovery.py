"""Decides after each failure of a worker whether the run goes on. Without clocks and processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pipedream_rt.errors import (
    NonFiniteLoss,
    PipelineError,
    PoisonedMicroBatch,
    RemoteError,
    ScheduleError,
    StageFailed,
    TransportError,
    WorkerLost,
)
from pipedream_rt.schedules import Action, Kind

_MOST_OF_ONE = 3
"""Failures in one and the same action, after which it is not tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One recovery.

    Attributes:
        generation: That it began.
        reason: What had failed.
        seconds: From when the failure was noticed until the new workers had taken all that was fed
            before; the next new loss follows.
        replayed: Micro-batches that were fed again.
    """

    generation: int
    reason: str
    seconds: float
    replayed: int


def is_passing(error: BaseException) -> bool:
    """Whether a failure may be gone with other workers; not if the same input must fail again."""
    if isinstance(error, StageFailed):
        deterministic = isinstance(error, NonFiniteLoss)
        cause = error.__cause__
        theirs = isinstance(cause, TransportError | RemoteError)
        ours = isinstance(cause, PipelineError) and not theirs
        return not deterministic and not ours
    return isinstance(error, TransportError | WorkerLost)


class Failures:
    """The failures of a run.

    Args:
        most: How many to recover from.
        per_update: Micro-batches per update.
    """

    def __init__(self, most: int, per_update: int) -> None:
        """None yet."""
        self._left = self._most = most
        self._per_update = per_update
        self._by_action: Counter[Action] = Counter()
        self._unexplained: list[range] = []

    def note(self, error: BaseException, open_micro_batches: range) -> None:
        """Take note of a failure.

        Args:
            error: What happened.
            open_micro_batches: Whose losses had not come, though they were fed.

        Raises:
            PoisonedMicroBatch: The same action failed for the third time.
            BaseException: ``error`` itself, if the run cannot go on after it.
        """
        if not is_passing(error) or not self._most:
            raise error
        action = action_of(error)
        if action is None:
            self._unexplained.append(open_micro_batches)
        else:
            self._forget_passed(action)
            self._by_action[action] += 1
            self._refuse_poison(action, error)
        if not self._left:
            raise error
        self._left -= 1

    def _forget_passed(self, action: Action) -> None:
        """Forget the failures of actions that must have gone well since: those before this one."""
        passed = [
            other
            for other in self._by_action
            if (other.stage, other.kind) == (action.stage, action.kind)
            and other.index < action.index
        ]
        for other in passed:
            del self._by_action[other]

    def _refuse_poison(self, action: Action, error: BaseException) -> None:
        """Stop where one action fails again and again."""
        number = self.micro_batch_of(action)
        # A failure that left no word of what was done counts once where it may have been this.
        unexplained = sum(number in micro_batches for micro_batches in self._unexplained)
        times = self._by_action[action] + min(unexplained, 1)
        if times >= _MOST_OF_ONE:
            raise PoisonedMicroBatch(
                f"micro-batch {number} has ended its worker {times} times, in {action}; it is not "
                "tried again. Look at its data and at the layers of that stage: the last failure "
                f"was: {error}",
                micro_batch=number,
                stage=action.stage or 0,
            ) from error

    def micro_batch_of(self, action: Action) -> int:
        """The micro-batch that an action is about; the last of an update for its step."""
        if action.kind is Kind.STEP:
            return (action.index + 1) * self._per_update - 1
        return action.index

    @property
    def left(self) -> int:
        """How many more are recovered from."""
        return self._left


def action_of(error: BaseException) -> Action | None:
    """The action in which a worker failed, with its stage, if it is known."""
    if isinstance(error, StageFailed):
        text = error.action if ":" in error.action else f"{error.stage}:{error.action}"
    elif isinstance(error, WorkerLost):
        text = error.doing
    else:
        return None
    try:
        return Action.parse(text)
    except ScheduleError:
        return None
