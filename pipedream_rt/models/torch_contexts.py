"""The contexts around an operator of torch that a program cannot carry.

A program carries ``no_grad`` and autocast beside the steps under them. All other contexts act on
the thread that enters them, and a stage would compute without them. They are found by the state
that they change, so it does not matter how they are entered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import torch

from pipedream_rt.models.settings import settings_in_forward
from pipedream_rt.torch_private import (
    DeviceContext,
    dispatch_modes,
    function_modes,
    in_transform,
    level_of_forward_ad,
    node_creation_hooks,
    order_of_attention,
    parametrizations_are_cached,
    saved_tensors_hooks,
    saved_tensors_hooks_allowed,
    views_are_replayed,
)

TorchContexts: TypeAlias = dict[str, Any]
"""The state of each context, by the name that a user knows."""


_READERS: dict[str, Callable[[], Any]] = {
    "torch.inference_mode": torch.is_inference_mode_enabled,
    "saved_tensors_hooks (or save_on_cpu)": saved_tensors_hooks,
    "torch.autograd.graph.node_creation_hook": node_creation_hooks,
    "disable_saved_tensors_hooks": saved_tensors_hooks_allowed,
    "torch.nn.attention.sdpa_kernel": lambda: (
        order_of_attention(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    ),
    "torch.autograd.forward_ad.dual_level": level_of_forward_ad,
    "a transform of torch.func (vmap, grad, jvp)": lambda: in_transform() is not None,
    "torch.nn.utils.parametrize.cached": parametrizations_are_cached,
    "_force_original_view_tracking": views_are_replayed,
}


def contexts_now(but: Collection[object]) -> TorchContexts:
    """Return the contexts that are on in this thread, but for the modes in ``but``."""
    modes = [
        *function_modes(),
        *dispatch_modes(),
    ]
    # The default device is a mode too, but settings_in_forward has it already.
    counted = [
        m for m in modes if not isinstance(m, DeviceContext) and all(m is not b for b in but)
    ]
    on = {f"the mode {type(mode).__name__}": True for mode in counted}
    return {**on, **{name: read() for name, read in _READERS.items()}, **settings_in_forward()}


def difference(now: TorchContexts, before: TorchContexts) -> str:
    """Return the name of a context that is in another state than before; empty if none is."""
    return next((name for name, value in now.items() if before.get(name) != value), "")
