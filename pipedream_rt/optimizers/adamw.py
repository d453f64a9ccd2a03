"""The base of optimizers that step matrices in a way of their own, and all else by AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pipedream_rt.corrections.prediction import step_of_moments


class AdamWBeside(torch.optim.Optimizer):
    """An optimizer whose groups with ``matrices=True`` a subclass steps, and AdamW all others."""

    matrix_types: tuple[torch.dtype, ...] = (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
    )
    """The dtypes that matrices may have."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {"matrices": False, **defaults})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; ValueError for an option that makes no sense, or a matrix that is none."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self.check(group)
        for parameter in group["params"] if group["matrices"] else ():
            if parameter.ndim != 2 or parameter.dtype not in self.matrix_types:
                shape, dtype = tuple(parameter.shape), parameter.dtype
                types = ", ".join(str(each) for each in self.matrix_types)
                raise ValueError(
                    f"a group with matrices=True has a parameter of shape {shape} and type "
                    f"{dtype}; those of {type(self).__name__} are matrices of {types}"
                )

    def check(self, group: dict[str, Any]) -> None:
        """Refuse options of a group that make no sense."""
        for name in ("lr", "eps", "weight_decay"):
            if not 0.0 <= float(group[name]) < math.inf:
                raise ValueError(f"{name} must be at least 0, not {group[name]!r}")
        betas = group["betas"]
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be two numbers from 0 to less than 1, not {betas!r}")

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step once, on the parameters that have a gradient; return the loss of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["matrices"]:
                self.step_matrices(group)
            else:
                self._step_others(group)
        return loss

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Step a group of matrices."""
        raise NotImplementedError

    def _step_others(self, group: dict[str, Any]) -> None:
        """Step a group as `torch.optim.AdamW` does."""
        with_gradient = [p for p in group["params"] if p.grad is not None]
        states = [self.moments(p) for p in with_gradient]
        first, second = group["betas"]
        adamw(
            with_gradient,
            [p.grad for p in with_gradient],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=False,
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def moments(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter, which begins with moments of zeros."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def expected_step(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return what the next step subtracts from a parameter of a group if no gradient comes.

        `WeightPrediction` asks for it, once the parameter has a state.
        """
        if group["matrices"]:
            return self.expected_step_of_matrix(parameter, group)
        return step_of_moments(group, self.state[parameter], parameter, decays=True)

    def expected_step_of_matrix(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return what the next step subtracts from a matrix if no gradient comes."""
        raise NotImplementedError
