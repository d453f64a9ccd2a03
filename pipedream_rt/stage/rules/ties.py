"""Ties: a weight that several stages use, and that the first of them owns and steps.

Every use by a micro-batch reads the version that the owner reads for it. The gradients of a
mini-batch go from the last user to the one before it, which adds its own, and so on to the owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipedream_rt.schedules import Edge, EdgeKind
from pipedream_rt.schedules.edges import Address
from pipedream_rt.schedules.placement import Tie
from pipedream_rt.stage.rules.rule import (
    Context,
    MicroBatchRule,
    Packed,
    Update,
    UpdateRule,
)
from pipedream_rt.stage.values import Outgoing, dense, with_gaps


class Ties(UpdateRule, MicroBatchRule):
    """The tied weights of one stage: those that it owns and those that it borrows."""

    channels = (EdgeKind.WEIGHT, EdgeKind.SHARE)

    def __init__(self, context: Context) -> None:
        self._plan, self._stage = plan, stage = context.plan, context.stage
        self._weights, self._per_update = context.weights, plan.per_update
        self._lent = _names(plan.lends(stage))
        self._passed_on = _names(plan.shares_of(stage))
        self._shares: dict[str, Tensor] = {}

    def pack(self, edge: Edge, value: Mapping[str, Tensor | None]) -> Packed:
        lends = edge.kind is EdgeKind.WEIGHT
        ties = (self._plan.lends if lends else self._plan.shares_of)(self._stage)[edge]
        present, tensors = dense([value[tie.name] for tie in ties])
        return Packed([present], tensors)

    def open(self, edge: Edge, number: int, packed: Packed) -> dict[str, Tensor]:
        (present,) = packed.values
        borrows = edge.kind is EdgeKind.WEIGHT
        ties = (self._plan.borrows if borrows else self._plan.shares_for)(self._stage)[edge]
        tensors = with_gaps(present, packed.tensors)
        return {tie.name: t for tie, t in zip(ties, tensors, strict=True) if t is not None}

    def receive(self, kind: EdgeKind, sender: Address, value: Any) -> None:
        """Take a new version of weights from their owner, or a share of their gradients."""
        if kind is EdgeKind.SHARE:
            self._shares |= value
        else:
            self._weights.receive(sender, value)

    def roots(self, micro_batch: int) -> list[tuple[GradientEdge, Tensor]]:
        """Return the shares of later users as roots, if each micro-batch is an update."""
        # As roots, autograd sums them with the uses on this stage one after another, from the last
        # use to the first, as in the unsplit model. Added afterwards, they would round otherwise.
        if self._per_update > 1:
            return []
        shares, self._shares = self._shares, {}
        return [
            (get_gradient_edge(self._weights.holder(name).leaf(name, micro_batch)), share)
            for name, share in shares.items()
        ]

    def ended(self, micro_batch: int) -> Outgoing:
        """Add the shares of later users; pass on borrowed weights' gradients after an update."""
        shares, self._shares = self._shares, {}
        for name, share in shares.items():
            self._weights.holder(name).add_gradient(name, share)
        if not self._passed_on or (micro_batch + 1) % self._per_update:
            return {}
        taken = {n: self._weights.holder(n).take_gradient(n) for n in self._passed_on}
        return {EdgeKind.SHARE: taken}

    def after(self, update: Update, optimizer: torch.optim.Optimizer | None) -> Outgoing:
        """Send the new version of owned weights to the stages that use them."""
        if not self._lent:
            return {}
        # Copies, since the next step may change these weights in place.
        named = self._weights.own.named
        return {EdgeKind.WEIGHT: {name: named[name].detach().clone() for name in self._lent}}


def _names(ties: Mapping[Edge, Sequence[Tie]]) -> list[str]:
    """Return the names of tied weights, each once."""
    return list(dict.fromkeys(tie.name for of_edge in ties.values() for tie in of_edge))
