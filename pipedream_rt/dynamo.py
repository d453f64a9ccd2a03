"""Keeps torch from importing its compiler where nothing is compiled.

Some methods of torch's optimizers are hidden from torch's compiler, dynamo. To hide them, torch
imports dynamo at their first call and at each step, which takes as long as importing torch itself.
While dynamo is not imported nothing can be compiled, so there is nothing to hide from.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_DYNAMO = "torch._dynamo"

_HIDDEN = "__dynamo_disable"
"""The attribute of a function that torch calls in its place (torch/_compile.py)."""


@contextmanager
def dynamo_spared() -> Iterator[None]:
    """Let torch build and use optimizers within the block without importing its compiler.

    Results stay the same. If something else imports the compiler meanwhile, the methods are hidden
    from it as usual.
    """
    spared = _spare_methods()
    try:
        yield
    finally:
        for method in spared:
            if getattr(method.__wrapped__, _HIDDEN, None) is not None:
                delattr(method.__wrapped__, _HIDDEN)  # torch sets it anew at the next call


def spare_dynamo() -> None:
    """Let torch build and use optimizers in this worker process without importing its compiler.

    Results stay the same. If something else imports the compiler, torch does as usual from then on.
    """
    _spare_methods()
    for cls in _classes(torch.optim.Optimizer):
        step = vars(cls).get("step")
        code = getattr(step, "__code__", None)
        if code is not None and code.co_name == "_use_grad" and hasattr(step, "__wrapped__"):
            cls.step = _step_of(step)


def _spare_methods() -> list[Any]:
    """Have hidden methods of optimizers called directly; return those that were changed for it."""
    spared = [method for method in _hidden_methods() if not hasattr(method.__wrapped__, _HIDDEN)]
    for method in spared:
        setattr(method.__wrapped__, _HIDDEN, _direct(method))
    return spared


def _classes(base: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and all its subclasses."""
    yield base
    for cls in base.__subclasses__():
        yield from _classes(cls)


def _step_of(step: Any) -> Callable[..., Any]:
    """Return a step that asks for no graph break while the compiler is not imported."""
    beneath = step.__wrapped__

    @functools.wraps(beneath)
    def without_compiler(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _DYNAMO in sys.modules:
            return step(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return beneath(self, *args, **kwargs)

    return without_compiler


def step_spared(optimizer: torch.optim.Optimizer) -> None:
    """Step with an optimizer without importing the compiler, outside of a worker."""
    step: Any = type(optimizer).step
    hooked = getattr(step, "__wrapped__", None)  # torch wraps it once more for its profiler
    for each in (step, hooked):
        code = getattr(each, "__code__", None)
        if code is not None and code.co_name == "_use_grad" and hasattr(each, "__wrapped__"):
            _step_of(each)(optimizer)
            return
    optimizer.step()


def _hidden_methods() -> list[Any]:
    """Return the methods of optimizers that torch hides from its compiler."""
    return [
        method
        for method in vars(torch.optim.Optimizer).values()
        if hasattr(method, "__wrapped__")
        and getattr(method, "__code__", None) is not None
        and method.__code__.co_filename.endswith("_compile.py")
    ]


def _direct(method: Any) -> Callable[..., Any]:
    """Return a function that calls what a wrapper hides, until the compiler is there."""
    function = method.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        if _DYNAMO not in sys.modules:
            return function(*args, **kwargs)
        if getattr(function, _HIDDEN, None) is call:
            delattr(function, _HIDDEN)
        return method(*args, **kwargs)

    return call
