"""Keeps torch from importing its compiler where nothing is compiled.

Some methods of torch's optimizers are hidden from torch's compiler, dynamo. torch imports dynamo to
hide each at its first call, which takes as long as to import torch itself. While dynamo is not
imported nothing can be compiled, so there is nothing to hide from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_DYNAMO = "torch._dynamo"

_HIDDEN = "__dynamo_disable"
"""The attribute in which a function keeps what is called in its place (torch/_compile.py)."""


@contextmanager
def dynamo_spared() -> Iterator[None]:
    """Let torch build and use optimizers within the block without importing its compiler.

    It changes no result. If something else imports the compiler meanwhile, the functions are hidden
    from it as ever.
    """
    spared = [method for method in _hidden_methods() if not hasattr(method.__wrapped__, _HIDDEN)]
    for method in spared:
        setattr(method.__wrapped__, _HIDDEN, _direct(method))
    try:
        yield
    finally:
        for method in spared:
            if getattr(method.__wrapped__, _HIDDEN, None) is not None:
                delattr(method.__wrapped__, _HIDDEN)  # torch sets it anew at the next call


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
    """Return what calls the function beneath a wrapper, unless the compiler is there by now."""
    function = method.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        if _DYNAMO not in sys.modules:
            return function(*args, **kwargs)
        if getattr(function, _HIDDEN, None) is call:
            delattr(function, _HIDDEN)
        return method(*args, **kwargs)

    return call
