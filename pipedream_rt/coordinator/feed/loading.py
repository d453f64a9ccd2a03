"""Drawing items from the user's loader, and coming back to the same place in it.

A checkpoint keeps how many items of which epoch were injected, and the states of the random
generators of the script's process at the start of the epoch and at the checkpoint. To come back,
the coordinator sets the generators as they were at the start of the epoch, draws that many items
again and drops them, and sets the generators as they were at the checkpoint. That is right for
every iterable that yields the same items from the same generators, as a
`torch.utils.data.DataLoader` does, whether it shuffles by torch's generator or by its own.

A sampler that is seeded per epoch (``sampler.set_epoch(epoch)``) gets the right number from
``for epoch in range(pipe.epoch, epochs)``. Those that count epochs by themselves, as accelerate's
do, are set to the number and the seed that they had. A loader may depend on more than that. So the
first item that is drawn again is compared with the one before, and a difference is logged.

Some loaders, such as ``torchdata``'s StatefulDataLoader, know their place: they have
``state_dict()``, which returns numbers, texts, lists and dicts, and ``load_state_dict(state)``,
after which the next iteration goes on from there. For those no item is drawn again. Such a loader
should have ``len``, the number of items of an epoch: when it stood at the end of an epoch, its next
iteration may be the next epoch, and only the length tells.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

# Not when training begins, as numpy would by itself: its import swallows a Ctrl-C meanwhile.
from numpy import random as numpy_random

from pipedream_rt.batches.looking import begun
from pipedream_rt.coordinator.results import PendingStep
from pipedream_rt.devices.randomness import random_state, set_random_state
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.wire import elements_of
from pipedream_rt.models.preserving_state import drawing_alone
from pipedream_rt.telling import log_of

_log = log_of(__name__)

Generators = dict[str, Any]
"""The states of the random generators of this process and of a loader, and its epoch counters."""


def generators(loader: object = None) -> Generators:
    """Return the states of the generators of torch, Python, NumPy and the loader."""
    with drawing_alone():  # else these may be the states in which another thread has seeded them
        host, *devices = random_state()
    return {
        **({"devices": devices} if devices else {}),
        "torch": host,
        "python": random.getstate(),
        "numpy": numpy_random.get_state(legacy=True),
        "loader": [own.get_state() for own in _own_generators(loader)],
        "counted": [counted for _, counted in _counters(loader)],
    }


def _saveable(state: Generators) -> Generators:
    """Return the states in a form that msgpack can keep."""
    kind, keys, *rest = state["numpy"]
    return {**state, "numpy": [kind, keys.tobytes(), *rest]}


def set_generators(state: Generators, loader: object = None) -> None:
    """Set the random generators to states that `_saveable` gave."""
    with drawing_alone():
        set_random_state([state["torch"], *state.get("devices", ())])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    numpy_random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
    for own, kept in zip(_own_generators(loader), state["loader"]):
        own.set_state(kept)
    for (part, counted), values in zip(_counters(loader), state.get("counted", ())):
        for name in counted.keys() & values.keys():
            setattr(part, name, values[name])


def _own_generators(loader: object) -> list[torch.Generator]:
    """Return the generators that a `torch.utils.data.DataLoader` or its samplers were given."""
    found = {}
    for part in _parts_of(loader):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())


def _counters(loader: object) -> Iterator[tuple[object, dict[str, int]]]:
    """Yield a loader and its samplers with the numbers of epochs and the seeds that they keep."""
    for part in _parts_of(loader):
        kept = getattr(part, "__dict__", {})
        yield part, {n: kept[n] for n in _COUNTERS if _is_count(kept.get(n))}


_COUNTERS = ("epoch", "_epoch", "iteration", "initial_seed")
"""The names of attributes in which samplers count epochs, or keep a drawn seed."""


def _is_count(value: object) -> bool:
    """Whether a value can be a number of epochs, or a seed."""
    return type(value) is int and 0 <= value < 1 << 63


def _parts_of(loader: object) -> list[object]:
    """Return a loader, its samplers, and what these wrap."""
    found = [loader] if loader is not None else []
    for part in found:
        for name in ("sampler", "batch_sampler", "base_dataloader"):
            inner = getattr(part, name, None)
            if inner is not None and not any(inner is each for each in found):
                found.append(inner)
    return found


def _fingerprint(item: object) -> str | None:
    """Return a digest of the numbers and texts in an item; None if it cannot be made."""
    digest = blake2b(digest_size=16)
    try:
        _add(digest, item)
    except Exception:  # a foreign class may raise anything, and an item may contain itself
        return None
    return digest.hexdigest()


def _add(digest: blake2b, value: Any) -> None:
    """Add a value to a digest; of foreign types, only the name of the type."""
    if isinstance(value, torch.Tensor):
        with contextlib.suppress(RuntimeError):  # a nested or sparse tensor, for example
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            if value.device.type == "cpu":
                digest.update(elements_of(value))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _add(digest, key)
            _add(digest, inner)
    elif isinstance(value, list | tuple):
        digest.update(b"(")  # so that nested items differ from flat ones
        for inner in value:
            _add(digest, inner)
    elif isinstance(value, int | float | str | bytes | None):
        digest.update(repr(value).encode())
    digest.update(type(value).__name__.encode())


def between_epochs(epoch: int, loader: object) -> dict[str, Any]:
    """Return the place of a script that stands between two epochs."""
    return {
        "epoch": epoch,
        "drawn": None,
        "now": _saveable(generators(loader)),
        "loader": _state_of(loader),
        "warm": _is_warm(loader),
    }


def begin_epoch_at(place: dict[str, Any], loader: Any) -> None:
    """Set the generators and the loader as they were at a place between two epochs."""
    _start_as(place["now"], place["warm"], loader)
    if place["loader"] is not None:
        loader.load_state_dict(place["loader"])


def _start_as(state: Generators, warm: bool, loader: Any) -> None:
    """Set the generators, and start the loader's worker processes if it had them at that time."""
    if warm and not _is_warm(loader):
        iter(loader)  # draws the seed of the processes, so before the generators are set
    set_generators(state, loader)


def _is_warm(loader: object) -> bool:
    """Whether a DataLoader has kept its worker processes from an earlier epoch."""
    # With persistent_workers=True it draws a seed only when it starts them.
    return getattr(loader, "_iterator", None) is not None


def _state_of(loader: object) -> Any:
    """Return a copy of the state of a loader that knows its place; None for other loaders."""
    ask = getattr(loader, "state_dict", None)
    if ask is None or not hasattr(loader, "load_state_dict"):
        return None
    try:
        return copy.deepcopy(ask())
    except AttributeError:  # accelerate's has the methods also without a stateful loader inside
        return None


class Loading:
    """One epoch of a loader, from which one item is drawn ahead of injection.

    Attributes:
        fetched: A list with the item that was drawn ahead; empty at the end of the loader.
        pending: The mini-batches whose results the script has not seen yet.
        error: The error of the loader, kept until the results of the items before it are handed
            out; None if it raised nothing.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        epoch: int,
        place: dict[str, Any] | None = None,
        pending: Iterable[PendingStep] = (),
    ) -> None:
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
        # A loader that loads the state of the end of an epoch would begin the next epoch.
        length = len(loader) if stateful and isinstance(loader, Sized) else None
        ended = place is not None and length is not None and place["drawn"] >= length
        self._items = iter(()) if ended else begun(loader, anew=stateful)
        self._drawn = 0
        self._first: str | None = None if place is None else place.get("first")
        # When the item in `fetched` was not drawn yet; None where no item draws random numbers.
        self._before: Generators | None = None
        self._state: Any = None  # of the loader, at that time
        if place is not None:
            self._come_back(place, skip=not stateful)
        self.fetch()
        # The script may have drawn numbers between that item and the checkpoint.
        if place is not None and place["after"] is not None:
            set_generators(place["after"], loader)

    def _come_back(self, place: dict[str, Any], skip: bool) -> None:
        """Drop the items drawn before the checkpoint, and set the generators as they were then."""
        for number in range(place["drawn"] if skip else 0):
            try:
                item = next(self._items)
            except StopIteration:
                raise ConfigError(
                    f"the loader ended after {number} items; the checkpoint was made after "
                    f"{place['drawn']} items of epoch {self.epoch}. Give the same loader "
                    "as then"
                ) from None
            if not number:
                self._compare_first(item)
        self._drawn = place["drawn"]
        set_generators(place["before"], self._loader)

    def fetch(self) -> None:
        """Draw an item into ``fetched``; at the end of the loader it stays empty."""
        if type(self._loader) not in (list, tuple):  # to read the states takes long (40 us)
            self._before = generators(self._loader)
        self._state = _state_of(self._loader)
        try:
            self.fetched.append(next(self._items))
            if not self._drawn:
                self._compare_first(self.fetched[0])
            self._drawn += 1
        except StopIteration:
            pass
        except Exception as error:  # the user's code; raised again by `train_epoch`
            self.error = error

    def _compare_first(self, item: object) -> None:
        """Note the first item of the epoch; warn if it differs from that before the checkpoint."""
        found = _fingerprint(item)
        if None not in (self._first, found) and self._first != found:
            _log.warning(
                "the first item of epoch %d is another one than before the checkpoint: some items "
                "may be trained on twice and others never, and the bits are not those of a run "
                "that was not interrupted. A loader must yield the same items from the same random "
                "generators; one that counts epochs needs set_epoch(epoch) in "
                "for epoch in range(pipe.epoch, epochs)",
                self.epoch,
            )
        self._first = found

    @property
    def is_empty(self) -> bool:
        """Whether the loader has ended without an item."""
        return not self._drawn and not self.error

    def place(self) -> dict[str, Any]:
        """Return the place of the next item to be injected, for a `Loading` in another process."""
        # The item drawn ahead is not injected, so it is drawn again after a resume.
        ahead, now = bool(self.fetched), generators(self._loader)
        return {
            "epoch": self.epoch,
            "drawn": self._drawn - ahead,
            "start": _saveable(self._start),
            "before": _saveable((self._before if ahead else None) or now),
            "after": _saveable(now) if ahead else None,
            "loader": self._state if ahead else _state_of(self._loader),
            "warm": self._warm,
            "first": self._first,
        }
