"""Looking at the first items of a loader that is trained on later, and leaving no trace of it.

A copy of the loader is looked at, with its samplers, its data set and the generators that they
hold. So the script may look where it likes, seed its generators, and then train. A loader that
cannot be copied, as one over a socket or an open file, is looked at itself, and goes on from there.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from copy import copy
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from pipedream_rt.devices.randomness import (
    has_drawn,
    kept_generator_state,
    random_state,
    set_random_state,
)
from pipedream_rt.errors import ConfigError
from pipedream_rt.models.mark import mark_of_draws_outside
from pipedream_rt.models.preserving_state import kept_outside
from pipedream_rt.models.shipping import classes_kept, copying
from pipedream_rt.telling import log_of

_MOST_BYTES = 64 << 20
"""The most bytes of a loader's tensors and arrays that are copied; the copy shares the rest. Also
the most bytes of all else: a loader with more is looked at itself."""

_log = log_of(__name__)


def is_loader(value: Any) -> bool:
    """Whether a value yields mini-batches; what may be an item of a loader, as a list, does not."""
    single = isinstance(value, Tensor | tuple | list | str | bytes)
    # `keys` is that of a mapping, and `__array__` that of an array.
    others = any(hasattr(type(value), name) for name in ("keys", "__array__"))
    return not single and not others and hasattr(type(value), "__iter__")


def looking(loader: Iterable[Any], count: int) -> list[Any]:
    """Peek at the first items of a loader, which yields the same items afterwards."""
    if isinstance(loader, Iterator):
        raise ConfigError(
            f"a {type(loader).__name__} gives each item once, so to look at some would take them "
            "out: give a list of them, or something that begins anew, as a DataLoader"
        )
    if type(loader) in (list, tuple):
        return list(islice(loader, count))
    with kept_generator_state(), kept_outside():
        try:
            if not (_is_key(loader) and loader in _LOOKED_AT):
                copy_of = copying(loader, _MOST_BYTES)
                with classes_kept():
                    # Worker processes end here, as nobody else refers to the copy.
                    return list(islice(copy_of(), count))
        except Exception as error:  # foreign classes may raise anything
            _log.info(
                "the %s itself is looked at, since it cannot be copied: %s",
                type(loader).__name__, error,
            )  # fmt: skip
        return _taken(loader, count)


def begun(loader: Any, anew: bool = False) -> Iterator[Any]:
    """Begin to iterate over a loader; one that was looked at itself goes on, unless ``anew``."""
    looked = _LOOKED_AT.pop(loader, None) if _is_key(loader) else None
    return iter(loader) if anew or looked is None else _again(loader, *looked)


# -- on the loader itself -------------------------------------------------------------------------


class _Item(NamedTuple):
    """An item that was taken out, and the random generators before and after that."""

    item: Any
    before: tuple[Any, ...]
    after: tuple[Any, ...]


_LOOKED_AT: WeakKeyDictionary[Any, tuple[list[_Item], Iterator[Any]]] = WeakKeyDictionary()
"""The items that were taken out of loaders that cannot be copied, with iterators over the rest."""


def _is_key(loader: object) -> bool:
    """Whether `_LOOKED_AT` can have a loader."""
    return type(loader).__hash__ is not None and hasattr(type(loader), "__weakref__")


def _taken(loader: Any, count: int) -> list[Any]:
    """Take the first items out of a loader, and note them for `begun`."""
    # A sampler that shuffles draws from these.
    owners = (loader, getattr(loader, "sampler", None))
    own = [getattr(owner, "generator", None) for owner in owners]
    states = [(each, each.get_state()) for each in own if isinstance(each, torch.Generator)]
    before, taken = _state(), list[_Item]()
    items = _begun_apart(loader)
    for item in islice(items, count):
        taken.append(_Item(item, before, after := _state()))
        before = after
    # A data set with indices begins anew, since the script may seed what its order is drawn from.
    if _is_key(loader) and not _has_indices(loader):
        _LOOKED_AT[loader] = (taken, items)
    for generator, state in states:
        generator.set_state(state)
    return [each.item for each in taken]


def _begun_apart(loader: Any) -> Iterator[Any]:
    """Begin to iterate; a DataLoader does not keep the worker processes that start here."""
    if not isinstance(loader, DataLoader) or not _has_indices(loader):
        return begun(loader)
    apart = copy(loader)
    apart._iterator = None
    return iter(apart)


def _has_indices(loader: Any) -> bool:
    """Whether a loader has a data set of which items are fetched by index."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _again(loader: Any, taken: list[_Item], items: Iterator[Any]) -> Iterator[Any]:
    """Yield the items that were taken out, as if they were drawn now, and then the others."""
    for number, (item, before, after) in enumerate(taken):
        is_as_then = not has_drawn(before[0]) and mark_of_draws_outside() == before[1]
        if is_as_then:
            _set_state(after)
        # iter(DataLoader) draws a seed. Drawn here too, else later numbers would differ.
        draws = not number and isinstance(loader, DataLoader)
        if draws and not (is_as_then and loader.generator is None):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        yield item
    yield from items


def _state() -> tuple[Any, ...]:
    """Return the state of all random generators of this process."""
    return random_state(), mark_of_draws_outside(), random.getstate(), np.random.get_state()


def _set_state(state: tuple[Any, ...]) -> None:
    """Set the generators to a state that `_state` has returned."""
    set_random_state(state[0])
    random.setstate(state[2])
    np.random.set_state(state[3])
