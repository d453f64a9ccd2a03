"""Parameters and buffers by name, and tensors that stand in for others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.containers import is_sparse, parts_of_sparse
from pipedream_rt.torch_private import make_subclass


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module under all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def own_buffers(module: nn.Module) -> None:
    """Copy buffers that lie over received memory into storage of their own."""
    for buffer in module.buffers():
        # A layer may resize its buffers, as quantization per channel does.
        if buffer.layout is torch.strided and not buffer.untyped_storage().resizable():
            same = buffer.clone()
            if same.stride() == buffer.stride():  # a clone of an expanded buffer is laid out anew
                buffer.data = same


def is_away(tensor: Tensor) -> bool:
    """Whether a tensor has values, and they are not in the memory of the host."""
    return not (tensor.is_cpu or tensor.is_meta)


def accelerator_here() -> torch.device | None:
    """Return the accelerator that torch is built for, without starting it; None for none."""
    found: torch.device | None = torch.accelerator.current_accelerator()
    return found


def home_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first tensor with values; the CPU if it has none."""
    tensors = (tensor for _, tensor in named_tensors(module) if not tensor.is_meta)
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def memory_of(tensor: Tensor) -> int:
    """Return a number that stands for the memory of a tensor; of a sparse one, of its values."""
    values = parts_of_sparse(tensor)[1][-1] if is_sparse(tensor) else tensor
    number: int = values.untyped_storage()._cdata
    return number


def in_place_of(tensor: Tensor, value: Tensor, requires_grad: bool) -> Tensor:
    """Return a leaf over the memory of ``value``, with the class and attributes of ``tensor``."""
    made: Tensor = make_subclass(type(tensor), value.detach(), requires_grad)
    vars(made).update(vars(tensor))  # a layer may go by them, as by the class
    return made


def gradient_hooks(parameter: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the hooks on a parameter's gradient, and on its accumulated one; pickle drops both."""
    before: Any = getattr(parameter, "_backward_hooks", None) or {}
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return tuple(before.values()), tuple(after.values())
