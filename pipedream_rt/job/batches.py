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
from pipedream_rt.errors import ConfigError
from pipedream_rt.models.undisturbed import kept_outside
from pipedream_rt.stage.seeds import kept_generator_state

Prepare: TypeAlias = Callable[[Any], Any]
"""Makes of an item of a loader something that `batch_of` understands."""


class Batch(NamedTuple):
    """A mini-batch, or the example of one."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


class Accumulated(NamedTuple):
    """A mini-batch whose parts are not joined: the gradients of all of them are added up.

    Their tensors may have different shapes. Each part is cut into its share of the micro-batches.
    """

    parts: tuple[Batch, ...]
    of: int
    factor: float = 1.0


def batch_of(item: Any, prepare: Prepare | None = None) -> Batch:
    """Return the mini-batch that an item of a loader is.

    An item is a pair ``(x, y)``: the model is called with x; or a dict: the model is called with
    its entries as keyword arguments, and the loss gets the dict; or ``(args, kwargs, y)``.
    """
    item = item if prepare is None else prepare(item)
    if isinstance(item, Mapping):
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
    """Refuse a loader that yields nothing one after another; it is not drawn from."""
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
"""Iterations over streams of which the first items were looked at, and come back first."""


def looking(loader: Iterable[Any], count: int) -> list[Any]:
    """Return the first items of a loader, which gives the same items afterwards."""
    if isinstance(loader, Iterator):
        raise ConfigError(
            f"a {type(loader).__name__} gives each item once, so to look at some would take them "
            "out: give a list of them, or something that begins anew, as a DataLoader"
        )
    if not isinstance(loader, DataLoader):
        with kept_generator_state(), kept_outside():
            return list(islice(iter(loader), count))
    generators = [
        found
        for owner in (loader, getattr(loader, "sampler", None))
        if isinstance(found := getattr(owner, "generator", None), torch.Generator)
    ]
    states = [generator.get_state() for generator in generators]
    with kept_generator_state(), kept_outside():
        items = begun(loader)
        found = list(islice(items, count))
        # Rows of a stream may come once: nobody can tell, so this iteration goes on later.
        if isinstance(loader.dataset, IterableDataset):
            _LOOKED_AT[loader] = chain(found, items)
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    return found


def begun(loader: Any) -> Iterator[Any]:
    """Begin to iterate over a loader, with the item that was taken as an example from a stream."""
    looked = _LOOKED_AT.pop(loader, None) if isinstance(loader, DataLoader) else None
    if looked is None:
        return iter(loader)
    # The seed that torch draws when an iteration over a DataLoader begins.
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    return looked
