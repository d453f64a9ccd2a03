"""The two protocols of rules, and the update that they change.

A rule is what one feature does to the training of a stage: it takes tensors and returns what goes
to other stages. There are two kinds, since some features act before an update exists. A rule has
the methods that it needs, and a stage calls no others, so a rule that is not there costs nothing.

The life of an update t on a stage, with the methods of `UpdateRule`::

    B .. B      each micro-batch adds its gradients        MicroBatchRule.loss, roots, adjust, ended
    S t         collect     complete and measure them
    A t         change      the last change of gradients, or the update is skipped
                around      around the step of the torch optimizer, unless it is skipped
                after       the version is made, also by an update that was skipped
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from pipedream_rt.messages.keys import Key, StepState
from pipedream_rt.schedules import EdgeKind, Plan
from pipedream_rt.schedules.edges import Address
from pipedream_rt.stage.optimizer import Hyper
from pipedream_rt.stage.parameters import Adjust
from pipedream_rt.stage.values import Gifts
from pipedream_rt.stage.weights import Weights


@dataclass(slots=True)
class Update:
    """An update from its step until it is applied.

    Attributes:
        gradients: The gradients of the stage's own weights, in their order.
    """

    number: int
    gradients: list[Tensor | None]
    hyper: list[Hyper]
    read: list[int]
    skipped: bool = False

    @property
    def mean_read(self) -> float:
        """The mean of the versions that its micro-batches have read; its own number if none has."""
        return sum(self.read) / len(self.read) if self.read else self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What rules know of the stage that they belong to.

    Attributes:
        norm_dtype: The dtype of the norm of all gradients of the model.
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
    """What rules of both kinds may have."""

    channels: ClassVar[tuple[EdgeKind, ...]] = ()
    names: Sequence[str] = ()

    def receive(self, kind: EdgeKind, sender: Address, value: Any) -> None:
        """Take a message of one of its channels, which a later method will use."""

    def state(self) -> StepState:
        """Return what is to be kept in a checkpoint, as of the newest version; see `Key`.

        The part of its keys is the rule's name.
        """
        return {}

    def load_state(self, state: Mapping[Key, Any], step: int) -> None:
        """Go on with what `state` returned, here or, after another split, on other stages."""

    def statistics(self) -> dict[str, Any]:
        """Return counters for `Pipeline.statistics`."""
        return {}


class RuleOption:
    """An option of the pipeline of which each stage makes a rule. It is pickled for the workers."""

    __slots__ = ()
    called: ClassVar[str] = "correction"

    def rule(self, context: Context) -> Rule:
        """Return the rule of a stage."""
        raise NotImplementedError

    def needs_totals(self, num_stages: int) -> bool:
        """Whether its rule needs the norm of all gradients; see `totals.py`."""
        return False

    def things(self) -> Sequence[object]:
        """Return objects of the user's in it, whose code workers compare with the script's."""
        return ()


class UpdateRule(Rule):
    """What changes updates. The methods are called in the order below, each for all rules."""

    def collect(self, update: Update) -> Gifts:
        """Complete or measure the gradients of an update, at its step."""
        return {}

    def change(self, update: Update) -> None:
        """Change the gradients once more, which are on the parameters now, or skip the update."""

    def around(
        self, update: Update, optimizer: torch.optim.Optimizer
    ) -> AbstractContextManager[object]:
        """Return a context in which the torch optimizer steps."""
        raise NotImplementedError

    def after(self, update: Update, optimizer: torch.optim.Optimizer | None) -> Gifts:
        """Look at the version that the update has made."""
        return {}


class MicroBatchRule(Rule):
    """What acts within a micro-batch."""

    def loss(self, update: int, loss: Tensor) -> Tensor:
        """Change the loss of a micro-batch of an update, of which the backward begins."""
        return loss

    def roots(self, micro_batch: int) -> list[tuple[GradientEdge, Tensor]]:
        """Return further roots of the backward of a micro-batch, with their gradients."""
        return []

    def adjust(self, micro_batch: int) -> Adjust | None:
        """Return what changes the gradients of a micro-batch before they are added, if anything."""
        return None

    def ended(self, micro_batch: int) -> Gifts:
        """Add to the pending update, or take something out of it, when a backward has ended."""
        return {}
