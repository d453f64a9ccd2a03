"""Weight prediction: forwards read the weights as they will be when the gradient is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.correction import Correction, Moment, Named, require_number


@dataclass(eq=False)
class WeightPrediction(Correction):
    """Forwards that read ``w - strength * tau * lr * d`` in the place of a stale version w.

    tau is the number of updates that will be made before the gradient is applied. d is the step
    that the optimizer would make with a gradient of zero, by its own rule:

    - `torch.optim.SGD` with momentum: d = v, the momentum buffer;
    - `torch.optim.Adam`: d = m^ / (sqrt(v^) + eps), with the moments corrected for their bias;
    - `torch.optim.AdamW`: the same, plus weight_decay * w;
    - `torch.optim.NAdam`: the same with m^ = m / (1 - mu_1 mu_2 ... mu_t);
    - an optimizer with a method ``expected_step(parameter, group)``, as those of this project have:
      what it returns is ``lr * d``.

    The backward uses the predicted weights too. They take the memory of one more copy for each
    version that micro-batches read or will read.

    Sources: Chen et al., Efficient and Robust Parallel DNN Training through Model Parallelism on
    Multi-GPU Platform (SpecTrain, 2018), equation 3 (momentum); Guan et al., XPipe (2019), equation
    3 (Adam); Guan et al., PipeOptim (2023), table 1 (SGD with momentum, Adam, AdamW).

    Attributes:
        strength: A factor for the distance; 1 for the papers.

    Raises:
        ConfigError: It is negative, or no number.
    """

    strength: float = 1.0
    copies_per_version = 1.0
    passes = 31.0  # with AdamW

    def __post_init__(self) -> None:
        require_number("strength", self.strength, 0.0)

    def require_fit(self, optimizer: type, group: Mapping[str, Any]) -> None:
        """See `Correction.require_fit`."""
        _require_rule(optimizer, group)

    def before_forward(self, at: Moment, weights: Named, optimizer: torch.optim.Optimizer) -> None:
        """See `Correction.before_forward`.

        Raises:
            ConfigError: There is no rule for the optimizer.
        """
        names = {id(p): name for name, p in self.parameters.items()}
        for group in optimizer.param_groups:
            _require_rule(type(optimizer), group)
            for parameter in group["params"]:
                if (name := names.get(id(parameter))) in weights and optimizer.state[parameter]:
                    step = expected_step(optimizer, group, parameter)
                    weights[name].sub_(step, alpha=self.strength * at.staleness)


@dataclass(eq=False)
class Extrapolation(Correction):
    """Forwards that read ``w + strength * tau * v`` in the place of a stale version w.

    v is the velocity, a moving average of updates: ``v = decay * v + (1 - decay) * u``, where u is
    all that a step has added to the weights, and v = u after the first step. v stands for each of
    the tau updates that will be made before the gradient is applied. So this is `WeightPrediction`
    without a rule for the optimizer.

    Source: Yang et al., PipeMare (MLSys 2021), technique T2, section 3.2; here the forward uses the
    extrapolated weights too.

    Attributes:
        strength: A factor for the distance.
        decay: The decay of the moving average; 0 for the last update alone.

    Raises:
        ConfigError: A number is out of range.
    """

    strength: float = 1.0
    decay: float = 0.0
    copies = 1.0
    copies_per_version = 1.0
    passes = 15.0

    def __post_init__(self) -> None:
        require_number("strength", self.strength, 0.0)
        require_number("decay", self.decay, 0.0, below=1.0)

    def after_step(self, at: Moment, weights: Named, before: Named) -> None:
        """See `Correction.after_step`."""
        for name, weight in weights.items():
            state, update = self.state.setdefault(name, {}), weight - before[name]
            if self.decay and "velocity" in state:
                state["velocity"].lerp_(update, 1.0 - self.decay)
            else:
                state["velocity"] = update

    def before_forward(self, at: Moment, weights: Named, optimizer: torch.optim.Optimizer) -> None:
        """See `Correction.before_forward`."""
        for name, weight in weights.items():
            if name in self.state:
                weight.add_(self.state[name]["velocity"], alpha=self.strength * at.staleness)


def expected_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> Tensor:
    """Return what the next step would subtract from a parameter if its gradient were zero."""
    own: Any = getattr(optimizer, "expected_step", None)
    step: Tensor
    if own is not None:
        step = own(parameter, group)
        return step
    state = optimizer.state[parameter]
    _require_rule(type(optimizer), group)
    if isinstance(optimizer, torch.optim.SGD):
        buffer = state.get("momentum_buffer")
        step = group["lr"] * (torch.zeros_like(parameter) if buffer is None else buffer)
        return step
    if isinstance(optimizer, torch.optim.NAdam):
        decays = group["decoupled_weight_decay"]
        # The bias of NAdam's first moment is the product of its momenta, not a power of beta1.
        return step_of_moments(group, state, parameter, decays, state["mu_product"])
    decays = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    return step_of_moments(group, state, parameter, decays)  # AdamW is an Adam too


def _require_rule(optimizer: type, group: Mapping[str, Any]) -> None:
    """Refuse a class of optimizers whose next step cannot be predicted."""
    moments = issubclass(optimizer, torch.optim.Adam | torch.optim.NAdam)
    if hasattr(optimizer, "expected_step") or moments:
        return
    if issubclass(optimizer, torch.optim.SGD) and group.get("momentum", 0.0):
        return
    raise ConfigError(
        f"WeightPrediction has no rule for {optimizer.__name__}: use SGD with momentum, "
        "Adam, AdamW or NAdam, or give the optimizer a method expected_step(parameter, group)"
    )


def step_of_moments(
    group: dict[str, Any],
    state: dict[str, Any],
    parameter: Tensor,
    decays: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Return lr * (m^ / (sqrt(v^) + eps)), plus lr * weight_decay * w if weight decay is decoupled.

    ``bias`` is the factor by which the first moment is too small: m^ = m / (1 - bias). None is for
    beta1 to the number of steps.
    """
    betas, number = group["betas"], float(state["step"])
    lacks = betas[0] ** number if bias is None else float(bias)
    first, second = state["exp_avg"], state.get("max_exp_avg_sq", state["exp_avg_sq"])
    if parameter.is_complex():  # Adam treats real and imaginary parts as separate numbers
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    scale = (second / (1 - betas[1] ** number)).sqrt() + group["eps"]
    direction = first / (1 - lacks) / scale
    if parameter.is_complex():
        direction = torch.view_as_complex(direction)
    if decays:
        direction = direction + group["weight_decay"] * parameter
    step: Tensor = group["lr"] * direction
    return step
