"""Objects that hold values under keys, such as a layer its attributes or a function its globals.

A plain value that the script changes in one of them travels with the next micro-batch, if a stage
has a copy of the holder. To find such changes at each mini-batch must cost next to nothing, so
`Look` compares all values at once, by identity.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import getitem, is_
from types import FunctionType
from typing import Any, TypeAlias

from torch import Tensor, nn

from pipedream_rt.models.code import is_installed
from pipedream_rt.models.mark import mark_of_value, mark_of_writes

Given: TypeAlias = list[Any]
"""A value that the script has changed: the number of its holder, its key there, its packed form."""

PLAIN = (type(None), bool, int, float, str)
"""The values that travel when the script changes them."""

OF_MODULES = {*vars(nn.Module())}
"""The attributes that every module has for torch: its mode, its parts, its hooks."""

LENGTH = "its length"
"""The only key of a large container; its value is the length."""

MOST = 4096
"""Above so many entries, only the length of a container is compared at each mini-batch."""


@dataclass(eq=False)
class Holder:
    """An object that holds values under keys.

    Attributes:
        kind: How it holds them: as an ``"object"``, a ``"class"``, a ``"dict"``, a ``"list"``, a
            ``"cell"`` of a closure, the ``"globals"`` of a function, or as its own ``"state"``.
        where: Where it was found, for messages.
        names: The keys that count; None for all.
        travels: Whether a stage has a copy of its own, which alone is changed.
    """

    value: Any
    kind: str
    where: str
    names: set[str] | None = None
    travels: bool = True
    _seen: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # Without what it held, which a worker sees for itself.
        return {**vars(self), "_seen": {}}

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
            return {"": mark_of_value(value)}
        if kind in ("dict", "list"):
            if len(value) > MOST:
                return {LENGTH: len(value)}
            return value if kind == "dict" else dict(enumerate(value))
        held, skipped = attributes_of(value).items(), OF_MODULES
        if kind == "class":
            return {k: v for k, v in held if not _is_machinery(k, v)}
        if not isinstance(value, nn.Module):
            skipped = set()
        return {k: v for k, v in held if k not in skipped and not _is_special(k)}

    def look(self) -> None:
        """Note what it holds now, for `changes` to compare with."""
        self._seen = dict(self.raw())

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield (key, value at `look`, value now) of each change; `GONE` where there is none."""
        now, seen = self.raw(), self._seen
        for key in [*seen, *(key for key in now if key not in seen)]:
            one, other = seen.get(key, GONE), now.get(key, GONE)
            if one is not other and not equal(one, other):
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
        """Return the name of the value under a key, for messages."""
        if self.kind in ("cell", "state"):
            return self.where
        return f"{key!r} of {self.where}"


class Look:
    """Tells at each mini-batch whether holders hold the very same values as before.

    It also tells whether somebody has written into some tensors. ``read`` has the attributes that
    code names: of modules of torch, whose code is known, no others are looked at.
    """

    def __init__(
        self, holders: Iterable[Holder], read: Collection[str], tensors: Iterable[Tensor] = ()
    ) -> None:
        self._tensors = list(tensors)
        self._read = frozenset(read)
        # To compare the state of a generator takes long: the net does that.
        self._holders = [holder for holder in holders if holder.kind != "state"]
        self.note()

    def note(self) -> None:
        """Note what they hold now."""
        # By entry, what has it, its key, its value, and its holder.
        self._maps: list[Any] = []
        self._keys: list[Any] = []
        self._owners: list[Holder] = []
        self._lengths: list[tuple[Any, Holder]] = []
        self._others: dict[Holder, Any] = {}
        for holder in self._holders:
            self._watch(holder, holder.value)
        self._seen = [*map(getitem, self._maps, self._keys)]
        self._sizes = [held for held, _ in self._lengths]
        self._total = sum(map(len, self._sizes))
        self._writes = mark_of_writes(self._tensors)

    def _watch(self, holder: Holder, value: Any) -> None:
        """Watch a holder in the cheapest way for its kind."""
        kind, cls = holder.kind, value.__class__
        if kind == "object" and not slots_of(cls):
            held = holder.raw()
            keys = [k for k in held if not cls.__module__.startswith("torch.") or k in self._read]
            self._add(holder, vars(value), keys)
            # An attribute may come later, where its class has a default.
            if not is_installed(cls.__module__):
                self._lengths.append((vars(value), holder))
        elif kind == "globals":
            self._add(holder, value.__globals__, holder.raw())
        else:
            self._others[holder] = self._of_other(holder)

    def _add(self, holder: Holder, there: Any, keys: Collection[Any]) -> None:
        self._maps += [there] * len(keys)
        self._keys += keys
        self._owners += [holder] * len(keys)

    def _of_other(self, holder: Holder) -> Any:
        value = holder.value
        if isinstance(value, dict | list) and len(value) <= MOST:
            return len(value), list(_entries(value))
        return dict(holder.raw())

    def is_same(self) -> bool:
        """Whether all hold the very same values as when they were noted."""
        try:
            return (
                all(map(is_, map(getitem, self._maps, self._keys), self._seen))
                and not self.has_written
                and sum(map(len, self._sizes)) == self._total
                and all(_holds(holder, seen) for holder, seen in self._others.items())
            )
        except (KeyError, RuntimeError):  # gone, or changed by another thread meanwhile
            return False

    @property
    def has_written(self) -> bool:
        """Whether somebody has written into one of the tensors."""
        return mark_of_writes(self._tensors) != self._writes

    def changed(self) -> list[Holder]:
        """Return the holders that may hold something else than when they were noted."""
        entries = zip(self._maps, self._keys, self._seen, self._owners, strict=True)
        found = {owner: None for held, k, seen, owner in entries if held.get(k, GONE) is not seen}
        found |= {h: None for h, seen in self._others.items() if not _holds(h, seen)}
        if sum(map(len, self._sizes)) != self._total:
            found |= {holder: None for _, holder in self._lengths}
        return list(found)

    def renew(self, holders: Iterable[Holder]) -> None:
        """Note the values of some holders now; no others have changed."""
        if sum(map(len, self._sizes)) != self._total:
            return self.note()  # there are other keys
        try:
            self._seen = [*map(getitem, self._maps, self._keys)]
        except KeyError:
            return self.note()
        for holder in holders:
            if holder in self._others:
                self._others[holder] = self._of_other(holder)
        self._writes = mark_of_writes(self._tensors)


def _holds(holder: Holder, seen: Any) -> bool:
    """Whether a holder holds the very same objects, or equal marks, as when they were noted."""
    held = holder.value
    if isinstance(seen, tuple):
        size, entries = seen
        return len(held) == size and all(map(is_, _entries(held), entries))
    now = holder.raw()
    return len(now) == len(seen) and all(
        now.get(k, GONE) is v or equal(now.get(k, GONE), v) for k, v in seen.items()
    )


def _entries(held: dict[Any, Any] | list[Any]) -> Iterable[Any]:
    """Return what is in a container: of a dict the keys, and then the values."""
    return itertools.chain(held, dict.values(held)) if isinstance(held, dict) else held


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object, those in ``__slots__`` too."""
    held: Mapping[str, Any] = getattr(value, "__dict__", {})
    cls: type = type(value)
    if isinstance(value, type) or not (names := slots_of(cls)):
        return held
    return {**held, **{n: getattr(value, n) for n in names if hasattr(value, n)}}


@functools.cache
def slots_of(cls: type) -> tuple[str, ...]:
    """Return the ``__slots__`` of a class of the user's and of its bases."""
    if is_installed(cls.__module__):
        return ()
    own = (vars(each).get("__slots__", ()) for each in cls.__mro__)
    return tuple(n for names in own for n in ((names,) if isinstance(names, str) else names))


class _Gone:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "nothing"


GONE = _Gone()


def equal(one: Any, other: Any) -> bool:
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
    """Whether an attribute of a class is a method, a property or of Python's, and so no value."""
    return _is_special(key) or isinstance(
        value, FunctionType | property | staticmethod | classmethod
    )


def _is_special(key: Any) -> bool:
    """Whether a name is one of Python's own."""
    return isinstance(key, str) and key.startswith("__")
