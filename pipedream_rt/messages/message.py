"""What travels between the coordinator and the stages. There is one frozen class for each kind.

The coordinator numbers everything that it feeds into the pipe, micro-batches and commands alike;
that number is the *position*. Each stage gets the items of the feed one after another; the number
of items that a stage was given before one is that item's *turn*. A stage takes turn after turn, so
it sees commands at the same place between the same micro-batches, whatever the timing, and it need
not see every position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeAlias

from torch import Tensor

from pipedream_rt.messages.tree import Structure
from pipedream_rt.schedules.plan import Address, Edge, EdgeKind, name_of


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
class Start:
    """Coordinator to stage, first of all: what the stage is made of, as cloudpickle bytes.

    The bytes are in the message's one tensor. In a later generation the stage takes up the state of
    a checkpoint and goes on from there.

    Attributes:
        digest: SHA-256 of those bytes: a transport need not authenticate tensors.
        optimizer: Pickled `OptimizerSpec`; empty where a command will bring it.
        training: Mode to set all modules to; None to leave them.
        restore: Arguments of `restore_stage`; None for a stage as it is.
        announced: The stage announces each action on a micro-batch with a lower number.
    """

    kind: ClassVar[EdgeKind] = EdgeKind.START
    digest: bytes
    optimizer: bytes = b""
    training: bool | None = None
    restore: dict[str, Any] | None = None
    announced: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Stage to coordinator: the stage is built and has its state. The index is the generation."""

    kind: ClassVar[EdgeKind] = EdgeKind.READY


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of a forward; from the coordinator to the first stages, then from stage to stage.

    Attributes:
        turn: Items of the feed that its receiver was given before.
        micro_batch: Number among the training micro-batches, or among all others.
        mode: Train, evaluate or infer.
        empty: Without samples: fills up a mini-batch that is too small, and changes nothing.
        hyper: Hyper-parameters of each parameter group at injection; None in other modes.
        structure: Of the value whose tensors the message carries.
        requires_grad: For each tensor, whether a gradient is expected back.
        trail: For each stage passed, in rising order: its index, the weight version that it read,
            and the nanoseconds that it has computed so far.
    """

    kind: ClassVar[EdgeKind] = EdgeKind.ACTIVATION
    turn: int = 0
    micro_batch: int
    mode: Mode
    empty: bool = False
    hyper: list[dict[str, Any]] | None = None
    structure: Structure = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    trail: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Coordinator to every stage: do this when its turn comes, then reply.

    Attributes:
        turn: Items of the feed that its receiver was given before.
        name: What to do.
        structure: Of the argument whose tensors the message carries; empty for none.
    """

    kind: ClassVar[EdgeKind] = EdgeKind.COMMAND
    turn: int = 0
    name: CommandName
    structure: Structure = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Coordinator to the last stage: what the loss compares with, and the weight of that loss.

    Attributes:
        structure: Of the value whose tensors the message carries.
        share: The micro-batch's samples as a share of its mini-batch's.
    """

    kind: ClassVar[EdgeKind] = EdgeKind.TARGET
    structure: Structure
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """Consumer to producer: gradients of the activations that the consumer was sent.

    Attributes:
        present: For each tensor that asked for a gradient, whether the message carries one.
    """

    kind: ClassVar[EdgeKind] = EdgeKind.GRADIENT
    present: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Last stage to coordinator.

    Attributes:
        loss: The plain loss; None for an empty micro-batch and in inference.
        trail: As of `MicroBatch`.
        structure: Of the output in inference.
    """

    kind: ClassVar[EdgeKind] = EdgeKind.LOSS
    loss: float | None
    trail: list[list[int]]
    structure: Structure = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Stage to coordinator: the result of a command."""

    kind: ClassVar[EdgeKind] = EdgeKind.REPLY
    structure: Structure


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Stage to coordinator: its part of a checkpoint is on the disk; later commands may be done."""

    kind: ClassVar[EdgeKind] = EdgeKind.SAVED
    structure: Structure


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Stage to coordinator: an error, as data. No exception crosses a transport."""

    kind: ClassVar[EdgeKind] = EdgeKind.FAILED
    action: str
    type_name: str
    text: str
    trace: str
    pickled: bytes = b""


Payload: TypeAlias = (
    Start | Ready | MicroBatch | Command | Target | Gradient | Loss | Reply | Saved | Failed
)


Send = Callable[[int, int, Payload, tuple[Tensor, ...]], None]
"""``send(to, index, payload, tensors)``: hands a message to the transport; never blocks."""


class Key(NamedTuple):
    """Under which a message waits in an inbox.

    Attributes:
        edge: On which it travels.
        number: Its turn if it is an item of the feed, else the position of the item it belongs to.
    """

    edge: Edge
    number: int

    def __str__(self) -> str:
        """For messages, as ``gradient 7 from stage 2``."""
        return f"{self.edge.kind.value} {self.number} from {name_of(self.edge.source)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message.

    Attributes:
        to: Address of the receiver.
        sender: Address of the sender.
        index: Position in the feed. Not the micro-batch, whose number comes again when a run goes
            back to a checkpoint.
        generation: Life of the group that it belongs to; others are refused.
        payload: What it says.
        tensors: What it carries. The sender does not change them any more.
    """

    to: Address
    sender: Address
    index: int
    generation: int
    payload: Payload
    tensors: tuple[Tensor, ...] = ()

    @property
    def key(self) -> Key:
        """Where it waits."""
        payload = self.payload
        fed = isinstance(payload, MicroBatch | Command)
        number = payload.turn if fed else self.index  # type: ignore[union-attr]
        return Key(Edge(payload.kind, self.sender, self.to), number)

    def __str__(self) -> str:
        """For logs, as ``gradient 7 from stage 2 to stage 1``."""
        ends = f"from {name_of(self.sender)} to {name_of(self.to)}"
        return f"{self.payload.kind.value} {self.index} {ends}"
