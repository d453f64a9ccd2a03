"""The net under what the script changes: the parcels are compared as a whole, now and then.

At mini-batches 1, 2, 4, 8 and so on, at each end of an epoch, before each evaluation or state dict
and after each save, all that was packed for the stages, and all that their code names, is walked
through again (`models/parcel.py`).
What differs, and does not travel, ends the run by name: the stages have trained without it. What
may be harmless is said once. A walk costs its time, so the net waits until a hundred times of that
have passed; only the first, if they are quick, and one at the end are free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import getattr_static
from typing import Any, NoReturn

from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.own_model import OwnModel
from pipedream_rt.models.code_reading import names_used
from pipedream_rt.models.holders import GONE, Holder, equal
from pipedream_rt.models.parcel import Parcel, has_grown, is_plain_mark
from pipedream_rt.models.settings import refuse_global_hooks
from pipedream_rt.telling import log_of

_log = log_of(__name__)

_FREE_S = 0.25
"""The seconds that walks may take before one waits."""

_SHARE = 100
"""Then a walk is made once so many times its own time has passed since the last one."""

_TRAVELS = (
    "workers have their own, and what is in flight would see it; keep it in an attribute of the "
    "layer or the loss, from which it travels, give it as an input, or change it on the stages by "
    "pipe.on_stages(function)"
)
_FIXED = "the stages have copies of it that nobody can reach"
_RECORDED = (
    "the forward between the layers was recorded with its value; give it to the model as an input, "
    "or keep it in a layer that reads it, from which it travels"
)


class Net:
    """Finds what the script has changed of all that its stages go by.

    ``sent`` has the parcels of the stages, of which ``travelling`` holders are sent changes;
    ``fixed`` has that of what no stage is sent changes of, and ``between`` that of what the forward
    between the layers goes by. ``read`` has the attributes that this forward has read, by the name
    of the module and their own. ``shared`` is whether stages in this process share with the script
    what is pickled by name; ``cost`` is what a walk takes, in seconds.

    Attributes:
        waits: Whether a walk is due, and waits for its time.
    """

    def __init__(
        self,
        own: OwnModel,
        sent: Sequence[Parcel],
        travelling: Collection[Holder],
        fixed: Parcel,
        between: Parcel,
        whole: nn.Module,
        read: Mapping[tuple[str, str], Any],
        *,
        shared: bool,
        cost: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._own, self._sent, self._fixed, self._between = own, sent, fixed, between
        self._travelling = {id(holder): holder for holder in travelling}
        self._whole, self._read, self._shared, self._clock = whole, read, shared, clock
        self._spent, self._cost, self._since = 0.0, cost, clock()
        self.waits = False
        self._said: set[str] = set()

    def cast(self, at_last: bool = False) -> bool:
        """Walk, unless that would cost more than its share of the time; return whether it has."""
        now = self._clock()
        is_free = self._spent + self._cost <= _FREE_S
        self.waits = not (is_free or at_last) and now - self._since < _SHARE * self._cost
        if self.waits:
            return False
        try:
            self._compare()
        finally:
            self._since = self._clock()
            self._cost = self._since - now
            self._spent += self._cost
        return True

    def say(self, what: str, why: str) -> None:
        """Say once that the script has changed something, where that may be harmless."""
        if what not in self._said:
            self._said.add(what)
            _log.warning("the script has changed %s since the pipeline was made: %s", what, why)

    def reads(self, holder: Holder) -> bool:
        """Whether code may read what a holder holds."""
        return any(
            _is_read(parcel, place) for parcel in self._sent for place in parcel.places_of(holder)
        )

    def _compare(self) -> None:
        refuse_global_hooks()
        if self._own.watches:
            self._own.require_known()
            self._compare_recorded()
        for place, *_ in self._fixed.changes():
            refuse(self._fixed.name(place), _FIXED)
        for parcel in self._sent:
            for change in parcel.changes():
                self._judge(parcel, *change)
            parcel.settle()

    def _compare_recorded(self) -> None:
        """Refuse changes of what the forward between the layers goes by."""
        for (name, key), before in self._read.items():
            module = self._whole.get_submodule(name)
            now = vars(module).get(key, getattr_static(type(module), key, before))
            if now is not before and not equal(before, now):
                refuse(f"{key!r} of {name or 'the model'}", _RECORDED)
        for place, *_ in self._between.changes():
            holder, key = self._between.holder(place)
            # Of data, `dtype` and the like may be what the code reads of a tensor instead.
            of_data = holder is not None and holder.kind == "object" and hasattr(Tensor, str(key))
            if not of_data and _is_read(self._between, place):
                refuse(self._between.name(place), _RECORDED)

    def _judge(self, parcel: Parcel, place: int, before: Any, now: Any) -> None:
        """Refuse a change that no stage sees; leave out those that travel, or that nobody reads."""
        holder, key = parcel.holder(place)
        copied = [id(parcel.holder(at)[0]) in self._travelling for at in parcel.above(place)]
        state, sampled = parcel.has_state(place), parcel.is_sampled(place)
        if key == "forward" and holder is not None and isinstance(holder.value, nn.Module):
            refuse(parcel.name(place), _TRAVELS)
        # `ScriptValues` sends it, or has refused it; but for what changes inside of the value.
        if (copied[0] and not (state or sampled)) or not _is_read(parcel, place):
            return
        shared, kind = self._shared and not any(copied), "" if holder is None else holder.kind
        # Nothing was there, as where a writer is opened later, or a cache is filled.
        opened = before == ("None",) and not is_plain_mark(now)
        cached = before is GONE or opened or has_grown(before, now)
        # In a large container other entries are looked at once it has another length.
        cached = cached or (sampled and (now is GONE or not is_plain_mark(now)))
        # Code that sets it itself may have been called by the script; and by stages that share it.
        stored = kind in ("class", "object", "globals") and key in parcel.stored
        if shared and kind in ("dict", "list", "state"):
            stored = parcel.changes_entries or kind == "state"
        if not (cached or stored or (shared and state)):
            refuse(parcel.name(place), _TRAVELS)
        if not shared and not (before is GONE and kind == "globals"):
            # Once for a container, whatever is added to it.
            grown = holder is not None and kind in ("dict", "list")
            what = holder.where if holder is not None and grown else parcel.name(place)
            self.say(what, f"if this is more than a cache, {_TRAVELS}")


def _is_read(parcel: Parcel, place: int) -> bool:
    """Whether code may read the value at a place: those in objects and classes by their names."""
    for at in parcel.above(place):
        holder, key = parcel.holder(at)
        if holder is not None and holder.kind in ("object", "class") and isinstance(key, str):
            # What is counted as objects are made is no value: stages in this process make some too.
            counted = holder.kind == "class" and key in names_used(holder.value, "__init__")[1]
            # load_state_dict has set it, and the stages have their own.
            cls: type = type(holder.value)
            extra = holder.kind == "object" and key in names_used(cls, "set_extra_state")[1]
            if key not in parcel.named or counted or extra:
                return False
    return True


def refuse(what: str, why: str) -> NoReturn:
    """Refuse a change of the script's."""
    raise ConfigError(f"the script has changed {what} since the pipeline was made: {why}")
