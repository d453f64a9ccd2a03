"""Every private name of torch that this library uses, looked up once.

torch may rename or drop such a name in any version. Most are *needed*: without them a result could
differ unnoticed, or nothing could run, so the import says which one is missing and fails. The
*optional* ones have a fallback here. `tests/test_layers.py` finds private names of torch in any
other file.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.rpc.internal import _InternalRPCPickler
    from torch.utils._device import DeviceContext as DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    InternalRpcPickler = _InternalRPCPickler

OLDEST, NEWEST = "2.9", "2.14"
"""The oldest and the newest torch that were tried; the first is the floor of ``setup.cfg``. In 2.8
no backward can begin in the middle of a graph at a Function written in Python, as that of
`zero-bubble` does. 2.7 lacks the name by which hooks on saved tensors are found."""


_MISSING = object()


def optional(path: str, otherwise: Any) -> Any:
    """Return what a dotted path below ``torch`` names, or a fallback if it names nothing."""
    found, parts = torch, path.split(".")
    for count, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:  # perhaps a module that torch does not import by itself
                found = import_module(".".join(parts[:count]))
            except ImportError:
                return otherwise
    return found


def needed(path: str) -> Any:
    """Return what a dotted path below ``torch`` names; ImportError if it names nothing."""
    found = optional(path, _MISSING)
    if found is _MISSING:
        _refuse(f", which lacks {path}")
    return found


def _refuse(why: str = "") -> NoReturn:
    """Raise an error that says which versions of torch work."""
    raise ImportError(
        f"pipedream-rt was tried with torch {OLDEST} to {NEWEST}, and this is torch "
        f"{torch.__version__}{why}; install another, as by: pip install 'torch>={OLDEST}'"
    )


def _minor(version: str) -> list[int]:
    """Return major and minor number of a version."""
    return [int(part) for part in version.split(".")[:2]]


if _minor(torch.__version__) < _minor(OLDEST):
    _refuse()


# -- modes of a thread that change what a layer computes -----------------------------------------

set_grad_enabled: Any = needed("torch._C._set_grad_enabled")
"""The call to which a recorded ``no_grad`` comes down."""

count_function_modes: Callable[[], int] = needed("torch._C._len_torch_function_stack")
function_modes: Callable[[], list[Any]] = needed("torch.overrides._get_current_function_mode_stack")
dispatch_modes: Callable[[], list[Any]] = needed(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack"
)
saved_tensors_hooks_allowed: Callable[[], bool] = needed(
    "torch._C._autograd._saved_tensors_hooks_is_enabled"
)
views_are_replayed: Callable[[], bool] = needed("torch._C._is_view_replay_enabled")
in_transform: Callable[[], Any] = needed("torch._C._functorch.peek_interpreter_stack")
preserve_version_counter: Any = needed("torch.autograd._unsafe_preserve_version_counter")

order_of_attention: Callable[[], Any] = optional("torch._C._get_sdp_priority_order", lambda: None)
"""The order in which attention kernels are tried. A torch without it has one fixed order."""

ATTENTION = {
    optional(f"torch.ops.aten.{name}_for_cpu", None): optional(f"torch.ops.aten.{name}", None)
    for name in ("_scaled_dot_product_flash_attention",)
}
"""The attention of processors, for which torch has no formula of its work, with one that has."""

nnpack_enabled: Callable[[], bool] | None = optional("torch._C._get_nnpack_enabled", None)
"""Without it nobody can read the setting, so each process keeps its own."""

_top_hooks = needed("torch._C._autograd._top_saved_tensors_default_hooks")  # since torch 2.8
_forward_ad = needed("torch.autograd.forward_ad")
_parametrize = needed("torch.nn.utils.parametrize")
needed("torch.autograd.forward_ad._current_level")
needed("torch.nn.utils.parametrize._cache_enabled")

if not TYPE_CHECKING:
    TorchDispatchMode = needed("torch.utils._python_dispatch.TorchDispatchMode")
    DeviceContext = needed("torch.utils._device.DeviceContext")


def saved_tensors_hooks() -> Any:
    """Return this thread's innermost hooks on tensors that autograd saves; None if none."""
    return _top_hooks(True)


class _Entered(threading.local):
    """Counts how deep this thread is in contexts of a class, for which torch has no query."""

    depth = 0

    def watch(self, context: Any) -> None:
        """Count from now on when contexts of a class are entered and left."""
        enter, leave = context.__enter__, context.__exit__

        @functools.wraps(enter)
        def entered(instance: Any) -> Any:
            found = enter(instance)
            self.depth += 1
            return found

        @functools.wraps(leave)
        def left(instance: Any, *error: Any) -> Any:
            self.depth -= 1
            return leave(instance, *error)

        context.__enter__, context.__exit__ = entered, left


_node_hooks = _Entered()
if (_context := optional("torch.autograd.graph.node_creation_hook", None)) is not None:
    _node_hooks.watch(_context)  # since torch 2.14


def node_creation_hooks() -> int:
    """Return how deep this thread is in ``torch.autograd.graph.node_creation_hook``."""
    return _node_hooks.depth


def level_of_forward_ad() -> int:
    """Return how deep this thread is in ``torch.autograd.forward_ad.dual_level``."""
    return int(_forward_ad._current_level)


def parametrizations_are_cached() -> int:
    """Return how deep this process is in ``torch.nn.utils.parametrize.cached``."""
    return int(_parametrize._cache_enabled)


def reader_of_cublas(name: str) -> Callable[[], Any] | None:
    """Return the getter of a cuBLAS setting; None if this torch has no such setting."""
    found: Callable[[], Any] | None = optional(f"torch._C._get_cublas_{name}", None)
    return found


# -- computing -----------------------------------------------------------------------------------

run_backward: Any = needed("torch.autograd.graph._engine_run_backward")
is_multithreading_enabled: Callable[[], bool] = needed("torch._C._is_multithreading_enabled")
set_multithreading_enabled: Callable[[bool], None] = needed("torch._C._set_multithreading_enabled")

find_non_finite_and_unscale: Callable[[list[Tensor], Tensor, Tensor], None] = needed(
    "torch._amp_foreach_non_finite_check_and_unscale_"
)

_grouped: Any = optional("torch.utils._foreach_utils._group_tensors_by_device_and_dtype", None)


def order_of_dtypes(tensors: list[Tensor]) -> list[torch.dtype]:
    """Return the dtypes of host tensors in the order in which torch's norm over them sums them."""
    # Without torch's own grouping: in the order of their first appearance.
    found = [t.dtype for t in tensors] if _grouped is None else [d for _, d in _grouped([tensors])]
    return list(dict.fromkeys(found))


make_subclass: Callable[[type[Tensor], Tensor, bool], Any] = needed("torch.Tensor._make_subclass")

no_torch_function: Callable[[], AbstractContextManager[None]] = needed(
    "torch._C.DisableTorchFunctionSubclass"
)
"""Makes a context in which ``__torch_function__`` of subclasses is not called."""

is_profiled: Callable[[], bool] = optional("torch.autograd._profiler_enabled", lambda: True)
"""Whether a profiler is on. Without it one is assumed at every step."""

shares_type: Callable[[Tensor, Tensor], bool] = optional(
    "torch._has_compatible_shallow_copy_type", lambda one, other: one.device == other.device
)
"""Whether one tensor can take the data of another (``.data =``)."""


def _copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


copy_all: Callable[[list[Tensor], list[Tensor]], None] = optional(
    "torch._foreach_copy_", _copy_each
)
"""Copies a list of tensors. One by one is only slower."""


def _norm_each(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors]


norms_of: Callable[[list[Tensor], float], list[Tensor]] = optional(
    "torch._foreach_norm", _norm_each
)
"""The norms with which torch's own clipping works. One by one they round differently on CUDA."""


class _NeverRaised(Exception):
    """Stands in for an error that this torch does not have."""


RecomputationEnds: type[Exception] = optional(
    "torch.utils.checkpoint._StopRecomputationError", _NeverRaised
)
"""What ends a recomputation of activations early, when the backward has all that it needs."""


# -- modules and optimizers ----------------------------------------------------------------------

CustomOpDef: Any = optional("torch._library.custom_ops.CustomOpDef", ())
"""The class of operators that ``torch.library.custom_op`` makes. Without it they cannot be pickled,
which is refused by name."""

OPERATORS: dict[str, Any] = optional("torch._library.custom_ops.OPDEFS", {})
"""The custom operators of this process by name. Without it one that exists is defined again."""


def parts_of_operator(operator: Any) -> tuple[Any, ...]:
    """Return the parts of a user's ``custom_op``; PicklingError for one with unknown parts."""
    known = {"_init_fn", "_abstract_fn", "_setup_context_fn", "_backward_fn"}
    others = [
        name
        for name, value in vars(operator).items()
        if name.endswith(("_fn", "_fns")) and name not in known and value
        if not (name == "_backend_fns" and {*value} == {None})
    ]
    if others:
        raise PicklingError(
            f"the operator {operator._qualname} has {others[0].strip('_')} of its own; define it "
            "in a module that the workers can import too"
        )
    return (operator._qualname, operator._schema, *(getattr(operator, n) for n in sorted(known)))


BatchNorm: type[nn.Module] = needed("torch.nn.modules.batchnorm._BatchNorm")
NormWithBuffers: type[nn.Module] = needed("torch.nn.modules.batchnorm._NormBase")
make_parametrized_class: Callable[[nn.Module], None] = needed(
    "torch.nn.utils.parametrize._inject_new_class"
)
add_computed_property: Callable[[nn.Module, str], None] = needed(
    "torch.nn.utils.parametrize._inject_property"
)
EXTRA_STATE: str = needed("torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX")

_of_all_optimizers = needed("torch.optim.optimizer")


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps of an optimizer have hooks, its own or global; true if it cannot be told."""
    return bool(
        getattr(optimizer, "_optimizer_step_pre_hooks", True)
        or getattr(optimizer, "_optimizer_step_post_hooks", True)
        or getattr(_of_all_optimizers, "_global_optimizer_pre_hooks", True)
        or getattr(_of_all_optimizers, "_global_optimizer_post_hooks", True)
    )


OF_MODULES = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_call_impl", "_wrapped_call_impl", "_compiled_call_impl"),
)
"""Names of the private attributes of modules that this library uses."""

OF_TENSORS = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_is_view")
"""Names of the private attributes of tensors that this library uses."""

for _name in OF_TENSORS:
    needed(f"torch.Tensor.{_name}")
needed("torch.UntypedStorage._cdata")
_module = nn.Module()  # most exist on instances only
for _name in OF_MODULES:
    if not hasattr(_module, _name):
        needed(f"torch.nn.Module.{_name}")


# -- sizes as symbols ----------------------------------------------------------------------------


_PLAIN: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_WITH_SYMBOLS = tuple(os.path.join(os.path.dirname(f), "") for f in (torch.__file__, __file__))
"""The folders of the code that tells symbols from numbers: torch and this library."""


def _class_as(plain: type) -> Callable[[Any, str], Any]:
    """Return a ``__getattribute__`` with which isinstance takes a symbol for a plain number too."""

    def get(symbol: Any, name: str) -> Any:
        if name == "__class__":
            asking: Any = sys._getframe(1)
            while asking.f_code.co_filename.startswith("<frozen"):  # an abstract class is asked
                asking = asking.f_back
            if not asking.f_code.co_filename.startswith(_WITH_SYMBOLS):
                return plain
        return object.__getattribute__(symbol, name)

    return get


_one_at_a_time = threading.Lock()


class SymbolicShapes(NamedTuple):
    """What follows the sizes of tensors without values; imported when it is asked for."""

    ShapeEnv: Any
    FakeTensorMode: Any
    StatelessSymbolicContext: Any
    DimDynamic: Any
    PythonPrinter: Any
    enable_python_dispatcher: Any

    @classmethod
    @functools.cache
    def of_torch(cls) -> SymbolicShapes | None:
        """Return these of the installed torch; None if it lacks one."""
        found = [
            optional(f"torch.{path}", None)
            for path in (
                "fx.experimental.symbolic_shapes.ShapeEnv",
                "_subclasses.fake_tensor.FakeTensorMode",
                "fx.experimental.symbolic_shapes.StatelessSymbolicContext",
                "fx.experimental.symbolic_shapes.DimDynamic",
                "utils._sympy.printers.PythonPrinter",
                "_dispatch.python.enable_python_dispatcher",
            )
        ]
        return None if None in found else cls(*found)

    @contextmanager
    def entered(self, mode: Any) -> Iterator[None]:
        """In the body tensors have no values; code that asks whether it is so is told no.

        Else it would take another way than with values, as transformers' masks do. To code outside
        of torch a size is an int. What torch logs of functions that it cannot follow is left out.
        """
        with _one_at_a_time:  # what is patched is so for the whole process
            yield from self._patched(mode)

    def _patched(self, mode: Any) -> Iterator[None]:
        log = logging.getLogger(self.FakeTensorMode.__module__)
        subclasses, was_disabled = torch._subclasses, log.disabled
        asked = subclasses.FakeTensor
        subclasses.FakeTensor = type("FakeTensor", (), {})  # type: ignore[misc, assignment]
        log.disabled = True
        for symbolic, plain in _PLAIN.items():
            symbolic.__getattribute__ = _class_as(plain)  # type: ignore[method-assign, assignment]
        try:
            with mode, self.enable_python_dispatcher():
                yield
        finally:
            for symbolic in _PLAIN:
                del symbolic.__getattribute__
            subclasses.FakeTensor = asked  # type: ignore[misc]
            log.disabled = was_disabled


# -- torch RPC -----------------------------------------------------------------------------------

_api = needed("torch.distributed.rpc.api")
_internal = needed("torch.distributed.rpc.internal")

if not TYPE_CHECKING:
    InternalRpcPickler = needed("torch.distributed.rpc.internal._InternalRPCPickler")

init_rpc_states: Callable[[Any], None] = needed("torch.distributed.rpc.api._init_rpc_states")
is_rpc_agent_set: Callable[[], bool] = needed("torch.distributed.rpc.api._is_current_rpc_agent_set")
init_distributed_autograd: Callable[[int], None] = needed("torch.distributed.autograd._init")
needed("torch.distributed.rpc.api._ignore_rref_leak")
needed("torch.distributed.rpc.api._default_pickler")
needed("torch.distributed.rpc.PyRRef._serialize")
needed("torch.distributed.rpc.PyRRef._deserialize")

_torchs_pickler = needed("torch.distributed.rpc.internal._internal_rpc_pickler")


def ignore_leaks_of_rrefs() -> None:
    """Have torch RPC shut down without complaining about references that are still held."""
    _api._ignore_rref_leak = True


def use_pickler(pickler: InternalRpcPickler | None) -> None:
    """Have torch RPC in this process use a pickler; None for torch's own."""
    # Each module of torch has its own name for the pickler.
    chosen = _torchs_pickler if pickler is None else pickler
    _internal._internal_rpc_pickler = chosen
    _api._internal_rpc_pickler = chosen
    _api._default_pickler = chosen
