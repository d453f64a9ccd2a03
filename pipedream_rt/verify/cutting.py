"""A mini-batch beside its micro-batches, in plain PyTorch: what differs because it was cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from pipedream_rt.batches.micro_batches import CutBatch
from pipedream_rt.lifecycle import is_of_a_handler
from pipedream_rt.torch_private import NormWithBuffers
from pipedream_rt.verify.compare import apart
from pipedream_rt.verify.plain import PlainTraining, rounding_in

MANY = 16
"""How many times what another rounding of the weights changes counts as rounding too."""


class Cutting(NamedTuple):
    """The differences between a mini-batch in micro-batches and as one.

    Attributes:
        losses: That of the whole, and the weighed sum of the micro-batches.
        loss: By how much they differ, as a share; 0.0 if by no more than rounding.
        gradient: The parameter whose gradient differs most; empty if by no more than rounding.
        difference: By how much it differs, as a share of its largest element.
        kept: The buffers and attributes that a forward leaves otherwise, and by how much.
    """

    losses: tuple[float, float]
    loss: float = 0.0
    gradient: str = ""
    difference: float = 0.0
    kept: Mapping[str, float] = MappingProxyType({})


def whole_and_parts(plain: PlainTraining, cut: CutBatch) -> Cutting | None:
    """Train on the first two micro-batches as one and one by one; return what differs.

    Nothing is stepped, and all is as before. Batch norms are in eval mode, and so is all else where
    the training forward draws random numbers. None where nothing can be compared: there is one
    micro-batch, it draws in eval mode too, it differs from itself, or it raises.
    """
    if len(cut.filled) < 2 or cut.is_whole:  # such a loss has nothing to say of parts
        return None
    for kinds in (NormWithBuffers, nn.Module):
        try:
            with plain.in_eval_mode(kinds):
                found = _compared(plain, cut)
        except Exception as error:  # the user's code, given more samples than it was written for
            if is_of_a_handler(error):
                raise
            plain.notes["whole"] = None
            return None
        if found is not None:
            return found
    return None


def _compared(plain: PlainTraining, cut: CutBatch) -> Cutting | None:
    filled = list(cut.filled.values())[:2]
    (whole, _), *parts = cut.first(2)
    total = math.fsum(part.share for part in filled) or 1.0
    # Losses that were divided by the total add up already.
    shares = [1.0 if cut.told else part.share / total for part in filled]
    one = [(*plain.flat(whole), 1.0)]
    several = [
        (*plain.flat(b), share) for (b, _), share in zip(parts, shares, strict=True) if share
    ]
    kept, held = plain.kept(), plain.held()
    plain.seed(0, "whole")
    before = plain.drawn()
    # Each part begins as it was kept, so that what forwards change does not count; then in order.
    of_whole, gradient, left = plain.gradients(one, kept)
    of_parts, summed, by_parts = plain.gradients(several, kept)
    if apart(held, left, exact=True) or apart(held, by_parts, exact=True):
        by_parts = plain.gradients(several, kept, anew=False)[2]
    if plain.drawn() != before or not math.isfinite(of_whole + of_parts):
        return None
    by = abs(of_whole - of_parts) / max(abs(of_whole), abs(of_parts), 1e-30)
    rounding = rounding_in(plain.job)
    found = {n: d for n, d in apart(gradient, summed).items() if d > rounding}
    if found or by > rounding:
        again = plain.gradients(one, kept)
        if again[0] != of_whole or apart(gradient, again[1]):
            return None
        # A gradient that is zero but for rounding, as of the bias of keys, differs by much.
        with plain.nudged():
            noise = apart(gradient, plain.gradients(one, kept)[1], exact=True)
        found = {name: d for name, d in found.items() if d > MANY * noise.get(name, 0.0)}
    name = max(found, key=lambda name: found[name], default="")
    return Cutting(
        losses=(of_whole, of_parts),
        loss=by if by > rounding else 0.0,
        gradient=name,
        difference=found.get(name, 0.0),
        kept=apart(left, by_parts),
    )


def noise_of(plain: PlainTraining, cut: CutBatch) -> dict[str, float]:
    """Return by how much the gradients of a mini-batch differ if weights are rounded otherwise.

    One that differs from itself is left out: that is no rounding.
    """
    filled = [(p.inputs, p.target, p.share) for p in cut.filled.values() if p.share]
    if cut.is_whole:
        filled = [(*plain.flat(cut.batch), 1.0)]
    kept, found = plain.kept(), []
    for nudges in (nullcontext(), nullcontext(), plain.nudged()):
        plain.seed(0, "noise")
        with nudges:
            found.append(plain.gradients(filled, kept)[1])
    one, again, other = found
    differs = apart(one, again)
    return {n: by for n, by in apart(one, other, exact=True).items() if n not in differs}
