"""The messages between the coordinator and the stages, with one frozen class for each payload.

The coordinator numbers everything that it feeds into the pipe, micro-batches and commands alike;
that number is the *position*. The *turn* of an item counts the items that its receiver was given
before it. A stage takes its items by rising turn: so it sees each command between the same two
micro-batches, whatever the timing, and need not be given every position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from pipedream_rt.messages.tree import Structure
from pipedream_rt.schedules.edges import COORDINATOR, Address, Edge, EdgeKind, Titles

Passed: TypeAlias = list[Any]
"""What one stage adds to the trail of a micro-batch (`MicroBatch.trail`)."""


class Mode(Enum):
    """What the stages do with a micro-batch."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    EVALUATE_AND_KEEP = "evaluate, and keep the buffers"
    INFER = "infer"
    INFER_IN_TRAINING_MODE = "infer in training mode"

    @property
    def has_target(self) -> bool:
        """Whether the stages compute a loss, for which a target is fed."""
        return self in (Mode.TRAIN, Mode.EVALUATE, Mode.EVALUATE_AND_KEEP)

    @property
    def evaluates(self) -> bool:
        """Whether the stages compute a loss in eval mode, without a gradient."""
        return self in (Mode.EVALUATE, Mode.EVALUATE_AND_KEEP)

    @property
    def leaves_no_trace(self) -> bool:
        """Whether it changes no stage, so that a recovery need not repeat it."""
        return self in (Mode.EVALUATE, Mode.INFER)


class CommandName(Enum):
    """The names of the commands that a stage carries out between two micro-batches."""

    FLUSH = "flush"  # its argument: one past the last micro-batch that was fed to any replica
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
    FINGERPRINT = "fingerprint"
    KEEP = "keep"
    DROP = "drop"
    END_CACHE = "end-cache"
    CALL = "call"
    METHOD = "method"  # of one stage, by a reference to it

    @property
    def leaves_no_trace(self) -> bool:
        """Whether it changes no stage, so that a recovery need not repeat it."""
        # A flush may: it ends backwards, in which layers may change buffers.
        return self in _ONLY_LOOK


_ONLY_LOOK = {
    CommandName.STATE,
    CommandName.OPTIMIZER_STATE,
    CommandName.STATISTICS,
    CommandName.TRACE,
    CommandName.SAVE,
    CommandName.FINGERPRINT,
    CommandName.METHOD,
}


class Payload:
    """The content of a message without its tensors: a frozen class for each kind of edge."""

    __slots__ = ()
    kind: ClassVar[EdgeKind]


P = TypeVar("P", bound=Payload)

PAYLOADS: list[type[Payload]] = []
"""The classes of payloads. The place in this list is the number of a class on the wire."""


def payload(kind: EdgeKind) -> Callable[[type[P]], type[P]]:
    """Register the class of the payloads of a kind of edge."""

    def register(cls: type[P]) -> type[P]:
        cls.kind = kind
        PAYLOADS.append(cls)
        return cls

    return register


@payload(EdgeKind.START)
@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Payload):
    """Coordinator to stage, as the first message: how to build the stage.

    The first tensor of the message holds the pickled `StageSpec`, the others the memory of tensors
    in it. In a later generation the stage also loads a checkpoint and goes on from there.

    Attributes:
        digest: The SHA-256 of the tensors (`digest_of`), since a link does not sign tensors.
        optimizer: The pickled `OptimizerSpec`; empty if a command will bring it.
        training: The mode to set the modules of the stage to (`Module.train`); None to leave it as
            it is.
        restore: The arguments of `restore_stage`; None to load no checkpoint.
        announced: One past the last micro-batch whose actions the stage announces.
        definitions: The pickled programs of all stages that were defined since the start, in the
            order of their numbers.
    """

    digest: bytes
    optimizer: bytes = b""
    training: bool | None = None
    restore: dict[str, Any] | None = None
    announced: int = 0
    definitions: list[bytes] = field(default_factory=list)


@payload(EdgeKind.READY)
@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Payload):
    """Stage to coordinator: the stage is built. The index of the message is the generation."""


@payload(EdgeKind.ACTIVATION)
@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch(Payload):
    """The input of a forward, from the coordinator to the first stages or from stage to stage.

    Attributes:
        turn: The turn of this item at the receiver.
        turns: By stage, the turn of this item at the replica that it goes to; empty if no stage has
            replicas, since all are then given the same items.
        micro_batch: Number among the micro-batches to train on, or among all others.
        empty: Whether it has no samples; it fills up a short mini-batch and changes nothing.
        program: Number of the program that the stages follow.
        definition: The pickled programs of all stages, where ``program`` is a new number; else
            empty.
        version: Number of the kept version that the stages read; 0 for the newest weights.
        cache: Number of the cache in which a stage keeps what the next micro-batch needs: what
            layers cache while a text is generated, or buffers in an evaluation; 0 for none.
        fingerprint: Whether each stage adds a fingerprint to the trail.
        hyper: For each parameter group, the hyper-parameters that the script has changed, packed by
            `pack_hyper`; None unless the micro-batch is trained on.
        given: The values that the script has changed since the start: the number of the holder, the
            key there, and the value as `pack_hyper` packs it.
        requires_grad: For each tensor, whether a gradient is expected back.
        coded: What the codec of the edge has packed (`Coding`); empty for nothing.
        trail: For each stage passed, in rising order: its index, the weight version that it read,
            the nanoseconds that it has computed so far, and a fingerprint in hex of its buffers and
            the weights that it read. The fingerprint is empty unless asked for; in an evaluation it
            is not empty where the evaluation has changed buffers so far.
    """

    turn: int = 0
    turns: list[int] = field(default_factory=list)
    micro_batch: int
    mode: Mode
    empty: bool = False
    program: int = 0
    definition: bytes = b""
    version: int = 0
    cache: int = 0
    fingerprint: bool = False
    hyper: list[dict[str, Any]] | None = None
    given: list[list[Any]] = field(default_factory=list)
    structure: Structure = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    coded: list[Any] = field(default_factory=list)
    trail: list[Passed] = field(default_factory=list)


@payload(EdgeKind.COMMAND)
@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Payload):
    """Coordinator to every stage: a command to carry out at its turn and to reply to.

    Attributes:
        turn: The turn of this item at the receiver.
        structure: The structure of the argument; empty for none.
    """

    turn: int = 0
    name: CommandName
    structure: Structure = field(default_factory=list)


@payload(EdgeKind.TARGET)
@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Payload):
    """Coordinator to the stage that computes the loss: the target, and the weight of the loss.

    Attributes:
        share: The weight of the micro-batch divided by that of its mini-batch, 0 or more.
        compared: For a check of the loss of the whole mini-batch against those of its
            micro-batches: how many of these have samples and come to this replica, and the number
            of samples in this one. Else empty.
        metrics: The pickled functions that are computed beside the loss.
    """

    structure: Structure
    share: float
    compared: list[int] = field(default_factory=list)
    metrics: bytes = b""


@payload(EdgeKind.GRADIENT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient(Payload):
    """Consumer to producer: the gradients of the activations that the producer sent.

    Attributes:
        present: For each tensor that asked for a gradient, whether the message carries one.
        coded: What the codec of the edge has packed (`Coding`); empty for nothing.
    """

    present: list[bool]
    coded: list[Any] = field(default_factory=list)


@payload(EdgeKind.LOSS)
@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Payload):
    """Last stage to coordinator: the loss of a micro-batch, or the output in inference.

    Attributes:
        loss: The loss, not multiplied by its weight; None for an empty micro-batch and in
            inference. Inside a worker with an accelerator it may be a `DeferredScalar`.
        trail: That of `MicroBatch`, with the last stage.
        metrics: By name, parts of the loss, and what the functions beside it returned, or the text
            of their errors.
        structure: The structure of the output in inference; empty otherwise.
    """

    loss: Any  # float | None on every way
    trail: list[Passed]
    metrics: dict[str, float | str] = field(default_factory=dict)
    structure: Structure = field(default_factory=list)


@payload(EdgeKind.WEIGHT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Weight(Payload):
    """Owner to user: the next version of shared weights, in the plan's order.

    The index of the message is the number of the version.
    """


@payload(EdgeKind.SHARE)
@dataclass(frozen=True, slots=True, kw_only=True)
class Share(Payload):
    """A stage to the one before it: its part of the gradients of the weights that both use.

    The index of the message is the number of the update.

    Attributes:
        present: For each weight, in the plan's order, whether the message carries a gradient.
    """

    present: list[bool]


@payload(EdgeKind.PARTIAL)
@dataclass(frozen=True, slots=True, kw_only=True)
class Partial(Payload):
    """A replica to another one of its stage: a partial sum of the gradients of an update.

    The index of the message is the number of the update.

    Attributes:
        present: For each parameter of the stage, whether the message carries a gradient.
        hyper: The hyper-parameters of the update, as in `MicroBatch`.
        read: The versions that its micro-batches with samples have read.
    """

    present: list[bool]
    hyper: list[dict[str, Any]]
    read: list[int]


@payload(EdgeKind.STEPPED)
@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(Payload):
    """A replica to another one of its stage: the weights that the sender steps, after an update.

    The index of the message is the number of the update.
    """


@payload(EdgeKind.NORM)
@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(Payload):
    """A stage to the one before it: the norms of its gradients and those of the stages behind it.

    The index of the message is the number of the update; its one tensor has the norms.

    Attributes:
        numbers: For each norm, the place of its parameter in the unsplit model.
    """

    numbers: list[int]


@payload(EdgeKind.TOTAL)
@dataclass(frozen=True, slots=True, kw_only=True)
class Total(Payload):
    """The first stage to another: the total norm of all gradients of an update.

    The index of the message is the number of the update.

    Attributes:
        update: Number of the update, of which ``index`` is made.
        total: The norm; infinite for an update that is skipped. Without meaning if the message has
            a tensor: that holds the norm where a device has computed it.
    """

    update: int
    total: float


@payload(EdgeKind.REPLY)
@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Payload):
    """Stage to coordinator: the result of a command.

    Attributes:
        refused: Why a command that changes nothing has no result; empty if it has one.
    """

    structure: Structure
    refused: str = ""


@payload(EdgeKind.SAVED)
@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Payload):
    """Stage to coordinator: the result of a command to save, which later replies may overtake.

    Attributes:
        structure: That of what `write_stage` returned, or of an error's text.
    """

    structure: Structure


@payload(EdgeKind.FAILED)
@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Payload):
    """Stage to coordinator: an error as data, since no exception crosses a transport.

    Attributes:
        action: The text form of the action that raised, or the name of a command.
        pickled: The error itself, pickled; empty if it cannot be pickled.
    """

    action: str
    type_name: str
    text: str
    trace: str
    pickled: bytes = b""


def digest_of(tensors: Sequence[Tensor]) -> bytes:
    """Return the SHA-256 of tensors of bytes, each behind its length (8 bytes)."""
    digest = hashlib.sha256()
    for tensor in tensors:
        data = tensor.numpy().data
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()


_FED = (MicroBatch, Command)
"""The payloads that the coordinator feeds into the pipe; they have a turn."""

Send = Callable[[int, int, Payload, tuple[Tensor, ...]], None]
"""``send(to, index, payload, tensors)`` hands a message to the transport. Never blocks."""


class Sender(Protocol):
    """Makes the messages of one address, and sends them."""

    def __call__(self, to: int, index: int, payload: Payload, tensors: tuple[Tensor, ...]) -> None:
        """Hand a message to the transport. Never blocks."""

    def hand_over(
        self,
        to: int,
        index: int,
        payload: Payload,
        tensors: tuple[Tensor, ...],
        ready: Callable[[], torch.Event],
    ) -> bool:
        """Give a message to a receiver in this process, tensors on accelerators included.

        ``ready`` makes the event of the message. Return False, and do nothing, if the receiver is
        in another process.
        """


class Key(NamedTuple):
    """The key under which a message waits in an inbox.

    Attributes:
        number: The turn of an item of the feed; the index of any other message.
    """

    edge: Edge
    number: int

    def words(self, titles: Titles) -> str:
        """Return the key for people, as ``gradient 7 from stage 2``."""
        return f"{self.edge.kind.value} {self.number} from {titles(self.edge.source)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message.

    Attributes:
        index: The position of the item of the feed that the message belongs to. It is not the
            number of the micro-batch, which comes again when a run goes back to a checkpoint. A
            message that belongs to no item has the generation (`Ready`), a number for the version
            (`Weight`) or the update (`Share`, `Partial`, `Stepped`, `Norm`, `Total`), or 0
            (`Start`, `Failed`).
        generation: A receiver of another generation drops the message.
        tensors: The sender does not change them any more.
        ready: The event after which tensors on an accelerator have their values. Only within a
            process; None where the tensors are on the host.
    """

    to: Address
    sender: Address
    index: int
    generation: int
    payload: Payload
    tensors: tuple[Tensor, ...] = ()
    ready: torch.Event | None = None

    @property
    def key(self) -> Key:
        payload = self.payload
        number = payload.turn if isinstance(payload, _FED) else self.index
        return Key(Edge(payload.kind, self.sender, self.to), number)

    def __str__(self) -> str:
        """Return the message for logs, as ``gradient 7 from address 2 to address 1``."""
        source, target = (
            "the coordinator" if end == COORDINATOR else f"address {end}"
            for end in (self.sender, self.to)
        )
        return f"{self.payload.kind.value} {self.index} from {source} to {target}"
