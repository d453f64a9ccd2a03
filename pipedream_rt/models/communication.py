"""Whether code asks torch.distributed, whose answers depend on the process that runs it."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from pipedream_rt.models.code import is_installed
from pipedream_rt.models.code_reading import function_of, names_in

_DISTRIBUTED = "torch.distributed"


def communicates(value: object) -> bool:
    """Whether a call of a module, of a loss or of a function may ask torch.distributed.

    Judged by the names in its code, in methods of its class and in functions of the script. Modules
    inside of a module are not looked at.
    """
    while isinstance(value, partial):
        value = value.func
    owner = value.__self__ if isinstance(value, MethodType) else value
    classes = type(owner).__mro__  # all of them, for super()
    left: list[Any] = [value, *(vars(cls).get(name) for cls in classes for name in _CALLED)]
    seen = set()
    while left:
        function = function_of(left.pop())
        # What every module has from torch calls nothing by a name of the user's.
        if function in seen or function is None or function.__module__ == nn.Module.__module__:
            continue
        seen.add(function)
        names = names_in(function.__code__).all
        read = [function.__globals__[name] for name in names & function.__globals__.keys()]
        if any("distributed" in name.split(".") for name in names) or any(map(_is_of_torch, read)):
            return True
        left += [vars(cls)[name] for cls in classes for name in names & vars(cls).keys()]
        left += [each for each in read if not is_installed(str(_module_of(each)))]
    return False


_CALLED = ("forward", "__call__")


def _is_of_torch(value: Any) -> bool:
    """Whether a value is torch.distributed, or a function or class of it."""
    names = (getattr(value, "__name__", ""), _module_of(value))
    return any(isinstance(name, str) and name.startswith(_DISTRIBUTED) for name in names)


def _module_of(value: Any) -> Any:
    return getattr(value, "__module__", "")
