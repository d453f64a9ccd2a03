"""The code of layers, compared between the script and a worker.

A class or a function that can be imported is pickled by its name, so a worker runs its own copy.
The copy differs where the script has replaced a method (``Layer.forward = faster``), or where the
worker has read another file of that name. Plain PyTorch would run the script's.

So two things are compared. One is where each method and function was written; those that the code
of installed classes names are among them. The other is the files of the user's own modules, without
comments. A wrapper of torch, or of a tool, around a function does not count.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from inspect import getattr_static
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import cloudpickle
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.code_reading import functions_called, names_in

Code: TypeAlias = dict[str, str]
"""By name of a method or function, where it was written; by "the file of MODULE", a digest."""

_FILE = "the file of "

_INSTALLED = tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib")})
_OWN = ("torch", "pipedream_rt", *sys.stdlib_module_names)
"""Packages whose functions are not searched for others that they call."""

_ALWAYS = ("torch.nn.functional",)
"""Installed modules that are compared too, because scripts replace functions in them."""

_COMPUTE = ("forward", "backward", "step")
"""The only methods of installed classes that count: scripts replace others, as initialisers."""

_NOT_COMPARED = ("__init__", "__repr__", "extra_repr", "reset_parameters")
"""The methods of the user's own classes that do not count, unless the worker builds the layers."""

_WRAPPERS = (FunctionType, type(functools.lru_cache(lambda: None)))

_WRAP = ("torch", "pipedream_rt", "beartype", "jaxtyping", "typeguard", "functools", "contextlib")
"""Packages whose wrappers around functions do not count; some wrap anew in each process."""


def code_of(things: Iterable[object], *, built: bool = False) -> Code:
    """Return the code of what is pickled: modules with those inside, functions, classes of objects.

    ``built`` is whether the worker builds the modules, rather than unpickles them.
    """
    found: Code = {}
    modules = set(_ALWAYS)
    for thing in things:
        while isinstance(thing, functools.partial):
            thing = thing.func
        thing = thing.__func__ if isinstance(thing, MethodType) else thing
        inside = list(thing.modules()) if isinstance(thing, nn.Module) else [thing]
        for each in inside:
            if isinstance(each, FunctionType):
                modules |= {each.__module__, *_modules_in(each.__globals__)}
                continue
            for cls in (each if isinstance(each, type) else type(each)).__mro__:
                if not is_by_name(cls):  # its code travels, but modules that it reads do not
                    own = (v.__globals__ for v in vars(cls).values() if type(v) is FunctionType)
                    modules.update(*map(_modules_in, own))
                elif f"{cls.__module__}.{cls.__qualname__}" not in found:
                    modules.add(cls.__module__)
                    found |= _methods(cls, built)
                    found |= {name: written_at(value) for name, value in named_by(cls).items()}
    for name in _with_imported(modules):
        found |= _functions(sys.modules[name], built)
    return found


def refuse_other_code(here: Code, sent: Code) -> None:
    """Refuse to compute with other code than the script has."""
    # What only one of them has does not count.
    names = [name for name in sorted(here.keys() & sent.keys()) if here[name] != sent[name]]
    # In another file other things differ too, so the files are the cause.
    files = [name for name in names if name.startswith(_FILE)]
    names = files or names
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    listed = f"{', '.join(names[:5])}{more}"
    if files:
        raise ConfigError(
            f"this worker has other code than the script in {listed}: a file was edited since "
            "the script read it, or this machine has another one of that name. Give all machines "
            "the same files, and leave them as they are while the run goes on"
        )
    if names:
        raise ConfigError(
            f"this worker has other code than the script of {listed}: the script has replaced or "
            "wrapped it when it ran, or this machine has another version of its package. Make "
            "replacements in the module that defines what is replaced, or in a class of your own; "
            "install the same packages on all machines"
        )


def _methods(cls: type, built: bool) -> Code:
    """Return where the methods of a class were written; an empty entry marks the class as done."""
    name, installed = f"{cls.__module__}.{cls.__qualname__}", is_installed(cls.__module__)
    # torch puts a step into each class of optimizers when one is made, so bases count as well.
    inherited = {key: getattr_static(cls, key, None) for key in _COMPUTE}
    named = {**inherited, **({} if installed else vars(cls))}
    counted = {key: written_at(v) for key, v in named.items() if built or key not in _NOT_COMPARED}
    return {name: "", **{f"{name}.{key}": mark for key, mark in counted.items() if mark}}


def _functions(module: ModuleType, built: bool) -> Code:
    """Return where what is in a module was written, and the digest of its file."""
    name, found = module.__name__, Code()
    for key, value in list(vars(module).items()):
        if mark := written_at(value):
            found[f"{name}.{key}"] = mark
        if issubclass(type(value), type) and value.__module__ == name:
            found |= _methods(value, built)
    path = getattr(module, "__file__", None)
    if path and not is_installed(name):
        with suppress(OSError):  # a file that cannot be read now does not count
            found[f"{_FILE}{name}"] = _digest(path)
    return found


def written_at(value: Any) -> str:
    """Return where a function or class was written; empty for other values."""
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    elif type(value) is property:
        value = value.fget
    while type(value) in _WRAPPERS and hasattr(value, "__wrapped__") and _package(value) in _WRAP:
        value = value.__wrapped__
    if issubclass(type(value), type):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value) is BuiltinFunctionType:
        return f"built in: {value.__name__}"
    if type(value) is not FunctionType:
        return ""
    # A replacement by functools.wraps has the names of what it wraps, but another file.
    file = getattr(sys.modules.get(value.__module__), "__file__", None)
    written = value.__code__.co_filename
    elsewhere = f" in {os.path.basename(written)}" if file and written != file else ""
    return f"{value.__module__}.{value.__qualname__}{elsewhere}"


def _package(value: Any) -> str:
    """Return the package of the code of a wrapper: a function, or an object of a class."""
    is_function = isinstance(value, FunctionType)
    named = value.__globals__["__name__"] if is_function else type(value).__module__
    return str(named).partition(".")[0]


@functools.cache
def _digest(path: str) -> str:
    """Return a digest of a Python file without its comments; empty if it cannot be parsed."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError):
        return ""
    return blake2b(ast.dump(tree).encode(), digest_size=8).hexdigest()


def _with_imported(names: Iterable[str]) -> Iterator[str]:
    """Yield names of modules, and of the user's own modules that these import, at any depth."""
    left, seen = [name for name in names if name in sys.modules], set[str]()
    while left:
        name = left.pop()
        if name in seen or name == "__main__":
            continue
        seen.add(name)
        if name not in _ALWAYS and is_installed(name):
            continue
        yield name
        left += _modules_in(vars(sys.modules[name]))


def _modules_in(namespace: Mapping[str, Any]) -> set[str]:
    """Return the user's own modules that are in a namespace, or that define a value in it."""
    found = set()
    for value in list(namespace.values()):
        # By type() instead of isinstance: a proxy may claim another class, or raise.
        is_code = issubclass(type(value), type) or type(value) is FunctionType
        if is_code or type(value) is ModuleType:
            module = value.__module__ if is_code else value.__name__
            if module in sys.modules and not is_installed(module):
                found.add(module)
    return found


def named_by(cls: type) -> dict[str, Any]:
    """Return the methods, functions and classes that the code of an installed class names.

    Also what these name, at any depth; by module and name. Nothing for a class of torch.
    """
    found: dict[str, Any] = {}
    if not is_installed(cls.__module__) or cls.__module__.partition(".")[0] in _OWN:
        return found
    left = functions_called(cls)
    for function in left:  # by its own name: the class may have another one under it
        name = function.__name__
        found[f"{cls.__module__}.{cls.__qualname__}.{name}"] = getattr_static(cls, name, None)
    seen = {id(function) for function in left}
    while left:
        function = left.pop()
        there, module = function.__globals__, function.__globals__["__name__"]
        for name in names_in(function.__code__).globals & there.keys():
            value = there[name]
            if type(value) is not FunctionType and not isinstance(value, type):
                continue
            found[f"{module}.{name}"] = value
            own = str(value.__module__).partition(".")[0] in _OWN
            if type(value) is FunctionType and not own and id(value) not in seen:
                seen.add(id(value))
                left.append(value)
    return found


@functools.cache
def is_installed(module: str) -> bool:
    """Whether a module is installed, Python's or ours, rather than the user's own."""
    root = module.partition(".")[0]
    if root in ("pipedream_rt", *sys.stdlib_module_names):
        return True
    # By its package: modules inside of a compiled one have no file.
    for there in (sys.modules.get(root), sys.modules.get(module)):
        path = str(getattr(there, "__file__", "") or "")
        if path:
            levels = 1 if getattr(there, "__path__", None) is None else 2
            return path.startswith(_INSTALLED) or _has_packages(str(Path(path).parents[levels - 1]))
    return False


@functools.cache
def _has_packages(folder: str) -> bool:
    """Whether packages are installed into a folder, as into a user's site or by ``--target``."""
    if os.path.basename(folder) in ("site-packages", "dist-packages"):
        return True
    with suppress(OSError):
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    return False


def is_by_name(thing: Any) -> bool:
    """Whether cloudpickle pickles a class or function by name; if not, its code travels."""
    module = thing.__module__
    by_value = cloudpickle.list_registry_pickle_by_value()
    if module in ("__main__", "__mp_main__", "builtins") or any(
        f"{module}.".startswith(f"{each}.") for each in by_value
    ):
        return False
    found: object = sys.modules.get(module)
    for name in getattr(thing, "__qualname__", "").split("."):  # a cache of a partial has none
        found = getattr(found, name, None)
    return found is thing
