"""Drawing from the user's loader, and coming back to the same place in it.

A checkpoint says how many items of which epoch were injected, and what the random generators of the
script's process were at the start of the epoch and at that moment. To come back, the generators are
set as at the start of the epoch, the items are drawn again and dropped, the generators are set as
they were then: that is right for any iterable that yields the same items from the same generators,
as a `torch.utils.data.DataLoader` does, whether it shuffles by torch's generator or by its own.

A loader that can do better has ``state_dict()``, which says where it is (and returns numbers,
texts, lists and dicts), and ``load_state_dict(state)``, after which its next iteration goes on
from there; nothing is drawn in vain then. ``torchdata``'s StatefulDataLoader is one.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from pipedream_rt.errors import ConfigError
from pipedream_rt.results import PendingStep

Generators = dict[str, Any]
"""States of the random generators of this process, as msgpack can keep them."""


def generators() -> Generators:
    """Read the random generators of torch (CPU), Python and NumPy."""
    state: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = state
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tobytes(), *rest],
    }


def set_generators(state: Generators) -> None:
    """Set what `generators` read."""
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))


class Loading:
    """An epoch of a loader, one item ahead of what is injected.

    Keeps the loader's error until the results before it are handed out.

    Args:
        loader: Any iterable.
        epoch: Number.
        place: Where to go on; None for the beginning.
        seen: Results that the script is still to see, from before that place.

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
            set_generators(place["start"])
        self._start = generators()
        stateful = place is not None and place["loader"] is not None
        if stateful:
            loader.load_state_dict(place["loader"])  # type: ignore[attr-defined, index]
        self._items = iter(loader)
        self._drawn = 0
        self._before: Generators = self._start
        self._state: Any = None
        if place is not None:
            self._come_back(place, skip=not stateful)
        self.fetch()
        if place is not None and place["after"] is not None:
            set_generators(place["after"])

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
        set_generators(place["before"])

    def fetch(self) -> None:
        """Draw an item into ``fetched``, which stays empty at the loader's end."""
        self._before = generators()
        self._state = self._loader_state()
        try:
            self.fetched.append(next(self._items))
            self._drawn += 1
        except StopIteration:
            pass
        except Exception as error:  # the user's code; raised again by `train_epoch`
            self.error = error

    def _loader_state(self) -> Any:
        """Where the loader says that it is, if it does."""
        ask = getattr(self._loader, "state_dict", None)
        known = ask is not None and hasattr(self._loader, "load_state_dict")
        return ask() if known else None  # type: ignore[misc]

    def place(self) -> dict[str, Any]:
        """Say where the next injected item comes from, for `Loading` in another process."""
        ahead = bool(self.fetched)
        return {
            "epoch": self.epoch,
            "drawn": self._drawn - ahead,
            "start": self._start,
            "before": self._before if ahead else generators(),
            "after": generators() if ahead else None,
            "loader": self._state if ahead else self._loader_state(),
        }
