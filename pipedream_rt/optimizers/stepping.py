"""The step of a torch optimizer, without what torch records of it for nobody."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from pipedream_rt.torch_private import has_hooks, is_profiled


def step(optimizer: Optimizer) -> None:
    """Call the step of an optimizer.

    torch wraps the steps of all classes, to record each for its profiler and to call hooks. Where
    no profiler is on and there is no hook, that is 40 microseconds for nothing, several times what
    a small optimizer computes. It changes no result.
    """
    wrapped: Any = type(optimizer).step
    # A wrapper of somebody else's may have taken over the attributes of torch's.
    is_torchs = getattr(wrapped, "__code__", None) is _WRAPPER
    if not is_torchs or "step" in vars(optimizer) or has_hooks(optimizer) or is_profiled():
        optimizer.step()
    else:
        wrapped.__wrapped__(optimizer)


_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__
"""The code of the wrapper, which is the same for all classes."""
