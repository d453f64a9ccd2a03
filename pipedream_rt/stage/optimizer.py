"""The optimizer of one stage: any unmodified `torch.optim` class over the stage's Parameters."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules.plan import EVERY_STAGE

Hyper = dict[str, Any]
"""The hyper-parameters of one parameter group: ``lr``, ``betas``, ``weight_decay`` and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The description of one parameter group.

    Attributes:
        names: The names of its parameters in the unsplit model.
        options: The options of the group.
    """

    names: tuple[str, ...]
    options: Hyper = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """The description from which each stage builds its optimizer.

    Attributes:
        optimizer_class: A subclass of `torch.optim.Optimizer`.
        args: Positional arguments of the class after the parameters.
        kwargs: Keyword arguments of the class.
        groups: The parameter groups of the whole model.
        attributes: Attributes that the optimizer gets after it was built.
    """

    optimizer_class: type[torch.optim.Optimizer]
    args: tuple[Any, ...] = ()
    kwargs: Hyper = field(default_factory=dict)
    groups: tuple[GroupSpec, ...] = ()
    attributes: Hyper = field(default_factory=dict)


def pack_hyper(value: Any, name: str) -> Any:
    """Pack the value of a hyper-parameter into plain data that gives the very same value again.

    Numbers, texts and None stay as they are. Tensors, NumPy's numbers, and lists, tuples and dicts
    become tagged lists, because arithmetic on them rounds otherwise than on Python's numbers.

    Args:
        value: The value.
        name: Name of the hyper-parameter, for the error.

    Raises:
        ConfigError: The value is of another kind.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ["T", str(value.dtype).removeprefix("torch."), list(value.shape), data]
    if isinstance(value, np.generic) and value.dtype.kind in "bifc":
        return ["N", value.dtype.str, value.tobytes()]
    if type(value) in (list, tuple):
        return ["l" if type(value) is list else "t", [pack_hyper(v, name) for v in value]]
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return ["d", {key: pack_hyper(v, name) for key, v in value.items()}]
    raise ConfigError(
        f"the hyper-parameter {name!r} is {value!r}, a {type(value).__name__}, which cannot be "
        "sent to the stages; give it as a number, a text, a tensor, or a list or dict of these"
    )


def unpack_hyper(packed: Any) -> Any:
    """Return the value that `pack_hyper` has packed."""
    if not isinstance(packed, list):
        return packed
    tag, *rest = packed
    match tag:
        case "T":
            dtype, shape, data = rest
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return flat.view(getattr(torch, dtype)).reshape(shape)
        case "N":
            return np.frombuffer(rest[1], dtype=np.dtype(rest[0]))[0]
        case "d":
            return {key: unpack_hyper(value) for key, value in rest[0].items()}
        case _:
            values = [unpack_hyper(value) for value in rest[0]]
            return tuple(values) if tag == "t" else values


_PLAIN = (type(None), bool, int, float, str)


def pack_group(group: Hyper) -> Hyper:
    """Pack the hyper-parameters of a group, as `pack_hyper` does, but for its parameters.

    What cannot be packed is left out if ``group`` is that of an optimizer on a stage, which then
    keeps it as it was built.
    """
    packed = {}
    for name, value in group.items():
        if name != "params":
            with suppress(ConfigError):
                packed[name] = pack_hyper(value, name)
    return packed


def set_hyper(group: Hyper, packed: Hyper) -> None:
    """Set those hyper-parameters of a group that were packed."""
    group.update((name, unpack_hyper(value)) for name, value in packed.items())


class StageOptimizer:
    """The optimizer of one stage, with its state under the names of the unsplit model.

    Besides the state of each parameter, an optimizer may keep values in its groups, as a count of
    steps, and in attributes of its own. These are part of its state too.

    Args:
        spec: The description for the whole model; the stage leaves out groups that have none of its
            parameters.
        parameters: The trainable Parameters of the stage, by name.
        stage: Index of the stage.

    Attributes:
        torch_optimizer: The torch optimizer; None if the stage has no parameter.
    """

    def __init__(
        self, spec: OptimizerSpec, parameters: dict[str, nn.Parameter], stage: int = 0
    ) -> None:
        """Build the torch optimizer, if the stage has a parameter."""
        self._parameters = parameters
        self._stage = stage
        self._group_numbers: list[int] = []
        groups = []
        for number, group in enumerate(spec.groups):
            mine = [parameters[name] for name in group.names if name in parameters]
            if mine:
                self._group_numbers.append(number)
                groups.append({"params": mine, **group.options})
        self.torch_optimizer: torch.optim.Optimizer | None = None
        self._built: list[Hyper] = []
        self._from_script: list[set[str]] = []
        if groups:
            build: Any = spec.optimizer_class
            self.torch_optimizer = build(groups, *spec.args, **spec.kwargs)
            vars(self.torch_optimizer).update(spec.attributes)
            self._built = [pack_group(group) for group in self._groups]
            self._from_script = [set() for _ in self._groups]
            self._attributes_built = _digests(_attributes_of(self.torch_optimizer))

    @property
    def _groups(self) -> list[Hyper]:
        """The parameter groups of the torch optimizer."""
        assert self.torch_optimizer is not None
        return self.torch_optimizer.param_groups

    def step(self, hyper: list[Hyper]) -> None:
        """Step once with the hyper-parameters that travelled with the micro-batch.

        Args:
            hyper: For each group of the whole model, the packed hyper-parameters that the script
                has changed; all others keep the values that the optimizer gives them.
        """
        if self.torch_optimizer is None:
            return
        for i, (number, group) in enumerate(zip(self._group_numbers, self._groups, strict=True)):
            set_hyper(group, hyper[number])
            self._from_script[i].update(hyper[number])
        self.torch_optimizer.step()

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer state by parameter name, and the optimizer's own state.

        The own state stands under names that begin with `EVERY_STAGE`: ``/group/0/STAGE`` has what
        the optimizer has changed in group 0, and ``/attributes/STAGE`` its changed attributes,
        packed by `pack_hyper`.

        Raises:
            ConfigError: The optimizer has changed an attribute that cannot be packed.
        """
        if self.torch_optimizer is None:
            return {}
        state = self.torch_optimizer.state
        found = {n: dict(state[p]) for n, p in self._parameters.items() if p in state}
        for i, (number, group) in enumerate(zip(self._group_numbers, self._groups, strict=True)):
            built, by_script = self._built[i], self._from_script[i]
            own = {
                name: value
                for name, value in pack_group(group).items()
                if name not in by_script and built.get(name) != value
            }
            if own:
                found[f"{EVERY_STAGE}group/{number}/{self._stage}"] = own
        attributes = _attributes_of(self.torch_optimizer)
        now = _digests(attributes)
        changed = {
            name: pack_hyper(value, name)
            for name, value in attributes.items()
            if self._attributes_built.get(name) != now[name]
        }
        if changed:
            found[f"{EVERY_STAGE}attributes/{self._stage}"] = changed
        return found

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        """Replace the optimizer state.

        Args:
            state: The state by parameter name, of the whole model or of this stage alone, with
                the own state of one or several stages.
        """
        if self.torch_optimizer is None:
            return
        # Not by its load_state_dict, which casts to the dtype of the parameter and keeps the
        # strides of the given tensor; a fused kernel needs equal strides in weights and moments.
        for name, parameter in self._parameters.items():
            self.torch_optimizer.state.pop(parameter, None)
            if name in state:
                self.torch_optimizer.state[parameter] = {
                    key: _like(parameter, value) if isinstance(value, Tensor) else value
                    for key, value in state[name].items()
                }
        self._from_script = [set() for _ in self._groups]
        for number, group in zip(self._group_numbers, self._groups, strict=True):
            set_hyper(group, self._own(state, f"group/{number}"))
        set_hyper(vars(self.torch_optimizer), self._own(state, "attributes"))
        # This call brings states of older versions of torch up to date.
        self.torch_optimizer.__setstate__(
            {
                "state": self.torch_optimizer.state,
                "param_groups": self.torch_optimizer.param_groups,
            }
        )

    def _own(self, state: dict[str, dict[str, Any]], kind: str) -> dict[str, Any]:
        """Return the own state of one kind: that of this stage, or of another if it has none.

        Another split has other stages. Values that count the steps are the same on all of them.
        """
        mine = state.get(f"{EVERY_STAGE}{kind}/{self._stage}")
        if mine is not None:
            return mine
        others = (v for k, v in sorted(state.items()) if k.startswith(f"{EVERY_STAGE}{kind}/"))
        return next(others, {})


def _attributes_of(optimizer: torch.optim.Optimizer) -> Hyper:
    """Return the attributes of an optimizer that `torch.optim.Optimizer` does not have itself."""
    return {name: v for name, v in vars(optimizer).items() if name not in _OF_EVERY_OPTIMIZER}


def own_attributes(optimizer: torch.optim.Optimizer, like: torch.optim.Optimizer) -> Hyper:
    """Return the attributes in which an optimizer differs from another one of its class.

    Args:
        optimizer: The user's optimizer.
        like: An optimizer of the class, built from its parameter groups alone.
    """
    built = _digests(_attributes_of(like))
    now = _attributes_of(optimizer)
    return {n: now[n] for n, digest in _digests(now).items() if built.get(n) != digest}


def _digests(attributes: Hyper) -> dict[str, bytes]:
    """Return a digest of every attribute, which differs once the attribute was changed."""
    return {name: blake2b(cloudpickle.dumps(v)).digest() for name, v in attributes.items()}


_OF_EVERY_OPTIMIZER = {
    *vars(torch.optim.SGD([nn.Parameter(torch.empty(1, device="meta"))])),
    "_step_supports_amp_scaling",
    "_need_device_dtype_check_for_fused",
    "_opt_called",  # which learning-rate schedulers set
    "step",
}


def _like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return a copy of a tensor of optimizer state, with the strides of its parameter."""
    if value.shape != parameter.shape:
        return value.detach().clone()
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
