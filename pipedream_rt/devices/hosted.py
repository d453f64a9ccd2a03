"""Values of the script in the memory of the host, wherever the script has made them."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from pipedream_rt.models.program import replaced

T = TypeVar("T")


def is_away(tensor: Tensor) -> bool:
    """Whether a tensor has values in another memory than that of the host."""
    return not (tensor.is_cpu or tensor.is_meta)


def _may_be_away() -> bool:
    """Whether this process has used an accelerator, so that tensors may be there."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return False
    known: bool = getattr(torch.get_device_module(kind), "is_initialized", lambda: True)()
    return known


def on_host(value: T) -> T:
    """Return a value whose tensors are in the memory of the host; itself if they are there.

    A tensor that occurs twice is one tensor in the result too.
    """
    if not _may_be_away():  # each mini-batch comes here
        return value
    made: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        if not is_away(tensor):
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = tensor.cpu()
        return made[id(tensor)]

    found: T = replaced(value, (Tensor,), moved)
    return found
