"""Tells those modules that ask whether a micro-batch is the first to read its weights.

Modules of Transformer Engine take ``is_first_microbatch``: if True, they cast their weights, and
keep the result in the place of the one before; if False, they use what they have kept; if None,
they cast and keep nothing. Their backward reads what their forward has used. So in a pipeline:

- the first micro-batch of a mini-batch that reads a weight version gets True, and later ones that
  read the same version get False;
- while a micro-batch in flight still needs the kept weights, those of another version get None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

from torch import nn

_NAME = "is_first_microbatch"


class FirstMicroBatch:
    """Passes ``is_first_microbatch`` to those modules of one stage whose forward takes it.

    Attributes:
        asked: Whether there are any.
    """

    def __init__(self, module: nn.Module) -> None:
        self._is_first: bool | None = None
        # What `read_by` returned for the weights whose casts the modules keep; and by micro-batch.
        self._kept: object = None
        self._in_flight: dict[int, object] = {}
        asking = [each for each in module.modules() if _asks(each)]
        for each in asking:
            each.register_forward_pre_hook(self._tell, with_kwargs=True)
        self.asked = bool(asking)

    def _tell(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Add the argument to a module's call, unless the caller has given it."""
        if self._is_first is None or kwargs.get(_NAME) is not None:
            return None
        return args, {**kwargs, _NAME: self._is_first}

    def forward(
        self, micro_batch: int, read_by: Callable[[int], object]
    ) -> AbstractContextManager[None]:
        """Return the context of a training forward; `read_by` identifies the weights it reads."""
        read = read_by(micro_batch)
        free = self._kept not in self._in_flight.values()
        self._in_flight[micro_batch] = read
        if read == self._kept:
            return self._saying(False)
        if not free:  # a backward to come still needs what is kept
            return nullcontext()
        self._kept = read
        return self._saying(True)

    def backward(self, micro_batch: int) -> AbstractContextManager[None]:
        """Return the context of a backward, which may recompute the forward."""
        kept = self._in_flight.get(micro_batch) == self._kept
        return self._saying(False) if kept else nullcontext()

    def forget(self) -> None:
        """Forget what the modules keep: their weights were changed, and nothing is in flight."""
        self._kept = None
        self._in_flight.clear()

    def end(self, micro_batch: int) -> None:
        """Forget a micro-batch that is no longer in flight."""
        self._in_flight.pop(micro_batch, None)

    @contextmanager
    def _saying(self, first: bool) -> Iterator[None]:
        self._is_first = first
        try:
            yield
        finally:
            self._is_first = None


def _asks(module: nn.Module) -> bool:
    """Whether the forward of a module takes the argument."""
    try:
        return _NAME in signature(type(module).forward).parameters
    except (TypeError, ValueError):  # a forward that is not a Python function
        return False
