"""The code of layers, compared between the script and a worker.

A class or a function that can be imported is pickled by its name, so a worker runs its own copy of
it. That copy is another one where the script has replaced a method (``Layer.forward = faster``), or
where the worker has read another file of that name. Plain PyTorch would run the script's.

Only what a worker calls is compared: the forward of a layer, the step of an optimizer, and whatever
functions, classes and attributes their code reads by name, and theirs.
"""

from __future__ import annotations

import dis
import functools
import logging
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import nn

from pipedream_rt.errors import ConfigError

_log = logging.getLogger(__name__)

_BEGAN = time.time()

_UNSEEN = {*sys.stdlib_module_names, "pipedream_rt"}
"""Packages whose code is the same wherever a worker is admitted."""

_TOOLS = ("beartype", "jaxtyping", "typeguard")
"""Packages that wrap what a script imports, to check types."""

_WRAPS_TORCH = "pipedream_rt.dynamo"

_COMPUTES = frozenset({"forward", "step"})
"""The methods by which layers and optimizers compute, their own or of a base, also of torch's."""

_CALLED = frozenset({
    "__init__", "__new__", "__post_init__", "__call__", "__getattr__", "__getitem__", "__enter__",
    "__exit__", "forward", "backward", "setup_context", "step", "zero_grad",
})  # fmt: skip
"""The methods of other classes that are called without their names."""

_OWN = frozenset(vars(nn.Module()))
"""The attributes that every module has."""

_INSTALLED = tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib")})
"""The folders of installed modules."""

_DEEPEST = 5
"""The number of dots, or of containers in one another, behind which nothing is looked for."""

_MOST_ITEMS = 1000
"""The number of items from which on a container is not looked into."""


class Piece(NamedTuple):
    """The code of one function.

    Attributes:
        digest: A digest of what it does.
        origin: Where it was written, with a digest of that file; empty if that is not known.
    """

    digest: str
    origin: str

    def is_same(self, other: Piece) -> bool:
        """Whether two processes run the same.

        Code may also differ because a tool rewrites what the script imports, as pytest does with
        assertions; then both were written in the same place.
        """
        return self.digest == other.digest or self.origin == other.origin != ""


@dataclass(frozen=True, slots=True)
class Code:
    """The code of some layers and functions, as one process has it.

    Attributes:
        pieces: The functions, by their names.
        constants: What prints for each plain value of a module or a class of the user's own that
            they read, by its name.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)


def code_of(things: Iterable[object], *, built: bool = False) -> Code:
    """Return the code of things that are pickled.

    Args:
        things: Modules, whose modules inside them count too; classes; functions; other objects, of
            which their classes count.
        built: Whether the worker builds the modules, rather than unpickles them.
    """
    collector = _Collector()
    for thing in things:
        while isinstance(thing, functools.partial):
            thing = thing.func
        if isinstance(thing, nn.Module):
            collector.add_module(thing, built)
        elif isinstance(thing, type):
            collector.add_class(thing, _CALLED)
        elif isinstance(thing, FunctionType):
            collector.add(_full_name(thing), thing, _is_by_name(thing))
        elif isinstance(thing, MethodType):
            collector.add_class(type(thing.__self__), {thing.__name__})
        else:  # a correction, say, whose methods the runtime calls
            collector.add_class(
                type(thing), {name for b in type(thing).__mro__ for name in vars(b)}
            )
    return collector.run()


def replaced(here: Code, there: Code) -> list[str]:
    """Return the names of the functions that two processes have otherwise.

    One that only one of them has does not count: who calls it does.
    """
    both = sorted(here.pieces.keys() & there.pieces.keys())
    names = [name for name in both if not here.pieces[name].is_same(there.pieces[name])]
    return [name.removesuffix("()") for name in names]


def changed(here: Code, there: Code) -> list[str]:
    """Return the plain values that are others in another process, each in words."""
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
        ConfigError: Functions differ. Where only plain values do, that is logged.
    """
    if names := replaced(here, sent):
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ConfigError(
            f"this worker has other code than the script of {', '.join(names[:5])}{more}: the "
            "script has replaced it when it ran, or the file was edited since the script read it, "
            "or this machine has another file of that name. Make replacements in the module that "
            "defines what is replaced, or in a class of your own; give all machines the same "
            "files, and leave them as they are while the run goes on"
        )
    if values := changed(here, sent):
        _log.warning(
            "values that layers read from modules and classes are others here, in a worker, than "
            "there, in the script, which has changed them since they were imported: %s; make them "
            "attributes of the layers",
            "; ".join(values[:5]),
        )


class _Collector:
    """Collects functions, and what the code of these reads by name, until nothing new is found."""

    def __init__(self) -> None:
        """Collect nothing yet."""
        self._code = Code()
        self._waiting: list[tuple[str, FunctionType, bool, str]] = []
        self._names: set[str] = set()
        # A class, which need not be hashable, the methods that are added anyway, and the package of
        # who reads it.
        self._classes: dict[int, tuple[type, set[str], str]] = {}
        self._taken: set[tuple[int, str]] = set()
        self._followed: set[int] = set()
        self._files: dict[str, str] = {}

    def run(self) -> Code:
        """Take everything that waits, and what that reads; return all of it."""
        while self._waiting:
            while self._waiting:
                self._take(*self._waiting.pop())
            for each in list(self._classes.values()):
                self._take_methods(*each)
        return self._code

    def add_module(self, module: nn.Module, built: bool) -> None:
        """Add the forwards of a module and of the modules in it, and functions that they hold."""
        for each in module.modules():
            self.add_class(type(each), {*_COMPUTES, "__call__", *(["__init__"] if built else [])})
            for name, value in vars(each).items():
                plain = issubclass(type(value), torch.Tensor) or _text_of_value(value) is not None
                if name in _OWN or plain:  # which travels with the module
                    continue
                if type(value) is FunctionType:
                    self.add(_full_name(value), value, _is_by_name(value))
                else:
                    self._note(f"{_name_of(type(each))}.{name}", value, _package_of(type(each)), 0)

    def add_class(self, cls: type, always: Collection[str], package: str = "") -> None:
        """Add methods of a class.

        Args:
            cls: The class.
            always: The names of methods to add; others are if their names are read anywhere.
            package: The package of who reads the class; empty for nobody.
        """
        if _package_of(cls) not in _UNSEEN:
            new = (cls, set[str](), package or _package_of(cls))
            found = self._classes.setdefault(id(cls), new)
            if not found[1].issuperset(always):
                found[1].update(always)
                self._take_methods(*found)

    def add(self, name: str, function: FunctionType, by_name: bool, package: str = "") -> None:
        """Add a function.

        Args:
            name: The name under which it is found.
            function: The function.
            by_name: Whether it is compared; else only what it reads is.
            package: The package of who reads it; empty for nobody.
        """
        self._waiting.append((name, function, by_name, package or _package_of(function)))

    def _take_methods(self, cls: type, always: Collection[str], package: str) -> None:
        """Add those methods of a class and its bases whose names are read, and plain values."""
        for name in _COMPUTES & set(always):
            holder = next((base for base in cls.__mro__ if name in vars(base)), None)
            if holder is not None and (id(cls), name) not in self._taken:
                self._taken.add((id(cls), name))
                for function in _functions_in(vars(holder)[name]):
                    by_name = _is_by_name(cls) or _is_by_name(function)
                    self.add(f"{_name_of(cls)}.{name}", function, by_name, package)
        for base in cls.__mro__:
            if _package_of(base) in (*_UNSEEN, "torch"):
                continue
            own = vars(base)
            for name in own.keys() & (self._names | set(always)):
                if (id(base), name) in self._taken:
                    continue
                self._taken.add((id(base), name))
                full, functions = f"{_name_of(base)}.{name}", list(_functions_in(own[name]))
                for i, function in enumerate(functions):  # of a property there are several
                    self.add(f"{full}{'.' * i}", function, _is_by_name(base), package)
                if not functions and not name.startswith("__"):
                    self._note(full, own[name], package, 0)

    def _take(self, name: str, function: FunctionType, by_name: bool, package: str) -> None:
        """Take a function, and what its code reads by global names."""
        chain = list(_unwrapped(function))
        if by_name and name not in self._code.pieces:
            modules = [f.__globals__.get("__name__") for f in _wrapping(function)]
            if all(_package(m) == "torch" or m == _WRAPS_TORCH for m in modules):
                # Of the same version everywhere; torch wraps some anew when they are called, and
                # so do workers.
                piece = Piece(f"torch's {function.__qualname__}", "")
            else:
                text = "|".join(_text_of(each) for each in chain)
                digest = blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
                piece = Piece(digest, self._origin_of(function))
            self._code.pieces[name] = piece
        for each in chain:
            own = _package_of(each)
            if id(each.__code__) in self._followed or own in _UNSEEN:
                continue
            self._followed.add(id(each.__code__))
            if own in (package, "torch") or not _is_installed(each.__globals__.get("__name__")):
                names = set(_names_in(each.__code__))
                if own != "torch":
                    self._names |= names
                self._read(each.__globals__, names, package, own == "torch")

    def _read(
        self,
        variables: Mapping[str, Any],
        names: set[str],
        package: str,
        torchs: bool,
        depth: int = 0,
    ) -> None:
        """Note what code reads of a module, and of the modules that it reads there.

        Args:
            variables: What the module holds.
            names: The names that are read.
            package: The package of who reads.
            torchs: Whether the code is torch's, of which no more than what it calls is noted.
            depth: The number of modules around this one.
        """
        where = variables.get("__name__")
        for name in names & variables.keys():
            value = variables[name]
            if issubclass(type(value), ModuleType):
                inner = ModuleType.__getattribute__(value, "__dict__")
                if depth < _DEEPEST and _package(inner.get("__name__")) not in _UNSEEN:
                    self._read(inner, names, package, torchs, depth + 1)
            elif not torchs or type(value) in (FunctionType, BuiltinFunctionType):
                self._note(f"{where}.{name}", value, package, depth)

    def _note(self, name: str, value: Any, package: str, depth: int) -> None:
        """Note a function that is called, a class that is used, or a plain value that is read."""
        kind = type(value)
        # What the script itself defines travels with its code.
        travels = _package(name) == "__main__"
        if kind is FunctionType:
            if f"{name}()" not in self._code.pieces and _package_of(value) not in _UNSEEN:
                if _package_of(value) == "torch":  # what it calls does not count
                    self._followed.add(id(value.__code__))
                self.add(f"{name}()", value, _is_by_name(value) or not travels, package)
        elif kind is BuiltinFunctionType:
            if _package(name) not in _UNSEEN:
                self._code.pieces[f"{name}()"] = Piece("built in", "")
        elif issubclass(kind, type):
            if _package_of(value) not in (*_UNSEEN, "torch"):
                if _is_by_name(value) or not travels:
                    self._code.pieces[name] = Piece(_name_of(value), "")
                self.add_class(value, _CALLED, package)
        elif (text := _text_of_value(value)) is not None:
            if not _is_installed(name.rpartition(".")[0]):
                self._code.constants[name] = text
        elif kind in (dict, list, tuple):
            items = value.items() if kind is dict else enumerate(value)
            if len(value) < _MOST_ITEMS and depth < _DEEPEST:
                for key, item in ((k, v) for k, v in items if type(k) in (str, int)):
                    self._note(f"{name}[{key!r}]", item, package, depth + 1)
        elif issubclass(kind, functools.partial):
            self._note(name, value.func, package, depth + 1)
        elif type(inner := _attribute(value, "__wrapped__")) is FunctionType:
            self._note(name, inner, package, depth + 1)
        elif _package_of(kind) not in (*_UNSEEN, "torch"):
            self.add_class(kind, _CALLED - {"__init__", "__new__", "__post_init__"}, package)

    def _origin_of(self, function: FunctionType) -> str:
        """Return where a function, and what wraps it but tools, was written; empty if not known."""
        found = []
        for each in _wrapping(function):
            by_tool = _package(each.__globals__.get("__name__")) in _TOOLS
            if not by_tool and not each.__code__.co_filename.startswith("<@beartype"):
                place = self._place_of(each)
                if not place:
                    return ""
                found.append(place)
        return "; ".join(found)

    def _place_of(self, function: FunctionType) -> str:
        """Return where a function itself was written; empty if its file was edited of late."""
        code, module = function.__code__, function.__globals__.get("__name__")
        path = str(_attribute(sys.modules.get(module or ""), "__file__") or "")
        if code.co_filename != path:
            return ""
        if path not in self._files:
            try:
                old = os.stat(path).st_mtime < _BEGAN
                found = blake2b(Path(path).read_bytes(), digest_size=8).hexdigest() if old else ""
            except OSError:
                found = ""
            self._files[path] = found
        if not self._files[path]:
            return ""
        return f"{module} {function.__qualname__} {code.co_firstlineno} {self._files[path]}"


def _package(module: object) -> str:
    """Return the package at the top of a module's name; that of Python's own for no name."""
    return module.partition(".")[0] if isinstance(module, str) else "builtins"


def _package_of(thing: object) -> str:
    """Return the package at the top of the module of a class or a function."""
    return _package(_attribute(thing, "__module__"))


def _full_name(function: FunctionType) -> str:
    """Return the name of a function that stands in no class."""
    return f"{function.__module__}.{function.__qualname__}()"


def _name_of(cls: type) -> str:
    """Return the full name of a class."""
    return f"{_attribute(cls, '__module__')}.{cls.__qualname__}"


def _attribute(value: object, name: str) -> object:
    """Return an attribute; None if there is none, or its owner raises something."""
    try:
        return getattr(value, name, None)
    except Exception:  # a foreign object may raise anything
        return None


@functools.cache
def _is_installed(module: object) -> bool:
    """Whether a module is an installed one, rather than one of the user's own."""
    name = module if isinstance(module, str) else ""
    while name and name not in sys.modules:  # it may be the name of a class in a module
        name = name.rpartition(".")[0]
    return str(_attribute(sys.modules.get(name), "__file__") or "").startswith(_INSTALLED)


def _is_by_name(thing: type | FunctionType) -> bool:
    """Whether a class or a function is pickled by its name; else its code travels with it."""
    module = _attribute(thing, "__module__")
    by_value = cloudpickle.list_registry_pickle_by_value()
    if not isinstance(module, str) or module == "__main__":
        return False
    if any(f"{module}.".startswith(f"{each}.") for each in by_value):
        return False
    found: object = sys.modules.get(module)
    for name in thing.__qualname__.split("."):
        found = _attribute(found, name)
    return found is thing


def _functions_in(value: object) -> Iterator[FunctionType]:
    """Yield the functions of an attribute of a class: a method, or a property's."""
    parts: tuple[Any, ...] = (value,)
    if isinstance(value, staticmethod | classmethod):
        parts = (value.__func__,)
    elif isinstance(value, property):
        parts = (value.fget, value.fset, value.fdel)
    elif isinstance(value, functools.cached_property):
        parts = (value.func,)
    for part in parts:
        if isinstance(part, FunctionType):
            # What torch puts around the step of every optimizer that is made.
            inner = getattr(part, "__wrapped__", None) if getattr(part, "hooked", 0) else None
            yield inner if isinstance(inner, FunctionType) else part


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
        inner += list(_cells_of(each))
        waiting += [f for f in inner if isinstance(f, FunctionType)]


def _wrapping(function: FunctionType) -> Iterator[FunctionType]:
    """Yield a function, what it says that it wraps, what that wraps, and so on."""
    each: object = function
    for _ in range(_MOST_ITEMS):  # somebody may have made a circle
        if not isinstance(each, FunctionType):
            return
        yield each
        each = getattr(each, "__wrapped__", None)


def _cells_of(function: FunctionType) -> Iterator[Any]:
    """Yield what the closure of a function holds."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing in it yet
            continue


def _text_of(function: FunctionType) -> str:
    """Return a text that is another one for code that does something else."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    values = [_text_of_value(value) for value in (*defaults, *_cells_of(function))]
    return f"{_text_of_code(function.__code__)} {values}"


def _text_of_value(value: object) -> str | None:
    """Return a text of a plain value, or of a container of these; None of anything else."""
    kind = type(value)
    if kind in (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device):
        return repr(value)
    if issubclass(kind, Enum):
        return f"{kind.__qualname__}.{value.name}"  # type: ignore[attr-defined]
    if kind in (tuple, list, dict, set, frozenset, torch.Size):
        flat: list[object] = [*value.items()] if kind is dict else [*value]  # type: ignore
        texts = [_text_of_value(each) for each in flat] if len(flat) < _MOST_ITEMS else [None]
        if None not in texts:
            ordered = sorted(map(str, texts)) if kind in (set, frozenset) else map(str, texts)
            return f"{kind.__name__}({', '.join(ordered)})"
    return None


@functools.lru_cache(maxsize=1 << 14)
def _text_of_code(code: CodeType) -> str:
    """Return a text of compiled code that depends on no line, no comment and no process."""
    parts = [str((code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_varnames))]
    for each in dis.get_instructions(code):
        value = each.argval
        if isinstance(value, CodeType):
            value = _text_of_code(value)
        elif each.opcode in dis.hasconst:
            value = _text_of_value(value) or repr(value)
        parts.append(f"{each.opname} {value}")
    return "\n".join(parts)


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that compiled code reads, also inside the functions that it makes."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names_in(value)
