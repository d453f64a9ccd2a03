"""The unsplit model: its layers, the names and shapes of its weights, and its state dicts."""

from __future__ import annotations

import copy
import functools
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.devices.randomness import kept_generator_state
from pipedream_rt.errors import ConfigError
from pipedream_rt.models import (
    Layers,
    LayerSpec,
    dumps,
    elements_of,
    find_layers,
    has_skips,
    is_sequence,
    layers_of,
    loads,
    refuse_unfit_layers,
)
from pipedream_rt.models.layer_spec import Blueprint
from pipedream_rt.models.modes import Modes, modes_of
from pipedream_rt.models.preserving_state import drawing_alone
from pipedream_rt.models.pretrained import (
    Pretrained,
    find_pretrained,
    give_values,
    refuse_no_values,
)
from pipedream_rt.paths import given_path
from pipedream_rt.schedules.placement import LOSS_LAYER
from pipedream_rt.schema import printable
from pipedream_rt.stage.buffers import buffer_slots


class UnsplitModel:
    """The model as the user gave it, which is read and never changed.

    Attributes:
        whole: The model as one module.
        sequence: Its layers by name, if it is a sequence of layers; else None.
        elements: The names of the elements of a sequence, which may be sequences themselves.
        blueprint: The layers that workers build.
        names: The name of each trainable parameter by its ``id``, in the order of the model; those
            of the loss come last.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        loss_fn: object = None,
        opens: bool = False,
    ) -> None:
        _refuse_wrapper(model)
        self.given: Any = model
        self.sequence: Layers | None = None
        self.elements: list[str] = []
        self.blueprint = Blueprint()
        if isinstance(model, Iterable) and not isinstance(model, nn.Module):
            self.given = list(model)  # an iterator can be read only once
            model = self._with_specs(self.given)
        if not isinstance(model, nn.Sequential) and is_sequence(model) and has_skips(model):
            model = nn.Sequential(OrderedDict(elements_of(model)))
        # With `opens`, a sequence is recorded as a whole where that cuts inside of a heavy layer.
        if isinstance(model, nn.Module) and (
            not is_sequence(model)
            or has_skips(model)
            or (opens and isinstance(model, nn.Sequential) and inside_of_layers(model))
        ):
            self.whole = model
            self.elements = list(elements_of(model)) if is_sequence(model) else []
        else:
            elements = elements_of(model)
            self.elements = list(elements)
            self.sequence = layers_of(elements, self.blueprint.specs.keys())
            self.whole = nn.Sequential()
            for name, element in elements.items():
                self.whole.add_module(name, element)
        self._loss = loss_fn if isinstance(loss_fn, nn.Module) else None
        refuse_unfit_layers(self.modules)
        named = list(self.whole.named_parameters())
        if self._loss is not None:
            named += self._loss.named_parameters(prefix=LOSS_LAYER)
        self.names: dict[int, str] = {}
        for name, parameter in named:
            if parameter.requires_grad:
                self.names.setdefault(id(parameter), name)

    def _with_specs(self, listed: list[Any]) -> list[Any]:
        """Return the layers; those that workers build are on the meta device, without values."""
        specs = {str(i): each for i, each in enumerate(listed) if isinstance(each, LayerSpec)}
        self.blueprint = Blueprint(specs)
        built = self.blueprint.on_meta()
        return [built.get(str(i), each) for i, each in enumerate(listed)]

    @property
    def modules(self) -> Layers:
        """The layers of a sequence, or else the whole under the empty name; and the loss."""
        of_model = {"": self.whole} if self.sequence is None else dict(self.sequence)
        return of_model | ({LOSS_LAYER: self._loss} if self._loss is not None else {})

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the model and of the loss, by all of their names."""
        of_loss = self._loss.named_parameters(prefix=LOSS_LAYER) if self._loss is not None else ()
        return dict(self.whole.named_parameters(remove_duplicate=False)) | dict(of_loss)

    @property
    def norm_dtype(self) -> torch.dtype:
        """The dtype of the norm of all gradients, to which those of other dtypes are promoted."""
        dtypes = {p.dtype.to_real() for p in self.parameters.values() if p.requires_grad}
        return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32

    def modes(self, layers: Iterable[nn.Module]) -> Modes:
        """Return which modules have a mode of their own, not that of the model."""
        return modes_of(self.given, layers) if isinstance(self.given, nn.Module) else Modes()

    def pretrained(self, folder: str | os.PathLike[str] | None) -> Pretrained | None:
        """Return where workers read the weights of the model; None if the model has them."""
        if folder is not None:
            if not isinstance(folder, str | os.PathLike) or not str(folder):
                raise ConfigError(f"weights must be a folder, not {folder!r}")
            return find_pretrained(
                given_path(folder, "the folder of the weights").absolute(), self.whole
            )
        # Layers that workers build need no values here.
        built = [m for n, m in (self.sequence or {}).items() if n in self.blueprint.specs]
        spared = {id(t) for m in built for t in (*m.parameters(), *m.buffers())}
        refuse_no_values(self.whole, spared)
        return None

    def part(self, names: Sequence[str]) -> nn.Module:
        """Return a module with a part of the model: its own layers and tensors, not copies."""
        if self.sequence is not None:
            part = nn.Sequential()
            for name in names:
                *path, last = name.split(".")
                holder: nn.Module = part
                for key in path:
                    if key not in holder._modules:
                        holder.add_module(key, nn.Sequential())
                    holder = holder._modules[key]  # type: ignore[assignment]
                holder.add_module(last, self.whole.get_submodule(name))
            return part
        wanted = {id(module_named(self.whole, name)) for name in names} - {id(None)}
        return _part_of(self.whole, "", wanted, set(names)) or nn.Module()

    def in_order(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict with its keys in the order of the model's state dict."""
        ordered = {key: state_dict[key] for key in self.whole.state_dict() if key in state_dict}
        # Buffers that had no value at the start come last.
        own = {k: v for k, v in state_dict.items() if not k.startswith(f"{LOSS_LAYER}.")}
        return {**ordered, **own}

    def require_fit(self, state_dict: dict[str, Tensor]) -> None:
        """Refuse a state dict of another model."""
        if not isinstance(state_dict, Mapping):
            raise ConfigError(
                f"a state dict is a dict of tensors by name, not a {type(state_dict).__name__}"
            )
        expected = self.whole.state_dict()
        missing = [k for k in expected if k not in state_dict]
        extra = [k for k in state_dict if k not in expected]
        shapes = [
            f"{k} has the shape {_shape(state_dict[k])}, in the model {_shape(v)}"
            for k, v in expected.items()
            if k in state_dict and _shape(v) != _shape(state_dict[k])
        ]
        if missing or extra or shapes:
            raise ConfigError(
                "the state dict does not fit the model: "
                f"missing keys: {missing or 'none'}, unexpected keys: {extra or 'none'}"
                + "".join(f"; {text}" for text in shapes)
            )

    def first_misfit(self, shapes: dict[str, tuple[int, ...]]) -> str:
        """Describe the first saved weight that does not fit the model; return "" if all fit."""
        # Buffers are not compared, because a forward may make them or change their shape.
        flexible = buffer_slots(self.whole)
        state = self.whole.state_dict()
        if self._loss is not None:
            state |= self._loss.state_dict(prefix=f"{LOSS_LAYER}.")
            flexible |= {f"{LOSS_LAYER}.{name}": [] for name in buffer_slots(self._loss)}
        expected = {
            k: tuple(v.shape)
            for k, v in state.items()
            if k not in flexible and isinstance(v, Tensor)
        }
        there = {k: shape for k, shape in shapes.items() if k not in flexible}
        if not (differing := sorted(there.items() ^ expected.items())):
            return ""
        key = differing[0][0]
        name = printable(key, 100)
        if key not in expected:
            return f"weight {name} (shape {there[key]}) is in the checkpoint and not in the model"
        if key not in there:
            return (
                f"weight {name} (shape {expected[key]}) is in the model and not in the checkpoint"
            )
        return (
            f"{name} has the shape {there[key]} in the checkpoint and {expected[key]} in the model"
        )

    def copy_with(self, state_dict: dict[str, Tensor]) -> nn.Module:
        """Return a copy of the model with the weights and buffers of a state dict."""
        if self.blueprint.specs:
            with drawing_alone(), kept_generator_state():  # the script draws on as before
                built = self.blueprint.build(list(self.blueprint.specs))
            elements = [
                built[n] if n in built else _copy_of(m)
                for n, m in self.whole._modules.items()
                if m is not None
            ]
            whole: nn.Module = nn.Sequential(*elements)
            whole.load_state_dict(state_dict)
            return whole
        given = self.given
        as_given = isinstance(given, nn.Module) and not isinstance(given, nn.ModuleList)
        whole = _copy_of(given if as_given else self.whole)
        # Layers without values get memory, which the state dict then fills.
        give_values(whole, lambda t: torch.empty_like(t, device="cpu") if t.is_meta else None)
        whole.load_state_dict(state_dict)
        return whole

    def loss_with(self, state_dict: dict[str, Tensor]) -> nn.Module:
        """Return a copy of the loss with the weights and buffers of a stage's state dict."""
        if self._loss is None:
            raise ConfigError("the loss function is no nn.Module, so it has no weights of its own")
        loss, prefix = _copy_of(self._loss), f"{LOSS_LAYER}."
        own = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        loss.load_state_dict(own)
        return loss


def _refuse_wrapper(model: object) -> None:
    """Refuse a model that is wrapped as a whole, so that no layer of it could be called alone."""
    if hasattr(model, "_orig_mod"):
        raise ConfigError(
            "the model is compiled as a whole by torch.compile: give Pipeline the model from "
            "before, which is model._orig_mod, and training=Training(compile=True), with which "
            "each worker compiles its layers"
        )
    if isinstance(model, nn.DataParallel):
        raise ConfigError(
            "the model is wrapped in DataParallel, which copies it to devices of its own: give "
            "model.module; Layout(replicas=...) is data parallelism beside the pipeline"
        )


def inside_of_layers(model: nn.Sequential) -> list[str]:
    """Return the names at which a recorded forward could cut inside the layers of a sequence."""
    # `find_layers` opens only a layer that holds most of the model, and has lists of modules.
    kept = find_layers(model, opens=False)
    return [name for name in find_layers(model) if name not in kept]


def parameter_names(model: UnsplitModel, parts: Sequence[nn.Module]) -> list[str]:
    """Return the names of the trainable parameters, stage by stage, in the order of each stage."""
    trained = (p for part in parts for p in part.parameters() if p.requires_grad)
    # A tied weight belongs to the first of its stages.
    return list(dict.fromkeys(model.names[id(p)] for p in trained))


def module_named(model: nn.Module, name: str) -> nn.Module | None:
    """Return a module in a model by its name; None if it is the name of something else."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _part_of(module: nn.Module, prefix: str, wanted: set[int], names: set[str]) -> nn.Module | None:
    """Return a module with the wanted layers and tensors of another one; None if it has none."""
    part = nn.Module()
    part.training = module.training
    for short, parameter in module._parameters.items():
        if f"{prefix}{short}" in names:
            part.register_parameter(short, parameter)
    for short, buffer in module._buffers.items():
        if f"{prefix}{short}" in names:
            persistent = short not in module._non_persistent_buffers_set
            part.register_buffer(short, buffer, persistent=persistent)
    for key, child in module._modules.items():
        if child is None:
            continue
        made = child if id(child) in wanted else _part_of(child, f"{prefix}{key}.", wanted, names)
        if made is not None:
            part.add_module(key, made)
    return part if part._modules or part._parameters or part._buffers else None


def _copy_of(module: nn.Module) -> nn.Module:
    """Copy a module by ``deepcopy``, or else as it is sent to workers."""
    try:
        return copy.deepcopy(module)
    except Exception as error:  # a foreign class may raise anything when copied
        try:
            made: nn.Module = loads(dumps(module)[0])
        except Exception:
            raise ConfigError(
                f"the model cannot be copied: {error}; read pipe.state_dict() and load it into a "
                "model that you build"
            ) from error
        return made


def _shape(value: object) -> tuple[int, ...] | None:
    """Return the shape of an entry of a state dict; None for extra state, which has none."""
    return tuple(value.shape) if isinstance(value, Tensor) else None
