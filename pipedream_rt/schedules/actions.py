"""What a stage can do: ``F3``, ``B3`` or its halves ``I3`` and ``W3``, ``S3``; or ``2:F3``.

Forward, backward, step. A backward may be split (zero bubble): the half ``I`` finds the gradient of
the stage's input, which the stage before waits for; the half ``W`` finds the gradients of the
weights, which nobody waits for until the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from pipedream_rt.errors import ScheduleError


class Kind(Enum):
    """The letter of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    STEP = "S"


SENDS_BACK = (Kind.BACKWARD, Kind.INPUT)
"""What takes a gradient from the stage after and gives one to the stage before."""

ENDS = (Kind.BACKWARD, Kind.WEIGHT)
"""What ends a micro-batch on a stage: its gradients are in the pending update."""

_TEXT = re.compile(r"(?:(\d+):)?([FBIWS])(\d+)")


class Action(NamedTuple):
    """One thing that a stage does.

    Attributes:
        kind: Forward, backward or a half of it, or step.
        index: Number of the update of a step, of the micro-batch otherwise; both 0-based.
        stage: The stage that does it; None for the only stage of a worker.
    """

    kind: Kind
    index: int  # type: ignore[assignment]  # nobody looks for an element of an action
    stage: int | None = None

    def __str__(self) -> str:
        """The text form, which `parse` reads back."""
        where = "" if self.stage is None else f"{self.stage}:"
        return f"{where}{self.kind.value}{self.index}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read the text form.

        Args:
            text: As ``"F3"`` or ``"2:F3"``.

        Returns:
            The action whose ``str`` is ``text``.

        Raises:
            ScheduleError: The text is not an action.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action; expected F, B, I, W or S and a number, "
                "with the stage and a colon before it if wanted, as in F3 or 2:F3"
            )
        stage, letter, index = match.groups()
        return Action(Kind(letter), int(index), None if stage is None else int(stage))


# The members by themselves: to look them up in their class takes longer than to make an action.
_F, _B, _I, _W, _S = Kind


def forward(micro_batch: int, stage: int | None = None) -> Action:
    """``F<micro_batch>``."""
    return Action(_F, micro_batch, stage)


def backward(micro_batch: int, stage: int | None = None) -> Action:
    """``B<micro_batch>``: both halves at once."""
    return Action(_B, micro_batch, stage)


def input_gradient(micro_batch: int, stage: int | None = None) -> Action:
    """``I<micro_batch>``: the half of the backward that the stage before waits for."""
    return Action(_I, micro_batch, stage)


def weight_gradient(micro_batch: int, stage: int | None = None) -> Action:
    """``W<micro_batch>``: the other half; any time between ``I<micro_batch>`` and the step."""
    return Action(_W, micro_batch, stage)


def step(update: int, stage: int | None = None) -> Action:
    """``S<update>``: makes weight version ``update + 1`` of ``update``."""
    return Action(_S, update, stage)


def until(order: Iterator[Action], stop: int, per_update: int, left: int) -> Iterator[Action]:
    """What is left of an endless order when the micro-batches end at ``stop``: the drain.

    Leaves out whatever belongs to micro-batches that do not exist, and ends with the last action
    of those that do::

        endless, two warm-up forwards    F0 F1 F2 B0 S0 F3 B1 S1 F4 B2 S2 F5 B3 ...
        until(stop=3), nothing done      F0 F1 F2 B0 S0    B1 S1    B2 S2

    Args:
        order: The endless order, from where it stands.
        stop: One past the last micro-batch, a multiple of ``per_update``.
        per_update: Micro-batches per update.
        left: How many ends of micro-batches (``B`` or ``W``) and steps are still to do.

    Yields:
        The actions that remain.

    Raises:
        ScheduleError: The order ends before, or goes on without ever ending these micro-batches.
    """
    updates = stop // per_update
    patience = most_left_out = 1000 + 8 * stop
    while left:
        action = next(order, None)
        if action is None:
            raise ScheduleError(f"the order ends before it has done all of {stop} micro-batches")
        kind = action.kind
        if action.index >= (updates if kind is _S else stop):
            patience -= 1
            if not patience:
                raise ScheduleError(
                    f"the order never ends all of {stop} micro-batches: the last {most_left_out} "
                    f"actions, up to {action}, are about later ones"
                )
            continue
        patience = most_left_out
        if kind is _S or kind in ENDS:
            left -= 1
        yield action
