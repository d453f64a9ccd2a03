"""Marks: what tells whether a value was changed, without a copy of it.

A *mark* is taken of a value before and after something runs. Two marks of an unchanged value are
equal, and two marks of a changed one differ. A mark goes by one of these:

- the *writes* that torch counts: they cost nothing, and are kept by the process alone;
- the *content*, of a large tensor in a sample: the same values give the same mark in any tensor;
- the *state* of an object whose changes show in no attribute, such as a random generator.

The kinds of objects with a state stand here alone.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from types import CodeType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from pipedream_rt.models.tensors import is_away

Mark: TypeAlias = Any
"""Equal to another mark of the same value, unless the value was changed meanwhile."""

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Random generators."""

WITH_STATE = (Tensor, np.ndarray, *GENERATORS, itertools.count)
"""Objects whose changes show in no attribute."""

_SAMPLE = 4096
"""Of larger tensors and arrays, about so many elements count, evenly spread."""

# -- by the writes ---------------------------------------------------------------------------------

_WRITES = attrgetter("_version")


def writes_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def mark_of_writes(tensors: Iterable[Tensor]) -> list[int]:
    """Return the mark of tensors that stay the same objects."""
    return [*map(_WRITES, tensors)]


def mark_of_tensor(tensor: Tensor | None) -> Mark:
    """Return the mark of a tensor in a place, where another one may be put."""
    # An inference tensor counts no writes: torch raises, where 0 would hide a change.
    return None if tensor is None else (id(tensor), tensor._version)


def mark_of_tensors(named: Iterable[tuple[str, Tensor | None]]) -> dict[str, Mark]:
    """Return by name the mark of each tensor, such as the buffers of a module."""
    return {name: mark_of_tensor(tensor) for name, tensor in named}


def mark_of_memory(tensor: Tensor) -> Mark:
    """Return the mark of a tensor that may get other memory, as by ``.data``."""
    return writes_of(tensor), tensor.data_ptr()


def mark_of_modules(named: Iterable[tuple[str, nn.Module]]) -> dict[str, Mark]:
    """Return by name the mark of each attribute of modules, but of their modes."""
    found: dict[str, Mark] = {}
    for name, module in named:
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                marks = mark_of_tensors(value.items())
            else:
                marks = {} if key in ("training", "_modules") else {key: id(value)}
            found |= {f"{name}.{short}".strip("."): mark for short, mark in marks.items()}
    return found


# -- by the content --------------------------------------------------------------------------------


def mark_of_content(tensor: Tensor) -> Mark:
    """Return the mark of a tensor's values, shape and dtype; its cost does not go by its size."""
    kind = str(tensor.dtype), tuple(tensor.shape)
    if tensor.layout is not torch.strided or tensor.is_meta:
        return (*kind, writes_of(tensor))
    try:
        return (*kind, hash(_sample(tensor)))
    except RuntimeError:  # a subclass without memory of its own
        return kind


def _sample(tensor: Tensor) -> bytes:
    """Return the bytes of some elements of a tensor."""
    with torch.no_grad():
        some = tensor.detach()
        if some.numel() > 4 * _SAMPLE:
            # Over its memory, whatever the order of its dimensions: nothing is copied as a whole.
            pairs = zip(some.shape, some.stride(), strict=True)
            reach = 1 + sum((n - 1) * stride for n, stride in pairs)
            step = 1 + reach // _SAMPLE
            some = some.as_strided((1 + (reach - 1) // step,), (step,))
        some = some.cpu() if is_away(some) else some
        some = some.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return some.view(torch.uint8).numpy().tobytes()


@functools.lru_cache(maxsize=4096)
def mark_of_code(code: CodeType) -> Mark:
    """Return the mark of what a function does, wherever it was written."""
    constants = [mark_of_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return "code", code.co_code, code.co_names, code.co_freevars, tuple(constants)


# -- by the state ----------------------------------------------------------------------------------


def state_of(generator: Any) -> tuple[Callable[[Any], object], Any]:
    """Return what sets the state of a random generator, and its state."""
    match generator:
        case np.random.Generator():
            bits = generator.bit_generator
            return partial(setattr, bits, "state"), bits.state
        case random.Random():
            return generator.setstate, generator.getstate()
    return generator.set_state, generator.get_state()


def mark_of_value(value: Any) -> Mark:
    """Return the mark of an object of `WITH_STATE`."""
    if isinstance(value, Tensor):
        # To read values of an accelerator would wait for it.
        return mark_of_memory(value) if is_away(value) else mark_of_content(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return value.shape, repr(value)
        flat = value.reshape(-1) if value.size <= _SAMPLE else value.flat
        return value.shape, flat[:: 1 + value.size // _SAMPLE].tobytes()
    return _mark_of_state(state_of(value)[1]) if isinstance(value, GENERATORS) else repr(value)


def _mark_of_state(state: Any) -> Mark:
    """Return the mark of a generator's state; the text of an array in it may be shortened."""
    match state:
        case Tensor():
            return state.numpy().tobytes()
        case str(kind), np.ndarray() as key, *rest:
            return kind, key.tobytes(), *rest
        case dict():
            return tuple((name, _mark_of_state(part)) for name, part in state.items())
        case np.ndarray():
            return state.tobytes()
    return state


def mark_of_draws(generators: Iterable[Any] = ()) -> Mark:
    """Return the mark of the random numbers drawn from torch, Python, NumPy and generators."""
    own = map(mark_of_value, generators)
    return mark_of_value(torch.default_generator), *mark_of_draws_outside(), *own


def mark_of_draws_outside() -> Mark:
    """Return the mark of the random numbers drawn from Python and NumPy."""
    return random.getstate(), _mark_of_state(np.random.get_state())


def quick_mark_of_draws_outside() -> Mark:
    """Return how far Python and NumPy have drawn of the random numbers that they have at hand.

    It costs a fraction of `mark_of_draws_outside`, and a seed may leave it as it is.
    """
    return random.getstate()[1][-1], np.random.get_state(legacy=False)["state"]["pos"]
