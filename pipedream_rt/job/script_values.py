"""What the script changes while it trains: it travels with the next micro-batch, or is refused.

Annealing is an everyday line: ``loss.beta = step / 1000``, ``model.drop.p = 0.1``. The stages have
copies of the loss and of the layers, so the change would reach nobody. A plain value in an
attribute, a closure, a global or a container that went along with a stage is therefore sent with
the micro-batches that are injected after the change, as hyper-parameters are, which is exact in
every schedule. For all else there is a net (`job/net.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from pipedream_rt.batches.forwards import Forwards
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.net import Net, refuse
from pipedream_rt.job.own_model import OwnModel
from pipedream_rt.job.specs import PackedStage
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.models.code import is_installed
from pipedream_rt.models.code_reading import names_used
from pipedream_rt.models.holders import GONE, LENGTH, Given, Holder, Look
from pipedream_rt.models.parcel import Parcel, same_code, weights_in
from pipedream_rt.models.preserving_state import modules_inside
from pipedream_rt.stage.hyper import pack_hyper, unpack_hyper
from pipedream_rt.stage.script_values import remove
from pipedream_rt.telling import log_of

_log = log_of(__name__)


class ScriptValues:
    """The values of the script that stages have copies of.

    Attributes:
        own: The script's own model and loss.
        watches: Whether changes are looked for.
        forwards_store: Whether a layer or the loss may change a value of its own in its forward.
    """

    def __init__(
        self,
        own: OwnModel,
        stages: Sequence[dict[int, Holder]],
        parcels: Sequence[Parcel],
        net: Net,
    ) -> None:
        self.own, self._net, self.watches = own, net, True
        held = {number: h for of_stage in stages for number, h in of_stage.items()}
        self._holders = {number: h for number, h in held.items() if h.travels}
        objects = [h.value for h in self._holders.values() if h.kind == "object"]
        classes: set[type] = {type(each) for each in objects}
        # An object of data, as a config, is read by code of other classes.
        self._loaded = {n for cls in classes for n in names_used(cls)[0]}
        named = {n for parcel in parcels for n in parcel.named}
        self._loaded |= named
        parts: set[type] = {type(each) for each in objects if isinstance(each, nn.Module)}
        self.forwards_store = any(names_used(cls)[1] for cls in parts) or any(
            h.kind == "state" for h in self._holders.values()
        )
        for holder in self._holders.values():
            holder.look()
        self._numbers = {holder: number for number, holder in self._holders.items()}
        self._look = Look(self._holders.values(), self._loaded, own.versioned)
        self._calls = self._compared_at = 0
        self._changed: dict[tuple[int, Any], Any] = {}
        self._first: dict[tuple[int, Any], Any] = {}  # of these, what was there at the start
        self._given: list[Given] = []

    def now(self) -> list[Given]:
        """Return all values that the script has changed so far; refuse what cannot be sent."""
        if not self.watches:
            return self._given
        if not self._look.is_same():
            # To look at all weights takes long: not where a value is annealed, say.
            if self._look.has_written:
                self.own.require_known()
            self._note_changes()
        self._calls += 1
        if self._net.waits or self._calls & (self._calls - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            self._cast()
        return self._given

    def end(self) -> None:
        """Compare all that the stages go by, at the end of an epoch and the like."""
        if self._calls and self.watches:
            self._cast()

    def _cast(self) -> None:
        if self._net.cast():
            self._compared_at = self._calls

    def close(self) -> None:
        """Compare once more if that has waited; the run has ended, so it is only said."""
        if self._calls != self._compared_at and self.watches:
            try:
                self._net.cast(at_last=True)
            except ConfigError as error:
                _log.warning("the run has ended, and was trained otherwise since: %s", error)

    # -- in checkpoints -------------------------------------------------------------------------

    def kept(self) -> list[list[Any]]:
        """Return the values that travel: where each is, its key, its value, and its first one."""
        with suppress(ConfigError):  # the next mini-batch is refused, which is no reason to lose it
            self._note_changes()
        places = self._places()
        return [
            [*places[number], key, value, _packed(self._first[number, key])]
            for (number, key), value in self._changed.items()
        ]

    def put_back(self, kept: Sequence[list[Any]]) -> tuple[list[str], list[str]]:
        """Set the script's values to those of a checkpoint, from which they travel again.

        Return the names that this script does not have, and in words those that the script of the
        checkpoint had begun with another value.
        """
        # All are unpacked first: what is no packed value raises before anything is changed.
        values = [(unpack_hyper(value), *map(unpack_hyper, first)) for *_, value, first in kept]
        self._undo()
        numbers = {place: number for number, place in self._places().items()}
        unknown, others = [], []
        for (where, nth, key, _, first), (value, *was) in zip(kept, values, strict=True):
            holder = self._holders.get(numbers.get((where, nth), -1))
            if holder is None or not _has_place(holder, key, first):
                unknown.append(f"{key!r} of {where}" if key != "" else where)
                continue
            mine = holder.raw().get(key, GONE)
            if _packed(mine) != first:
                said = f"{was[0]!r}" if was else "something else"
                others.append(f"{holder.called(key)} was {said} at first, and is {mine!r:.40} here")
            holder.put(key, value)  # `now` finds it, as a change by the script
        return unknown, others

    def _undo(self) -> None:
        """Set all values that the script has changed to what they were at first."""
        self._note_changes()  # what is not noted yet too
        for (number, key), first in self._first.items():
            holder = self._holders[number]
            if first is not GONE:
                holder.put(key, first)
            else:
                remove(holder, key)
            holder.look()
        self._look.note()
        self._changed.clear()
        self._given = []

    def _places(self) -> dict[int, tuple[str, int]]:
        """Return by number where each holder is, which another process calls the same.

        The numbers of holders depend on the split, and on the order of names in sets.
        """
        seen: Counter[str] = Counter()
        places = {}
        for number, holder in self._holders.items():
            places[number] = (holder.where, seen[holder.where])
            seen[holder.where] += 1
        return places

    @property
    def weights_moved(self) -> bool:
        """Whether the script has loaded weights into its model or its loss."""
        return self.own.has_moved

    def _note_changes(self) -> None:
        changed = self._look.changed()
        for holder in changed:
            for key, before, value in holder.changes():
                self._note(self._numbers[holder], holder, key, before, value)
            holder.look()
        self._look.renew(changed)
        self._given = [[number, key, value] for (number, key), value in self._changed.items()]

    def _note(self, number: int, holder: Holder, key: Any, before: Any, value: Any) -> None:
        """Note a change that is to be sent, or refuse it."""
        cls: type = type(holder.value)
        read, stored = names_used(cls) if holder.kind == "object" else ((), ())
        if holder.kind == "object" and key in names_used(cls, "set_extra_state")[1]:
            return  # load_state_dict has set it, and the stages have their own
        if key in stored:
            if not self.weights_moved:
                why = (
                    "its forward changes it too, on its stage, so it is not known what it is to be "
                    "there. If the script calls the module by itself, let it call pipe.module(); "
                    "to set it, pipe.on_stages(function)"
                )
                # A tensor may be a cache that a call by the script itself has filled.
                is_cache = is_installed(cls.__module__) and not _can_be_sent(value)
                (self._net.say if is_cache else refuse)(holder.called(key), why)
            return
        # No single value describes an object with a state of its own, or a container that grows.
        whole = key is LENGTH or isinstance(holder.value, set)
        grown = holder.kind == "list" and GONE in (before, value)
        if type(key) in (str, int) and _can_be_sent(value) and not (whole or grown):
            self._changed[number, key] = pack_hyper(value, str(key))
            self._first.setdefault((number, key), before)
            return
        by = {*read, "forward"} if isinstance(holder.value, nn.Module) else self._loaded
        unread = holder.kind == "object" and key not in by
        if unread or same_code(before, value) or not self._net.reads(holder):
            return
        why = (
            "only numbers, texts, None and tuples of these travel to the stages while one trains; "
            "give it as an input, or change it by pipe.on_stages(function)"
        )
        # A call by the script itself may have filled a cache, or opened what it writes to.
        if holder.kind == "dict" and before is GONE:
            self._net.say(holder.where, why)
        elif holder.kind == "globals" and before is None:
            self._net.say(holder.called(key), why)
        else:
            refuse(holder.called(key), why)


def script_values_of(
    model: UnsplitModel,
    forwards: Forwards,
    packed: Sequence[PackedStage],
    fixed: Sequence[tuple[str, Any]],
    optimizer: type | None,
    *,
    shared: bool,
) -> ScriptValues:
    """Return the values of the script in what was packed for its stages.

    ``fixed`` has what no stage is sent changes of; ``shared`` is whether stages in this process
    share with the script what is pickled by name.
    """
    own = OwnModel(model)
    parcels = [each.parcel for each in packed]
    by_name = Parcel([] if optimizer is None else [("the optimizer", optimizer)])
    inside = modules_inside(forwards.layers)
    apart = [(n or "the model", m) for n, m in model.whole.named_modules() if id(m) not in inside]
    recorded = [
        (f"{key!r} of {name or 'the model'}", v) for (name, key), v in forwards.read.items()
    ]
    net = Net(
        own,
        [*parcels, by_name],
        [h for each in packed for h in each.holders.values() if h.travels],
        Parcel(fixed),
        Parcel(
            [*apart, *recorded] if inside else [],
            [*weights_in([model.whole]), *forwards.layers.values()],
        ),
        model.whole,
        forwards.read,
        shared=shared,
        cost=sum(parcel.took for parcel in parcels),
    )
    return ScriptValues(own, [each.holders for each in packed], parcels, net)


def _can_be_sent(value: Any) -> bool:
    """Whether a value travels: it can be packed, and is no tensor, list or dict."""
    try:
        pack_hyper(value, "")
    except ConfigError:
        return False
    return not isinstance(value, Tensor | list | dict) and value is not GONE


def _packed(value: Any) -> list[Any]:
    """Return a value packed, in a list; an empty one for a value that does not travel."""
    return [pack_hyper(value, "")] if _can_be_sent(value) else []


def _has_place(holder: Holder, key: Any, first: list[Any]) -> bool:
    """Whether a holder has a value under a key, or had none at first and can get one."""
    if holder.kind == "state":
        return False
    return key in holder.raw() or (not first and holder.kind in ("object", "dict"))
