"""Values that stages hand to each other, and the messages of a micro-batch that carry them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from pipedream_rt.messages.head import PLAIN_LOSS, LossTask
from pipedream_rt.messages.message import Activation, Failed, Gradient, Message, Passed, Target
from pipedream_rt.messages.tree import Value
from pipedream_rt.schedules import EdgeKind
from pipedream_rt.stage.hyper import Hyper

Gradients: TypeAlias = list[Tensor | None]
"""The gradients of those tensors of a value that asked for one, in order; None where none came."""

Outgoing: TypeAlias = dict[EdgeKind, Any]
"""The outputs of rules for an update or a version, by kind of edge; `Rule.pack` packs them."""


def activation_of(message: Message) -> Activation:
    """Return the payload of a micro-batch's message."""
    assert isinstance(message.payload, Activation)
    return message.payload


def value_of(message: Message, tensors: tuple[Tensor, ...]) -> Value:
    """Return the value of a micro-batch's message, given its tensors unpacked."""
    payload = activation_of(message)
    return Value(payload.structure, tensors, tuple(payload.requires_grad))


def target_of(messages: Sequence[Message]) -> tuple[Value | None, LossTask]:
    """Return the target among the messages of a micro-batch, which is the last, and its task."""
    payload = messages[-1].payload
    if not isinstance(payload, Target):
        return None, PLAIN_LOSS
    return Value(payload.structure, messages[-1].tensors, ()), payload.task


def gradients_of(message: Message, tensors: tuple[Tensor, ...]) -> Gradients:
    """Return the gradients of a message, given its tensors unpacked."""
    payload = message.payload
    assert isinstance(payload, Gradient)
    return with_gaps(payload.present, tensors)


def said_of_update(messages: Sequence[Message]) -> tuple[bool, list[Hyper] | None]:
    """Return the script's word on the update: whether it is skipped, and its hyper-parameters."""
    payloads = [each.payload for each in messages if isinstance(each.payload, Gradient)]
    hyper = next((each.hyper for each in payloads if each.hyper is not None), None)
    return any(each.skips for each in payloads), hyper


def trail_of(inputs: Sequence[Message]) -> list[Passed]:
    """Return the trails of all inputs merged, one entry a stage, in the order of stages."""
    trails = (m.payload.trail for m in inputs if isinstance(m.payload, Activation))
    merged = {passed.stage: passed for trail in trails for passed in trail}
    return [merged[stage] for stage in sorted(merged)]


def failed_of(inputs: Sequence[Message]) -> Failed | None:
    """Return the error of an earlier stage in a pass; of several, that of the first input."""
    payloads = (m.payload for m in inputs if isinstance(m.payload, Activation))
    return next((each.failed for each in payloads if each.failed is not None), None)


def dense(values: Sequence[Tensor | None]) -> tuple[list[bool], tuple[Tensor, ...]]:
    """Return which tensors are there, and these without the gaps."""
    return [v is not None for v in values], tuple(v for v in values if v is not None)


def with_gaps(present: Sequence[bool], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return tensors, the inverse of `dense`: None where there is none."""
    left = iter(tensors)
    return [next(left) if there else None for there in present]
