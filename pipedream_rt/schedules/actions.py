"""What a stage can do: forward ``F3``, backward ``B3``, step ``S3``; ``2:F3`` with its stage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pipedream_rt.errors import ScheduleError


class Kind(Enum):
    """The letter of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    STEP = "S"


_TEXT = re.compile(r"(?:(\d+):)?([FBS])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a stage does.

    Attributes:
        kind: Forward, backward or step.
        index: Micro-batch of a forward or backward, number of the update of a step; both 0-based.
        stage: The stage that does it, where the context does not tell.
    """

    kind: Kind
    index: int
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
                f"{text!r} is not an action; expected F, B or S and a number, "
                "with the stage and a colon before it if wanted, as in F3 or 2:F3"
            )
        stage, letter, index = match.groups()
        return Action(Kind(letter), int(index), None if stage is None else int(stage))


def forward(micro_batch: int) -> Action:
    """``F<micro_batch>``."""
    return Action(Kind.FORWARD, micro_batch)


def backward(micro_batch: int) -> Action:
    """``B<micro_batch>``."""
    return Action(Kind.BACKWARD, micro_batch)


def step(update: int) -> Action:
    """``S<update>``: makes weight version ``update + 1`` of ``update``."""
    return Action(Kind.STEP, update)


def until(
    order: Iterator[Action], stop: int, per_update: int, backwards_done: int, steps_done: int
) -> Iterator[Action]:
    """What is left of an endless order when the micro-batches end at ``stop``: the drain.

    Leaves out whatever belongs to micro-batches that do not exist, and ends with the last action
    of those that do::

        endless, two warm-up forwards    F0 F1 F2 B0 S0 F3 B1 S1 F4 B2 S2 F5 B3 ...
        until(stop=3), nothing done      F0 F1 F2 B0 S0    B1 S1    B2 S2

    Args:
        order: The endless order, from where it stands.
        stop: One past the last micro-batch, a multiple of ``per_update``.
        per_update: Micro-batches per update.
        backwards_done: First micro-batch whose backward is still to do.
        steps_done: First update that is still to do.

    Yields:
        The actions that remain.
    """
    updates = stop // per_update
    backwards, steps = stop - backwards_done, updates - steps_done
    while backwards or steps:
        action = next(order)
        if action.index >= (updates if action.kind is Kind.STEP else stop):
            continue
        backwards -= action.kind is Kind.BACKWARD
        steps -= action.kind is Kind.STEP
        yield action
