"""The values of the script's that a stage has copies of, as each micro-batch was given them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.holders import GONE, PLAIN, Given, Holder
from pipedream_rt.stage.optimizer import unpack_hyper


class GivenValues:
    """The copies of one stage."""

    def __init__(self, stage: int, holders: Mapping[int, Holder], shared: Sequence[int]) -> None:
        self._stage, self._holders = stage, holders
        self._shared = [holders[number] for number in shared]
        self._filled: set[int] = set()
        for holder in self._shared:
            holder.look()
        self._now: dict[tuple[int, Any], Any] = {}
        # What stood there before the script changed it, as earlier micro-batches in flight read it.
        self._first: dict[tuple[int, Any], Any] = {}

    def apply(self, given: Sequence[Given]) -> None:
        """Let the copies have the values with which a micro-batch was injected."""
        if not given and not self._now:
            return
        wanted = {(number, key): value for number, key, value in given if number in self._holders}
        if wanted == self._now:
            return
        for (number, key), packed in wanted.items():
            place = (number, key)
            if place not in self._first:
                self._first[place] = self._holders[number].content().get(key, _NOTHING)
            if self._now.get(place, _NOTHING) != packed:
                self._put(number, key, unpack_hyper(packed))
        for number, key in self._now.keys() - wanted.keys():
            self._put(number, key, self._first[number, key])
        self._now = wanted

    def _put(self, number: int, key: Any, value: Any) -> None:
        """Let a holder have a value; that is no change of the stage's own."""
        holder = self._holders[number]
        if value is _NOTHING:
            vars(holder.value).pop(key, None)
        else:
            holder.put(key, value)
        holder.look()

    def refuse_parted(self) -> None:
        """Refuse that a stage has changed what other stages have copies of."""
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
                    continue  # a cache of a class or of a module may fill, which is right on each
                how = "" if holder.kind == "state" else f" ({one!r:.40} became {other!r:.40})"
                raise ConfigError(
                    f"stage {self._stage} has changed {holder.called(key)}{how}, of which other "
                    "stages have copies: in plain PyTorch it is one object, and here the copies "
                    "would part. Keep the layers that share it in one stage, by stages=[first "
                    "layers], or pass the value along"
                )


def _fills(one: Any, other: Any) -> bool:
    """Whether a constant stands where nothing stood, as in a cache of masks."""
    tensor = isinstance(other, Tensor) and not other.requires_grad
    return (one is GONE or one is None) and tensor


_NOTHING = object()
