"""Joining the outputs of micro-batches into that of the mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.tree import Structure, Value, own, places


class Part(NamedTuple):
    """The output of a micro-batch.

    Attributes:
        number: The number of the micro-batch.
        samples: The number of its samples.
    """

    number: int
    samples: int
    value: Value


def joined(parts: Sequence[Part]) -> tuple[Structure, list[Tensor], list[bool]]:
    """Return the output of a whole mini-batch: structure, tensors, and which ask for a gradient.

    Tensors are joined along their first dimension, which counts samples. They are the caller's own.
    """
    first = parts[0].value
    if len(parts) == 1:
        return first.structure, [own(t, copy=True) for t in first.tensors], [*first.requires_grad]
    named = places(first.structure)
    for part in parts[1:]:
        if part.value.structure != first.structure:
            raise ConfigError(
                f"the outputs of the micro-batches {parts[0].number} and {part.number} are not of "
                "one form, or hold plain values that differ, so they cannot be joined to that of "
                "the mini-batch: let the model return tensors of (samples, ...) alone, or give "
                "micro_batches=1"
            )
    tensors = []
    for i, tensor in enumerate(first.tensors):
        pieces = [part.value.tensors[i] for part in parts]
        for part, piece in zip(parts, pieces, strict=True):
            if not piece.dim() or len(piece) != part.samples:
                where = f"[{named[i]!r}]" if named[i] else ""
                raise ConfigError(
                    f"output{where} of a micro-batch of {part.samples} samples has the shape "
                    f"{tuple(piece.shape)}, and only tensors of (samples, ...) can be joined to "
                    "the output of the mini-batch: return such tensors, or give micro_batches=1, "
                    f"with which nothing is joined (found in a tensor like {tuple(tensor.shape)})"
                )
        tensors.append(torch.cat([piece.detach() for piece in pieces]))
    flags = zip(*(part.value.requires_grad for part in parts), strict=True)
    return first.structure, tensors, [any(each) for each in flags]
