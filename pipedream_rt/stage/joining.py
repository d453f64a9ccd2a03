"""Joining the outputs of micro-batches into that of the mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.tree import Structure, Value, own, places

_ONE = 'micro_batches=1, schedule="gpipe"'


class Part(NamedTuple):
    """The output of a micro-batch.

    Attributes:
        number: The number of the micro-batch.
        samples: The number of its samples.
    """

    number: int
    samples: int
    value: Value


def joined(
    parts: Sequence[Part], what: str = "output"
) -> tuple[Structure, list[Tensor], list[bool]]:
    """Return the output of a whole mini-batch: structure, tensors, and which ask for a gradient.

    Tensors are joined along their first dimension, which counts samples; those that are the same in
    all parts may have none. They are the caller's own. ``what`` is its name in errors.
    """
    first = parts[0].value
    if len(parts) == 1:
        return first.structure, [own(t, copy=True) for t in first.tensors], [*first.requires_grad]
    named = places(first.structure)
    for part in parts[1:]:
        if part.value.structure != first.structure:
            raise ConfigError(
                f"the {what}s of the micro-batches {parts[0].number} and {part.number} are not of "
                "one form, or hold plain values that differ, so they cannot be joined to that of "
                f"the mini-batch: let it be tensors of (samples, ...) alone, or give {_ONE}"
            )
    tensors = []
    for i in range(len(first.tensors)):
        pieces = [part.value.tensors[i] for part in parts]
        counts = all(p.dim() and len(p) == part.samples for part, p in zip(parts, pieces))
        asked = any(part.value.requires_grad[i] for part in parts)
        if not (counts or asked) and all(torch.equal(piece, pieces[0]) for piece in pieces):
            tensors.append(own(pieces[0], copy=True))  # as a temperature
            continue
        for part, piece in zip(parts, pieces, strict=True):
            if not piece.dim() or len(piece) != part.samples:
                raise ConfigError(
                    f"{what}{_at(named[i])} of a micro-batch of {part.samples} samples has "
                    f"the shape {tuple(piece.shape)}, and only tensors of (samples, ...) can be "
                    f"joined to the {what} of the mini-batch: let it be such tensors, or give "
                    f"{_ONE}, with which nothing is joined"
                )
        others = {(piece.shape[1:], piece.dtype) for piece in pieces}
        if len(others) > 1:
            shapes = ", ".join(str(tuple(piece.shape)) for piece in pieces)
            raise ConfigError(
                f"{what}{_at(named[i])} of the micro-batches has the shapes {shapes}, which "
                "cannot be joined to that of the mini-batch: pad it to one length, or give "
                f"{_ONE}, with which nothing is joined"
            )
        tensors.append(torch.cat([piece.detach() for piece in pieces]))
    flags = zip(*(part.value.requires_grad for part in parts), strict=True)
    return first.structure, tensors, [any(each) for each in flags]


def slices(
    parts: Sequence[Part], asks: Sequence[bool], gradients: Sequence[Tensor | None]
) -> list[list[Tensor | None]]:
    """Return, by micro-batch, the gradients of those tensors of its output that ask for one.

    ``asks`` says which tensors of the joined output ask for one; ``gradients`` has these.
    """
    left = iter(gradients)
    of_all = [next(left) if asked else None for asked in asks]
    if len(parts) == 1:  # it was not joined, and may be of any shape
        return [_asked(parts[0], of_all)]
    found, start = [], 0
    for part in parts:
        cut = [None if g is None else g.narrow(0, start, part.samples) for g in of_all]
        found.append(_asked(part, cut))
        start += part.samples
    return found


def _asked(part: Part, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of those tensors that ask for one in a micro-batch."""
    pairs = zip(gradients, part.value.requires_grad, strict=True)
    return [gradient for gradient, asked in pairs if asked]


def _at(name: str) -> str:
    """Return the place of a tensor in an output, for an error."""
    return f"[{name!r}]" if name else ""


def summed(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients; either may be missing."""
    return other if one is None else one if other is None else one + other


def dense_of(gradient: Tensor) -> Tensor:
    """Return a gradient as the stages take it: one of sparse rows becomes a dense one."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
