"""Pickling what goes to a worker: its layers, the loss, hooks, the optimizer.

cloudpickle does the work. The pickler here also notes which of the model's tensors come along. A
copy of a weight that belongs to another stage would never be trained, without a word: such copies
come by a module in a tuple or in a closure, or by a hook that looks at another layer.
"""

from __future__ import annotations

import functools
import io
import pickle
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias, cast
from weakref import WeakSet

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pipedream_rt.messages.wire import bytes_of, sendable
from pipedream_rt.models.code import is_installed
from pipedream_rt.models.tensors import is_away
from pipedream_rt.torch_private import (
    OPERATORS,
    CustomOpDef,
    add_computed_property,
    make_parametrized_class,
    make_subclass,
    parts_of_operator,
)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
    """A pickler that notes tensors, and can pickle modules with parametrizations."""

    def __init__(self, file: io.BytesIO, take: Take | None = None) -> None:
        super().__init__(file, buffer_callback=take)
        self.tensors: dict[int, Range] = {}
        self._data_to_come: set[Range] = set()

    def persistent_id(self, value: object) -> None:
        """Note a tensor; nothing gets a persistent id."""
        if not isinstance(value, Tensor) or id(value) in self.tensors:
            return
        where = range_of(value)
        if isinstance(value, nn.Parameter):
            self._data_to_come.add(where)  # which is pickled next, as a tensor of its own
        elif where in self._data_to_come:
            self._data_to_come.remove(where)
            return
        self.tensors[id(value)] = where

    def reducer_override(self, value: Any) -> Any:
        """Take a module with parametrizations apart, whose class is made at run time.

        And write tensors as their memory: torch's own way copies it five times.
        """
        if type(value) is Tensor and is_away(value):
            # Its worker puts it where it computes.
            value = _on_host(value)
        if type(value) is Tensor and _is_plain(value):
            memory = pickle.PickleBuffer(bytes_of(value))
            return _tensor_over, (memory, value.dtype, tuple(value.shape), value.stride())
        if isinstance(value, nn.Parameter) and type(value) is not nn.Parameter:
            # torch would make a plain Parameter of it, and an optimizer may go by the class.
            return _parameter, (type(value), value.data, value.requires_grad, vars(value))
        cls: type = type(value)
        if name := _global_of(cls).get(id(value)):
            # As what a hook of transformers looks at, which holds a ContextVar.
            return _attribute_of, (cls.__module__, name)
        if isinstance(value, CustomOpDef):
            return _own_operator, parts_of_operator(value)
        if isinstance(value, _OPERATORS):
            return _operator, (str(value),)
        if isinstance(value, ModuleType) and type(value) is not ModuleType:
            # As torch.ops and its namespaces, which are modules of classes of their own.
            return _module_named, (value.__name__,)
        if isinstance(value, tuple) and hasattr(type(value), "_make"):
            # A named tuple, whose own constructor may look at tensors, where a program has numbers.
            return _named_tuple, (type(value), tuple(value))
        if isinstance(value, nn.Module) and parametrize.is_parametrized(value):
            cls = parametrize.type_before_parametrizations(value)
            return (
                _parametrized,
                (cls, list(cast(nn.ModuleDict, value.parametrizations))),
                _state_of(cls, value),
                None,
                None,
                (_set_state),
            )
        return super().reducer_override(value)


def _parameter(cls: Any, data: Tensor, requires_grad: bool, state: dict[str, Any]) -> Tensor:
    """Return a parameter of a class of the user's."""
    made: Tensor = make_subclass(cls, data, requires_grad)
    vars(made).update(state)
    return made


@functools.lru_cache(maxsize=4096)
def _global_of(cls: Any) -> dict[int, str]:
    """Return the globals of the installed module of a class that are objects of it, by ``id``."""
    module = cls.__module__
    if module == "builtins" or not is_installed(module):
        return {}
    there = vars(sys.modules[module]).items() if module in sys.modules else ()
    return {id(value): name for name, value in there if type(value) is cls}


def _attribute_of(module: str, name: str) -> Any:
    """Return a global of a module."""
    return getattr(import_module(module), name)


_OPERATORS = (type(torch.ops.aten.relu), type(torch.ops.aten.relu.default))


def _operator(name: str) -> Any:
    """Return an operator by its name in ``torch.ops``."""
    return functools.reduce(getattr, name.split("."), torch.ops)


def _module_named(name: str) -> Any:
    """Return a module that can be imported, or what is reached as an attribute of one."""
    if name in sys.modules:
        return sys.modules[name]
    parent, _, last = name.rpartition(".")
    return getattr(_module_named(parent), last) if parent else import_module(name)


def _own_operator(
    name: str, schema: str, fake: Any, backward: Any, function: Any, setup: Any
) -> Any:
    """Return the operator of a name; define it if this process has none."""
    if name in OPERATORS:
        return OPERATORS[name]
    # What it changes in place stands in its schema: "(Tensor(a0!) x, Tensor y) -> Tensor".
    changed = re.findall(r"!\)\S* (\w+)", schema)
    made = torch.library.custom_op(name, function, mutates_args=changed, schema=schema)
    if fake is not None:
        made.register_fake(fake)
    if backward is not None:
        made.register_autograd(backward, setup_context=setup)
    return made


Take: TypeAlias = Callable[[pickle.PickleBuffer], None]
"""Takes the memory of a tensor, which `pickle` then does not write."""


def _named_tuple(cls: Any, items: tuple[Any, ...]) -> Any:
    return cls._make(items)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on an accelerator; itself if it is more than values in memory."""
    more = tensor.layout is not torch.strided or tensor.requires_grad or vars(tensor)
    return tensor if more else tensor.cpu()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but values in memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or vars(tensor))
        and not (tensor.is_quantized or tensor.is_inference())
        and sendable(tensor).data_ptr() == tensor.data_ptr()
    )


def _tensor_over(
    memory: Any, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Return a tensor over memory, or over a copy of it where it cannot be changed."""
    view = memoryview(memory)
    if not view.nbytes:
        return torch.empty(0, dtype=dtype, device="cpu").as_strided(tuple(shape), tuple(stride))
    raw = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).as_strided(tuple(shape), tuple(stride))


def _state_of(cls: Any, module: nn.Module) -> dict[str, Any]:
    """Return what a module holds, as its class before parametrization would have it pickled."""
    own = getattr(cls, "__getstate__", None)  # every class has one since Python 3.11
    return dict(module.__dict__ if own is None else own(module))


def _parametrized(cls: type[nn.Module], names: list[str]) -> nn.Module:
    """Return a module of a class whose tensors of these names are computed by parametrizations."""
    module = cls.__new__(cls)
    make_parametrized_class(module)
    for name in names:
        add_computed_property(module, name)
    return module


def _set_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Give a module what it holds."""
    module.__dict__.update(state)


Range: TypeAlias = tuple[int, int]
"""The addresses from the first byte of a tensor to one past the last; (0, 0) if it has none."""


def range_of(tensor: Tensor) -> Range:
    """Return where a dense tensor lies in memory."""
    dense = tensor.layout is torch.strided and tensor.device.type != "meta"
    if not dense or not tensor.numel():
        return (0, 0)
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return (0, 0)
    reach = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()


def dumps(
    value: object, take: Take | None = None, along: set[int] | None = None
) -> tuple[bytes, dict[int, Range]]:
    """Pickle a value for a worker."""
    _have_the_script_travel()
    with io.BytesIO() as file:
        pickler = _Pickler(file, take)
        pickler.dump(value)
        tracked = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", ())
        _GIVEN_AWAY.update(list(tracked))
        if along is not None:
            along.update(pickler.memo.copy())
        return file.getvalue(), pickler.tensors


def loads(data: Any, buffers: Iterable[Any] | None = None) -> Any:
    """Return what `dumps` has pickled.

    The classes of this process stay as they are: cloudpickle knows them again where it reads its
    own bytes, and would give them the methods and attributes that were pickled, all of them copies.
    """
    before = [(cls, dict(vars(cls))) for cls in list(_GIVEN_AWAY)]
    try:
        return cloudpickle.loads(data, buffers=buffers)
    finally:
        for cls, held in before:
            now = vars(cls)
            for name in [n for n in now if n not in held]:
                type.__delattr__(cls, name)
            for name, value in held.items():
                if now.get(name) is not value:
                    type.__setattr__(cls, name, value)


_GIVEN_AWAY: WeakSet[type] = WeakSet()
"""The classes of the script that were pickled with their code."""


def _have_the_script_travel() -> None:
    """Have classes of the script pickled with their code where multiprocessing has spawned it.

    The script is called ``__mp_main__`` there, which no worker can import; cloudpickle knows only
    ``__main__``.
    """
    script = sys.modules.get("__mp_main__")
    if script is not None:
        cloudpickle.register_pickle_by_value(script)


def why_unpicklable(value: object, error: Exception) -> str:
    """Why a value cannot be pickled, and what to do."""
    if isinstance(value, torch.jit.ScriptModule):
        return (
            "torch.jit.script keeps its weights where versions of them cannot be put; give the "
            "module as it was before"
        )
    return f"{error}; keep files, locks, connections and lambdas over them out of the model"


def alias(tensors: Mapping[int, Range], weights: Mapping[int, tuple[Range, str]]) -> str:
    """Return a weight or buffer that shares memory with another tensor; empty if none does."""
    others = [where for each, where in tensors.items() if each not in weights and where[1]]
    for (start, end), name in weights.values():
        if any(first < end and start < last for first, last in others):
            return name
    return ""


def foreign(
    tensors: Collection[int], owners: Mapping[int, tuple[Collection[int], str]], stage: int
) -> str:
    """Return the name of a weight of another stage among tensors; empty if there is none."""
    for each in tensors:
        stages, name = owners.get(each, ((stage,), ""))
        if stage not in stages:
            return f"{name} of stage {next(iter(stages))}"
    return ""
