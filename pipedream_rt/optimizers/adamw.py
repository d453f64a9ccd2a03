"""The base of optimizers that treat some groups of matrices in a way of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pipedream_rt.corrections.prediction import step_of_moments


class AdamWBeside(torch.optim.Optimizer):
    """An optimizer whose groups with ``matrices=True`` a subclass steps, and AdamW all others.

    Args:
        params: As of every `torch.optim.Optimizer`.
        defaults: The options, among them those of AdamW: ``lr``, ``betas``, ``eps`` and
            ``weight_decay``.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """Check the options that all such optimizers have.

        Raises:
            ValueError: One makes no sense.
        """
        for name in ("lr", "eps", "weight_decay"):
            if not float(defaults[name]) >= 0.0:
                raise ValueError(f"{name} must be at least 0, not {defaults[name]!r}")
        if not all(0.0 <= beta < 1.0 for beta in defaults["betas"]):
            raise ValueError(f"betas must be from 0 to less than 1, not {defaults['betas']!r}")
        super().__init__(params, {"matrices": False, **defaults})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ValueError: It is one of matrices, and has a parameter that is none.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"] if group["matrices"] else ():
            if parameter.ndim != 2:
                raise ValueError(
                    f"a group with matrices=True has a parameter of shape {tuple(parameter.shape)}"
                )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step once, on the parameters that have a gradient."""
        for group in self.param_groups:
            if group["matrices"]:
                self.step_matrices(group)
            else:
                self._step_others(group)

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
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def expected_step(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return what the next step would take off a parameter if no gradient came.

        `WeightPrediction` asks for it.

        Args:
            parameter: The parameter, which has a state.
            group: Its group.
        """
        if group["matrices"]:
            return self.expected_step_of_matrix(parameter, group)
        return step_of_moments(group, self.state[parameter], parameter, decays=True)

    def expected_step_of_matrix(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return what the next step would take off a matrix if no gradient came."""
        raise NotImplementedError
