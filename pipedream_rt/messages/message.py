"""The messages between the coordinator and the stages, with one frozen class for each payload.

The coordinator numbers everything that it feeds into the pipe, micro-batches and commands alike;
that number is the *position*. The *turn* of an item counts the items that its receiver was given
before it. A stage takes its items by rising turn: so it sees each command between the same two
micro-batches, whatever the timing, and need not be given every position.

The kind of a message says what its number counts (`Channel.by`): of a micro-batch the turn on the
way to the loss, and the position on the way back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipedream_rt.messages.head import PLAIN_LOSS, Head, LossTask
from pipedream_rt.messages.tree import Structure
from pipedream_rt.schedules.edges import COORDINATOR, Address, Edge, EdgeKind, Titles


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
    DEFINE = "define"  # programs to know, and numbers of others to forget
    CALL = "call"
    METHOD = "method"  # of one stage, by a reference to it

    @property
    def leaves_no_trace(self) -> bool:
        """Whether it changes no stage, so that a recovery need not repeat it."""
        # A flush may: it ends backwards, in which layers may change buffers.
        return self in _ONLY_LOOK

    @property
    def has_reply(self) -> bool:
        """Whether stages reply. Nobody waits for a command that they cannot refuse."""
        return self not in _WITHOUT_REPLY


_ONLY_LOOK = {
    CommandName.STATE,
    CommandName.OPTIMIZER_STATE,
    CommandName.STATISTICS,
    CommandName.TRACE,
    CommandName.SAVE,
    CommandName.FINGERPRINT,
    CommandName.METHOD,
}
_WITHOUT_REPLY = {CommandName.DEFINE, CommandName.DROP, CommandName.END_CACHE}


class Payload:
    """The content of a message without its tensors: a frozen class for each kind of edge."""

    __slots__ = ()


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
        definitions: The programs that were defined since the start, each pickled with its number
            and a part for every stage.
    """

    digest: bytes
    optimizer: bytes = b""
    training: bool | None = None
    restore: dict[str, Any] | None = None
    announced: int = 0
    definitions: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Payload):
    """Stage to coordinator: the stage is built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Payload):
    """Stage to coordinator: an error as data, since no exception crosses a transport.

    By itself it ends the generation. In an evaluation or inference, nothing was trained by what has
    failed: the error then goes the way of the micro-batch, as what came of it.

    Attributes:
        address: The address of the stage.
        action: The text form of the action that raised, or the name of a command or pass.
        pickled: The error itself, pickled; empty if it cannot be pickled.
    """

    address: Address
    action: str
    type_name: str
    text: str
    trace: str
    pickled: bytes = b""


class Passed(NamedTuple):
    """What a stage adds to the trail of a micro-batch that it has passed on.

    Attributes:
        stage: Its index, 0-based.
        version: The weight version that it read.
        busy_ns: The nanoseconds that it has computed so far.
        processor_ns: The nanoseconds of a processor in them.
        process_ns: The nanoseconds that its process has had of all processors.
        fingerprint: That of its buffers and the weights that it read, in hex; empty unless asked
            for.
        changed_buffers: Whether the evaluation has changed its buffers so far; False elsewhere.
    """

    stage: int
    version: int
    busy_ns: int
    processor_ns: int
    process_ns: int
    fingerprint: str = ""
    changed_buffers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation(Payload):
    """The input of a forward, from the coordinator to the first stages or from stage to stage.

    Attributes:
        head: The same at all stages.
        turns: By stage, the turn of this item at the replica that it goes to.
        requires_grad: For each tensor, whether a gradient is expected back.
        coded: What the codec of the edge has packed (`Coding`); empty for nothing.
        trail: Of each stage passed, in rising order.
        failed: What a stage before has raised in a pass that does not train, so that there are no
            tensors; None if nothing.
    """

    head: Head
    turns: list[int]
    structure: Structure = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    coded: list[Any] = field(default_factory=list)
    trail: list[Passed] = field(default_factory=list)
    failed: Failed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Payload):
    """Coordinator to every stage: a command to carry out at its turn and to reply to.

    Attributes:
        position: Its position in the feed.
        structure: The structure of the argument; empty for none.
    """

    position: int
    name: CommandName
    structure: Structure = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Payload):
    """Coordinator to the stage that computes the loss: the target, and what to do with it."""

    structure: Structure
    task: LossTask = PLAIN_LOSS


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient(Payload):
    """Consumer to producer: the gradients of the activations that the producer sent.

    Attributes:
        present: For each tensor that asked for a gradient, whether the message carries one.
        coded: What the codec of the edge has packed (`Coding`); empty for nothing.
        skips: Whether the update of this micro-batch is skipped, as the script has said.
        hyper: The hyper-parameters of its update, where the script has closed it by a call: those
            of that moment, and not those in its `MiniBatch`; else None.
    """

    present: list[bool]
    coded: list[Any] = field(default_factory=list)
    skips: bool = False
    hyper: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Payload):
    """Last stage to coordinator: the loss of a micro-batch, or the output.

    The output comes in inference, and in training where the script computes the loss.

    Attributes:
        loss: The loss, not multiplied by its weight; None for an empty micro-batch and beside an
            output. Inside a worker with an accelerator it may be a `DeferredScalar`.
        trail: That of `Activation`, with the last stage.
        metrics: By name, parts of the loss, and what the functions beside it returned, or the text
            of their errors.
        structure: The structure of the output; empty where there is none.
        requires_grad: For each tensor of the output, whether a gradient is expected back.
        failed: What a stage has raised in a pass that does not train, in the place of a loss or an
            output; None if nothing.
        parts: The losses of the micro-batches of an update that were computed with this one.
        whole: Why this is the loss of the whole update, in words; empty where it is not.
    """

    loss: Any  # float | None on every way
    trail: list[Passed]
    metrics: dict[str, float | str] = field(default_factory=dict)
    structure: Structure = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    failed: Failed | None = None
    parts: list[float] = field(default_factory=list)
    whole: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRule(Payload):
    """A rule of a stage to the same rule of another one, or of another replica.

    Attributes:
        values: The values that the rule packs beside tensors (`Rule.pack`).
    """

    values: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Payload):
    """Stage to coordinator: the result of a command.

    Attributes:
        refused: Why a command that changes nothing has no result; empty if it has one.
    """

    structure: Structure
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Payload):
    """Stage to coordinator: the result of a command to save, which later replies may overtake.

    Attributes:
        structure: That of what `write_stage` returned, or of an error's text.
    """

    structure: Structure


PAYLOADS: Mapping[EdgeKind, type[Payload]] = {
    **dict.fromkeys(EdgeKind, OfRule),
    EdgeKind.START: Start,
    EdgeKind.READY: Ready,
    EdgeKind.ACTIVATION: Activation,
    EdgeKind.TARGET: Target,
    EdgeKind.GRADIENT: Gradient,
    EdgeKind.LOSS: Loss,
    EdgeKind.COMMAND: Command,
    EdgeKind.REPLY: Reply,
    EdgeKind.SAVED: Saved,
    EdgeKind.FAILED: Failed,
}
"""The class of the payloads of each kind of edge."""


def digest_of(tensors: Sequence[Tensor]) -> bytes:
    """Return the SHA-256 of tensors of bytes, each behind its length (8 bytes)."""
    digest = hashlib.sha256()
    for tensor in tensors:
        data = tensor.numpy().data
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()


class Key(NamedTuple):
    """The key of a message, under which it waits in an inbox.

    Attributes:
        number: The kind of the edge says what it counts (`Channel.by`).
        restores: How often the sender has gone back to an earlier state, in which it gives the same
            updates and versions again; 0 where the number always rises.
    """

    edge: Edge
    number: int
    restores: int = 0

    def words(self, titles: Titles) -> str:
        """Return the key for people, as ``gradient 7 from stage 2``."""
        return f"{self.edge.kind.value} {self.number} from {titles(self.edge.source)}"


Send = Callable[[Key, Payload, tuple[Tensor, ...]], None]
"""``send(key, payload, tensors)`` hands a message to the transport. Never blocks."""


class Sender(Protocol):
    """Makes messages of a generation, and sends them."""

    def __call__(self, key: Key, payload: Payload, tensors: tuple[Tensor, ...]) -> None:
        """Hand a message to the transport. Never blocks."""

    def hand_over(
        self,
        key: Key,
        payload: Payload,
        tensors: tuple[Tensor, ...],
        ready: Callable[[], torch.Event],
    ) -> bool:
        """Give a message to a receiver in this process, tensors on accelerators included.

        ``ready`` makes the event of the message. Return False, and do nothing, if the receiver is
        in another process.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message.

    Attributes:
        generation: A receiver of another generation drops the message.
        tensors: The sender does not change them any more.
        ready: The event after which tensors on an accelerator have their values. Only within a
            process; None where the tensors are on the host.
    """

    key: Key
    generation: int
    payload: Payload
    tensors: tuple[Tensor, ...] = ()
    ready: torch.Event | None = None

    @property
    def to(self) -> Address:
        return self.key.edge.target

    @property
    def sender(self) -> Address:
        return self.key.edge.source

    @property
    def number(self) -> int:
        return self.key.number

    def __str__(self) -> str:
        """Return the message for logs, as ``gradient 7 from address 2 to address 1``."""
        source, target = (
            "the coordinator" if end == COORDINATOR else f"address {end}"
            for end in (self.sender, self.to)
        )
        return f"{self.key.edge.kind.value} {self.number} from {source} to {target}"
