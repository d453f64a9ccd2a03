"""The step of a torch optimizer, without torch's wrapper where nobody profiles or has hooks."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from pipedream_rt.torch_private import has_hooks, is_profiled


def step(optimizer: Optimizer) -> None:
    """Call the step of an optimizer, past torch's wrapper where that has nothing to do."""
    # torch wraps the steps of all classes, to record each for its profiler and to call hooks. With
    # neither, that is 40 microseconds for nothing, several times what a small optimizer computes.
    wrapped: Any = type(optimizer).step
    # Somebody else's wrapper may have copied the attributes of torch's, so the code is compared.
    is_torchs = getattr(wrapped, "__code__", None) is _WRAPPER
    if not is_torchs or "step" in vars(optimizer) or has_hooks(optimizer) or is_profiled():
        optimizer.step()
    else:
        wrapped.__wrapped__(optimizer)


_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__
"""The code of the wrapper, which is the same for all classes."""
