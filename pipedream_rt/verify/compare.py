"""Comparing what two trainings have computed, value by value, in the order of computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipedream_rt.stage.loss_check import rounding_of
from pipedream_rt.stage.parameters import same


class Place(NamedTuple):
    """Where a value was seen.

    Attributes:
        step: The number of the mini-batch.
        micro_batch: Counted over all mini-batches; -1 for what belongs to the update.
        kind: ``"input"`` or ``"output"`` of a layer, ``"loss"``, or ``"result"``, the output of the
            model, where the script computes the loss; ``"gradient"``, ``"state"``.
        name: The layer, with ``#2`` at its second call; the parameter or the buffer.
        number: Which of the tensors of an input or output.
    """

    step: int
    micro_batch: int
    kind: str
    name: str = ""
    number: int = 0

    def __str__(self) -> str:
        """Return the place in words."""
        which = f" (tensor {self.number})" if self.number else ""
        of = {
            "input": f"the input{which} of layer {self.name}",
            "output": f"the output{which} of layer {self.name}",
            "loss": "the loss",
            "result": "the output of the model",
            "gradient": f"the gradient of {self.name}",
            "state": f"{self.name} after the update",
        }[self.kind]
        at = f"mini-batch {self.step}"
        return of + (
            f", micro-batch {self.micro_batch} of {at}" if self.micro_batch >= 0 else f", {at}"
        )


Seen: TypeAlias = dict[Place, Any]
"""The values of a training, in the order of computation: `sampled` tensors, and losses."""

MOST = 1 << 14
"""The elements of a tensor that are compared, at most: so its size does not count."""


def sampled(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the host; of a large one, every n-th element."""
    values = tensor.detach()
    values = values if values.layout is torch.strided else values.to_dense()
    if values.numel() > MOST:
        # An odd step, so that a power of two does not pick the same columns of each row.
        values = values.reshape(-1)[:: values.numel() // MOST | 1]
    return values.to("cpu", copy=True)


@dataclass(frozen=True, slots=True)
class Verification:
    """What `Pipeline.verify` has found. It is true if nothing parts from plain PyTorch.

    Attributes:
        same: Whether no value that was compared differs by more than rounding.
        values: The number of values that were compared: tensors, and losses.
        steps: The number of mini-batches that were trained on.
        parted: The first value that differs by more than rounding, in words; empty if none does.
        difference: By how much it differs, as a share of its largest element; 0.0 if none does.
        cause: The likeliest cause; empty if none does.
        notes: What was left out of the comparison, and what else there is to know, in sentences.
    """

    same: bool
    values: int
    steps: int
    parted: str = ""
    difference: float = 0.0
    cause: str = ""
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether nothing parts from plain PyTorch."""
        return self.same

    def __str__(self) -> str:
        """Return what was found, in sentences."""
        if self.same:
            text = f"the same as plain PyTorch: {self.values} values of {self.steps} mini-batches"
        else:
            before = f", after {self.values} values that are the same" if self.values else ""
            text = (
                f"not the same as plain PyTorch: {self.parted} differs by {self.difference:.2g} of "
                f"its largest element{before}. {self.cause}"
            )
        return "\n".join([text, *(f"- {note}" for note in self.notes)])


class Parted(NamedTuple):
    """The first value that differs.

    Attributes:
        difference: As a share of the largest element; infinite where one side lacks the value.
        before: The number of values before it, which are the same.
        rounds: Whether rounding may explain the difference.
    """

    place: Place
    difference: float
    before: int
    rounds: bool


def compared(
    plain: Seen, other: Seen, excused: Callable[[Place, float], bool] = lambda place, by: False
) -> tuple[int, Parted | None]:
    """Return how many values were compared, and the first that differs by more than rounding.

    If none does, the first that differs at all; None if all bits are the same. ``excused`` says of
    a difference whether it is rounding all the same.
    """
    count, first = 0, None
    for place, value in plain.items():
        if place not in other:
            continue
        by, rounds = difference(value, other[place])
        if by and (first is None or not rounds):
            rounds = rounds or excused(place, by)
            first = Parted(place, by, count, rounds) if first is None or not rounds else first
            if not rounds:
                return count, first
        count += 1
    return count, first


def lacking(plain: Seen, other: Seen, kinds: Sequence[str]) -> Place | None:
    """Return the first place, of some kinds, that one training has and the other lacks."""
    for one, another in ((plain, other), (other, plain)):
        for place in one:
            if place.kind in kinds and place not in another:
                return place
    return None


def difference(one: Any, other: Any) -> tuple[float, bool]:
    """Return the difference as a share of the largest element, and whether it may be rounding."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        if len(one) != len(other):
            return float("inf"), False
        parts = [difference(*pair) for pair in zip(one, other, strict=True)]
        return max((by for by, _ in parts), default=0.0), all(rounds for _, rounds in parts)
    # A bool is a number too; of all else it is only known whether it is equal.
    if not all(isinstance(each, Tensor | float | int) for each in (one, other)):
        equal = type(one) is type(other) and bool(one == other)
        return (0.0 if equal else float("inf")), equal
    one, other = (
        each if isinstance(each, Tensor) else torch.tensor(each, dtype=torch.float32)
        for each in (one, other)
    )
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf"), False
    if same(one, other):
        return 0.0, True
    wide = torch.complex128 if one.is_complex() else torch.float64
    gap = (one.to(wide) - other.to(wide)).abs()
    size = max(one.to(wide).abs().max().item(), other.to(wide).abs().max().item())
    share = gap.max().item() / size if size else float("inf")
    if not share < float("inf"):  # NaN or infinite in one of them
        return float("inf"), False
    # Other bits with a difference of 0 are those of -0.0; the least number above 0 tells of them.
    exact = not (one.is_floating_point() or one.is_complex())
    return share or 5e-324, share <= (0.0 if exact else rounding_of(one.dtype.to_real()))


def apart(
    one: Mapping[str, Any], other: Mapping[str, Any], exact: bool = False
) -> dict[str, float]:
    """Return the values that differ by more than rounding, or ``exact`` at all, and by how much.

    A tensor that is not there is one of zeros, as a gradient of what was not used.
    """
    found = {}
    for name in {**one, **other}:
        pair = [one.get(name), other.get(name)]
        there = [each for each in pair if isinstance(each, Tensor)]
        if len(there) == 1 and None in [each for each in pair if not isinstance(each, Tensor)]:
            pair = [there[0], torch.zeros_like(there[0])]
        by, rounds = difference(*pair)
        if by and (exact or not rounds):
            found[name] = by
    return found


_CAUSES: Mapping[str, str] = {
    "input": (
        "The layer before it gave the same, so it is what is done between the two: in the forward "
        "of the model, by a hook of the whole model, or by a codec"
    ),
    "output": (
        "Its input is the same, so the layer goes by something else than its input and its "
        "weights: an object that it shares with other layers or with the script (a dict, a "
        "counter, a generator), a global or an attribute of its class, random numbers of Python or "
        "NumPy, a clock"
    ),
    "loss": (
        "All layers gave the same, so it is the loss: it reads something that the script or a "
        "layer changes (a global, a closure, an attribute), or draws random numbers of its own"
    ),
    "result": (
        "The script gets another output than a copy of its model gives: a layer goes by something "
        "else than its input and its weights (a global, an attribute of its class, random numbers "
        "of Python or NumPy, a clock)"
    ),
    "gradient": (
        "All layers and losses gave the same, so it is in the backward: a hook of the model or of "
        "a parameter, an autograd function with a state, a loss that is detached in part, or how "
        "gradients are clipped"
    ),
    "state": (
        "All gradients are the same, so it is the step of the optimizer: an attribute, a default "
        "or a count that it keeps for all parameters, or random numbers; or, of a buffer, how a "
        "layer changes it"
    ),
}


def cause_of(place: Place) -> str:
    """Return the likeliest cause of the first value that differs: all before it are the same."""
    later = " It parts in a later micro-batch alone, so something has changed meanwhile."
    first = place.step == 0 and place.micro_batch <= 0
    return f"{_CAUSES[place.kind]}.{'' if first else later}"
