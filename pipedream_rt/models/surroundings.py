"""What is on around an operator of torch that changes what it does, and that a program cannot keep.

A forward may enter contexts: ``no_grad`` and autocast are kept beside the steps under them. All
others act on the thread that enters them, and a stage would compute without them. They are known by
what they change, whichever way they are entered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import torch
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pipedream_rt.models.settings import settings_in_forward

Surroundings: TypeAlias = dict[str, Any]
"""What is on, by what a user would call it."""


def _saved_tensors_hooks() -> Any:
    """The hooks on what autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


_READERS: dict[str, Callable[[], Any]] = {
    "torch.inference_mode": torch.is_inference_mode_enabled,
    "saved_tensors_hooks (or save_on_cpu)": _saved_tensors_hooks,
    "disable_saved_tensors_hooks": (
        torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined] # no stub
    ),
    "torch.nn.attention.sdpa_kernel": lambda: (
        torch._C._get_sdp_priority_order(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    ),
    "torch.autograd.forward_ad.dual_level": lambda: torch.autograd.forward_ad._current_level,
    "a transform of torch.func (vmap, grad, jvp)": lambda: (
        torch._C._functorch.peek_interpreter_stack() is not None
    ),
    "torch.nn.utils.parametrize.cached": lambda: parametrize._cache_enabled,
    "_force_original_view_tracking": torch._C._is_view_replay_enabled,
}


def surroundings_now(but: Collection[object]) -> Surroundings:
    """Return what is on in this thread.

    Args:
        but: Modes of torch that do not count.
    """
    modes = [
        *torch.overrides._get_current_function_mode_stack(),
        *_get_current_dispatch_mode_stack(),
    ]
    # The default device is a mode, and a setting.
    counted = [
        m for m in modes if not isinstance(m, DeviceContext) and all(m is not b for b in but)
    ]
    on = {f"the mode {type(mode).__name__}": True for mode in counted}
    return {**on, **{name: read() for name, read in _READERS.items()}, **settings_in_forward()}


def difference(now: Surroundings, before: Surroundings) -> str:
    """Return the name of something that is on now and was not before; empty if nothing is."""
    return next((name for name, value in now.items() if before.get(name) != value), "")
