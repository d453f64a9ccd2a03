"""What messages say of a micro-batch: its head, what its mini-batch has in common, and its loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple


class Mode(Enum):
    """What the stages do with a micro-batch."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    EVALUATE_AND_KEEP = "evaluate, and keep the buffers"
    INFER = "infer"
    INFER_IN_TRAINING_MODE = "infer in training mode"

    @property
    def evaluates(self) -> bool:
        """Whether the stages compute a loss in eval mode, without a gradient."""
        return self in (Mode.EVALUATE, Mode.EVALUATE_AND_KEEP)

    @property
    def leaves_no_trace(self) -> bool:
        """Whether it changes no stage, so that a recovery need not repeat it."""
        return self in (Mode.EVALUATE, Mode.INFER)


WITH_LOSS = (Mode.TRAIN, Mode.EVALUATE, Mode.EVALUATE_AND_KEEP)
"""The modes in which a loss is computed, for which there is a target."""


class OfLoss(Enum):
    """What the last stage computes the loss of."""

    PARTS = "of each micro-batch"
    WHOLE = "of the whole mini-batch"
    DECIDE = "of the whole, unless it is a weighed mean of those of micro-batches"


class MiniBatch(NamedTuple):
    """What the micro-batches of a mini-batch have in common: made once, and never changed.

    Attributes:
        hyper: For each parameter group, the hyper-parameters that the script has changed, packed by
            `pack_hyper`; empty unless the mini-batch is trained on.
        given: The values that the script has changed since the start: the number of the holder, the
            key there, and the value as `pack_hyper` packs it.
    """

    hyper: list[dict[str, Any]]
    given: list[list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all stages are told of a micro-batch: made once, and passed from stage to stage.

    Attributes:
        position: Its position in the feed.
        micro_batch: Number among the micro-batches to train on, or among all others.
        mini_batch: What it has in common with the others of its mini-batch.
        empty: Whether it has no samples; it fills up a short mini-batch and changes nothing.
        has_target: Whether a target is fed with it: for a loss that a stage computes.
        program: Number of the program that the stages follow.
        numbers: What the sizes of the inputs decide in that program, in the order of its `Number`.
        version: Number of the kept version that the stages read; 0 for the newest weights.
        cache: Number of the cache in which a stage keeps what the next micro-batch needs: what
            layers cache while a text is generated, or buffers in an evaluation; 0 for none.
        fingerprint: Whether each stage adds a fingerprint to the trail.
    """

    position: int
    micro_batch: int
    mode: Mode
    mini_batch: MiniBatch
    empty: bool = False
    has_target: bool = False
    program: int = 0
    numbers: list[int] = field(default_factory=list)
    version: int = 0
    cache: int = 0
    fingerprint: bool = False


class Together(NamedTuple):
    """The micro-batches of a mini-batch whose losses, or outputs, one stage looks at together.

    Attributes:
        micro_batches: How many of them have samples and come to this replica.
        samples: The number of samples in this one.
    """

    micro_batches: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTask:
    """What the stage that computes the loss is told of a micro-batch.

    Attributes:
        share: The weight of the micro-batch divided by that of its mini-batch, 0 or more.
        loss: Of what the loss is computed.
        together: The micro-batches that are looked at together: for a loss of all of them, or for a
            check of the loss of the whole mini-batch against theirs; None without either.
        metrics: The pickled functions that are computed beside the loss, or in its place.
    """

    share: float = 1.0
    loss: OfLoss = OfLoss.PARTS
    together: Together | None = None
    metrics: bytes = b""


PLAIN_LOSS = LossTask()
"""The loss of one micro-batch, which is all of its mini-batch."""
