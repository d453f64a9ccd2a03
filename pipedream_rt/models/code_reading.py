"""What the code of a function reads and changes, found in its bytecode."""

from __future__ import annotations

import dis
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from inspect import getattr_static
from types import CodeType, FunctionType
from typing import Any

from torch import nn


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def globals_read(function: FunctionType) -> set[str]:
    """Return the globals that the code of a function, or of one inside it, reads."""
    return {
        ins.argval
        for code in _codes(function.__code__)
        for ins in dis.get_instructions(code)
        if ins.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


_ADDING = {"append", "appendleft", "extend", "insert", "add", "update"}
"""Methods that add to a container."""


def uses(function: FunctionType) -> Iterator[tuple[str, bool]]:
    """Yield each global or closure variable that a function loads, and whether only to add to it.

    To add is ``seen.append(x)``, ``seen[i] = x`` or ``count += 1``.
    """
    for code in _codes(function.__code__):
        steps = [ins for ins in dis.get_instructions(code) if ins.opname not in _NOTHING]
        stored = Counter(
            ins.argval
            for before, ins in itertools.pairwise(steps)
            if ins.opname in ("STORE_GLOBAL", "STORE_DEREF") and _is_in_place(before)
        )
        loaded = Counter(i.argval for i in steps if i.opname in _LOADING)
        own = {*code.co_cellvars, *code.co_varnames}
        for i, ins in enumerate(steps):
            if ins.opname not in _LOADING or ins.argval in own:
                continue
            name, following = ins.argval, steps[i + 1] if i + 1 < len(steps) else ins
            adds = following.opname in ("LOAD_ATTR", "LOAD_METHOD") and following.argval in _ADDING
            # `count += 1` loads once for each store; any further load reads the value.
            yield name, adds or loaded[name] == stored[name] or _is_stored_into(steps[i:])


def _is_in_place(ins: dis.Instruction) -> bool:
    """Whether an instruction is the operator of ``count += 1``."""
    # INPLACE_ADD and the like until Python 3.10; BINARY_OP since 3.11.
    return ins.opname.startswith("INPLACE_") or (
        ins.opname == "BINARY_OP" and ins.argrepr.endswith("=")
    )


_LOADING = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")


_NOTHING = {"CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "PRECALL", "RESUME"}


def _is_stored_into(steps: Sequence[dis.Instruction]) -> bool:
    """Whether what the first instruction loads is the container of ``container[i] = x``."""
    following = [ins.opname for ins in steps[1:3]]
    return len(following) == 2 and following[1] == "STORE_SUBSCR"


@functools.cache
def names_used(cls: type, *methods: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the attributes, of any object, that methods of a class may read, and may set."""
    names = [names_in(function) for function in functions_called(cls, *methods)]
    loaded = frozenset(name for of_one, _ in names for name in of_one)
    return loaded, frozenset(name for _, of_one in names for name in of_one)


def names_in(function: FunctionType) -> tuple[set[str], set[str]]:
    """Return the attributes, of any object, that a function may read, and those that it sets."""
    loaded: set[str] = set()
    stored: set[str] = set()
    for code in _codes(function.__code__):
        for ins in dis.get_instructions(code):
            if ins.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                loaded.add(ins.argval)
            elif ins.opname == "STORE_ATTR":
                stored.add(ins.argval)
        # Texts too, for getattr(self, "alpha").
        loaded |= {c for c in code.co_consts if isinstance(c, str) and c.isidentifier()}
    return loaded, stored


def functions_called(cls: type, *methods: str) -> list[FunctionType]:
    """Return the functions that methods of a class, or a call of it, may reach, judged by names."""
    left, seen, found = list(methods or ("forward", "__call__")), set[str](), []
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        function: Any = getattr_static(cls, name, None)
        function = getattr(function, "fget", None) or getattr(function, "__func__", function)
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType) or function.__module__ == nn.Module.__module__:
            continue
        found.append(function)
        for code in _codes(function.__code__):
            left += [each for each in code.co_names if each not in seen]
    return found
