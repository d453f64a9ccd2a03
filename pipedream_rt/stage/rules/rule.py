"""The two protocols of rules, and the update that they change.

A rule is what one feature does to the training of a stage: it takes tensors and returns what goes
to other stages. There are two kinds, since some features act before an update exists. A rule
overrides the methods that it needs, and a stage calls those alone, so a feature that is not used
costs nothing.

The life of an update t on a stage, with the methods of `UpdateRule`::

    B .. B      each micro-batch adds its gradients        MicroBatchRule.loss, roots, adjust, ended
    R t         reduce      hand them to the other replicas
    S t         collect     complete and measure them
    A t         change      the last change of gradients, or the update is skipped
                around      around the step of the torch optimizer, unless it is skipped
                after       the version is made, even if the update was skipped
    T t         take        weights that other replicas have stepped come in
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from pipedream_rt.messages.state_keys import StateKey, StepState
from pipedream_rt.schedules import EdgeKind, Plan
from pipedream_rt.schedules.edges import Address, Edge
from pipedream_rt.stage.hyper import Hyper
from pipedream_rt.stage.parameters import Adjust
from pipedream_rt.stage.values import Outgoing
from pipedream_rt.stage.weights import Weights


class Packed(NamedTuple):
    """A message of a rule: plain values, and tensors."""

    values: list[Any]
    tensors: tuple[Tensor, ...]


@dataclass(slots=True)
class Update:
    """An update from its step until it is applied.

    Attributes:
        number: Number of the update, which makes version ``number + 1``.
        gradients: The gradients of the stage's own weights, in their order.
        hyper: By parameter group of the whole model, its hyper-parameters.
        read: The versions that its micro-batches with samples have read.
        skipped: Whether no stage applies it.
    """

    number: int
    gradients: list[Tensor | None]
    hyper: list[Hyper]
    read: list[int]
    skipped: bool = False

    @property
    def mean_read(self) -> float:
        """The mean of the versions that its micro-batches have read; its own number if none did."""
        return sum(self.read) / len(self.read) if self.read else self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The facts that rules know about their stage.

    Attributes:
        numbers: By name, the place of each trainable parameter of the stage in the unsplit model.
        norm_dtype: The dtype of the norm of all gradients of the model.
        totals: The rule that makes that norm (`totals.py`); None if no rule needs it.
    """

    plan: Plan
    stage: int
    address: Address
    weights: Weights
    numbers: Mapping[str, int]
    norm_dtype: torch.dtype = torch.float32
    totals: Rule | None = None

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """The stage's own trainable parameters, by name in the unsplit model."""
        return self.weights.own.named


class Rule:
    """The methods that rules of both kinds may have.

    Attributes:
        channels: The kinds of messages that it sends and takes.
        names: The names under which it keeps something, besides those of parameters.
        keeps: Whose state `state` returns: the optimizer's, so that another optimizer does not go
            on with it; the weights', as an average of them; or the run's.
    """

    channels: ClassVar[tuple[EdgeKind, ...]] = ()
    names: Sequence[str] = ()
    keeps: ClassVar[Literal["optimizer", "weights", "run"]] = "optimizer"

    def pack(self, edge: Edge, value: Any) -> Packed:
        """Return the message on an edge of what another method has given for its kind."""
        return Packed([], value)

    def open(self, edge: Edge, number: int, packed: Packed) -> Any:
        """Return the value that the sender's `pack` was given, or its part for this stage.

        ``number`` is that of the message: of the update, or of the version.
        """
        return packed.tensors

    def receive(self, kind: EdgeKind, sender: Address, value: Any) -> None:
        """Take a message of one of its channels, for a later method to use."""

    def state(self) -> StepState:
        """Return the state for a checkpoint, as of the newest version.

        The part of its keys is the rule's name.
        """
        return {}

    def load_state(self, state: Mapping[StateKey, Any], step: int) -> None:
        """Go on with what `state` returned; ``step`` is the number of updates that are done.

        ``state`` is the whole checkpoint's, since the model may have been split otherwise.
        """

    def views(self, version: int) -> StepState:
        """Return its views of an older version, whose memory the next updates recycle."""
        return {}

    def lacks_views(self) -> bool:
        """Whether a restore has left out a view that a later micro-batch reads."""
        return False

    def statistics(self) -> dict[str, Any]:
        """Return counters for `Pipeline.statistics`."""
        return {}


class RuleOption:
    """An option of the pipeline of which each stage makes a rule. It is pickled for the workers.

    Attributes:
        called: The name of the user's objects in it, for messages.
    """

    __slots__ = ()
    called: ClassVar[str] = "correction"

    def rule(self, context: Context) -> Rule:
        """Return the rule that acts on one stage."""
        raise NotImplementedError

    def needs_totals(self, num_stages: int) -> bool:
        """Whether its rule needs the norm of all gradients; see `totals.py`."""
        return False

    def things(self) -> Sequence[object]:
        """Return the user's objects in it: workers compare their code with the script's."""
        return ()


class UpdateRule(Rule):
    """A rule that changes updates. Each method is called for all rules in turn, in this order."""

    def collect(self, update: Update) -> Outgoing:
        """Complete or measure the gradients of an update, at its step; return what is sent."""
        return {}

    def reduce(self, update: Update) -> Outgoing:
        """Hand over the gradients that this replica has summed; `collect` gets the whole sum."""
        return {}

    def stepped(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return those of a stage's parameters that the optimizer steps here."""
        return dict(named)

    def take(self, update: int) -> None:
        """Take the weights that other replicas have stepped in an update."""

    def change(self, update: Update) -> None:
        """Change the gradients, which are on the parameters now, or skip the update."""

    def around(
        self, update: Update, optimizer: torch.optim.Optimizer
    ) -> AbstractContextManager[object]:
        """Return a context around the step of the torch optimizer."""
        raise NotImplementedError

    def after(self, update: Update, optimizer: torch.optim.Optimizer | None) -> Outgoing:
        """Use the version that the update has made; the optimizer is None without weights."""
        return {}


class MicroBatchRule(Rule):
    """A rule that acts within a micro-batch, before its update exists."""

    def loss(self, update: int, loss: Tensor) -> Tensor:
        """Return the changed loss of a micro-batch, just before its backward."""
        return loss

    def roots(self, micro_batch: int) -> list[tuple[GradientEdge, Tensor]]:
        """Return further roots for the backward of a micro-batch, with their gradients."""
        return []

    def adjust(self, micro_batch: int) -> Adjust | None:
        """Return a function that changes a micro-batch's gradients before they are added up."""
        return None

    def ended(self, micro_batch: int) -> Outgoing:
        """Add to the pending update, or take from it, after a backward; return what is sent."""
        return {}
