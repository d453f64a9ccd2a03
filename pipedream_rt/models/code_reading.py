"""The names in the code of a function: globals, attributes, modules, texts."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Iterator
from inspect import getattr_static
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn


class Names(NamedTuple):
    """The names in some code.

    Attributes:
        globals: The globals that it reads.
        loaded: The attributes, of any object, that it may read.
        stored: The globals, and the attributes of any object, that it sets.
        imported: The modules that it imports.
        texts: The texts in it.
    """

    globals: frozenset[str]
    loaded: frozenset[str]
    stored: frozenset[str]
    imported: frozenset[str]
    texts: frozenset[str]

    @property
    def all(self) -> frozenset[str]:
        """All names but the texts."""
        return self.globals | self.loaded | self.stored | self.imported


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


ENTRY = "[]"
"""Stands for the entries of a container among the names that code stores."""

_KINDS = {
    "LOAD_GLOBAL": "globals", "LOAD_NAME": "globals",
    "LOAD_ATTR": "loaded", "LOAD_METHOD": "loaded", "LOAD_SUPER_ATTR": "loaded",
    "STORE_ATTR": "stored", "STORE_GLOBAL": "stored", "STORE_SUBSCR": "stored",
    "IMPORT_NAME": "imported", "IMPORT_FROM": "loaded",
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
    """Return the names in the code of a function, and of those inside it."""
    found: dict[str, set[str]] = {name: set() for name in Names._fields}
    for each in _codes(code):
        for ins in dis.get_instructions(each):
            if kind := _KINDS.get(ins.opname):
                found[kind].add(ins.argval if ins.argval is not None else ENTRY)
        found["texts"] |= {c for c in each.co_consts if isinstance(c, str)}
    # Texts too, for getattr(self, "alpha").
    found["loaded"] |= {text for text in found["texts"] if text.isidentifier()}
    return Names(*(frozenset(each) for each in found.values()))


@functools.cache
def names_used(cls: type, *methods: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the attributes, of any object, that methods of a class may read, and may set."""
    names = [names_in(function.__code__) for function in functions_called(cls, *methods)]
    loaded = frozenset(name for each in names for name in each.loaded)
    return loaded, frozenset(name for each in names for name in each.stored)


def functions_called(cls: type, *methods: str) -> list[FunctionType]:
    """Return the functions that methods of a class, or a call of it, may reach, judged by names."""
    left, seen, found = list(methods or _CALLED), set[str](), []
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        function = function_of(getattr_static(cls, name, None))
        if function is None or function.__module__ == nn.Module.__module__:
            continue
        found.append(function)
        for code in _codes(function.__code__):
            left += [each for each in code.co_names if each not in seen]
    return found


def methods_named(cls: type, names: Iterable[str]) -> Iterator[FunctionType]:
    """Yield the methods and properties of a class itself that have one of some names."""
    for name in sorted(vars(cls).keys() & names):  # in each process in the same order
        function = function_of(vars(cls)[name])
        if function is not None:
            yield function


def function_of(value: Any) -> FunctionType | None:
    """Return the function of a method, a property or a wrapper; None for everything else."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    value = getattr(value, "__wrapped__", value)
    return value if isinstance(value, FunctionType) else None


_CALLED = ("forward", "__call__", "backward", "setup_context")
"""The methods that torch calls: of modules, losses and autograd functions."""
