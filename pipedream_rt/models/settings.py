"""The settings of torch that hold for a process or a thread and change what layers compute.

The script reads them once, when the pipeline starts, and every worker applies them. They cannot
change while the pipeline is open: micro-batches are in flight all the time, so timing would decide
which of them get a new setting.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.backends import opt_einsum  # older torch imports it only with its compiler

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.tensors import accelerator_here
from pipedream_rt.torch_private import (
    DeviceContext,
    count_function_modes,
    dispatch_modes,
    function_modes,
    nnpack_enabled,
    node_creation_hooks,
    reader_of_cublas,
    saved_tensors_hooks,
)

Settings: TypeAlias = dict[str, Any]
"""The value of each setting, by the expression that reads it."""


class _Setting(NamedTuple):
    read: Callable[[], Any]
    set: Callable[[Any], object]


def _flushes_denormals() -> bool:
    """Whether this thread flushes denormal numbers to zero."""
    # torch has no function that tells. The flag is the processor's, so Python's floats show it too,
    # in a hundredth of the time of a tensor.
    return _DENORMAL * _ONE == 0.0


_DENORMAL, _ONE = 1e-310, 1.0


def _default_device() -> str:
    # A default device is a function mode. To count the modes is quicker than to ask for it.
    return str(torch.get_default_device()) if count_function_modes() else "cpu"


def _set_deterministic(mode: list[bool]) -> None:
    """Set whether algorithms must be deterministic, and whether torch only warns of others."""
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _set_mkldnn(value: list[Any]) -> None:
    enabled, deterministic = value
    torch.backends.mkldnn.set_flags(enabled, deterministic)


def _matmul_precision() -> str | None:
    """Return the precision of float32 products; None where the new names have set parts of it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _attribute(owner: Any, name: str) -> _Setting:
    """Make a setting of an attribute of a module of torch."""
    # Not by a Python function, which is slower: all settings are read for every mini-batch.
    return _Setting(
        functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)
    )


_cuda = torch.backends.cuda
_SETTINGS: dict[str, _Setting] = {
    "torch.get_default_dtype()": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_default_device()": _Setting(_default_device, torch.set_default_device),
    "torch.are_deterministic_algorithms_enabled()": _Setting(
        lambda: [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
        _set_deterministic,
    ),
    "torch.utils.deterministic.fill_uninitialized_memory": _attribute(
        torch.utils.deterministic, "fill_uninitialized_memory"
    ),
    "torch.get_float32_matmul_precision()": _Setting(_matmul_precision, _set_matmul_precision),
    "torch.set_flush_denormal(...)": _Setting(_flushes_denormals, torch.set_flush_denormal),
    "torch.backends.mkldnn.flags(...)": _Setting(
        lambda: [torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic], _set_mkldnn
    ),
    "torch.backends.cuda.flash_sdp_enabled()": _Setting(
        _cuda.flash_sdp_enabled, _cuda.enable_flash_sdp
    ),
    "torch.backends.cuda.mem_efficient_sdp_enabled()": _Setting(
        _cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp
    ),
    "torch.backends.cuda.math_sdp_enabled()": _Setting(
        _cuda.math_sdp_enabled, _cuda.enable_math_sdp
    ),
    "torch.backends.cuda.cudnn_sdp_enabled()": _Setting(
        _cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp
    ),
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()": _Setting(
        _cuda.fp16_bf16_reduction_math_sdp_allowed, _cuda.allow_fp16_bf16_reduction_math_sdp
    ),
    "torch.backends.mha.get_fastpath_enabled()": _Setting(
        torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled
    ),
    "torch.backends.opt_einsum.enabled": _attribute(opt_einsum, "enabled"),
    "torch.backends.opt_einsum.strategy": _attribute(opt_einsum, "strategy"),
    "torch.backends.quantized.engine": _attribute(torch.backends.quantized, "engine"),
    "torch.is_anomaly_enabled()": _Setting(
        torch.is_anomaly_enabled, lambda on: torch.autograd.set_detect_anomaly(on)
    ),
}

_OF_DEVICES: dict[str, _Setting] = {}
"""The settings of CUDA kernels, which a job on CPUs alone does not carry."""


def _owner_of(place: str) -> Any:
    """Return a module of `torch.backends` by its dotted name."""
    found: Any = torch.backends
    for part in place.split("."):
        found = getattr(found, part)
    return found


def _if_told(read: Callable[[], Any]) -> Any:
    """Read a setting; None where torch refuses to read it under this name."""
    # torch raises where the old name is read after the new one was set, and the other way round.
    try:
        return read()
    except RuntimeError:
        return None


def _set_unless_none(change: Callable[[Any], object], value: Any) -> None:
    if value is not None:
        change(value)


def _by_old_name(old: _Setting) -> _Setting:
    """Make a setting that is None where torch refuses its old name."""
    return _Setting(
        functools.partial(_if_told, old.read), functools.partial(_set_unless_none, old.set)
    )


def _by_new_name(old: _Setting, new: _Setting) -> _Setting:
    """Make a setting that is read by its new name only where torch refuses the old one."""

    def read() -> Any:
        return None if _if_told(old.read) is not None else _if_told(new.read)

    return _Setting(read, functools.partial(_set_unless_none, new.set))


def _reduction(name: str, read: Callable[[], Any]) -> _Setting:
    """Make the setting of reductions in half precision, with its flag of split-K if it has one."""

    def plain() -> Any:
        found = read()
        return list(found) if isinstance(found, tuple) else found

    return _Setting(plain, functools.partial(setattr, torch.backends.cuda.matmul, name))


if nnpack_enabled is not None:
    _SETTINGS["torch.backends.nnpack.flags(...)"] = _Setting(
        nnpack_enabled, lambda on: torch.backends.nnpack.set_flags(on)
    )
# The new names of torch 2.9 for the precision of float32, by kernel.
for _place in ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"):
    _SETTINGS[f"torch.backends.{_place}.fp32_precision"] = _attribute(
        _owner_of(_place), "fp32_precision"
    )
for _place, _news in (("cuda.matmul", ("cuda.matmul",)), ("cudnn", ("cudnn.conv", "cudnn.rnn"))):
    _old = _attribute(_owner_of(_place), "allow_tf32")
    _OF_DEVICES[f"torch.backends.{_place}.allow_tf32"] = _by_old_name(_old)
    for _each in _news:
        _new = _attribute(_owner_of(_each), "fp32_precision")
        _OF_DEVICES[f"torch.backends.{_each}.fp32_precision"] = _by_new_name(_old, _new)
for _name in ("enabled", "benchmark", "benchmark_limit", "deterministic"):
    _OF_DEVICES[f"torch.backends.cudnn.{_name}"] = _attribute(torch.backends.cudnn, _name)
for _name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
    if (_read := reader_of_cublas(_name)) is not None:
        _OF_DEVICES[f"torch.backends.cuda.matmul.{_name}"] = _reduction(_name, _read)
if reader_of_cublas("allow_fp16_accumulation") is not None:
    _OF_DEVICES["torch.backends.cuda.matmul.allow_fp16_accumulation"] = _attribute(
        torch.backends.cuda.matmul, "allow_fp16_accumulation"
    )
_ALL = {**_SETTINGS, **_OF_DEVICES}


def autocasts() -> bool:
    """Whether autocast is on in this thread, for whatever device."""
    kind = accelerator_here()
    kinds = ("cpu", "cuda" if kind is None else kind.type)
    return any(map(torch.is_autocast_enabled, kinds))


def settings_now(of_devices: bool = False) -> Settings:
    """Read the settings of this process and thread; those of CUDA kernels too ``of_devices``."""
    return {name: s.read() for name, s in (_ALL if of_devices else _SETTINGS).items()}


def settings_in_forward() -> Settings:
    """Read the settings that can be read without computing, as while a forward is recorded."""
    return {name: s.read() for name, s in _SETTINGS.items() if s.read is not _flushes_denormals}


def settings_of_devices() -> Settings:
    """Read the settings of CUDA kernels, which a forward may change around a part of it."""
    return {name: setting.read() for name, setting in _OF_DEVICES.items()}


@contextmanager
def settings_applied(settings: Settings) -> Iterator[None]:
    """Apply settings in the body."""
    before = {name: _ALL[name].read() for name in settings}
    apply_settings(settings)
    try:
        yield
    finally:
        apply_settings(before)


def apply_settings(settings: Settings) -> None:
    """Apply settings to this process and thread."""
    # Only those that differ: to set one of them again makes torch import its compiler.
    for name, setting in _ALL.items():
        # Read each just before: an old name and a new one may mean the same setting.
        if name in settings and settings[name] != setting.read():
            setting.set(settings[name])


def refuse_other_settings(settings: Settings) -> None:
    """Refuse settings that the script has changed since the pipeline started."""
    now = settings_now(len(settings) > len(_SETTINGS))
    if now == settings:
        return
    for name, value in settings.items():
        if now[name] != value:
            raise ConfigError(
                f"{name} was {value} when the pipeline started and is {now[name]} now; the workers "
                "have the settings of the start, so set it before Pipeline(...) and leave it"
            )


def refuse_contexts() -> None:
    """Refuse contexts around the training loop, which would not reach the workers."""
    where = "; it acts on this thread alone, and the layers compute on workers: "
    if autocasts():
        raise ConfigError(
            f"torch.autocast is on around the pipeline{where}use it inside the layers' forward and "
            "in loss_fn"
        )
    if saved_tensors_hooks() is not None:
        # torch's checkpoint (2.11) leaves its own on after an error in what it computes, in this
        # thread with workers="serial", until the frames of the error are collected.
        gc.collect()
    if saved_tensors_hooks() is not None:
        raise ConfigError(
            f"saved_tensors_hooks (or save_on_cpu) are on around the pipeline{where}use them "
            "inside the layers' forward; in the place of torch.utils.checkpoint around a call, use "
            "Training(recompute=True)"
        )
    if node_creation_hooks():
        raise ConfigError(
            f"node_creation_hook is on around the pipeline{where}use it inside the layers' forward"
        )
    modes: list[Any] = dispatch_modes()
    if count_function_modes():
        functions = function_modes()
        # The default device is such a mode too, but workers get it as a setting.
        modes = [*modes, *(m for m in functions if not isinstance(m, DeviceContext))]
    # This one only watches what this thread computes.
    modes = [mode for mode in modes if type(mode).__name__ != "CUDASanitizerDispatchMode"]
    if modes:
        name = type(modes[-1]).__name__
        raise ConfigError(
            f"the mode {name} is on around the pipeline{where}use it inside the layers' forward"
        )


def refuse_global_hooks() -> None:
    """Refuse hooks on all modules of the process, which the workers would not have."""
    for name, hooks in vars(torch.nn.modules.module).items():
        if name.startswith("_global_") and name.endswith("_hooks") and hooks:
            kind = name.removeprefix("_global_").removesuffix("s")
            raise ConfigError(
                f"a {kind} was registered on all modules of this process, and layers compute on "
                "workers; register it on the modules of the model"
            )


def refuse_no_grad() -> None:
    """Refuse to train where gradients are off, as plain PyTorch could not."""
    if not torch.is_grad_enabled():
        raise ConfigError(
            "training inside torch.no_grad() or inference_mode(): leave that block, or use evaluate"
        )
