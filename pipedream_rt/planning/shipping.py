"""Pickling what goes to a worker: its layers, the loss, hooks, the optimizer.

cloudpickle does the work. The pickler here also notes which of the model's tensors come along. A
copy of a weight that belongs to another stage would never be trained, without a word: such copies
come by a module in a tuple or in a closure, or by a hook that looks at another layer.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from typing import Any, cast

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
    """A pickler that notes tensors, and can pickle modules with parametrizations.

    Args:
        file: What is written to.
    """

    def __init__(self, file: io.BytesIO) -> None:
        """Note nothing yet."""
        super().__init__(file)
        self.tensors: set[int] = set()

    def persistent_id(self, value: object) -> None:
        """Note a tensor; nothing gets a persistent id."""
        if isinstance(value, Tensor):
            self.tensors.add(id(value))

    def reducer_override(self, value: Any) -> Any:
        """Take a module with parametrizations apart, whose class is made at run time."""
        if isinstance(value, nn.Module) and parametrize.is_parametrized(value):
            cls = parametrize.type_before_parametrizations(value)
            return (
                _parametrized,
                (cls, list(cast(nn.ModuleDict, value.parametrizations))),
                value.__dict__,
                None,
                None,
                (_set_state),
            )
        return super().reducer_override(value)


def _parametrized(cls: type[nn.Module], names: list[str]) -> nn.Module:
    """Return a module of a class whose tensors of these names are computed by parametrizations."""
    module = cls.__new__(cls)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _set_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Give a module what it holds."""
    module.__dict__.update(state)


def dumps(value: object) -> tuple[bytes, set[int]]:
    """Pickle a value for a worker.

    Returns:
        The bytes, which `cloudpickle.loads` reads; and the ``id`` of every tensor in it.
    """
    with io.BytesIO() as file:
        pickler = _Pickler(file)
        pickler.dump(value)
        return file.getvalue(), pickler.tensors


def why_unpicklable(value: object, error: Exception) -> str:
    """Why a value cannot be pickled, and what to do."""
    if isinstance(value, torch.jit.ScriptModule):
        return (
            "torch.jit.script keeps its weights where versions of them cannot be put; give the "
            "module as it was before"
        )
    return f"{error}; keep files, locks, connections and lambdas over them out of the model"


def foreign(
    tensors: Collection[int], owners: Mapping[int, tuple[Collection[int], str]], stage: int
) -> str:
    """Return the name of a weight of another stage among tensors; empty if there is none.

    Args:
        tensors: The ``id`` of each tensor.
        owners: For each weight and buffer of the model, the stages that have it, and its name.
        stage: The stage that is allowed to have the tensors.
    """
    for each in tensors:
        stages, name = owners.get(each, ((stage,), ""))
        if stage not in stages:
            return f"{name} of stage {next(iter(stages))}"
    return ""
