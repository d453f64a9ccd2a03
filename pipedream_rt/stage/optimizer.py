"""The optimizer of one stage: any unmodified `torch.optim` class over the stage's Parameters."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.state_keys import (
    ATTRIBUTE,
    GROUP,
    OF_OPTIMIZERS,
    OPTIMIZER,
    OWN_STATE,
    SPLIT,
    StateKey,
    StepState,
    by_name,
    optimizer_state,
)
from pipedream_rt.models.code import Code
from pipedream_rt.stage.hyper import Hyper, pack_group, pack_hyper, set_hyper, unpack_hyper


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The description of one parameter group."""

    names: tuple[str, ...]  # in the unsplit model
    options: Hyper = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """The description from which each stage builds its optimizer.

    Attributes:
        args: Positional arguments of the class after the parameters.
        groups: The parameter groups of the whole model.
        attributes: Attributes that the optimizer gets after it was built.
        code: The code of the class, as the user's process has it; None to compare none.
    """

    optimizer_class: type[torch.optim.Optimizer]
    args: tuple[Any, ...] = ()
    kwargs: Hyper = field(default_factory=dict)
    groups: tuple[GroupSpec, ...] = ()
    attributes: Hyper = field(default_factory=dict)
    code: Code | None = None


class StageOptimizer:
    """The optimizer of one stage, with its state under the names of the unsplit model.

    Its *own state* is what it keeps for all parameters: in groups, as a count of steps, in
    attributes, and in its state under keys that are not parameters.

    Attributes:
        torch_optimizer: The torch optimizer; None if the stage has no parameter.
        steps: The names of the parameters that it steps.
    """

    def __init__(
        self, spec: OptimizerSpec, parameters: dict[str, nn.Parameter], address: int = 0
    ) -> None:
        self._parameters = parameters
        self._own_name = str(address)  # the name of its own state, which no other optimizer has
        self._group_numbers: list[int] = []  # in the whole model: groups without parameters are out
        self.steps: list[str] = []
        groups = []
        for number, group in enumerate(spec.groups):
            mine = [name for name in group.names if name in parameters]
            if mine:
                self.steps += mine
                self._group_numbers.append(number)
                groups.append({"params": [parameters[name] for name in mine], **group.options})
        self.torch_optimizer: torch.optim.Optimizer | None = None
        self._built: list[Hyper] = []
        # By group, the names that the script has set: they are not the optimizer's own state.
        self._from_script: list[set[str]] = []
        if groups:
            build: Any = spec.optimizer_class
            self.torch_optimizer = build(groups, *spec.args, **spec.kwargs)
            vars(self.torch_optimizer).update(spec.attributes)
            self._built = [pack_group(group) for group in self._groups]
            self._from_script = [set() for _ in self._groups]
            attributes = _attributes_of(self.torch_optimizer)
            self._attributes_built = _digests(attributes, parameters)
            self._attributes_packed = pack_group(attributes)

    @property
    def _groups(self) -> list[Hyper]:
        """The parameter groups of the torch optimizer."""
        assert self.torch_optimizer is not None
        return self.torch_optimizer.param_groups

    def prepare(self, hyper: list[Hyper]) -> torch.optim.Optimizer | None:
        """Set the script's hyper-parameters, by group of the model; return the torch optimizer."""
        if self.torch_optimizer is None:
            return None
        for i, (number, group) in enumerate(zip(self._group_numbers, self._groups, strict=True)):
            set_hyper(group, hyper[number])
            self._from_script[i].update(hyper[number])
        return self.torch_optimizer

    def state(self) -> StepState:
        """Return the state of every parameter, and the optimizer's own state."""
        if self.torch_optimizer is None:
            return {}
        state = self.torch_optimizer.state
        attributes = _attributes_of(self.torch_optimizer)
        named = {n: dict(state[p]) for n, p in self._parameters.items() if p in state}
        _refuse_unfit_tensors([*named.values(), attributes])
        split = {StateKey(SPLIT, self._own_name): self._names}
        return optimizer_state(named) | self._own_state(attributes) | split

    def _own_state(self, attributes: Hyper) -> StepState:
        """Return, packed, what it keeps for all parameters and has changed since it was built."""
        assert self.torch_optimizer is not None
        found: StepState = {}
        own_name, mine = self._own_name, {id(p) for p in self._parameters.values()}
        state = self.torch_optimizer.state
        if others := {key: value for key, value in state.items() if id(key) not in mine}:
            found[StateKey(OWN_STATE, own_name)] = pack_hyper(others, "state")
        for i, (number, group) in enumerate(zip(self._group_numbers, self._groups, strict=True)):
            for name, value in pack_group(group).items():
                if name not in self._from_script[i] and self._built[i].get(name) != value:
                    found[StateKey(GROUP, own_name, (number, name))] = value
        now = _digests(attributes, self._parameters)
        changed = [n for n in attributes if self._attributes_built.get(n) != now[n]]
        if any(_has_key(attributes[name], mine) for name in changed):
            raise ConfigError(
                f"the optimizer keeps values under the id of a parameter in {sorted(changed)}; ids "
                "differ in every process, so keep them in optimizer.state[parameter]"
            )
        for name in changed:
            found[StateKey(ATTRIBUTE, own_name, (name,))] = pack_hyper(attributes[name], name)
        return found

    @property
    def _names(self) -> list[str]:
        """The names of the parameters, by which a stage knows its own state in a checkpoint."""
        return list(self._parameters)

    def load_state(self, state: Mapping[StateKey, Any]) -> None:
        """Replace the state by that of this stage, or of the whole model."""
        if self.torch_optimizer is None:
            return
        # Not by load_state_dict, which casts to the dtype of the parameter and keeps the strides of
        # the given tensor: a fused kernel needs equal strides in weights and moments.
        saved = by_name(state, OPTIMIZER, self._parameters)
        # A count of steps, and the product of NAdam, are on the host, except for kernels that read
        # them on the device.
        counted_there = {
            id(p)
            for group in self._groups
            if group.get("capturable") or group.get("fused")
            for p in group["params"]
        }
        for name, parameter in self._parameters.items():
            self.torch_optimizer.state.pop(parameter, None)
            if saved[name]:
                on_host = () if id(parameter) in counted_there else ("step", "mu_product")
                self.torch_optimizer.state[parameter] = {
                    path[0]: _loaded(value, None if path[0] in on_host else parameter)
                    for path, value in saved[name].items()
                    if path
                }
        self._load_own_state(state)
        # Brings the state of an older torch up to date.
        self.torch_optimizer.__setstate__(
            {
                "state": self.torch_optimizer.state,
                "param_groups": self.torch_optimizer.param_groups,
            }
        )

    def _load_own_state(self, state: Mapping[StateKey, Any]) -> None:
        """Reset groups and attributes to their values when built, then load the saved ones."""
        assert self.torch_optimizer is not None
        own, saved = vars(self.torch_optimizer), self._saved_own(state)
        self._from_script = [set() for _ in self._groups]
        for number, group, built in zip(
            self._group_numbers, self._groups, self._built, strict=True
        ):
            for name in [name for name in pack_group(group) if name not in built]:
                del group[name]
            set_hyper(group, built)
            of_groups = {path: v for (part, path), v in saved.items() if part == GROUP}
            set_hyper(group, {name: v for (of, name), v in of_groups.items() if of == number})
        for name in [
            n for n in _attributes_of(self.torch_optimizer) if n not in self._attributes_built
        ]:
            del own[name]
        set_hyper(own, self._attributes_packed)
        set_hyper(own, {k[0]: v for (part, k), v in saved.items() if part == ATTRIBUTE})
        mine = {id(p) for p in self._parameters.values()}
        for key in [key for key in self.torch_optimizer.state if id(key) not in mine]:
            del self.torch_optimizer.state[key]
        if (OWN_STATE, ()) in saved:
            self.torch_optimizer.state.update(unpack_hyper(saved[OWN_STATE, ()]))

    def _saved_own(self, state: Mapping[StateKey, Any]) -> dict[tuple[str, tuple[Any, ...]], Any]:
        """Return the own state that belongs to this stage, by part and path of `StateKey`."""
        places = {key.name: names for key, names in state.items() if key.part == SPLIT}
        saved: dict[str, dict[tuple[str, tuple[Any, ...]], Any]] = {}
        for key, value in state.items():
            if key.part in OF_OPTIMIZERS and key.part != SPLIT:
                saved.setdefault(key.name, {})[key.part, key.path] = value
        for place, names in places.items():
            if names == self._names:  # the split of the checkpoint: what this stage has saved
                return saved.get(place, {})
        # Another split: what all stages have saved, if it is the same on all, as a count of steps.
        merged: dict[tuple[str, tuple[Any, ...]], Any] = {}
        seen: dict[tuple[Any, ...], str] = {}
        for values in saved.values():
            # Each group, and all attributes together, must be the same on every stage that has it.
            kinds: dict[tuple[Any, ...], dict[Any, Any]] = {}
            for (part, path), value in values.items():
                kinds.setdefault((part, *path[:-1]), {})[part, path] = value
            for kind, of_kind in kinds.items():
                text = repr(sorted(of_kind.items()))  # in which NaN is the same as NaN
                if seen.setdefault(kind, text) != text:
                    named = ", ".join(str(path[-1] if path else part) for part, path in of_kind)
                    raise ConfigError(
                        f"the optimizer has saved values of its own ({named}) that differ from "
                        "stage to stage; they can be loaded with the same split alone"
                    )
            merged.update(values)
        return merged


def _attributes_of(optimizer: torch.optim.Optimizer) -> Hyper:
    """Return the attributes of an optimizer that torch does not give to every optimizer."""
    of_every = _attributes_of_every_optimizer()
    return {name: v for name, v in vars(optimizer).items() if name not in of_every}


def own_attributes(optimizer: torch.optim.Optimizer, like: torch.optim.Optimizer) -> Hyper:
    """Return the attributes that differ from those of `like`, newly built from its groups."""

    def named(each: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
        parameters = (p for group in each.param_groups for p in group["params"])
        return {str(number): p for number, p in enumerate(parameters)}

    built = _digests(_attributes_of(like), named(like))
    now = _attributes_of(optimizer)
    digests = _digests(now, named(optimizer))
    return {n: now[n] for n, digest in digests.items() if built.get(n) != digest}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
    """A pickler that writes parameters as their names, given by ``id``."""

    def __init__(self, file: io.BytesIO, names: dict[int, str]) -> None:
        super().__init__(file)
        self._names_of_parameters = names

    def persistent_id(self, value: object) -> str | None:
        return self._names_of_parameters.get(id(value))


def _digests(attributes: Hyper, parameters: Mapping[str, nn.Parameter]) -> dict[str, bytes]:
    """Return a digest of every attribute, which differs once the attribute was changed."""
    # A parameter in an attribute counts by its name, since its values change all the time.
    names, found = {id(p): name for name, p in parameters.items()}, {}
    for name, value in attributes.items():
        if name == "defaults":  # torch adds "differentiable" to it when a state is loaded
            value = {k: v for k, v in value.items() if k != "differentiable"}
        with suppress(ConfigError):  # pickles of equal plain values differ if objects are shared
            found[name] = blake2b(repr(pack_hyper(value, name)).encode()).digest()
            continue
        with io.BytesIO() as file:
            try:
                _Pickler(file, names).dump(value)
            except Exception:  # what does not pickle, as a lock, is taken for unchanged
                file.truncate(0)
            found[name] = blake2b(file.getvalue()).digest()
    return found


def _has_key(value: Any, keys: set[int]) -> bool:
    """Whether a value has a dict, at any depth, with one of the keys."""
    if isinstance(value, dict):
        return not keys.isdisjoint(value) or any(_has_key(v, keys) for v in value.values())
    return isinstance(value, list | tuple) and any(_has_key(v, keys) for v in value)


def _refuse_unfit_tensors(places: Iterable[Hyper]) -> None:
    """Refuse state tensors that are not dense, and those that are kept in two places."""
    # The former cannot be saved or sent; the latter would be two tensors once they are loaded.
    seen: dict[int, str] = {}
    for place in places:
        for name, value in place.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                if value.layout is not torch.strided:
                    raise ConfigError(
                        f"the optimizer keeps {name!r} of a parameter as a tensor of layout "
                        f"{value.layout}, as its gradient is; that cannot be saved, so use an "
                        "optimizer whose state is dense (SparseAdam, Adagrad, SGD without "
                        "momentum), or dense gradients"
                    )
                if id(value) in seen:
                    raise ConfigError(
                        f"the optimizer keeps one tensor in two places ({seen[id(value)]!r} and "
                        f"{name!r}), which would be two after a recovery; give each its own"
                    )
                seen[id(value)] = name


@functools.cache
def _attributes_of_every_optimizer() -> frozenset[str]:
    """Return the names of the attributes that torch gives to an optimizer of any class."""
    # Without ``defaults``, which each optimizer has of its own, and schedulers and steps read.
    some = torch.optim.SGD([nn.Parameter(torch.empty(1, device="meta"))])
    return frozenset(
        {
            *(vars(some).keys() - {"defaults"}),
            "_step_supports_amp_scaling",
            "_need_device_dtype_check_for_fused",
            "_opt_called",  # which learning-rate schedulers set
            "step",
        }
    )


def _loaded(value: Any, parameter: nn.Parameter | None) -> Any:
    """Return a copy of a value of the state, as `like` makes it; on the host for None."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone() if parameter is None else like(parameter, value)


def like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return a copy of a state tensor with the device, and strides, of its parameter."""
    if value.shape != parameter.shape:
        return value.detach().to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
