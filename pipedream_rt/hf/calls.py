"""The calls of a model that the stages answer, while a Trainer computes its own loss in the script.

The Trainer's ``training_step`` and ``compute_loss`` get the model itself, so that all they read of
it is there: its config, its mode, its type, what a loss has of it. Only its class is another one
meanwhile, whose ``__call__`` goes to the stages. A copy of the model is called as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import new_class
from typing import Any

from torch import nn

_CLASSES: dict[type, type] = {}
_ANSWERS: dict[int, Callable[..., Any]] = {}
"""The functions that answer the calls of models, by ``id`` of the model."""


@contextmanager
def answered(model: nn.Module, answer: Callable[..., Any]) -> Iterator[None]:
    """Have a function answer the calls of a model while the body runs."""
    own = type(model)

    def once(*args: Any, **kwargs: Any) -> Any:
        model.__class__ = own  # what answers sees the model as it is
        try:
            return answer(*args, **kwargs)
        finally:
            model.__class__ = _class(own)

    _ANSWERS[id(model)], model.__class__ = once, _class(own)
    try:
        yield
    finally:
        del _ANSWERS[id(model)]
        model.__class__ = own


def _class(base: type) -> type:
    """Return a subclass of ``base`` whose calls are answered."""

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = _ANSWERS.get(id(self), lambda *a, **k: base.__call__(self, *a, **k))
        return answer(*args, **kwargs)

    def reduced(self: Any, protocol: Any) -> Any:
        """Pickle and copy it as one of its own class."""
        of_base: Any = base.__reduce_ex__
        make, arguments, *rest = of_base(self, protocol)
        return make, tuple(base if each is type(self) else each for each in arguments), *rest

    if base not in _CLASSES:
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        body = {**names, "__call__": called, "__reduce_ex__": reduced}
        _CLASSES[base] = new_class(base.__name__, (base,), {}, lambda n: n.update(body))
    return _CLASSES[base]
