"""The state that a forward leaves for its backward: where autograd begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipedream_rt.messages.head import MiniBatch
from pipedream_rt.messages.tree import Structure, Value, flatten, own, unflatten
from pipedream_rt.models.program import numbered
from pipedream_rt.stage.runner import Runner
from pipedream_rt.stage.split_backward import SplitBackward
from pipedream_rt.stage.values import Gradients


class Boundary(torch.autograd.Function):
    """The identity at the entrance of a stage, which catches the gradient of an input tensor."""

    # The module gets a tensor that is no leaf, as inside an unsplit model, so that a first layer
    # may work in place (``ReLU(inplace=True)``). The gradient is not read from ``leaf.grad``, which
    # takes the strides of the leaf: kernels round differently for other strides.

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, caught: list[Tensor]) -> Tensor:
        """Return a tensor over the leaf's storage that autograd does not take for a view of it."""
        ctx.caught = caught
        # Else autograd makes zeros where no gradient comes. An optimizer takes them for a gradient:
        # weights would decay that the unsplit model leaves alone.
        ctx.set_materialize_grads(False)
        # A view that is made in a custom Function may not be changed in place.
        alias = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return alias.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        """Keep the gradient, if one comes; it goes no further."""
        if gradients[0] is not None:
            ctx.caught.append(gradients[0])
        return None, None


@dataclass(slots=True, kw_only=True)
class Flight:
    """A micro-batch in flight on a stage.

    Attributes:
        mini_batch: What it has in common with the others of its mini-batch.
        caught: By input, by tensor that asked for a gradient: a list to which autograd appends it.
        entrances: The autograd nodes at which these gradients are caught.
        outputs: By consumer, the edges where the backward begins; on the loss's stage, the loss.
        unit: The gradient of the loss (a one), on the stage that computes it.
        said: Parts of the loss, and metrics, by name; on that stage.
        split: The backward whose first half is done; None before that, and if there is nothing to
            differentiate.
    """

    mini_batch: MiniBatch
    empty: bool = False
    caught: list[list[list[Tensor]]] = field(default_factory=list)
    entrances: list[Node] = field(default_factory=list)
    outputs: list[list[GradientEdge]] = field(default_factory=list)
    unit: Tensor | None = None
    said: dict[str, float | str] = field(default_factory=dict)
    split: SplitBackward | None = None

    def enter(
        self, runner: Runner, inputs: Sequence[Value], program: int, numbers: Sequence[int] = ()
    ) -> dict[int, Any]:
        """Return the input values by slot, behind the nodes that catch their gradients."""
        values = numbered(numbers)
        for source, (structure, received, requires_grad) in zip(
            runner.sources, inputs, strict=True
        ):
            tensors = list(received)
            caught: list[list[Tensor]] = []
            for i, wanted in enumerate(requires_grad):
                if wanted:
                    caught.append([])
                    leaf = tensors[i].requires_grad_()
                    inside: Tensor = Boundary.apply(leaf, caught[-1])  # type: ignore[no-untyped-call]
                    assert inside.grad_fn is not None
                    # Read now: a layer that works in place would give the tensor another node.
                    self.entrances.append(inside.grad_fn)
                    tensors[i] = inside
            self.caught.append(caught)
            runner.put_in(program, source, unflatten(structure, tensors), values)
        return values

    def leave(self, made: Sequence[Any]) -> list[Value]:
        """Return the values for each consumer, and note where the backward will begin."""
        flat = list(map(flatten, made))
        # Edges, not tensors, which would keep the values of the outputs in memory.
        self.outputs = [
            [get_gradient_edge(t) for t in tensors if t.requires_grad] for _, tensors in flat
        ]
        return [outgoing(structure, tensors) for structure, tensors in flat]

    def end_in(self, loss: Tensor) -> None:
        """Note that the backward begins at the loss."""
        self.outputs, self.unit = [[get_gradient_edge(loss)]], torch.ones_like(loss)

    def begin(self, gradients: Sequence[Gradients]) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return where a backward begins, and the gradients there: one from each consumer."""
        if self.unit is not None:
            return [*self.outputs[0]], [self.unit]
        pairs = [
            (output, gradient)
            for outputs, of_consumer in zip(self.outputs, gradients)
            for output, gradient in zip(outputs, of_consumer)
            if gradient is not None
        ]
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]

    def found(self) -> list[Gradients]:
        """Return by input the gradients that were caught at the entrance of the stage."""
        return [[own(c[0]) if c else None for c in caught] for caught in self.caught]


def outgoing(structure: Structure, tensors: Sequence[Tensor]) -> Value:
    """Return a flattened output as a value whose tensors do not change until they are sent."""
    # Nobody changes tensors that require a gradient: they belong to autograd. Others may be a
    # buffer or a workspace that the next forward overwrites.
    wanted = [tensor.requires_grad for tensor in tensors]
    sent = [own(t, copy=not graded) for t, graded in zip(tensors, wanted, strict=True)]
    return Value(structure, tuple(sent), tuple(wanted))
