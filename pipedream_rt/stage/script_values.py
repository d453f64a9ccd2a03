"""A stage's copies of values of the script: a micro-batch sees the values it was fed with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.holders import GONE, PLAIN, Given, Holder
from pipedream_rt.stage.hyper import unpack_hyper


class GivenValues:
    """One stage's copies, in holders by the number that micro-batches name.

    Attributes:
        differs: Whether the copies have other values than at the start.
    """

    def __init__(self, stage: int, holders: Mapping[int, Holder], shared: Sequence[int]) -> None:
        self._stage, self._holders = stage, holders
        self._shared = [holders[number] for number in shared]
        self._filled: set[int] = set()
        for holder in self._shared:
            holder.look()
        # By (holder, key), the packed values that the copies have now.
        self._now: dict[tuple[int, Any], Any] = {}
        self.differs = False
        # What stood there before the script changed it, as earlier micro-batches in flight read it.
        self._first: dict[tuple[int, Any], Any] = {}

    def apply(self, given: Sequence[Given]) -> None:
        """Give the copies the values that a micro-batch was fed with."""
        wanted = {(number, key): value for number, key, value in given if number in self._holders}
        if wanted == self._now:
            return
        for (number, key), packed in wanted.items():
            entry = (number, key)
            if entry not in self._first:
                self._first[entry] = self._holders[number].raw().get(key, _NOTHING)
            if self._now.get(entry, _NOTHING) != packed:
                self._put(number, key, unpack_hyper(packed))
        # A backward may come after forwards that were fed with later values.
        for number, key in self._now.keys() - wanted.keys():
            self._put(number, key, self._first[number, key])
        self._now, self.differs = wanted, bool(wanted)

    def _put(self, number: int, key: Any, value: Any) -> None:
        holder = self._holders[number]
        if value is _NOTHING:
            remove(holder, key)
        else:
            holder.put(key, value)
        holder.look()  # else `refuse_parted` takes it for a change by the stage

    def refuse_parted(self) -> None:
        """Refuse changes by the stage to values that other stages have copies of."""
        for holder in self._shared:
            changes = list(holder.changes())
            filled = bool(changes) and all(_fills(one, other) for _, one, other in changes)
            # A cache that a first call fills gets the same on each stage.
            if filled and (holder.kind == "dict" or id(holder) not in self._filled):
                self._filled.add(id(holder))
                holder.look()
                continue
            for key, one, other in changes:
                if not holder.travels and not (isinstance(one, PLAIN) and isinstance(other, PLAIN)):
                    continue  # a cache of a class or module, which each stage may fill for itself
                how = "" if holder.kind == "state" else f" ({one!r:.40} became {other!r:.40})"
                raise ConfigError(
                    f"stage {self._stage} has changed {holder.called(key)}{how}, of which other "
                    "stages have copies: in plain PyTorch it is one object, and here the change "
                    "would not reach the other stages. Keep the layers that share it in one stage, "
                    "by stages=[first layers], or pass the value along"
                )


def remove(holder: Holder, key: Any) -> None:
    """Remove a value that was not there at first, if it is there."""
    if key not in holder.raw():
        return
    if holder.kind == "dict":
        del holder.value[key]
    else:
        object.__delattr__(holder.value, key)  # its class may refuse it, or do more


def _fills(one: Any, other: Any) -> bool:
    """Whether a tensor without gradient is where nothing was, as in a cache of masks."""
    tensor = isinstance(other, Tensor) and not other.requires_grad
    return (one is GONE or one is None) and tensor


_NOTHING = object()
