"""What the user's code reads beside its arguments: attributes, closures, globals, containers.

A stage has copies of all that. So a value that the script changes while it trains must travel, or
be refused; and an object that several stages use would be a separate copy on each. Both are found
by a walk over what is pickled for a stage, from its layers, its loss and its hooks. A *holder* is
an object that holds values under keys, as an object its attributes, or a function its globals.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from pipedream_rt.models.code import is_by_name, is_installed
from pipedream_rt.models.code_reading import functions_called, globals_read, names_in, uses

Given: TypeAlias = list[Any]
"""A value that the script has changed: the number of its holder, its key there, its packed form."""

PLAIN = (type(None), bool, int, float, str)
"""The values that travel when the script changes them."""

_WITH_STATE = (
    Tensor, torch.Generator, np.ndarray, np.random.Generator, np.random.RandomState,
    random.Random, itertools.count,
)  # fmt: skip
"""Objects whose changes show in no attribute."""

_OF_MODULES = {*vars(nn.Module())}
"""The attributes that every module has for torch: its mode, its parts, its hooks."""

_BY_NAME = ("globals", "class", "object")
"""Kinds of holders of which each process has its own, if they do not travel. The walk goes from
these into code alone, so what is inside of their values is compared with them."""

LENGTH = "its length"
"""The only key of a large container; its value is the length."""

_MOST, _SMALL = 4096, 1 << 20
"""Above so many entries, only the length of a container is compared; above so many bytes, only the
shape of an array."""


@dataclass(eq=False)
class Holder:
    """An object that holds values under keys.

    Attributes:
        kind: How it holds them: as an ``"object"``, a ``"class"``, a ``"dict"``, a ``"list"``, a
            ``"cell"`` of a closure, the ``"globals"`` of a function, or as its own ``"state"``.
        where: Where it was found, for messages.
        names: The keys that count; None for all.
        travels: Whether a stage has a copy of its own, which alone is changed.
        loads: For globals of functions, the attributes that these functions name.
    """

    value: Any
    kind: str
    where: str
    names: set[str] | None = None
    travels: bool = True
    loads: set[str] = field(default_factory=set, repr=False)
    _seen: dict[Any, Any] = field(default_factory=dict, repr=False)
    _size: int = 0

    def __getstate__(self) -> dict[str, Any]:
        # Without what it held, which a worker sees for itself.
        return {**vars(self), "_seen": {}}

    def content(self) -> Mapping[Any, Any]:
        """Return the values that it holds now, in a form in which changes inside show."""
        there = self.raw()
        return there if self.travels or self.kind not in _BY_NAME else _inside_of(there)

    def raw(self) -> Mapping[Any, Any]:
        """Return the values that it holds now, as they are."""
        value, kind = self.value, self.kind
        if kind == "globals":
            held = value.__globals__ if isinstance(value, FunctionType) else vars(value)
            return {n: held[n] for n in self.names or () if n in held}
        if kind == "cell":
            try:
                return {"": value.cell_contents}
            except ValueError:  # the cell is empty
                return {}
        if kind == "state":
            return {"": _state_of(value)}
        if kind in ("dict", "list"):
            if len(value) > _MOST:
                return {LENGTH: len(value)}
            return value if kind == "dict" else dict(enumerate(value))
        skipped = _OF_MODULES if isinstance(value, nn.Module) else ()
        held = attributes_of(value).items()
        return {k: v for k, v in held if k not in skipped and not _is_machinery(k, v)}

    def look(self) -> None:
        """Note what it holds now, for `changes` to compare with."""
        self._seen = dict(self.content())
        self._size = self._length()

    def _length(self) -> int:
        """Return the number of all entries, which shows that one was added."""
        if self.kind == "object":
            return len(attributes_of(self.value))
        return len(self.value) if self.kind in ("dict", "list") else 0

    def _is_same(self) -> bool:
        """Whether it holds the very same objects as before; quick, for each mini-batch."""
        value, seen, kind = self.value, self._seen, self.kind
        if kind == "object":
            held = attributes_of(value)
            return len(held) == self._size and _holds(held, seen)
        if kind in ("dict", "list") and len(value) == self._size <= _MOST:
            return all(map(is_, value, seen.values())) if kind == "list" else _holds(value, seen)
        return False

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield (key, value at `look`, value now) of each change; `GONE` where there is none."""
        if self._is_same():
            return
        now, seen = self.content(), self._seen
        for key in [*seen, *(key for key in now if key not in seen)]:
            one, other = seen.get(key, GONE), now.get(key, GONE)
            if one is not other and not _equal(one, other):
                yield key, one, other

    def put(self, key: Any, value: Any) -> None:
        match self.kind:
            case "cell":
                self.value.cell_contents = value
            case "globals":
                self.value.__globals__[key] = value
            case "dict" | "list":
                self.value[key] = value
            case _:
                # Not by the __setattr__ of its class, which may refuse it, or do more.
                object.__setattr__(self.value, key, value)

    def restore(self, held: Mapping[Any, Any]) -> None:
        """Put back what `raw` had returned."""
        now = self.raw()
        for key in [*held, *(key for key in now if key not in held)]:
            before = held.get(key, GONE)
            if now.get(key, GONE) is before or self.kind == "state":
                continue
            if self.kind == "cell" or isinstance(self.value, FunctionType):
                self.put(key, before)
            elif before is GONE:
                delattr(self.value, key)
            else:
                setattr(self.value, key, before)

    def called(self, key: Any) -> str:
        """Return what messages call the value under a key."""
        if self.kind in ("cell", "state"):
            return self.where
        return f"{key!r} of {self.where}"


def _holds(held: Mapping[Any, Any], seen: Mapping[Any, Any]) -> bool:
    """Whether a mapping has the very same objects under the keys that were seen."""
    # By key: None may have gone while another key came, and an object may have another key now.
    # A subclass of dict may do more when it is asked.
    get = functools.partial(dict.get, held) if isinstance(held, dict) else held.get
    return all(map(is_, map(get, seen, itertools.repeat(GONE)), seen.values()))


def _state_of(value: Any) -> Any:
    """Return what differs after an object of `_WITH_STATE` was changed."""
    match value:
        case Tensor():
            return id(value), 0 if value.is_inference() else value._version
        case torch.Generator():
            return bytes(value.get_state())
        case np.ndarray():
            return value.tobytes() if value.nbytes < _SMALL else value.shape
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case np.random.RandomState():
            return repr(value.get_state(legacy=True))
        case random.Random():
            return repr(value.getstate())
    return repr(value)


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object, those in ``__slots__`` too."""
    held: Mapping[str, Any] = getattr(value, "__dict__", {})
    cls: type = type(value)
    if isinstance(value, type) or not (names := _slots_of(cls)):
        return held
    return {**held, **{n: getattr(value, n) for n in names if hasattr(value, n)}}


@functools.cache
def _slots_of(cls: type) -> tuple[str, ...]:
    """Return the ``__slots__`` of a class of the user's and of its bases."""
    if is_installed(cls.__module__):
        return ()
    own = (vars(each).get("__slots__", ()) for each in cls.__mro__)
    return tuple(n for names in own for n in ((names,) if isinstance(names, str) else names))


def _inside_of(there: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return values in a form in which changes inside of containers and objects show.

    The walk does not go into them where no stage is sent a copy.
    """
    return {key: _shallow(value) for key, value in there.items()}


def _shallow(value: Any) -> Any:
    """Return what differs after a container, or an object of the user's, was changed."""
    if isinstance(value, (*PLAIN, bytes, type, FunctionType, ModuleType, nn.Module)):
        return value
    if isinstance(value, _WITH_STATE):
        return _marked(_state_of(value))
    if isinstance(value, dict):
        return tuple((str(k), _marked(v)) for k, v in value.items()) if len(value) <= _MOST else ()
    if isinstance(value, list | set | deque | tuple):
        return tuple(map(_marked, value)) if len(value) <= _MOST else (len(value),)
    if not is_installed(type(value).__module__):
        return tuple((k, _marked(v)) for k, v in attributes_of(value).items())
    return value


def _marked(value: Any) -> Any:
    """Return a value that can be compared; the ``id`` of any other."""
    return value if _is_plain(value) else id(value)


class _Gone:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "nothing"


GONE = _Gone()


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are plain and equal, where NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other) or (one != one and other != other)
    return isinstance(one, tuple | bytes) and _is_plain(one) and one == other


def _is_plain(value: Any) -> bool:
    """Whether a value is plain, bytes, or a tuple of such."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (*PLAIN, bytes))


def _is_machinery(key: Any, value: Any) -> bool:
    """Whether an attribute is a method, a property or a special name, and so no value."""
    return (isinstance(key, str) and key.startswith("__")) or isinstance(
        value, FunctionType | property | staticmethod | classmethod
    )


# -- what code reads ----------------------------------------------------------------------------


# -- the walk -----------------------------------------------------------------------------------


class Holders:
    """The holders that are found from some roots, each once.

    Attributes:
        found: The holders, by kind and ``id`` of what holds the values.
        uses: By ``id`` of the globals or the cell, and name: for each use by code the value, what
            messages call it, whether the code only adds to it, and whether it travels to a stage.
    """

    def __init__(self, spared: Iterable[Any] = ()) -> None:
        self.found: dict[tuple[str, int], Holder] = {}
        self.uses: dict[tuple[int, str], list[tuple[Any, str, bool, bool]]] = {}
        # Left out with all that is in them, as weights, which have versions.
        self._spared = {id(each): each for each in spared}
        self._visited = dict(self._spared)

    def walk(self, roots: Iterable[tuple[str, Any]]) -> None:
        """Go through objects, each with what messages call it."""
        left = deque(roots)
        while left:
            where, value = left.popleft()
            if isinstance(value, (*PLAIN, bytes, torch.dtype, torch.device)):
                continue
            if id(value) not in self._visited:
                self._visited[id(value)] = value  # kept alive, so that no other object gets its id
                left.extend(self._inside(where, value))

    def _add(self, value: Any, kind: str, where: str, **more: Any) -> Holder:
        # The functions of a module share their globals, and so one holder.
        of = value.__globals__ if isinstance(value, FunctionType) else value
        name = kind if more.get("travels", True) else f"fixed {kind}"
        return self.found.setdefault((name, id(of)), Holder(value, kind, where, **more))

    def _inside(self, where: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Note a value if it is a holder, and yield what is in it."""
        cls: type = type(value)
        if isinstance(value, _WITH_STATE):
            if id(value) not in self._spared:
                self._add(value, "state", where)
        elif isinstance(value, type):
            yield from self._of_class(where, value)
        elif isinstance(value, FunctionType):
            yield from self._of_function(where, value)
        elif isinstance(value, MethodType):
            yield from ((where, value.__func__), (where, value.__self__))
        elif isinstance(value, functools.partial):
            yield from ((where, each) for each in (value.func, value.args, value.keywords))
        elif isinstance(value, CellType):
            yield from self._held(self._add(value, "cell", where))
        elif isinstance(value, dict):
            yield from self._held(self._add(value, "dict", where))
        elif isinstance(value, list | set | deque):
            yield from self._held(self._add(value, "list", where))
        elif isinstance(value, tuple | frozenset):
            yield from ((where, each) for each in value)
        elif isinstance(value, ModuleType) or not (hasattr(value, "__dict__") or _slots_of(cls)):
            return
        else:
            yield from self._held(self._add(value, "object", where))
            if isinstance(value, nn.Module):
                yield from self._of_module(where, value)
            yield where, cls

    @staticmethod
    def _held(holder: Holder) -> Iterator[tuple[str, Any]]:
        """Yield what a holder holds, for the walk to go on."""
        if holder.kind in ("dict", "list") and len(holder.value) > _MOST:
            return
        for key, value in holder.content().items():
            # What does not travel is compared with its content: the walk goes on into code alone.
            if holder.travels or isinstance(value, FunctionType | type | functools.partial):
                yield holder.called(key), value

    def _of_module(self, where: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield the modules inside a module, its hooks, and weights that are not of the model."""
        for name, child in module._modules.items():
            yield f"{where}.{name}".strip("."), child
        for key in _OF_MODULES:
            held = vars(module).get(key)
            if key.endswith("_hooks") and isinstance(held, dict):
                yield from ((f"a hook of {where}", hook) for hook in held.values())
        for tensors in (module._parameters, module._buffers):
            if any(t is not None and id(t) not in self._spared for t in tensors.values()):
                yield where, tensors

    def _of_class(self, where: str, cls: type) -> Iterator[tuple[str, Any]]:
        """Note a class of the user's, and yield what its methods read."""
        if is_installed(cls.__module__) or issubclass(cls, Enum):
            return
        holder = self._add(cls, "class", f"the class {cls.__qualname__}", travels=False)
        yield from self._held(holder)
        yield from ((where, each) for each in cls.__bases__)
        entries: tuple[str, ...] = ()
        if issubclass(cls, torch.optim.Optimizer):
            entries = ("__init__", "step")
        for function in functions_called(cls, *entries):
            # In this process, what these functions read is the script's own.
            yield from self._of_function(where, function, travels=False)

    def _of_function(
        self, where: str, function: FunctionType, travels: bool | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Note the cells, defaults and globals of a function of the user's, and yield them."""
        if is_installed(function.__module__):
            return
        self._visited[id(function)] = function
        travels = not is_by_name(function) if travels is None else travels
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            # The cells travel with a function that is not pickled by name.
            what = f"{name!r}, which {_named(function)} of {where} reads"
            yield from self._held(self._add(cell, "cell", what, travels=not is_by_name(function)))
        yield from ((where, each) for each in function.__defaults__ or ())
        yield from ((where, each) for each in (function.__kwdefaults__ or {}).values())
        yield from self._of_globals(where, function, travels)

    def _of_globals(
        self, where: str, function: FunctionType, travels: bool
    ) -> Iterator[tuple[str, Any]]:
        """Note the globals that a function reads, and yield them."""
        place = where
        owner: Any = sys.modules[function.__module__] if is_by_name(function) else function
        where = f"the globals that {_named(function)} reads"
        holder = self._add(owner, "globals", where, names=set(), travels=travels)
        there = {n for n in globals_read(function) if n in function.__globals__}
        assert holder.names is not None
        holder.names |= there
        holder.loads |= names_in(function)[0]
        for name in sorted(there):  # the same in each process, as checkpoints name what is found
            value = function.__globals__[name]
            if travels or isinstance(value, FunctionType | type | functools.partial):
                yield f"the global {name!r}", value
        free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, adds in uses(function):
            cell, what = free.get(name), f"{name!r}, in {_named(function)} of {place}"
            inside = () if cell is None else Holder(cell, "cell", what).content().values()
            value = next(iter(inside), None) if cell else function.__globals__.get(name)
            key = (id(function.__globals__ if cell is None else cell), name)
            self.uses.setdefault(key, []).append((value, what, adds, travels))


def collecting(walks: Iterable[Holders], elsewhere: bool) -> str:
    """Return what code only adds to, which the script would never see; empty for nothing.

    ``walks`` are by stage. ``elsewhere`` is whether stages are in other processes.
    """
    uses: dict[tuple[int, str], list[tuple[Any, str, bool, bool]]] = {}
    for walk in walks:
        for key, used in walk.uses.items():
            uses.setdefault(key, []).extend(used)
    for used in uses.values():
        value, what, *_ = used[0]
        if isinstance(value, _COLLECTING) and not isinstance(value, bool):
            lost = elsewhere or any(travels for *_, travels in used)
            if lost and all(adds for _, _, adds, _ in used):
                return what
    return ""


_COLLECTING = (list, dict, set, deque, int, float)


def _named(function: FunctionType) -> str:
    """Return what messages call a function."""
    return function.__qualname__.replace("<locals>.", "")
