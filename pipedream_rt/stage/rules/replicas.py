"""Replicas: the gradients of an update are summed over them, in rank order.

Each replica adds up all parts itself, in the same order, so all come to the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules import EdgeKind
from pipedream_rt.schedules.edges import Address, Edge
from pipedream_rt.stage.hyper import Hyper
from pipedream_rt.stage.rules.rule import Context, Packed, Update, UpdateRule
from pipedream_rt.stage.values import Outgoing, dense, with_gaps


class ReplicaGradients(NamedTuple):
    """The gradients that a replica has summed for an update."""

    gradients: list[Tensor | None]
    hyper: list[Hyper]
    read: list[int]  # versions, one for each micro-batch with samples
    skipped: bool = False


class Replicas(UpdateRule):
    """The gradients that one replica has summed, and those that the others have sent.

    Source: Narayanan et al., PipeDream (SOSP 2019), section 3.2 (1F1B-RR).
    """

    channels = (EdgeKind.PARTIAL,)

    def __init__(self, context: Context) -> None:
        self._context = context
        self._mine: dict[int, ReplicaGradients] = {}  # by update, what this replica has sent
        self._received: dict[Address, ReplicaGradients] = {}

    def reduce(self, update: Update) -> Outgoing:
        """Send the gradients that this replica has summed for an update."""
        for name, gradient in zip(self._context.named, update.gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise ConfigError(
                    f"stage {self._context.stage}: the gradient of {name!r} is sparse, and "
                    "replicas add up dense ones alone; make the layer with sparse=False"
                )
        part = ReplicaGradients(update.gradients, update.hyper, update.read, update.skipped)
        self._mine[update.number] = part
        return {EdgeKind.PARTIAL: part}

    def pack(self, edge: Edge, value: ReplicaGradients) -> Packed:
        present, tensors = dense(value.gradients)
        return Packed([present, *value[1:]], tensors)

    def open(self, edge: Edge, number: int, packed: Packed) -> ReplicaGradients:
        present, *rest = packed.values
        return ReplicaGradients(with_gaps(present, packed.tensors), *rest)

    def receive(self, kind: EdgeKind, sender: Address, value: Any) -> None:
        """Take the gradients of another replica for the update whose step is next."""
        self._received[sender] = value

    @torch.no_grad()
    def collect(self, update: Update) -> Outgoing:
        """Sum the gradients of all replicas."""
        parts, self._received = self._received, {}
        if update.number in self._mine:
            parts[self._context.address] = self._mine.pop(update.number)
        ordered = [parts[address] for address in sorted(parts)]
        total: list[Tensor | None] = [None] * len(self._context.named)
        for part in ordered:
            for i, gradient in enumerate(part.gradients):
                before = total[i]
                if gradient is not None:
                    # A clone: the update may change it, while others still use what was sent.
                    total[i] = gradient.clone() if before is None else before.add_(gradient)
        update.gradients, update.hyper = total, ordered[0].hyper
        update.skipped = any(part.skipped for part in ordered)
        update.read = [version for part in ordered for version in part.read]
        return {}
