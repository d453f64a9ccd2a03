"""Pickling what goes to a worker: its layers, the loss, hooks, the optimizer.

cloudpickle does the work. The pickler here also notes which of the model's tensors come along,
because a copy of a weight of another stage would silently never be trained. Such a copy comes by a
module in a tuple or in a closure, or by a hook that refers to another layer.
"""

from __future__ import annotations

import functools
import io
import pickle
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakSet

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

from pipedream_rt.messages.wire import bytes_of, sendable
from pipedream_rt.models.code import is_by_name, is_installed
from pipedream_rt.models.tensors import is_away
from pipedream_rt.torch_private import (
    OPERATORS,
    CustomOpDef,
    add_computed_property,
    make_parametrized_class,
    make_subclass,
    parts_of_operator,
)

T = TypeVar("T")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
    """A pickler that notes tensors, and can pickle modules with parametrizations.

    Attributes:
        tensors: Where each tensor that came along lies in memory, by ``id``.
    """

    def __init__(self, file: io.BytesIO, take: Take | None = None, travels: bool = True) -> None:
        super().__init__(file, buffer_callback=take)
        self.tensors: dict[int, Range] = {}
        self._travels = travels
        self._data_to_come: set[Range] = set()

    def persistent_id(self, value: object) -> None:
        """Note a tensor; return None for all, so that nothing gets a persistent id."""
        if not isinstance(value, Tensor) or id(value) in self.tensors:
            return
        where = range_of(value)
        if isinstance(value, nn.Parameter):
            # Its .data is pickled next, as a tensor of its own, which must not be noted.
            self._data_to_come.add(where)
        elif where in self._data_to_come:
            self._data_to_come.remove(where)
            return
        self.tensors[id(value)] = where

    def reducer_override(self, value: Any) -> Any:
        """Pickle the objects that cloudpickle or torch cannot pickle, or only slowly."""
        if self._travels and type(value) is Tensor and is_away(value):
            # The worker moves it to the device on which it computes.
            value = _on_host(value)
        if type(value) is Tensor and _is_plain(value):
            # As its memory: torch's own way copies it five times.
            memory = pickle.PickleBuffer(bytes_of(value))
            return _tensor_over, (memory, value.dtype, tuple(value.shape), value.stride())
        if isinstance(value, nn.Parameter) and type(value) is not nn.Parameter:
            # torch would make it a plain Parameter, but an optimizer may go by the class.
            return _parameter, (type(value), value.data, value.requires_grad, vars(value))
        cls: type = type(value)
        if name := _global_of(cls).get(id(value)):
            # By name, as it may hold what cannot be pickled: one of transformers has a ContextVar.
            return _attribute_of, (cls.__module__, name)
        if isinstance(value, type) and (name := _renamed(value)):
            return _attribute_of, (value.__module__, name)
        if isinstance(value, torch.finfo | torch.iinfo):
            return _limits_of, (cls, value.dtype)
        if isinstance(value, CustomOpDef):
            return _own_operator, parts_of_operator(value)
        if isinstance(value, _OPERATORS):
            return _operator, (str(value),)
        if isinstance(value, _CACHED) and not is_by_name(value):
            # Pickled by its name, though no worker can import the script.
            return _cached, (value.__wrapped__, value.cache_parameters())
        if type(value) is functools.cached_property:
            # Up to Python 3.11 it has a lock; it is no function, so its class is pickled with it.
            return _cached_property, (value.func, value.attrname)
        if type(value) is FunctionType and value.__code__ is _DISPATCHING and not is_by_name(value):
            # What it has found for a class it keeps in weak references.
            return _dispatching, (dict(cast(Any, value).registry),)
        if isinstance(value, ModuleType) and type(value) is not ModuleType:
            # torch.ops and its namespaces are modules of classes of their own.
            return _module_named, (value.__name__,)
        if isinstance(value, tuple) and hasattr(type(value), "_make"):
            # A program has slots in place of tensors, which the own constructor may not bear.
            return _named_tuple, (type(value), tuple(value))
        if isinstance(value, DataLoader) and value._iterator is not None:
            # Its worker processes stay here; the copy starts its own.
            reduced: Any = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            make, args, state, *rest = reduced
            return make, args, {**state, "_iterator": None}, *rest
        if isinstance(value, nn.Module) and parametrize.is_parametrized(value):
            # Its class is made at run time, so no worker can import it.
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
    made: Tensor = make_subclass(cls, data, requires_grad)
    vars(made).update(state)
    return made


@functools.lru_cache(maxsize=4096)
def _global_of(cls: Any) -> dict[int, str]:
    """Return the names of a class's objects in its installed module, by ``id``."""
    module = cls.__module__
    if module == "builtins" or not is_installed(module):
        return {}
    there = vars(sys.modules[module]).items() if module in sys.modules else ()
    return {id(value): name for name, value in there if type(value) is cls}


def _attribute_of(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _renamed(cls: type) -> str:
    """Return the name of an installed class in its module, where it has another itself; else ""."""
    # torch.nn.attention.SDPBackend calls itself _SDPBackend, and its code, in C, cannot travel.
    module = sys.modules.get(cls.__module__)
    if module is None or "." in cls.__qualname__ or not is_installed(cls.__module__):
        return ""
    if hasattr(module, cls.__qualname__):
        return ""
    return next((name for name, value in vars(module).items() if value is cls), "")


def _limits_of(cls: Any, dtype: str) -> Any:
    """Return torch's record of the limits of a dtype."""
    return cls(getattr(torch, dtype))


_OPERATORS = (type(torch.ops.aten.relu), type(torch.ops.aten.relu.default))


def _operator(name: str) -> Any:
    """Return an operator by its name in ``torch.ops``."""
    return functools.reduce(getattr, name.split("."), torch.ops)


_CACHED = type(functools.lru_cache(lambda: None))


def _cached(function: Any, options: dict[str, Any]) -> Any:
    """Return a function with an empty cache."""
    return functools.lru_cache(**options)(function)


def _cached_property(function: Any, name: str | None) -> Any:
    """Return a property that is computed once; ``name`` is where its object keeps it."""
    made: Any = functools.cached_property(function)
    made.attrname = name
    return made


_DISPATCHING = functools.singledispatch(lambda value: None).__code__  # type: ignore[attr-defined]


def _dispatching(registry: dict[type, Any]) -> Any:
    """Return a function that goes by the class of its first argument."""
    made = functools.singledispatch(registry.pop(object))
    for cls, function in registry.items():
        made.register(cls, function)
    return made


def _module_named(name: str) -> Any:
    """Return a module by name; if it is not imported as one, as an attribute of its parent."""
    if name in sys.modules:
        return sys.modules[name]
    parent, _, last = name.rpartition(".")
    return getattr(_module_named(parent), last) if parent else import_module(name)


def _own_operator(
    name: str, schema: str, fake: Any, backward: Any, function: Any, setup: Any
) -> Any:
    """Return a custom operator; define it if this process does not have it."""
    if name in OPERATORS:
        return OPERATORS[name]
    # The schema marks what it changes in place by "!": "(Tensor(a0!) x, Tensor y) -> Tensor".
    changed = re.findall(r"!\)\S* (\w+)", schema)
    made = torch.library.custom_op(name, function, mutates_args=changed, schema=schema)
    if fake is not None:
        made.register_fake(fake)
    if backward is not None:
        made.register_autograd(backward, setup_context=setup)
    return made


Take: TypeAlias = Callable[[pickle.PickleBuffer], None]
"""Takes the memory of a tensor, which is then left out of the pickle."""


def _named_tuple(cls: Any, items: tuple[Any, ...]) -> Any:
    return cls._make(items)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a tensor of an accelerator on the host; itself if it is more than plain values."""
    more = tensor.layout is not torch.strided or tensor.requires_grad or vars(tensor)
    return tensor if more else tensor.cpu()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but values in host memory."""
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
    """Return a tensor over memory; over a copy if the memory is read-only or misaligned."""
    view = memoryview(memory)
    if not view.nbytes:
        return torch.empty(0, dtype=dtype, device="cpu").as_strided(tuple(shape), tuple(stride))
    raw = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).as_strided(tuple(shape), tuple(stride))


def _state_of(cls: Any, module: nn.Module) -> dict[str, Any]:
    """Return the state of a module, as its class before parametrization would pickle it."""
    own = getattr(cls, "__getstate__", None)  # every class has one since Python 3.11
    return dict(module.__dict__ if own is None else own(module))


def _parametrized(cls: type[nn.Module], names: list[str]) -> nn.Module:
    """Make a module, without its state, whose named tensors are computed by parametrizations."""
    module = cls.__new__(cls)
    make_parametrized_class(module)
    for name in names:
        add_computed_property(module, name)
    return module


def _set_state(module: nn.Module, state: dict[str, Any]) -> None:
    module.__dict__.update(state)


Range: TypeAlias = tuple[int, int]
"""The address of the first byte of a tensor, and that after the last; (0, 0) if it has none."""


def range_of(tensor: Tensor) -> Range:
    """Return where a dense tensor with values lies in memory."""
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
    """Pickle a value for a worker; return the bytes, and where each tensor in it lies, by ``id``.

    ``take`` gets the memory of each tensor, in the order in which `loads` needs it as ``buffers``;
    with None it is among the bytes. ``along`` gets the ``id`` of each object that was pickled.
    """
    with io.BytesIO() as file:
        pickler = _Pickler(file, take)
        _dump(pickler, value)
        if along is not None:
            along.update(pickler.memo.copy())
        return file.getvalue(), pickler.tensors


def _dump(pickler: _Pickler, value: object) -> None:
    """Pickle a value, and note the classes that are pickled with their code."""
    _have_the_script_travel()
    pickler.dump(value)
    tracked = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", ())
    _GIVEN_AWAY.update(list(tracked))


def loads(data: Any, buffers: Iterable[Any] | None = None) -> Any:
    """Return the value that `dumps` has pickled; the classes of this process stay as they are."""
    # cloudpickle recognises a class that this process has pickled itself. It would give that class
    # the methods and attributes of the pickle, which are copies with other globals.
    with classes_kept():
        return cloudpickle.loads(data, buffers=buffers)


@contextmanager
def classes_kept() -> Iterator[None]:
    """Give the classes that this process has pickled with their code their attributes back."""
    before = [(cls, dict(vars(cls))) for cls in list(_GIVEN_AWAY)]
    try:
        yield
    finally:
        for cls, held in before:
            now = vars(cls)
            for name in [n for n in now if n not in held]:
                type.__delattr__(cls, name)
            for name, value in held.items():
                if now.get(name) is not value:
                    type.__setattr__(cls, name, value)


def copying(value: T, most: int = 1 << 30) -> Callable[[], T]:
    """Return a maker of copies of a value as it is now; each copy may be changed.

    They share all classes (see `classes_kept`), what pickles by its name, and tensors and arrays
    beyond ``most`` bytes. PicklingError is raised if all else takes more, or if there are too many
    tensors and arrays.
    """
    memory: list[memoryview] = []
    copied: list[bool] = []
    left = most

    def take(buffer: pickle.PickleBuffer) -> None:
        if len(memory) == _MOST_BUFFERS:
            raise pickle.PicklingError(f"it has more than {_MOST_BUFFERS} tensors and arrays")
        nonlocal left
        memory.append(buffer.raw())
        copied.append(memory[-1].nbytes <= left)
        left -= memory[-1].nbytes * copied[-1]

    with _Bounded(most) as file:
        _dump(_Pickler(file, take, travels=False), value)
        data = file.getvalue()

    def copy() -> T:
        buffers = zip(memory, copied, strict=True)
        made: T = loads(data, [bytearray(raw) if own else raw for raw, own in buffers])
        return made

    return copy


_MOST_BUFFERS = 1 << 16
"""How many tensors and arrays are copied at most: to pickle one takes 30 us."""


class _Bounded(io.BytesIO):
    """A file in memory that grows to a number of bytes at most."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, data: Any) -> int:
        """Write bytes, or raise PicklingError."""
        if self.tell() + memoryview(data).nbytes > self._most:
            raise pickle.PicklingError(f"it takes more than {self._most >> 20} MiB")
        return super().write(data)


_GIVEN_AWAY: WeakSet[type] = WeakSet()
"""The classes that this process has pickled with their code."""


def _have_the_script_travel() -> None:
    """Have classes of the script pickled with their code in a process of multiprocessing too."""
    # A spawned process calls the script __mp_main__, which no worker can import. cloudpickle
    # pickles only __main__ with its code by itself.
    script = sys.modules.get("__mp_main__")
    if script is not None:
        cloudpickle.register_pickle_by_value(script)


def why_unpicklable(value: object, error: Exception) -> str:
    """Say why a value cannot be pickled, and what to do."""
    if isinstance(value, torch.jit.ScriptModule):
        return (
            "torch.jit.script keeps its weights where versions of them cannot be put; give the "
            "module as it was before"
        )
    return (
        f"{error}; keep files, locks, connections and lambdas over them out of the model, or make "
        "them where they are used, in a forward"
    )


def alias(tensors: Mapping[int, Range], weights: Mapping[int, tuple[Range, str]]) -> str:
    """Return the name of a weight or buffer that shares memory with another tensor; "" if none."""
    others = [where for each, where in tensors.items() if each not in weights and where[1]]
    for (start, end), name in weights.values():
        if any(first < end and start < last for first, last in others):
            return name
    return ""


def foreign(
    tensors: Collection[int], owners: Mapping[int, tuple[Collection[int], str]], stage: int
) -> str:
    """Return the weight among tensors, by ``id``, that ``stage`` does not have; "" if none.

    ``owners`` has, for each weight and buffer by ``id``, the stages that have it, and its name.
    """
    for each in tensors:
        stages, name = owners.get(each, ((stage,), ""))
        if stage not in stages:
            return f"{name} of stage {next(iter(stages))}"
    return ""
