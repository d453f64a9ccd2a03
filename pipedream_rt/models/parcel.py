"""What a stage goes by beside inputs and weights: layers, loss, hooks, what their code names.

A *parcel* is what the script packs for a stage. The stage has a copy of it, or its own of what is
pickled by name, so a value that the script changes later reaches the stage only if it travels. The
walk goes through a parcel as pickling does, and on into the globals, modules, classes and methods
that its code names. It gives each *place* a mark (`mark.py`), which of a plain value is its text.
Whatever kind of object holds a value, it has a place, so no list says what is watched.
"""

from __future__ import annotations

import contextvars
import copyreg
import functools
import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from inspect import getattr_static
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from pipedream_rt.models.code import is_by_name, is_installed, named_by, written_at
from pipedream_rt.models.code_reading import ENTRY, functions_called, methods_named, names_in
from pipedream_rt.models.holders import GONE, MOST, Holder, slots_of
from pipedream_rt.models.mark import WITH_STATE, Mark, mark_of_code, mark_of_value

_ATOMS = {
    type(None), bool, int, float, complex, range, slice, type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
"""Types whose text tells values apart."""

_MOST_PLACES = 200_000
"""A walk ends after so many places; it goes breadth first, so what is left out lies deepest."""

_LONGEST = 200
"""The characters of a name that are kept."""

_SAMPLED = 64
"""Of a container of more than `MOST` entries, the walk goes into so many."""

_CHANGING = {"append", "appendleft", "extend", "insert", "pop", "remove", "clear", "setdefault"}
"""Methods that change what is in a list or a dict."""

_COMPUTE = ("__call__", "forward", "backward", "step")
"""The methods of installed classes in whose place scripts put others."""

Name: TypeAlias = Callable[[Any], str]
"""Returns the name of the value under a key, for messages; "" for the name of its container."""


class Parcel:
    """The places of what is packed for a stage.

    Attributes:
        roots: The place and the value of each root.
        found: The holders of values in it, by kind and ``id``, as of the first walk.
        named: What its code names: attributes, globals and functions.
        stored: The attributes and globals that its code sets.
        texts: The texts in its code, and in globals that it reads.
        at_first: The places of the first walk: later ones do not go into others.
        took: The seconds that the first walk took.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], spared: Iterable[Any] = ()) -> None:
        self.found: dict[tuple[str, int], Holder] = {}
        self.named: set[str] = set()
        self.stored: set[str] = set()
        self.texts: set[str] = set()
        self._names: list[tuple[int, Any, str]] = []  # of each place: its parent, key, and name
        self._numbers: dict[tuple[int, Any], int] = {}
        self.roots = [
            (self.place(-1, number, functools.partial(_as_is, where)), each)
            for number, (where, each) in enumerate(roots)
        ]
        # Left out with all that is in them, as weights, of which the script's own are known.
        self._spared = {id(each): each for each in spared}
        self._holders: dict[int, Holder] = {}  # by place
        began = time.perf_counter()
        self.at_first: frozenset[int] = frozenset()
        self.marks = self._now = self.cast(first=True)
        self.at_first = frozenset(self.marks)
        self.took = time.perf_counter() - began

    def place(self, parent: int, key: Any, name: Name) -> int:
        """Return the number of a place; the same one in each walk."""
        at = parent, key
        number = self._numbers.get(at)
        if number is None:
            number = self._numbers[at] = len(self._names)
            # Cut, since the name of what it is in is part of it: objects may be linked in a chain.
            self._names.append((parent, key, name(key)[:_LONGEST]))
        return number

    def name(self, place: int) -> str:
        """Return the name of a place, for messages."""
        parent, _, name = self._names[place]
        return name if name or parent < 0 else self.name(parent)

    def holder(self, place: int) -> tuple[Holder | None, Any]:
        """Return the holder of the value at a place, if its place has one, and the key there."""
        parent, key, _ = self._names[place]
        return self._holders.get(parent), key

    def above(self, place: int) -> Iterator[int]:
        """Yield a place and those that it is in."""
        while place >= 0:
            yield place
            place = self._names[place][0]

    def places_of(self, holder: Holder) -> list[int]:
        """Return the places of what a holder holds."""
        return [place for place, each in self._holders.items() if each is holder]

    @property
    def changes_entries(self) -> bool:
        """Whether its code may change what is in a list or a dict."""
        return ENTRY in self.stored or not _CHANGING.isdisjoint(self.named)

    def has_state(self, place: int) -> bool:
        """Whether the value at a place changes in ways that no attribute shows."""
        there = self._holders.get(place)
        return there is not None and there.kind == "state"

    def is_sampled(self, place: int) -> bool:
        """Whether a place is in a container of which the walk goes into some entries alone."""
        marks = (self.marks.get(at) for at in self.above(place))
        return any(_size_of(mark) > MOST for mark in marks)

    def changes(self) -> list[tuple[int, Mark, Mark]]:
        """Return each place whose mark has changed since `settle`, and both marks."""
        before, now = self.marks, self.cast()
        self._now = now
        if before == now:
            return []
        places = [*before, *(place for place in now if place not in before)]
        pairs = ((place, before.get(place, GONE), now.get(place, GONE)) for place in places)
        return [each for each in pairs if each[1] != each[2]]

    def settle(self) -> None:
        """Accept the changes that `changes` has found."""
        self.marks = self._now

    def cast(self, first: bool = False) -> dict[int, Mark]:
        """Walk, and return the mark of each place."""
        return _Walk(self, first).marks

    def spares(self, value: Any) -> bool:
        return id(value) in self._spared

    def add(self, place: int, value: Any, kind: str, first: bool, **more: Any) -> Holder:
        """Note a holder; where it stands in several places it is one."""
        # The functions of a module share their globals, and so one holder.
        of = value.__globals__ if isinstance(value, FunctionType) and kind == "globals" else value
        at = kind if more.get("travels", True) else f"fixed {kind}", id(of)
        holder = self.found.get(at) or Holder(value, kind, self.name(place), **more)
        if first:
            self.found[at] = holder
        self._holders[place] = holder
        return holder


def _as_is(name: str, _: Any) -> str:
    """Return a name that is the same for every key."""
    return name


_UNNAMED = functools.partial(_as_is, "")


class _Walk:
    """One walk through a parcel, breadth first."""

    def __init__(self, parcel: Parcel, first: bool) -> None:
        self.marks: dict[int, Mark] = {}
        self._parcel, self._first = parcel, first
        # By id, the first place of each object, which it holds so that no id is given twice.
        self._seen: dict[int, tuple[Any, int]] = {}
        self._classes: dict[type, int] = {}
        self._modules: dict[int, ModuleType] = {}
        self._reads_environ = False
        self._queue = deque(parcel.roots)
        self._run()
        # A method that no forward calls itself may be called by other code that was found.
        while any(
            self._methods(place, methods_named(cls, parcel.named))
            for cls, place in self._classes.items()
        ) or any(self._module_attributes(each) for each in list(self._modules.values())):
            self._run()
        if self._reads_environ:
            self._environ()
            self._run()

    def _run(self) -> None:
        """Go through the queue."""
        queue, marks, seen, first = self._queue, self.marks, self._seen, self._parcel.at_first
        while queue and len(marks) < _MOST_PLACES:
            place, value = queue.popleft()
            cls: type = type(value)
            if cls is str or cls is bytes:
                marks[place] = value
            elif cls in _ATOMS:
                marks[place] = (repr(value),)
            elif id(value) in seen:
                marks.setdefault(place, ("what is at", seen[id(value)][1], "too"))
            elif not self._parcel.spares(value):
                seen[id(value)] = value, place
                if self._first or place in first:
                    self._visit(place, value)
                else:  # a value that came later is told of, and not gone into
                    marks[place] = (cls.__qualname__, "")

    def _push(self, place: int, parts: Iterable[tuple[Any, Any]], name: Name = _UNNAMED) -> None:
        """Queue what is in a value, each under its key."""
        make, queue = self._parcel.place, self._queue
        for key, value in parts:
            queue.append((make(place, key, name), value))

    def _hold(self, place: int, value: Any, kind: str, **more: Any) -> Holder:
        """Note and return a holder."""
        return self._parcel.add(place, value, kind, self._first, **more)

    def _visit(self, place: int, value: Any) -> None:
        """Mark a value that is no atom, and queue what is in it."""
        cls: type = type(value)
        self.marks[place] = (cls.__qualname__, "")
        if isinstance(value, WITH_STATE):
            self._hold(place, value, "state")
            self.marks[place] = mark_of_value(value)
        elif isinstance(value, type):
            self._class(place, value)
        elif isinstance(value, FunctionType):
            self._function(place, value, travels=not is_by_name(value))
        elif isinstance(value, MethodType):
            self._push(place, ((("()",), value.__func__), (("self",), value.__self__)))
        elif isinstance(value, functools.partial):
            parts = value.func, value.args, value.keywords
            self._push(place, ((f"partial {i}", each) for i, each in enumerate(parts)))
        elif isinstance(value, CellType):
            self._held(place, self._hold(place, value, "cell"))
        elif isinstance(value, dict | list | deque | set | frozenset | tuple):
            self._container(place, value)
        elif isinstance(value, nn.Module):
            self._held(place, self._hold(place, value, "object"))
            self._module(place, value)
            self._push(place, ((("class",), cls),))
        elif isinstance(value, Enum | np.generic):
            self.marks[place] = (repr(value),)
        elif isinstance(value, contextvars.ContextVar):
            self._push(place, ((("value",), value.get(None)),))
        elif isinstance(value, threading.local):
            self._push(place, ((("here",), vars(value)),))
        elif isinstance(value, ModuleType):
            if not is_installed(value.__name__):
                self._modules[id(value)] = value
        elif not isinstance(value, weakref.ref):
            self._object(place, value)

    def _held(self, place: int, holder: Holder) -> None:
        """Queue what a holder holds."""
        self._push(place, holder.raw().items(), holder.called)

    def _container(self, place: int, value: Any) -> None:
        """Mark a container by its length, and queue its entries; of a large one some."""
        size, where = len(value), self._parcel.name(place)
        self.marks[place] = (type(value).__qualname__, size)
        if isinstance(value, dict):
            self._hold(place, value, "dict")
            entries: Iterable[tuple[Any, Any]] = value.items()
        else:
            if isinstance(value, list | deque | set):
                self._hold(place, value, "list")
            entries = enumerate(value)
        step = 1 if size <= MOST else size // _SAMPLED
        try:
            chosen = list(itertools.islice(entries, 0, None, step))
        except RuntimeError:  # another thread adds to it meanwhile
            return
        self._push(place, ((_key(k), v) for k, v in chosen), lambda k: f"{k!r:.60} of {where}")

    def _module(self, place: int, module: nn.Module) -> None:
        """Queue the modules inside a module, its hooks, and weights that are not of the model."""
        where = self._parcel.name(place)
        inner = (((".", name), each) for name, each in module._modules.items())
        self._push(place, inner, lambda key: f"{where}.{key[1]}".strip("."))
        for key, held in vars(module).items():
            if key.endswith("_hooks") and isinstance(held, dict) and held:
                at = self._parcel.place(place, key, lambda _: f"a hook of {where}")
                self._push(at, held.items())
        for tensors in (module._parameters, module._buffers):
            if not self._parcel.spares(tensors):
                self._push(place, (((id(tensors),), tensors),), lambda _: where)

    def _object(self, place: int, value: Any) -> None:
        """Queue the attributes of an object, or what it is pickled as, and its class."""
        cls: type = type(value)
        reduced = _reduced(value)
        has_attributes = hasattr(value, "__dict__") or bool(slots_of(cls))
        if has_attributes and reduced is None:
            self._held(place, self._hold(place, value, "object"))
        elif isinstance(reduced, tuple):
            if not has_attributes:
                self._hold(place, value, "state")
            self._push(place, ((("reduced", i), each) for i, each in enumerate(reduced)))
        elif reduced is not None:
            self.marks[place] = reduced
        if inner := getattr(value, "__dict__", {}).get("__wrapped__"):  # a function that is cached
            self._push(place, ((("wrapped",), inner),))
        self._push(place, ((("class",), cls),))

    def _class(self, place: int, cls: type) -> None:
        """Mark the methods of a class, and queue what a class of the user's holds and reads."""
        named = (getattr_static(cls, name, None) for name in _COMPUTE)
        self.marks[place] = tuple(map(written_at, (cls, *named, *named_by(cls).values())))
        if is_installed(cls.__module__) or issubclass(cls, Enum):
            return
        self.marks[place] = (cls.__qualname__, "")
        own = self._parcel.place(-1, id(cls), lambda _: f"the class {cls.__qualname__}")
        self._classes[cls] = own
        holder = self._hold(own, cls, "class", travels=False)
        self._held(own, holder)
        self._push(place, ((f"base {i}", base) for i, base in enumerate(cls.__bases__)))
        entries = ("__init__", "step") if issubclass(cls, torch.optim.Optimizer) else ()
        self._methods(place, functions_called(cls, *entries))

    def _methods(self, place: int, functions: Iterable[FunctionType]) -> bool:
        """Read the methods of a class that were not read yet; return whether there were any."""
        new = [each for each in functions if id(each) not in self._seen]
        for function in new:
            self._seen[id(function)] = function, place
            at = self._parcel.place(place, function.__qualname__, _UNNAMED)
            # In this process, what these functions read is the script's own.
            self._function(at, function, travels=False)
        return bool(new)

    def _function(self, place: int, function: FunctionType, travels: bool) -> None:
        """Mark the code of a function, and queue its cells, defaults, attributes and globals."""
        if is_installed(function.__module__):
            self.marks[place] = "function", id(function)
            return
        by_name, where = is_by_name(function), self._parcel.name(place)
        names = names_in(function.__code__)
        self.marks[place] = mark_of_code(function.__code__)
        if self._first:  # what is found later is not gone into
            self._parcel.named |= names.loaded | names.globals
            self._parcel.stored |= names.stored
            self._parcel.texts |= names.texts
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            # The cells travel with a function that is not pickled by name.
            at = self._parcel.place(
                place,
                ("cell", name),
                lambda key: f"{key[1]!r}, which {_named(function)} of {where} reads",
            )
            self._held(at, self._hold(at, cell, "cell", travels=not by_name))
        values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._push(place, ((f"default {i}", each) for i, each in enumerate(values)))
        own = ((("", key), each) for key, each in vars(function).items())
        self._push(place, own, lambda key: f"{key[1]!r} of {_named(function)}")
        self._globals(function, travels)

    def _globals(self, function: FunctionType, travels: bool) -> None:
        """Queue the globals that a function reads, and the attributes of modules among them."""
        there, named = function.__globals__, names_in(function.__code__)
        names = named.globals & there.keys()
        owner: Any = sys.modules[function.__module__] if is_by_name(function) else function
        said = f"the globals that {_named(function)} reads"
        at = self._parcel.place(-1, id(there), lambda _: said)
        holder = self._hold(at, owner, "globals", names=set(), travels=travels)
        assert holder.names is not None
        holder.names |= names
        for name in sorted(names):
            if isinstance(there[name], ModuleType):
                self._attributes(there[name], function, set())
            else:
                self._push(at, ((name, there[name]),), holder.called)
        for name in sorted(named.imported & sys.modules.keys()):
            self._attributes(sys.modules[name], function, set())
        if (named.loaded | named.globals) & {"environ", "getenv"}:
            self._reads_environ = True
        if self._first:
            self._parcel.texts |= {there[name] for name in names if type(there[name]) is str}

    def _environ(self) -> None:
        """Queue the entries of the environment that any code may read, judged by its texts."""
        at = self._parcel.place(-1, "environ", _UNNAMED)
        given = ((text, os.environ.get(text)) for text in sorted(self._parcel.texts))
        self._push(at, given, lambda key: f"{key!r} of os.environ")

    def _module_attributes(self, module: ModuleType) -> bool:
        """Queue what any code names of a module that is a value; return whether there was more."""
        said = f"the module {module.__name__}"
        at = self._parcel.place(-1, id(vars(module)), lambda _: said)
        there = {n: v for n, v in vars(module).items() if n in self._parcel.named}
        holder = self._hold(at, module, "globals", names=set(), travels=False)
        assert holder.names is not None
        new = {n: v for n, v in there.items() if not isinstance(v, ModuleType)}
        more = [
            n for n in sorted(new) if self._parcel.place(at, n, holder.called) not in self.marks
        ]
        holder.names |= {*more}
        self._push(at, ((n, new[n]) for n in more), holder.called)
        return bool(more)

    def _attributes(self, module: ModuleType, by: FunctionType, seen: set[int]) -> None:
        """Queue what a function names of a module: of an installed one, its functions alone."""
        if id(module) in seen:
            return
        seen.add(id(module))
        installed, what = is_installed(module.__name__), f"the module {module.__name__}"
        names = names_in(by.__code__).loaded & vars(module).keys()
        at = self._parcel.place(-1, id(vars(module)), lambda _: what)
        if not installed:
            holder = self._hold(at, module, "globals", names=set(), travels=False)
            assert holder.names is not None
            holder.names |= names
        for name in sorted(names):
            value = vars(module)[name]
            if isinstance(value, ModuleType):
                self._attributes(value, by, seen)
            elif not installed or isinstance(value, FunctionType):
                self._push(at, ((name, value),), lambda key: f"{key!r} of {what}")


def _key(key: Any) -> Any:
    """Return a key that is the same in each walk."""
    return key if type(key) in (str, int, float, bool, bytes, tuple) else id(key)


def _named(function: FunctionType) -> str:
    """Return the name of a function, for messages."""
    return function.__qualname__.replace("<locals>.", "")


def _reduced(value: Any) -> Any:
    """Return the parts as which an object is pickled, or one mark.

    None if it is pickled by its attributes.
    """
    cls: type = type(value)
    if _is_plain_object(cls):
        return None
    if sys.getsizeof(value, 0) > 1 << 20:
        return "large", id(value)  # as a table: to pickle it would copy its data
    try:
        reducer: Any = copyreg.dispatch_table.get(cls)
        reduced = reducer(value) if reducer is not None else value.__reduce_ex__(4)
    except Exception:  # the user's code; a lock or a file does not pickle
        return None if hasattr(value, "__dict__") else ("as it is", id(value))
    if isinstance(reduced, str):
        return "by name", reduced
    call, given, state, *entries = (*reduced, None, None, None)[:5]
    if state is not None and hasattr(value, "__dict__"):
        return None
    listed = [None if each is None else list(each) for each in entries]
    return (getattr(call, "__qualname__", repr(call)), given, state, *listed)


@functools.lru_cache(maxsize=4096)
def _is_plain_object(cls: type) -> bool:
    """Whether objects of a class are pickled by their attributes alone."""
    same = all(
        getattr(cls, name, None) is getattr(object, name, None)
        for name in ("__reduce__", "__reduce_ex__", "__getstate__")
    )
    has_attributes = bool(cls.__dictoffset__ or slots_of(cls))
    return same and has_attributes and cls not in copyreg.dispatch_table


def _size_of(mark: Mark) -> int:
    """Return the size of a container by its mark; 0 for other values."""
    sized = isinstance(mark, tuple) and len(mark) == 2 and type(mark[1]) is int
    return mark[1] if sized else 0


def has_grown(before: Mark, now: Mark) -> bool:
    """Whether two marks are those of a container that has got more entries."""
    return 0 <= _size_of(before) < _size_of(now) and before is not GONE and before[:1] == now[:1]


def is_plain_mark(mark: Mark) -> bool:
    """Whether a mark is that of a plain value."""
    return isinstance(mark, str | bytes) or (isinstance(mark, tuple) and mark[1:] == ())


def same_code(one: Any, other: Any) -> bool:
    """Whether two values are functions that do the same, as of a cell that was run again."""
    return (
        isinstance(one, FunctionType)
        and isinstance(other, FunctionType)
        and one.__closure__ is other.__closure__ is None
        and mark_of_code(one.__code__) == mark_of_code(other.__code__)
    )


def weights_in(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the weights and buffers of modules, and what holds them: a walk leaves these out."""
    every = [each for module in modules for each in module.modules()]
    holding = [held for each in every for held in (each._parameters, each._buffers)]
    return [*holding, *(t for held in holding for t in held.values() if t is not None)]
