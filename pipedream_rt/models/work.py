"""The work of an operation of torch, by the shapes of what it takes and makes.

Nothing is measured, so the same model with the same example has the same work everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from pipedream_rt.torch_private import ATTENTION

_OF_A_BYTE = 8
"""The FLOPs that a written byte counts for: a core multiplies faster than memory takes."""

_OF_AN_UPDATE = 4
"""How often an update writes each weight, on the scale of a forward; a mini-batch takes about
three. Gradients come, and an optimizer goes over weights, gradients and its state."""


def work_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any, tensors: Sequence[Tensor]
) -> int:
    """Return the FLOPs of a call of an operator that has ``made`` tensors, and of their bytes."""
    written = 0 if func.is_view else sum(map(_size_of, tensors))
    packet = func.overloadpacket
    formula = flop_registry.get(ATTENTION.get(packet, packet))
    flops = 0
    if formula is not None:
        with suppress(Exception):  # one for other layouts, or of somebody else, may raise anything
            flops = int(formula(*args, **kwargs, out_val=made))
    return flops + _OF_A_BYTE * written


def work_of_update(parameters: Iterable[nn.Parameter]) -> int:
    """Return the work of an update of weights, on the scale of a forward."""
    return _OF_A_BYTE * _OF_AN_UPDATE * sum(map(_size_of, parameters))


def _size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor; those of a sparse one, which has no ``nbytes``, as if dense."""
    return tensor.numel() * tensor.element_size()
