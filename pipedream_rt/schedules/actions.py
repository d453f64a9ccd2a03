"""Actions: forward ``F3``, backward ``B3`` or its halves ``I3`` and ``W3``, step ``S3``.

With its stage an action is written ``2:F3``. A backward may be split, as for a zero bubble: the
half ``I`` computes the gradient of the stage's input, which the stage before waits for; the half
``W`` computes the gradients of the weights, which no stage waits for until the step.

The replicas of a stage sum their gradients of an update before each of them steps: with ``R3`` a
replica sends its own sum for update 3 to the others; with ``S3`` it takes theirs, adds all up in
the order of the replicas, and steps. If the optimizer is sharded, each replica steps its own part
of the weights, and with ``T3`` it takes the rest from the others.

Where gradients are clipped by the norm of the whole model, an update may have to wait for that
norm. Then ``S3`` measures its gradients, and ``A3`` applies them just before the stage's first
forward with the result. Elsewhere ``S3`` applies them at once.

Four kinds are in no written order; the plan puts them in. ``A3`` is one. With ``D3`` a stage ends a
flush after 3 updates. Two are the coordinator's: ``N3`` injects micro-batch 3, and ``G3`` gives the
gradient of its output, where the script computes the loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from pipedream_rt.errors import ScheduleError


class Kind(Enum):
    """The kinds of actions, by their letters."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    STEP = "S"
    REDUCE = "R"
    TAKE = "T"
    APPLY = "A"
    DRAIN = "D"
    INJECT = "N"
    GRADIENT = "G"

    # By identity: kinds are looked up for every action, and the default hashes the name in Python,
    # which is slow.
    __hash__ = object.__hash__


SENDS_BACK = (Kind.BACKWARD, Kind.INPUT)
"""The kinds that take gradients from the consumers and give gradients to the producers."""

ENDS = (Kind.BACKWARD, Kind.WEIGHT)
"""The kinds that end a micro-batch: its gradients are in the pending update now."""

OF_UPDATES = (Kind.STEP, Kind.REDUCE, Kind.TAKE, Kind.APPLY, Kind.DRAIN)
"""The kinds whose index is the number of an update (for a drain: of updates done). The index of the
others is that of a micro-batch."""

OF_COORDINATOR = (Kind.INJECT, Kind.GRADIENT)
"""The kinds of actions that the coordinator does."""

OF_ORDERS = (
    Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.STEP, Kind.REDUCE, Kind.TAKE,
)  # fmt: skip
"""The kinds that an `Order` yields; the plan puts the others in."""

OF_STAGES = (*OF_ORDERS, Kind.APPLY)
"""The kinds with which a stage computes."""

COUNTED = (*ENDS, Kind.STEP, Kind.TAKE, Kind.APPLY)
"""The kinds by which `until` counts what is left."""

_TEXT = re.compile(r"(?:(\d+):)?([FBIWSRTADNG])(\d+)")


class Action(NamedTuple):
    """One action of a stage.

    Attributes:
        kind: The kind of the action.
        index: Number of the update for the kinds `OF_UPDATES`, of the micro-batch otherwise; both
            0-based.
        stage: The stage that does the action; None for the only stage of a worker.
    """

    kind: Kind
    index: int  # type: ignore[assignment]  # nobody looks for an element of an action
    stage: int | None = None

    def __str__(self) -> str:
        """Return the text form, which `parse` reads back."""
        where = "" if self.stage is None else f"{self.stage}:"
        return f"{where}{self.kind.value}{self.index}"

    @staticmethod
    def parse(text: str) -> Action:
        """Return the action of a text form.

        Args:
            text: The text form, as ``"F3"`` or ``"2:F3"``.

        Returns:
            The action whose ``str`` is ``text``.

        Raises:
            ScheduleError: The text is not an action.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action; expected F, B, I, W, S, R, T, A, D, N or G and a "
                "number, with the stage and a colon before it if wanted, as in F3 or 2:F3"
            )
        stage, letter, index = match.groups()
        return Action(Kind(letter), int(index), None if stage is None else int(stage))


# Module globals, because looking a member up in its class takes longer than making an action.
_F, _B, _I, _W, _S, _R, _T, _A, _D, _N, _G = Kind


def forward(micro_batch: int, stage: int | None = None) -> Action:
    """Return the forward ``F<micro_batch>``."""
    return Action(_F, micro_batch, stage)


def backward(micro_batch: int, stage: int | None = None) -> Action:
    """Return the whole backward ``B<micro_batch>``."""
    return Action(_B, micro_batch, stage)


def input_gradient(micro_batch: int, stage: int | None = None) -> Action:
    """Return ``I<micro_batch>``, the half of a backward that the stage before waits for."""
    return Action(_I, micro_batch, stage)


def weight_gradient(micro_batch: int, stage: int | None = None) -> Action:
    """Return ``W<micro_batch>``, the half of a backward between ``I<micro_batch>`` and the step."""
    return Action(_W, micro_batch, stage)


def step(update: int, stage: int | None = None) -> Action:
    """Return the step ``S<update>``, which makes weight version ``update + 1``."""
    return Action(_S, update, stage)


def reduce(update: int, stage: int | None = None) -> Action:
    """Return ``R<update>``, by which a replica sends the gradients that it has summed."""
    return Action(_R, update, stage)


def take(update: int, stage: int | None = None) -> Action:
    """Return ``T<update>``, by which a replica takes the weights that others have stepped."""
    return Action(_T, update, stage)


def apply(update: int, stage: int | None = None) -> Action:
    """Return ``A<update>``, which applies an update that has waited for its norm."""
    return Action(_A, update, stage)


def drain(updates: int, stage: int | None = None) -> Action:
    """Return ``D<updates>``, the end of a flush; ``updates`` counts those done since the start."""
    return Action(_D, updates, stage)


def inject(micro_batch: int) -> Action:
    """Return ``N<micro_batch>``, by which the coordinator injects a micro-batch."""
    return Action(_N, micro_batch)


def gradient(micro_batch: int) -> Action:
    """Return ``G<micro_batch>``, by which the coordinator gives the gradient of an output."""
    return Action(_G, micro_batch)


def until(order: Iterator[Action], stop: int, per_update: int, left: int) -> Iterator[Action]:
    """Yield the rest of an endless order when the micro-batches end at ``stop``: the drain.

    ``stop`` is one past the last micro-batch, and ``left`` counts the actions of `COUNTED` that are
    still to be done::

        endless, two warm-up forwards    F0 F1 F2 B0 S0 F3 B1 S1 F4 B2 S2 F5 B3 ...
        until(stop=3), nothing done      F0 F1 F2 B0 S0    B1 S1    B2 S2
    """
    updates = stop // per_update
    # A wrong order may yield later micro-batches for ever and never end those before `stop`; only a
    # limit finds that.
    patience = most_left_out = 100_000 + 8 * stop
    while left:
        action = next(order, None)
        if action is None:
            raise ScheduleError(f"the order ends before it has done all of {stop} micro-batches")
        kind = action.kind
        if action.index >= (updates if kind in OF_UPDATES else stop):
            patience -= 1
            if not patience:
                raise ScheduleError(
                    f"the order never ends all of {stop} micro-batches: the last {most_left_out} "
                    f"actions, up to {action}, are about later ones"
                )
            continue
        patience = most_left_out
        if kind in COUNTED:
            left -= 1
        yield action
