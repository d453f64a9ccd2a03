"""The optimizer of one stage: any unmodified `torch.optim` class over the stage's Parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
    """

    optimizer_class: type[torch.optim.Optimizer]
    args: tuple[Any, ...] = ()
    kwargs: Hyper = field(default_factory=dict)
    groups: tuple[GroupSpec, ...] = ()


def plain_hyper(group: dict[str, Any]) -> Hyper:
    """Return the hyper-parameters of a group: numbers, texts, None, and tuples of these.

    A tensor with one element becomes a number, because a learning rate may be such a tensor.
    """
    hyper: Hyper = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            hyper[name] = value.item()
        elif all(
            v is None or isinstance(v, bool | int | float | str)
            for v in (value if isinstance(value, tuple) else (value,))
        ):
            hyper[name] = value
    return hyper


def set_hyper(group: dict[str, Any], hyper: Hyper) -> None:
    """Set the hyper-parameters of a group; on their way tuples have become lists."""
    group.update((k, tuple(v) if isinstance(v, list) else v) for k, v in hyper.items())


class StageOptimizer:
    """The optimizer of one stage, with its state under the names of the unsplit model.

    Args:
        spec: The description for the whole model; the stage leaves out groups that have none of its
            parameters.
        parameters: The trainable Parameters of the stage, by name.

    Attributes:
        torch_optimizer: The torch optimizer; None if the stage has no parameter.
    """

    def __init__(self, spec: OptimizerSpec, parameters: dict[str, nn.Parameter]) -> None:
        """Build the torch optimizer, if the stage has a parameter."""
        self._parameters = parameters
        self._group_numbers: list[int] = []
        groups = []
        for number, group in enumerate(spec.groups):
            mine = [parameters[name] for name in group.names if name in parameters]
            if mine:
                self._group_numbers.append(number)
                groups.append({"params": mine, **group.options})
        self.torch_optimizer: torch.optim.Optimizer | None = None
        if groups:
            build: Any = spec.optimizer_class
            self.torch_optimizer = build(groups, *spec.args, **spec.kwargs)

    def step(self, hyper: list[Hyper]) -> None:
        """Step once with the hyper-parameters that travelled with the micro-batch.

        Args:
            hyper: The hyper-parameters of each group of the whole model.
        """
        if self.torch_optimizer is None:
            return
        for number, group in zip(
            self._group_numbers, self.torch_optimizer.param_groups, strict=True
        ):
            set_hyper(group, hyper[number])
        self.torch_optimizer.step()

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer state by parameter name."""
        if self.torch_optimizer is None:
            return {}
        state = self.torch_optimizer.state
        return {n: dict(state[p]) for n, p in self._parameters.items() if p in state}

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        """Replace the optimizer state.

        Args:
            state: The state by parameter name, of the whole model or of this stage alone.
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
        # This call brings states of older versions of torch up to date.
        self.torch_optimizer.__setstate__(
            {
                "state": self.torch_optimizer.state,
                "param_groups": self.torch_optimizer.param_groups,
            }
        )


def _like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return a copy of a tensor of optimizer state, with the strides of its parameter."""
    if value.shape != parameter.shape:
        return value.detach().clone()
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
