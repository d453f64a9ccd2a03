"""What travels between the coordinator and the stages. One frozen class for each kind.

The coordinator numbers everything that it feeds into the pipe, micro-batches and commands alike;
that number is the *position*. A stage takes position after position, so all stages see commands at
the same place between the same micro-batches, whatever the timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeAlias

from torch import Tensor

from pipedream_rt.messages.tree import Structure
from pipedream_rt.schedules.shape import COORDINATOR as COORDINATOR


class Channel(Enum):
    """The first part of an inbox key; messages of one channel are taken in rising order."""

    JOB = "job"
    READY = "ready"
    FEED = "feed"
    TARGET = "target"
    GRADIENT = "gradient"
    LOSS = "loss"
    REPLY = "reply"
    SAVED = "saved"
    FAILED = "failed"


class Mode(Enum):
    """What becomes of a micro-batch."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    INFER = "infer"


class CommandName(Enum):
    """What a stage can be told to do between two micro-batches."""

    FLUSH = "flush"
    STATE = "state"
    LOAD_STATE = "load-state"
    OPTIMIZER = "optimizer"
    OPTIMIZER_STATE = "optimizer-state"
    LOAD_OPTIMIZER_STATE = "load-optimizer-state"
    TRAINING = "training"
    STATISTICS = "statistics"
    TRACE = "trace"
    SAVE = "save"
    LOAD = "load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Coordinator to stage, first of all: the stage itself, as cloudpickle bytes in one tensor.

    In a later generation the stage takes up the state of a checkpoint and goes on from there.

    Attributes:
        digest: SHA-256 of those bytes: a transport need not authenticate tensors.
        position: The first of the feed that it will be sent.
        optimizer: Pickled `OptimizerSpec`; empty where a command will bring it.
        training: Mode to set all modules to; None to leave them.
        restore: Arguments of `Stage.load`; None for a stage as it is.
        announced: Micro-batches with lower numbers are announced before each action on them.
    """

    channel: ClassVar[Channel] = Channel.JOB
    digest: bytes
    position: int = 0
    optimizer: bytes = b""
    training: bool | None = None
    restore: dict[str, Any] | None = None
    announced: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Stage to coordinator: it has understood its job. The index is the generation."""

    channel: ClassVar[Channel] = Channel.READY


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of a forward; from the coordinator to stage 0, then from stage to stage.

    Attributes:
        micro_batch: Number among the training micro-batches, or among all others.
        mode: Train, evaluate or infer.
        empty: Without samples: fills up a mini-batch that is too small, and changes nothing.
        hyper: Hyper-parameters of each parameter group at injection; None in other modes.
        structure: Of the value whose tensors the message carries.
        requires_grad: For each tensor, whether a gradient is expected back.
        trail: Per stage passed, the weight version read and the nanoseconds computed so far.
    """

    channel: ClassVar[Channel] = Channel.FEED
    micro_batch: int
    mode: Mode
    empty: bool = False
    hyper: list[dict[str, Any]] | None = None
    structure: Structure = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    trail: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Coordinator to every stage: do this when its position comes, then reply."""

    channel: ClassVar[Channel] = Channel.FEED
    name: CommandName
    structure: Structure = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Coordinator to the last stage: what the loss compares with, and the weight of that loss."""

    channel: ClassVar[Channel] = Channel.TARGET
    structure: Structure
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """Stage to the one before: gradients of the tensors that asked for one; False where none."""

    channel: ClassVar[Channel] = Channel.GRADIENT
    present: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Last stage to coordinator. ``loss`` is None for an empty micro-batch and in inference."""

    channel: ClassVar[Channel] = Channel.LOSS
    loss: float | None
    trail: list[list[int]]
    structure: Structure = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Stage to coordinator: the result of a command."""

    channel: ClassVar[Channel] = Channel.REPLY
    structure: Structure


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Stage to coordinator: its part of a checkpoint is on the disk; later commands may be done."""

    channel: ClassVar[Channel] = Channel.SAVED
    structure: Structure


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Stage to coordinator: an error, as data. No exception crosses a transport."""

    channel: ClassVar[Channel] = Channel.FAILED
    action: str
    type_name: str
    text: str
    trace: str
    pickled: bytes = b""


Payload: TypeAlias = (
    Job | Ready | MicroBatch | Command | Target | Gradient | Loss | Reply | Saved | Failed
)


Send = Callable[[int, int, Payload, tuple[Tensor, ...]], None]
"""``send(to, index, payload, tensors)``: hands a message to the transport; never blocks."""


class Key(NamedTuple):
    """Under which a message waits in an inbox.

    Attributes:
        channel: The kind of message.
        number: Its index.
        stage: Which one it is for; which one it is from, where the coordinator receives.
    """

    channel: Channel
    number: int
    stage: int

    def __str__(self) -> str:
        """For messages: ``feed 7``."""
        return f"{self.channel.value} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message.

    Attributes:
        to: Stage index, or `COORDINATOR`.
        sender: The same.
        index: Position in the feed. Not the micro-batch, which comes again when a run goes back to
            a checkpoint.
        generation: Life of the group that it belongs to; others are refused.
        payload: What it says.
        tensors: What it carries. The sender does not change them any more.
    """

    to: int
    sender: int
    index: int
    generation: int
    payload: Payload
    tensors: tuple[Tensor, ...] = ()

    @property
    def key(self) -> Key:
        """Where it waits."""
        stage = self.sender if self.to == COORDINATOR else self.to
        return Key(self.payload.channel, self.index, stage)

    def __str__(self) -> str:
        """For logs: ``feed 7 from stage 1 to stage 2``."""
        names = [
            "the coordinator" if a == COORDINATOR else f"stage {a}" for a in (self.sender, self.to)
        ]
        return f"{self.payload.channel.value} {self.index} from {names[0]} to {names[1]}"
