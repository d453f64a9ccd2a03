"""The loss of a whole mini-batch, on the stage that has the outputs of all its micro-batches.

The outputs of an update's micro-batches meet here, as its schedule does all their forwards before
the first backward. The loss is computed once, of all of them joined; the first backward computes
the gradients of the outputs, and each micro-batch takes its part of these.

Where nobody has said what kind of loss it is, the first mini-batch decides: a loss that is the
weighed mean of those of micro-batches is computed of each of them, as it always was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from pipedream_rt.devices import DeferredScalar
from pipedream_rt.messages.tree import Value, flatten, unflatten
from pipedream_rt.stage.in_flight import Boundary
from pipedream_rt.stage.joining import Part, dense_of, joined, slices
from pipedream_rt.stage.loss_check import Compared, Verdict, are_large, verdict
from pipedream_rt.stage.spec import LossFunction
from pipedream_rt.stage.values import Gradients
from pipedream_rt.torch_private import run_backward


class Met(NamedTuple):
    """A micro-batch whose loss is computed with those of the others of its update.

    Attributes:
        output: The output of the model, in the graph of autograd.
        value: The same as a value.
        share: Its weight, with that of the mini-batch as 1.
    """

    number: int
    samples: int
    output: Any
    value: Value
    target: Value
    share: float
    metrics: bytes

    @classmethod
    def of(cls, number: int, samples: int, output: Any, target: Value) -> Met:
        """Return a micro-batch of which nothing but the loss is asked."""
        structure, tensors = flatten(output)
        value = Value(structure, tuple(tensors), tuple(t.requires_grad for t in tensors))
        return cls(number, samples, output, value, target, 1.0, b"")


class LossOfUpdate(NamedTuple):
    """The loss of an update, sent with its last micro-batch that has samples.

    Attributes:
        loss: The loss of the whole; None where it was computed of each micro-batch.
        parts: The loss of each micro-batch with samples, where it was.
        whole: Why it was computed of the whole, in words; empty where it was not.
    """

    loss: float | DeferredScalar | None = None
    parts: Sequence[float] = ()
    whole: str = ""


class WholeLoss:
    """The micro-batches of an update until its loss is computed, and then their gradients.

    Attributes:
        met: Those whose forward is done.
        has_gradients: Whether the next backward of a micro-batch begins at a loss of the whole.
    """

    def __init__(self) -> None:
        self.met: list[Met] = []
        self.has_gradients = False
        self._parts: list[Part] = []  # that were joined, and which tensors ask for a gradient
        self._asks: list[bool] = []
        self._caught: list[list[Tensor]] = []  # the gradients of these
        self._loss: Tensor | None = None
        self._gradients: dict[int, Gradients] = {}

    def verdict(self, loss_fn: LossFunction) -> Verdict:
        """Return the verdict on a loss by these micro-batches."""
        compared = [
            Compared(
                unflatten(each.value.structure, [t.detach() for t in each.value.tensors]),
                unflatten(each.target.structure, each.target.tensors),
                each.share,
                each.samples,
            )
            for each in self.met
        ]
        large = are_large(self.met[0].value.tensors, len(self.met))
        return verdict(loss_fn, compared, precisely=not large)

    def join(self) -> tuple[Any, Value]:
        """Return the outputs of all micro-batches, joined, and their targets."""
        self._parts = [Part(each.number, each.samples, each.value) for each in self.met]
        form, outputs, self._asks = joined(self._parts)
        self._caught = [[] for asked in self._asks if asked]
        caught, apply = iter(self._caught), cast("Any", Boundary.apply)
        # A loss may work in place, which torch refuses for a leaf.
        inside = [
            apply(tensor.requires_grad_(), next(caught)) if asked else tensor
            for tensor, asked in zip(outputs, self._asks, strict=True)
        ]
        targets = [
            Part(
                each.number,
                each.samples,
                each.target._replace(requires_grad=(False,) * len(each.target.tensors)),
            )
            for each in self.met
        ]
        structure, tensors, _ = joined(targets, "target")
        return unflatten(form, inside), Value(structure, tuple(tensors))

    def begin(self, loss: Tensor) -> None:
        """Let the backward of all these micro-batches begin at a loss."""
        self._loss, self.has_gradients = loss, True

    def gradients(self, number: int) -> Gradients:
        """Return the gradients of the output of a micro-batch, after the loss's own backward."""
        if self._loss is not None:
            # Within the backward of the first: the loss may have weights of its own.
            loss, self._loss, self.has_gradients = self._loss, None, False
            run_backward(
                (loss,), (loss.new_ones(loss.shape),), False, False, (),
                allow_unreachable=True, accumulate_grad=True,
            )  # fmt: skip
            of_outputs = [dense_of(each[0]) if each else None for each in self._caught]
            of_parts = slices(self._parts, self._asks, of_outputs)
            numbers = [part.number for part in self._parts]
            self._gradients = dict(zip(numbers, of_parts, strict=True))
            self._parts, self._asks, self._caught = [], [], []
        gradients = self._gradients.pop(number, [])
        self.has_gradients = bool(self._gradients)
        return gradients


def mean_of_said(
    reported: Sequence[Mapping[str, float | str]], shares: Sequence[float]
) -> dict[str, float | str]:
    """Return the weighed means of numbers by name; a text, which says what is wrong, stays."""
    found: dict[str, float | str] = {}
    for name in dict.fromkeys(name for each in reported for name in each):
        there = [
            (each[name], share) for each, share in zip(reported, shares) if name in each and share
        ]
        text = next((value for value, _ in there if isinstance(value, str)), None)
        numbers = [(value, share) for value, share in there if not isinstance(value, str)]
        if text is not None:
            found[name] = text
        elif numbers:
            found[name] = mean(numbers, len(numbers) == sum(map(bool, shares)))
    return found


def mean(found: Sequence[tuple[float, float]], of_all: bool) -> float:
    """Return the mean of (value, share) pairs; ``of_all``: whether the shares together are one."""
    total = sum(value * share for value, share in found)
    # To divide by one would round.
    return total if of_all else total / sum(share for _, share in found)
