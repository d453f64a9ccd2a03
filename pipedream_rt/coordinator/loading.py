"""Drawing from the user's loader, and coming back to the same place in it.

A checkpoint says how many items of which epoch were injected, and what the random generators of the
script's process were at the start of the epoch and at that moment. To come back, the generators are
set as at the start of the epoch, the items are drawn again and dropped, the generators are set as
they were then: that is right for any iterable that yields the same items from the same generators,
as a `torch.utils.data.DataLoader` does, whether it shuffles by torch's generator or by its own.

A sampler that is seeded per epoch (``sampler.set_epoch(epoch)``) gets the numbers from
``for epoch in range(pipe.epoch, epochs)``, as ever.

A loader that can do better has ``state_dict()``, which says where it is (and returns numbers,
texts, lists and dicts), and ``load_state_dict(state)``, after which its next iteration goes on
from there; nothing is drawn in vain then. ``torchdata``'s StatefulDataLoader is one. It needs a
``len``, in items of an epoch, for at the end of an epoch "from there" may be its next one.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterable, Sized
from typing import Any

import numpy as np
import torch

from pipedream_rt.coordinator.results import PendingStep
from pipedream_rt.errors import ConfigError

Generators = dict[str, Any]
"""States of the random generators of this process, and of a loader."""


def generators(loader: object = None) -> Generators:
    """Read the random generators of torch (CPU), Python, NumPy, and those that a loader has."""
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "loader": [own.get_state() for own in _own_generators(loader)],
    }


def _saveable(state: Generators) -> Generators:
    """As msgpack can keep it."""
    kind, keys, *rest = state["numpy"]
    return {**state, "numpy": [kind, keys.tobytes(), *rest]}


def set_generators(state: Generators, loader: object = None) -> None:
    """Set what `generators` read, after a way through a file."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
    for own, kept in zip(_own_generators(loader), state["loader"]):
        own.set_state(kept)


def _own_generators(loader: object) -> list[torch.Generator]:
    """The generators that a `torch.utils.data.DataLoader` or its samplers were given."""
    samplers = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    inner = getattr(samplers[1], "sampler", None)
    found = {}
    for part in (loader, *samplers, inner):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())


def between_epochs(epoch: int, loader: object) -> dict[str, Any]:
    """The place of a script that draws from no loader now.

    Args:
        epoch: Number of the next.
        loader: The last one; None if there was none.
    """
    return {
        "epoch": epoch,
        "drawn": None,
        "now": _saveable(generators(loader)),
        "loader": _state_of(loader),
        "warm": _is_warm(loader),
    }


def begin_epoch_at(place: dict[str, Any], loader: Any) -> None:
    """Come back to a place between two epochs."""
    _start_as(place["now"], place["warm"], loader)
    if place["loader"] is not None:
        loader.load_state_dict(place["loader"])


def _start_as(state: Generators, warm: bool, loader: Any) -> None:
    """Let the next epoch of a loader begin with generators, and worker processes, as they were."""
    if warm and not _is_warm(loader):
        iter(loader)
    set_generators(state, loader)


def _is_warm(loader: object) -> bool:
    """Whether a DataLoader has worker processes of an epoch before.

    One that keeps them (``persistent_workers=True``) draws a seed only when it starts them.
    """
    return getattr(loader, "_iterator", None) is not None


def _state_of(loader: object) -> Any:
    """Where a loader says that it is, if it does; a copy, for it may go on with its own."""
    ask = getattr(loader, "state_dict", None)
    known = ask is not None and hasattr(loader, "load_state_dict")
    return copy.deepcopy(ask()) if known else None  # type: ignore[misc]


class Loading:
    """An epoch of a loader, one item ahead of what is injected.

    Keeps the loader's error until the results before it are handed out.

    Args:
        loader: Any iterable.
        epoch: Number.
        place: Where to go on; None for the beginning.
        pending: Mini-batches before that place whose results the script is still to see.

    Attributes:
        epoch: Number.
        fetched: The item ahead, if there is one.
        pending: Mini-batches whose results the script has not seen.
        error: What the loader raised.

    Raises:
        ConfigError: The loader has fewer items than were drawn before.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        epoch: int,
        place: dict[str, Any] | None = None,
        pending: Iterable[PendingStep] = (),
    ) -> None:
        """Draw the first item, or come back to a place."""
        self.epoch = epoch
        self.fetched: list[Any] = []
        self.pending = deque(pending)
        self.error: Exception | None = None
        self._loader = loader
        if place is not None:
            _start_as(place["start"], place["warm"], loader)
        self._start = generators(loader)
        self._warm = _is_warm(loader)
        stateful = place is not None and place["loader"] is not None
        if stateful:
            loader.load_state_dict(place["loader"])  # type: ignore[attr-defined, index]
        # At its end a loader that goes on from a state would begin its next epoch.
        length = len(loader) if stateful and isinstance(loader, Sized) else None
        ended = place is not None and length is not None and place["drawn"] >= length
        self._items = iter(()) if ended else iter(loader)
        self._drawn = 0
        self._before: Generators = self._start
        self._state: Any = None
        if place is not None:
            self._come_back(place, skip=not stateful)
        self.fetch()
        if place is not None and place["after"] is not None:
            set_generators(place["after"], loader)

    def _come_back(self, place: dict[str, Any], skip: bool) -> None:
        """Drop what was drawn before, and set the generators as they were."""
        for number in range(place["drawn"] if skip else 0):
            try:
                next(self._items)
            except StopIteration:
                raise ConfigError(
                    f"the loader ended after {number} items; the checkpoint was made after "
                    f"{place['drawn']} items of epoch {self.epoch}. Give the same loader"
                ) from None
        self._drawn = place["drawn"]
        set_generators(place["before"], self._loader)

    def fetch(self) -> None:
        """Draw an item into ``fetched``, which stays empty at the loader's end."""
        self._before = generators(self._loader)
        self._state = _state_of(self._loader)
        try:
            self.fetched.append(next(self._items))
            self._drawn += 1
        except StopIteration:
            pass
        except Exception as error:  # the user's code; raised again by `train_epoch`
            self.error = error

    def place(self) -> dict[str, Any]:
        """Say where the next injected item comes from, for `Loading` in another process."""
        ahead, now = bool(self.fetched), generators(self._loader)
        return {
            "epoch": self.epoch,
            "drawn": self._drawn - ahead,
            "start": _saveable(self._start),
            "before": _saveable(self._before if ahead else now),
            "after": _saveable(now) if ahead else None,
            "loader": self._state if ahead else _state_of(self._loader),
            "warm": self._warm,
        }
