"""Values that stages hand to each other, and the messages that carry them.

A stage takes and returns values: tensors with little around them. Here each kind of message becomes
a value, and each value the payload and the tensors of a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipedream_rt.messages.message import (
    Gradient,
    Message,
    MicroBatch,
    Norm,
    Partial,
    Passed,
    Payload,
    Share,
    Stepped,
    Target,
    Total,
    Weight,
)
from pipedream_rt.messages.tree import Value, flatten
from pipedream_rt.schedules import Edge, EdgeKind, Plan

Gradients: TypeAlias = list[Tensor | None]
"""The gradients of those tensors of a value that asked for one, in order; None where none came."""

NOTHING = Value(flatten(None)[0], (), ())
"""The value that a micro-batch without samples carries."""


class ReplicaGradients(NamedTuple):
    """What a replica has summed for an update."""

    gradients: list[Tensor | None]
    hyper: list[dict[str, Any]]  # by parameter group, packed
    read: list[int]  # versions, one for each micro-batch with samples


# -- from messages ------------------------------------------------------------------------------


def value_of(message: Message, tensors: tuple[Tensor, ...]) -> Value:
    """Return the value of a micro-batch's message, given its tensors unpacked."""
    head = message.payload
    assert isinstance(head, MicroBatch)
    return Value(head.structure, tensors, tuple(head.requires_grad))


_NO_TARGET = Target(structure=[], share=1.0)


def target_of(message: Message | None) -> tuple[Value | None, Target]:
    """Return the target that a message carries, and its payload."""
    if message is None:
        return None, _NO_TARGET
    head = message.payload
    assert isinstance(head, Target)
    return Value(head.structure, message.tensors, ()), head


def _with_gaps(present: Sequence[bool], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return tensors, the inverse of `dense`: None where there is none."""
    left = iter(tensors)
    return [next(left) if there else None for there in present]


def gradients_of(message: Message, tensors: tuple[Tensor, ...]) -> Gradients:
    """Return the gradients of a message, given its tensors unpacked."""
    head = message.payload
    assert isinstance(head, Gradient)
    return _with_gaps(head.present, tensors)


def trail_of(inputs: Sequence[Message]) -> list[Passed]:
    """Return the trails of all inputs merged, one entry a stage, in the order of stages."""
    trails = (m.payload.trail for m in inputs if isinstance(m.payload, MicroBatch))
    merged = {of_stage[0]: of_stage for trail in trails for of_stage in trail}
    return [merged[stage] for stage in sorted(merged)]


def _part_in(plan: Plan, message: Message) -> ReplicaGradients:
    head = message.payload
    assert isinstance(head, Partial)
    return ReplicaGradients(_with_gaps(head.present, message.tensors), head.hyper, head.read)


def _shares_in(plan: Plan, message: Message) -> dict[str, Tensor]:
    head, edge = message.payload, message.key.edge
    assert isinstance(head, Share)
    shares = _with_gaps(head.present, message.tensors)
    ties = plan.shares_for(plan.stage_of(edge.target))[edge]
    return {tie.name: s for tie, s in zip(ties, shares, strict=True) if s is not None}


def _weights_in(plan: Plan, message: Message) -> dict[str, Tensor]:
    edge = message.key.edge
    ties = plan.borrows(plan.stage_of(edge.target))[edge]
    return dict(zip((tie.name for tie in ties), message.tensors, strict=True))


def _norms_in(plan: Plan, message: Message) -> dict[int, Tensor]:
    head = message.payload
    assert isinstance(head, Norm)
    return dict(zip(head.numbers, message.tensors[0].unbind(), strict=True))


def _total_in(plan: Plan, message: Message) -> tuple[int, float | Tensor]:
    head = message.payload
    assert isinstance(head, Total)
    # A total on an accelerator stays a tensor, so that the host need not wait for it.
    (total,) = message.tensors or (head.total,)
    return head.update, total if isinstance(total, float) or not total.is_cpu else float(total)


def _stepped_in(plan: Plan, message: Message) -> tuple[Tensor, ...]:
    return message.tensors


# -- to messages --------------------------------------------------------------------------------

Packed: TypeAlias = tuple[Payload, tuple[Tensor, ...]]


def dense(values: Sequence[Tensor | None]) -> tuple[list[bool], tuple[Tensor, ...]]:
    """Return which tensors are there, and these without the gaps."""
    return [v is not None for v in values], tuple(v for v in values if v is not None)


def _packed_part(plan: Plan, edge: Edge, part: ReplicaGradients) -> Packed:
    present, tensors = dense(part.gradients)
    return Partial(present=present, hyper=part.hyper, read=part.read), tensors


def _packed_stepped(plan: Plan, edge: Edge, tensors: tuple[Tensor, ...]) -> Packed:
    return Stepped(), tensors


def _packed_weights(plan: Plan, edge: Edge, weights: Mapping[str, Tensor]) -> Packed:
    ties = plan.lends(plan.stage_of(edge.source))[edge]
    return Weight(), tuple(weights[tie.name] for tie in ties)


def _packed_shares(plan: Plan, edge: Edge, shares: Mapping[str, Tensor | None]) -> Packed:
    ties = plan.shares_of(plan.stage_of(edge.source))[edge]
    present, tensors = dense([shares[tie.name] for tie in ties])
    return Share(present=present), tensors


def _packed_norms(plan: Plan, edge: Edge, norms: Mapping[int, Tensor]) -> Packed:
    tensor = torch.stack(list(norms.values())) if norms else torch.empty(0, device="cpu")
    return Norm(numbers=list(norms)), (tensor,)


def _packed_total(plan: Plan, edge: Edge, total: tuple[int, float | Tensor]) -> Packed:
    update, found = total
    if isinstance(found, float):
        return Total(update=update, total=found), ()
    return Total(update=update, total=math.nan), (found,)


PACK: Mapping[EdgeKind, Callable[[Plan, Edge, Any], Packed]] = {
    EdgeKind.PARTIAL: _packed_part,
    EdgeKind.STEPPED: _packed_stepped,
    EdgeKind.WEIGHT: _packed_weights,
    EdgeKind.SHARE: _packed_shares,
    EdgeKind.NORM: _packed_norms,
    EdgeKind.TOTAL: _packed_total,
}
"""By kind of edge, how a value that a stage gives there becomes a message.

Messages of a micro-batch (activations, gradients, losses) also carry what came with it; `Exchange`
makes them.
"""

OPEN: Mapping[EdgeKind, Callable[[Plan, Message], Any]] = {
    EdgeKind.PARTIAL: _part_in,
    EdgeKind.STEPPED: _stepped_in,
    EdgeKind.WEIGHT: _weights_in,
    EdgeKind.SHARE: _shares_in,
    EdgeKind.NORM: _norms_in,
    EdgeKind.TOTAL: _total_in,
}
"""By kind of edge, the inverse of `PACK`.

- PARTIAL: `ReplicaGradients`. STEPPED: the weights that the sender steps, as `Shards` orders them.
- WEIGHT and SHARE: tied weights and shares of their gradients, by name of the weight.
- NORM: norms, by the places of their parameters in the model. TOTAL: an update, and its total.
"""

Outgoing: TypeAlias = dict[EdgeKind, Any]
"""What an action of a stage gives, by kind of edge; see `PACK`."""
