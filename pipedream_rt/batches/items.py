"""What the items of a loader mean: the inputs of the model, and the target of the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from pipedream_rt.batches.looking import is_loader, looking
from pipedream_rt.devices.hosted import on_host
from pipedream_rt.errors import ConfigError

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


class ScriptCall(Batch):
    """An example of what the model gets where the script computes the loss, whatever it returns."""


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
    if not is_loader(example):
        return input_of(example)
    items = looking(example, 1)
    if not items:
        raise ConfigError("the loader given as example yields nothing")
    return batch_of(items[0])


def input_of(item: Any) -> Batch:
    """Return the mini-batch of an item that may be an input alone."""
    return on_host(Batch((item,), {}, None)) if isinstance(item, Tensor) else batch_of(item)
