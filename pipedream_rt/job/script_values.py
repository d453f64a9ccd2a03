"""What the script changes while it trains: it travels with the next micro-batch, or is refused.

Annealing is an everyday line: ``loss.beta = step / 1000``, ``model.drop.p = 0.1``. The stages have
copies of the loss and of the layers, so the change would reach nobody. A plain value in an
attribute, a closure, a global or a container that went along with a stage is therefore sent with
the micro-batches that are injected after the change, as hyper-parameters are, which is exact in
every schedule. What cannot be sent is refused at the next injection, by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.models.captures import GONE, LENGTH, Given, Holder, Holders, collecting
from pipedream_rt.models.code_reading import names_used
from pipedream_rt.models.preserving_state import modules_inside
from pipedream_rt.models.tensors import named_tensors
from pipedream_rt.schedules.placement import LOSS_LAYER
from pipedream_rt.stage.hyper import pack_hyper, unpack_hyper
from pipedream_rt.stage.script_values import remove
from pipedream_rt.torch_private import NormWithBuffers


def holders_of(
    roots: Sequence[Sequence[tuple[str, Any]]], model: UnsplitModel, elsewhere: bool
) -> list[Holders]:
    """Return, by stage, the objects that hold values of the script (see `models/captures.py`)."""
    found = []
    for of_stage in roots:
        found.append(Holders(t for m in model.modules.values() for _, t in named_tensors(m)))
        found[-1].walk(of_stage)
    if what := collecting(found, elsewhere):
        raise ConfigError(
            f"{what}, is only added to and never read, as what is collected for the script; on a "
            "stage it is a copy, which the script would never see. Return it from the model or as "
            "a metric of evaluate(), keep it in an attribute of the layer, which "
            "pipe.on_stages(function) can read, or collect it in the loop over the results"
        )
    return found


class ScriptValues:
    """The values of the script that stages have copies of.

    Attributes:
        forwards_store: Whether a layer or the loss may change a value of its own in its forward.
    """

    def __init__(
        self,
        model: UnsplitModel,
        layers: dict[str, nn.Module],
        stages: Sequence[dict[int, Holder]],
        fixed: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._holders: dict[int, Holder] = {}
        for of_stage in stages:
            self._holders.update(of_stage)
        others = Holders()
        others.walk(fixed)
        # Stages have copies of these that nobody can reach, as corrections: any change is refused.
        self._fixed = list(others.found.values())
        # Modules that are taken apart are on no stage: the recorded forward has read their values.
        self._apart, self._read = self._taken_apart(model, layers) if layers else ([], set())
        for holder in (*self._holders.values(), *self._fixed, *self._apart):
            holder.look()
        self._weights = [_Weights(*each) for each in model.modules.items()]
        if model.sequence is not None:
            given = model.given if isinstance(model.given, nn.Sequential) else model.whole
            self._weights[0].watch_layers(given, modules_inside(model.sequence))
        objects = [h.value for of in stages for h in of.values() if h.kind == "object"]
        classes: set[type] = {type(each) for each in objects}
        # An object of data, as a config, is read by code of other classes.
        self._loaded = {n for cls in classes for n in names_used(cls)[0]}
        self._loaded.update(*(h.loads for of in stages for h in of.values()))
        parts: set[type] = {type(each) for each in objects if isinstance(each, nn.Module)}
        self.forwards_store = any(names_used(cls)[1] for cls in parts) or any(
            h.kind == "state" and h.travels for of in stages for h in of.values()
        )
        self._changed: dict[tuple[int, Any], Any] = {}
        self._first: dict[tuple[int, Any], Any] = {}  # of these, what was there at the start

    @staticmethod
    def _taken_apart(
        model: UnsplitModel, layers: dict[str, nn.Module]
    ) -> tuple[list[Holder], set[str]]:
        """Return the holders of modules that no stage has, and the attributes that they read."""
        inside = modules_inside(layers)
        apart = [(n, m) for n, m in model.whole.named_modules() if id(m) not in inside]
        whole = [m for m in model.whole.modules() if id(m) in inside]
        found = Holders([*(t for _, t in named_tensors(model.whole)), *whole])
        found.walk((name or "the model", module) for name, module in apart)
        read: set[str] = set()
        for _, module in apart:
            cls: type = type(module)
            read |= names_used(cls)[0]
        return list(found.found.values()), read

    def now(self) -> list[Given]:
        """Return all values that the script has changed so far; refuse what cannot be sent."""
        for weights in self._weights:
            weights.refuse_changes()
        for holder in self._fixed:
            for key, *_ in holder.changes():
                _refuse(holder, key, "the stages have copies of it that nobody can reach")
        for holder in self._apart:
            for key, *_ in holder.changes():
                # Of data, `dtype` and the like may be what the code reads of a tensor instead.
                of_data = holder.kind == "object" and not isinstance(holder.value, nn.Module)
                named = key in self._read and not (of_data and hasattr(Tensor, str(key)))
                if named or holder.kind != "object":
                    _refuse(
                        holder,
                        key,
                        "the forward between the layers was recorded with its value; give it to "
                        "the model as an input, or keep it in a layer, from which it travels",
                    )
        for number, holder in self._holders.items():
            changes = list(holder.changes())
            for key, before, value in changes:
                self._note(number, holder, key, before, value)
            if changes:
                holder.look()
        return [[number, key, value] for (number, key), value in self._changed.items()]

    # -- in checkpoints -------------------------------------------------------------------------

    def kept(self) -> list[list[Any]]:
        """Return the values that travel: where each is, its key, its value, and its first one."""
        with suppress(ConfigError):  # the next mini-batch is refused, which is no reason to lose it
            self.now()
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
        self.now()  # what is not noted yet too
        for (number, key), first in self._first.items():
            holder = self._holders[number]
            if first is not GONE:
                holder.put(key, first)
            else:
                remove(holder, key)
            holder.look()
        self._changed.clear()

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
        return any(each.has_moved for each in self._weights)

    @contextmanager
    def stages_may_change_shared(self) -> Iterator[None]:
        """Let the body compute stages that share modules and classes with the script by name."""
        # The script's changes are noted first: afterwards those of the stages are among them.
        common = [(n, h) for n, h in self._holders.items() if not h.travels]
        for number, holder in common:
            for change in holder.changes():
                self._note(number, holder, *change)
        try:
            yield
        finally:
            for _, holder in common:
                holder.look()

    def _note(self, number: int, holder: Holder, key: Any, before: Any, value: Any) -> None:
        """Note a change that is to be sent, or refuse it."""
        cls: type = type(holder.value)
        read, stored = names_used(cls) if holder.kind == "object" else ((), ())
        if holder.kind == "class" and key in names_used(holder.value, "__init__")[1]:
            return  # as a count of its objects: stages in this process make some too
        if not holder.travels:
            by_class = "an attribute of the object" if holder.kind == "class" else "an attribute"
            _refuse(
                holder,
                key,
                f"workers have their own, and what is in flight would see it; keep it in {by_class}"
                " of the layer or the loss, from which it travels",
            )
        if holder.kind == "object" and key in names_used(cls, "set_extra_state")[1]:
            return  # load_state_dict has set it, and the stages have their own
        if key in stored:
            if _can_be_sent(value) and not self.weights_moved:
                _refuse(
                    holder,
                    key,
                    "its forward changes it too, on its stage, so it is not known what it is to be "
                    "there. If the script calls the module by itself, let it call pipe.module()",
                )
            return
        # No single value describes an object with a state of its own, or a container that grows.
        whole = holder.kind == "state" or key is LENGTH or isinstance(holder.value, set)
        grown = holder.kind == "list" and GONE in (before, value)
        if type(key) in (str, int) and _can_be_sent(value) and not (whole or grown):
            self._changed[number, key] = pack_hyper(value, str(key))
            self._first.setdefault((number, key), before)
        elif holder.kind != "object" or key in (
            read if isinstance(holder.value, nn.Module) else self._loaded
        ):
            _refuse(
                holder,
                key,
                "only numbers, texts, None and tuples of these travel to the stages while one "
                "trains; give it as an input, or change it by pipe.on_stages(function)",
            )


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
    if not holder.travels or holder.kind in ("state", "class"):
        return False
    return key in holder.raw() or (not first and holder.kind in ("object", "dict"))


class _Weights:
    """The script's weights, buffers, layers and hooks of a module; no stage reads them any more."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._is_loss = name == LOSS_LAYER
        self._parameters = [(n, p, p.requires_grad) for n, p in module.named_parameters(name)]
        self._trained = [trained for *_, trained in self._parameters]
        self._at_first = self._now()
        modules = list(module.named_modules(prefix=name))
        self._places = [
            (f"{where}.{key}".strip("."), held, key, value)
            for where, each in modules
            for held in (each._parameters, each._buffers, each._modules)
            for key, value in held.items()
        ]
        self._hooks = [
            held
            for _, each in modules
            for key, held in vars(each).items()
            if key.endswith("_hooks") and isinstance(held, dict)
        ]
        self._count = sum(map(len, self._hooks))
        # Forwards that the script runs by itself change the statistics of norms.
        normed = {
            id(b)
            for _, m in modules
            if isinstance(m, NormWithBuffers)
            for b in m.buffers(recurse=False)
        }
        self._buffers = [
            (n, b, b._version, b.clone() if b.nbytes < _SMALL else None)
            for n, b in module.named_buffers(name)
            if id(b) not in normed
        ]

    def watch_layers(self, sequence: nn.Module, inside: Set[int]) -> None:
        """Watch a sequence and those in it too; `inside` has the ``id`` of modules in a layer."""
        for where, each in sequence.named_modules():
            if id(each) not in inside:
                hooks = [held for key, held in vars(each).items() if key.endswith("_hooks")]
                self._hooks += [held for held in hooks if isinstance(held, dict)]
                layers = each._modules
                self._places += [
                    (f"{where}.{key}".strip("."), layers, key, layer)
                    for key, layer in layers.items()
                ]
        self._count = sum(map(len, self._hooks))

    def _now(self) -> list[tuple[int, int]]:
        """Return what differs once a weight was changed: of each its version and its address."""
        # `p.data = x` moves the address alone. Of a subclass it may be unknown.
        plain = (nn.Parameter, Tensor)
        return [
            (p._version, p.data_ptr() if type(p) in plain and not p.is_meta else 0)
            for _, p, _ in self._parameters
        ]

    @property
    def has_moved(self) -> bool:
        """Whether the script has loaded weights into the module, as to use it by itself."""
        return self._now() != self._at_first

    def refuse_changes(self) -> None:
        """Refuse a change that plain PyTorch would act on, and the stages do not see."""
        now = self._now()
        loaded = now != self._at_first
        # All trained weights at once: the script has loaded those of the stages, to use the model
        # by itself. Only some of them: it expects the stages to see the change.
        if loaded:
            moved = [one != other for one, other in zip(now, self._at_first, strict=True)]
            partly = not all(m for m, trained in zip(moved, self._trained, strict=True) if trained)
            if partly or (self._is_loss and not any(self._trained)):
                name = self._parameters[moved.index(True)][0]
                _refuse_own(
                    f"the weight {name!r} was changed", "Change it by pipe.load_state_dict(), "
                )
        trained = [p.requires_grad for _, p, _ in self._parameters]
        if trained != self._trained and (any(trained) or not loaded):
            name = next(n for n, p, before in self._parameters if p.requires_grad != before)
            raise ConfigError(
                f"requires_grad of {name!r} was changed in the script, and the stages train "
                "what was trained at the start. To freeze or unfreeze in a run, save() it, and "
                "go on with load() in a new Pipeline; for a model of your own take "
                "pipe.module()"
            )
        if loaded:
            return  # it uses the model by itself, and may change the rest of it
        for name, held, key, value in self._places:
            if held.get(key) is not value:
                _refuse_own(f"{name!r} was replaced", "Replace it before the pipeline is made, ")
        if sum(map(len, self._hooks)) != self._count:
            what = "a hook of the model or of the loss was added or removed"
            _refuse_own(what, "Register hooks before the pipeline is made, ")
        for name, buffer, version, before in self._buffers:
            if buffer._version != version and (before is None or not buffer.equal(before)):
                instead = "Keep a number that changes in a plain attribute, which travels, "
                _refuse_own(f"the buffer {name!r} was changed", instead)


def _refuse_own(what: str, instead: str) -> NoReturn:
    """Refuse a change of the script's own model or loss."""
    raise ConfigError(
        f"{what} in the script, and the stages have a copy of what was there at the start. "
        f"{instead}or change it on the stages by pipe.on_stages(function); for a model of your own "
        "take pipe.module()"
    )


_SMALL = 1 << 20
"""Bytes below which the values of a buffer are compared; of a larger one only its version is."""


def _refuse(holder: Holder, key: Any, why: str) -> NoReturn:
    """Refuse a change of the script's."""
    raise ConfigError(
        f"the script has changed {holder.called(key)} since the pipeline was made: {why}"
    )
