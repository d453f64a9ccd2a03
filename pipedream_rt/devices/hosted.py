"""Values of the script, brought to the memory of the host."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from pipedream_rt.devices.choice import module_in_use
from pipedream_rt.models.program import replaced
from pipedream_rt.models.tensors import is_away

T = TypeVar("T")


def on_host(value: T) -> T:
    """Return a value whose tensors are in the memory of the host; itself if they are there."""
    if module_in_use(unknown=True) is None:  # each mini-batch comes here: no walk without need
        return value
    made: dict[int, Tensor] = {}  # a tensor that occurs twice stays one tensor

    def moved(tensor: Tensor) -> Tensor:
        if not is_away(tensor):
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = tensor.cpu()
        return made[id(tensor)]

    found: T = replaced(value, (Tensor,), moved)
    return found
