"""The buffers of a module: the places that hold them, and how they are loaded."""

from __future__ import annotations

from torch import Tensor, nn


def buffer_slots(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return, for the name of each buffer, all places of the module that hold that buffer.

    A place is a submodule and a name in its ``_buffers``. Buffers that are None are included; they
    are missing in ``named_buffers``, as is every name of a shared buffer but the first.
    """
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    by_tensor: dict[int, list[tuple[nn.Module, str]]] = {}
    for prefix, owner in module.named_modules():
        for short, buffer in owner._buffers.items():
            shared = [] if buffer is None else by_tensor.setdefault(id(buffer), [])
            shared.append((owner, short))
            found[f"{prefix}.{short}" if prefix else short] = shared
    return found


def load_buffers(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load buffers by name, in place where shape and dtype agree, since tensors may be shared."""
    for name, slots in buffer_slots(module).items():
        if name not in state:
            continue
        owner, short = slots[0]
        current, saved = owner._buffers[short], state[name]
        if current is not None and (current.shape, current.dtype) == (saved.shape, saved.dtype):
            current.copy_(saved)
            continue
        made = saved.clone()
        for holder, its_name in slots:
            holder._buffers[its_name] = made


def load_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load those entries of a state dict that belong to this module, and ignore the others."""
    keys = module.state_dict()
    module.load_state_dict({k: state[k] for k in keys if k in state}, strict=False)
