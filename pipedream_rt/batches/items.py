"""What the items of a loader mean: the inputs of the model, and the target of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from pipedream_rt.devices.hosted import on_host
from pipedream_rt.devices.randomness import kept_generator_state
from pipedream_rt.errors import ConfigError
from pipedream_rt.models.preserving_state import kept_outside

Prepare: TypeAlias = Callable[[Any], Any]
"""Turns an item of a loader into something that `batch_of` understands."""


class Batch(NamedTuple):
    """A mini-batch, or the example of one.

    Attributes:
        target: What the loss takes beside the output; of a dict, the dict itself.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


class Accumulated(NamedTuple):
    """A mini-batch whose parts are not joined: the gradients of all of them are added up.

    Their tensors may have different shapes. Each part is cut into its share of the micro-batches.

    Attributes:
        of: The number of parts of a mini-batch that is not short.
        factor: What the loss of each part is multiplied by.
    """

    parts: tuple[Batch, ...]
    of: int
    factor: float = 1.0


def batch_of(item: Any, prepare: Prepare | None = None) -> Batch:
    """Return the mini-batch of an item: a pair ``(x, y)``, a dict, or ``(args, kwargs, y)``."""
    item = item if prepare is None else prepare(item)
    if isinstance(item, Mapping):
        # The model gets the entries as keyword arguments, the loss the dict.
        named = {str(key): value for key, value in item.items()}
        return on_host(Batch((), named, named))
    if isinstance(item, tuple | list):
        if len(item) == 2:
            return on_host(Batch((item[0],), {}, item[1]))
        if len(item) == 3 and isinstance(item[0], tuple | list) and isinstance(item[1], Mapping):
            return on_host(Batch(tuple(item[0]), dict(item[1]), item[2]))
    length = f" of {len(item)}" if isinstance(item, tuple | list) else ""
    raise ConfigError(
        "the loader must yield pairs (x, y), dicts of the model's keyword arguments, or triples "
        f"(args, kwargs, y) of a tuple, a dict and a target; this item is a {type(item).__name__}"
        f"{length}. Give prepare=, which makes one of these: "
        "prepare=lambda item: (item[0], item[1])"
    )


def require_loader(loader: Any, what: str) -> None:
    """Refuse a loader that cannot be iterated over; nothing is drawn from it."""
    if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
        raise ConfigError(
            f"{what} takes a loader, something that yields mini-batches, as a DataLoader or a list "
            f"of pairs (x, y); it was given {loader!r:.80}"
        )


def example_of(example: Any) -> Batch:
    """Return the mini-batch of the argument ``example`` of `Pipeline`."""
    if isinstance(example, Tensor):
        return on_host(Batch((example,), {}, None))
    if isinstance(example, DataLoader):
        items = looking(example, 1)
        if not items:
            raise ConfigError("the loader given as example yields nothing")
        return batch_of(items[0])
    return batch_of(example)


_LOOKED_AT: WeakKeyDictionary[DataLoader[Any], Iterator[Any]] = WeakKeyDictionary()
"""Iterators over streams whose first items were looked at; they begin with these once more."""


def looking(loader: Iterable[Any], count: int) -> list[Any]:
    """Peek at the first items of a loader, which yields the same items afterwards."""
    if isinstance(loader, Iterator):
        raise ConfigError(
            f"a {type(loader).__name__} gives each item once, so to look at some would take them "
            "out: give a list of them, or something that begins anew, as a DataLoader"
        )
    if not isinstance(loader, DataLoader):
        with kept_generator_state(), kept_outside():
            return list(islice(iter(loader), count))
    # A sampler that shuffles draws from these, so a peek would change the order of the first epoch.
    generators = [
        found
        for owner in (loader, getattr(loader, "sampler", None))
        if isinstance(found := getattr(owner, "generator", None), torch.Generator)
    ]
    states = [generator.get_state() for generator in generators]
    with kept_generator_state(), kept_outside():
        items = begun(loader)
        found = list(islice(items, count))
        # A stream may yield each row only once, so `begun` goes on with this very iterator.
        if isinstance(loader.dataset, IterableDataset):
            _LOOKED_AT[loader] = chain(found, items)
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    return found


def begun(loader: Any) -> Iterator[Any]:
    """Begin to iterate over a loader; a stream begins with the items that were looked at."""
    looked = _LOOKED_AT.pop(loader, None) if isinstance(loader, DataLoader) else None
    if looked is None:
        return iter(loader)
    # iter(DataLoader) draws a seed. Drawn here too, else all later random numbers would differ.
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    return looked
