"""The code of layers, compared between the script and a worker.

A class or a function that can be imported is pickled by its name, so a worker runs its own copy of
it. That copy is another one where the script has replaced a method (``Layer.forward = faster``), or
where the worker's machine has another file of that name. Plain PyTorch would run the script's.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import cloudpickle
from torch import nn

from pipedream_rt.errors import ConfigError

_log = logging.getLogger(__name__)

_UNSEEN = {*sys.stdlib_module_names, "pipedream_rt"}
"""Packages whose code is the same wherever a worker is admitted."""

_COMPUTES = ("forward", "step")
"""The methods of torch's classes that somebody may replace."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Piece(NamedTuple):
    """The code of one function.

    Attributes:
        digest: A digest of what it does.
        module: The name of the module in which it says it was defined.
        file: A digest of that module's file; empty if it cannot be read.
    """

    digest: str
    module: str
    file: str

    def is_same(self, other: Piece) -> bool:
        """Whether two processes run the same.

        Code may also differ because a tool of the script rewrites what is imported, as pytest does
        with assertions and checkers of types with functions; then the files are the same.
        """
        if self.digest == other.digest:
            return True
        return self.module == other.module and self.file == other.file != ""


@dataclass(frozen=True, slots=True)
class Code:
    """The code of some layers and functions, as one process has it.

    Attributes:
        pieces: The functions, by their names.
        constants: What prints for each plain global variable that they read, by its name.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)


def code_of(things: Iterable[object]) -> Code:
    """Return the code of things that are pickled.

    Args:
        things: Modules, whose modules inside them count too; classes; functions; other objects, of
            which their classes count.
    """
    collector = _Collector()
    for thing in things:
        while isinstance(thing, functools.partial):
            thing = thing.func
        if isinstance(thing, MethodType):
            collector.add_class(type(thing.__self__))
        elif isinstance(thing, nn.Module):
            for module in thing.modules():
                collector.add_class(type(module))
        elif isinstance(thing, type):
            collector.add_class(thing)
        elif isinstance(thing, FunctionType):
            collector.add_function(thing)
        else:
            collector.add_class(type(thing))
    return collector.code


def replaced(here: Code, there: Code) -> list[str]:
    """Return the names of the functions that two processes have otherwise.

    A method that one of them lacks counts; another function does not, since who calls it counts.
    """
    names = []
    for name in sorted(here.pieces.keys() | there.pieces.keys()):
        one, other = here.pieces.get(name), there.pieces.get(name)
        if one is None or other is None:
            if "()" not in name:
                names.append(name)
        elif not one.is_same(other):
            names.append(name)
    return [name.removesuffix("()") for name in names]


def changed(here: Code, there: Code) -> list[str]:
    """Return the global variables that have other values in another process, each in words."""
    return [
        f"{name} is {value} here and {there.constants[name]} there"
        for name, value in sorted(here.constants.items())
        if there.constants.get(name, value) != value
    ]


def refuse_other_code(here: Code, sent: Code) -> None:
    """Refuse to compute with other code than the script would.

    Args:
        here: The code that this process has.
        sent: The code that the script has.

    Raises:
        ConfigError: Functions differ. Where only global variables do, that is logged.
    """
    if names := replaced(here, sent):
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ConfigError(
            f"this worker has other code than the script of {', '.join(names[:5])}{more}: the "
            "script has replaced it when it ran, or this machine has another file of that name. "
            "Replace it in the module that defines it, or define a class of your own with the "
            "replacement; give all machines the same files"
        )
    if values := changed(here, sent):
        _log.warning(
            "global variables that layers read have another value here, in a worker, than there, "
            "in the script, which has changed them since they were imported: %s; make them "
            "attributes of the layers",
            "; ".join(values[:5]),
        )


class _Collector:
    """Collects the code of classes and functions, and of the functions that those call by name."""

    def __init__(self) -> None:
        """Collect nothing yet."""
        self.code = Code()
        self._seen: set[int] = set()
        self._files: dict[str, str] = {}

    def add_class(self, cls: type) -> None:
        """Add the methods and the plain values of a class and of each of its bases."""
        for base in cls.__mro__:
            if id(base) not in self._seen and _package(base.__module__) not in _UNSEEN:
                self._seen.add(id(base))
                if _is_by_name(base):
                    self._add_methods(base)

    def _add_methods(self, cls: type) -> None:
        """Add the methods of a class itself and its plain values; of torch only what computes."""
        own = {} if _package(cls.__module__) == "torch" else dict(vars(cls))
        for name in _COMPUTES:  # own or not: an optimizer of torch gets its own when one is made
            holder = next((base for base in cls.__mro__ if name in vars(base)), None)
            if holder is not None:
                own[name] = vars(holder)[name]
        for name, value in own.items():
            full = f"{cls.__module__}.{cls.__qualname__}.{name}"
            if type(value) in _PLAIN and not name.startswith("__"):
                self.code.constants[full] = repr(value)
            for function in _functions_in(value):
                self._add(full, function, _package(cls.__module__))

    def add_function(self, function: FunctionType) -> None:
        """Add a function, unless its package is one whose code is the same everywhere."""
        own = _package(function.__module__)
        if own not in (*_UNSEEN, "torch") and _is_by_name(function):
            self._add(f"{function.__module__}.{function.__qualname__}()", function, own)

    def _add(self, name: str, function: FunctionType, package: str) -> None:
        """Add a function under a name, and what it reads by global names in its own package."""
        chain = list(_unwrapped(function))
        digest = blake2b("|".join(_text_of(each) for each in chain).encode(), digest_size=8)
        before = self.code.pieces.get(name)  # of a property: its getter, and now its setter
        text = digest.hexdigest() + ("" if before is None else before.digest)
        module = function.__module__ or ""
        self.code.pieces[name] = Piece(text, module, self._file_of(module))
        if _package(module) == package != "torch":
            for each in chain:
                self._follow(each, package)

    def _follow(self, function: FunctionType, package: str) -> None:
        """Add the functions and the plain values that a function reads by global names."""
        names = set(_names_in(function.__code__))
        for name in names:
            value = function.__globals__.get(name)
            if isinstance(value, ModuleType):
                if _package(value.__name__) not in (*_UNSEEN, "torch"):
                    for inner in names & vars(value).keys():
                        self._note(f"{value.__name__}.{inner}", vars(value)[inner], package)
            elif name in function.__globals__:
                self._note(f"{function.__globals__.get('__name__')}.{name}", value, package)

    def _note(self, name: str, value: object, package: str) -> None:
        """Add a function that is called, or a plain value that is read."""
        if isinstance(value, FunctionType):
            if f"{name}()" not in self.code.pieces and _package(name) not in (*_UNSEEN, "torch"):
                self._add(f"{name}()", value, package)
        elif type(value) in _PLAIN and not name.rpartition(".")[2].startswith("__"):
            self.code.constants[name] = repr(value)

    def _file_of(self, module: str) -> str:
        """Return a digest of a module's file; empty if it cannot be read."""
        if module not in self._files:
            path = getattr(sys.modules.get(module), "__file__", None)
            try:
                found = blake2b(Path(path or "").read_bytes(), digest_size=8).hexdigest()
            except OSError:
                found = ""
            self._files[module] = found
        return self._files[module]


def _package(module: str | None) -> str:
    """Return the package at the top of a module's name."""
    return (module or "builtins").partition(".")[0]


def _is_by_name(thing: type | FunctionType) -> bool:
    """Whether a class or a function is pickled by its name; else its code travels with it."""
    module = thing.__module__ or ""
    by_value = cloudpickle.list_registry_pickle_by_value()
    if module == "__main__" or any(f"{module}.".startswith(f"{each}.") for each in by_value):
        return False
    found: object = sys.modules.get(module)
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing


def _functions_in(value: object) -> Iterator[FunctionType]:
    """Yield the functions of an attribute of a class: a method, or a property's."""
    parts: tuple[Any, ...] = (value,)
    if isinstance(value, staticmethod | classmethod):
        parts = (value.__func__,)
    elif isinstance(value, property):
        parts = (value.fget, value.fset, value.fdel)
    yield from (part for part in parts if isinstance(part, FunctionType))


def _unwrapped(function: FunctionType) -> Iterator[FunctionType]:
    """Yield a function, and those that it wraps or keeps in its closure."""
    waiting, seen = [function], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        inner: list[Callable[..., Any] | None] = [getattr(each, "__wrapped__", None)]
        for cell in each.__closure__ or ():
            try:
                inner.append(cell.cell_contents)
            except ValueError:  # nothing in it yet
                continue
        waiting += [f for f in inner if isinstance(f, FunctionType)]


def _text_of(function: FunctionType) -> str:
    """Return a text that is another one for code that does something else."""
    values = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return f"{_code_text(function.__code__)} {[v for v in values if type(v) in _PLAIN]}"


def _code_text(code: CodeType) -> str:
    """Return a text of compiled code that does not depend on the process."""
    constants = [_constant_text(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _constant_text(value: Any) -> str:
    """Return a text of a constant of compiled code."""
    if isinstance(value, CodeType):
        return _code_text(value)
    if isinstance(value, frozenset):  # whose order differs from process to process
        return str(sorted(map(_constant_text, value)))
    if isinstance(value, tuple):
        return str([_constant_text(each) for each in value])
    return repr(value)


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that compiled code reads, also inside the functions that it makes."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names_in(value)
