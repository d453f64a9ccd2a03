"""Addresses, the edges between them, and what an action needs of an edge."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, TypeAlias

Address: TypeAlias = int
"""Where a message goes: a replica of a stage, counted over all stages, or `COORDINATOR`."""

COORDINATOR: Address = -1
"""The address of the coordinator."""


Titles: TypeAlias = Callable[[Address], str]
"""Returns the name of an address for people."""


def name_of(stage: int) -> str:
    """Return the name of a stage, or of the coordinator, for people.

    It names an address only as long as no stage has replicas; see `Placement.title_of`.
    """
    return "the coordinator" if stage == COORDINATOR else f"stage {stage}"


class EdgeKind(Enum):
    """The kinds of messages, of which each edge carries one."""

    ACTIVATION = "activation"  # the input of a forward, from the coordinator or another stage
    TARGET = "target"
    GRADIENT = "gradient"
    LOSS = "loss"
    WEIGHT = "weight"  # a new version of weights that the receiver uses and the sender owns
    SHARE = "share"  # the gradients of tied weights, summed over the sender and later users
    NORM = "norm"  # the norms of the gradients of the sender and of the stages behind it
    TOTAL = "total"  # the total norm of all gradients of an update, from the first stage
    PARTIAL = "partial"  # an update's gradients as one replica has summed them, for another one
    STEPPED = "stepped"  # with a sharded optimizer, the weights that one replica has stepped
    START = "start"  # the specification of a stage
    READY = "ready"
    COMMAND = "command"
    REPLY = "reply"
    SAVED = "saved"
    FAILED = "failed"

    # By identity: keys are hashed often, and the default hashes the name in Python, which is slow.
    __hash__ = object.__hash__


class Edge(NamedTuple):
    """A directed way for one kind of message.

    Attributes:
        kind: The kind of its messages.
        source: The address of the sender.
        target: The address of the receiver.
    """

    kind: EdgeKind
    source: Address
    target: Address

    def __str__(self) -> str:
        """Return the edge for people, as ``gradient from stage 2 to stage 1``."""
        return f"{self.kind.value} from {name_of(self.source)} to {name_of(self.target)}"


class By(Enum):
    """The counter that numbers the messages of a channel."""

    MICRO_BATCH = "micro-batch"
    UPDATE = "update"
    VERSION = "weight version"
    TURN = "turn of the feed"
    POSITION = "position in the feed"
    GENERATION = "generation"
    NOTHING = "nothing: it comes once"


class Need(NamedTuple):
    """All messages of an edge up to a number, as far as they were not taken yet.

    Attributes:
        edge: The edge.
        number: The number of the last of them.
        peek: Whether the message must have come, but is left for a later action.
    """

    edge: Edge
    number: int
    peek: bool = False

    def words(self, titles: Titles = name_of) -> str:
        """Return the need for people, as ``share 0 from stage 1``."""
        return f"{self.edge.kind.value} {self.number} from {titles(self.edge.source)}"


class EdgeRule(NamedTuple):
    """A need, or an output, of the actions of one kind at an address.

    Attributes:
        number: Maps the index of an action to the number of the last message; None where it is one
            message, numbered by the index itself.
    """

    edge: Edge
    number: Callable[[int], int] | None = None
    peek: bool = False

    def of(self, index: int) -> Need:
        """Return the need of the action with an index."""
        return Need(self.edge, index if self.number is None else self.number(index), self.peek)
