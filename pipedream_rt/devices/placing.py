"""The parameters and buffers of a module, moved to a device."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from pipedream_rt.models.tensors import in_place_of, named_tensors
from pipedream_rt.torch_private import shares_type


@torch.no_grad()
def moved(module: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers of a module; those that are shared stay shared."""
    there: dict[int, Tensor] = {}
    for name, tensor in list(named_tensors(module)):
        if id(tensor) not in there:
            there[id(tensor)] = _in_memory_of(tensor, tensor.detach().to(device))
        if there[id(tensor)] is not tensor:
            path, _, short = name.rpartition(".")
            setattr(module.get_submodule(path), short, there[id(tensor)])


def _in_memory_of(tensor: Tensor, there: Tensor) -> Tensor:
    """Return a parameter or buffer that has other memory now; the object itself where possible."""
    # Not every backend lets its memory be assigned to a tensor of the host.
    if shares_type(tensor, there):
        tensor.data = there
        return tensor
    made = in_place_of(tensor, there, tensor.requires_grad)
    # What is referred to weakly, as the weights of an LSTM, cannot be swapped either.
    if weakref.getweakrefcount(tensor):
        return made
    torch.utils.swap_tensors(tensor, made)
    return tensor
