"""Nesterov's form of momentum, for optimizers that have it in another form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.corrections.prediction import step_of_moments
from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.correction import Correction, Moment, Named, require_number

_BUFFERS = {torch.optim.SGD: "momentum_buffer", torch.optim.Adam: "exp_avg"}
"""The optimizers that have a rule, with their name of the moving average; AdamW is an Adam too."""


@dataclass(eq=False)
class StalenessNesterov(Correction):
    """Momentum that answers the newest gradient sooner, in steps that are stale.

    A stale gradient tells of weights that are left already, and momentum carries it on for
    1 / (1 - beta) updates more; the two delays together are what makes training swing. So in a step
    with any staleness the memory of the momentum is ``memory`` times as long,
    ``beta' = 1 - (1 - beta) / memory`` and at least 0, and the direction m of the optimizer becomes
    ``m(t) + strength * (m(t) - m(t-1))``. With a strength of beta' this is Nesterov's form, as
    `torch.optim.NAdam` and ``SGD(nesterov=True)`` have it. All else is the optimizer's own: second
    moments, weight decay, the rate. It remembers nothing. Weights that several stages use get the
    shorter memory alone.

    m is, before and after the step:

    - `torch.optim.Adam`, `torch.optim.AdamW`: m^ / (sqrt(v^) + eps), with the second moment and the
      corrections for the bias of this step, and with ``betas[0]`` for beta;
    - `torch.optim.SGD`: its momentum buffer, with ``momentum`` for beta. A buffer is a sum, not a
      mean, so the rate is multiplied by (1 - beta') / (1 - beta). A beta' of 0 is SGD without a
      buffer. With ``nesterov=True`` it has the form by itself, and is refused.

    Sources: Sutskever et al., On the importance of initialization and momentum in deep learning
    (ICML 2013), section 2.1; Dozat, Incorporating Nesterov Momentum into Adam (2016); Ajanthan et
    al., Nesterov Method for Asynchronous Pipeline Parallel Optimization (ICML 2025), which raises
    the momentum where this shortens it.

    Attributes:
        strength: The factor of what m has changed by.
        memory: The factor of the memory, 1 / (1 - beta).

    Raises:
        ConfigError: A number is out of range.
    """

    strength: float = 1.0
    memory: float = 0.5
    passes = 36.0  # with AdamW

    def __post_init__(self) -> None:
        require_number("strength", self.strength, 0.0)
        require_number("memory", self.memory, 0.0)
        if not 0.0 < self.memory <= 1.0:
            raise ConfigError(f"memory must be above 0, and at most 1, not {self.memory!r}")
        self._optimizer: torch.optim.Optimizer | None = None  # during a stale step alone
        self._moments: dict[str, Tensor] = {}

    def require_fit(self, optimizer: type, group: Mapping[str, Any]) -> None:
        """See `Correction.require_fit`."""
        first, *_ = group.get("betas") or (1.0,)
        no_momentum = issubclass(optimizer, torch.optim.SGD) and not group.get("momentum", 0.0)
        no_momentum = no_momentum or not first
        if no_momentum or not issubclass(optimizer, tuple(_BUFFERS)):
            raise ConfigError(
                f"StalenessNesterov has no rule for {optimizer.__name__}: use SGD with momentum, "
                "Adam or AdamW"
            )
        if group.get("nesterov"):
            raise ConfigError(
                "StalenessNesterov gives momentum the form that SGD(nesterov=True) has by itself; "
                "leave one of both out"
            )

    def before_step(self, at: Moment, optimizer: torch.optim.Optimizer) -> None:
        """See `Correction.before_step`."""
        if not at.staleness:
            return
        self._optimizer = optimizer
        for name, key, parameter, _ in self._stepped(optimizer):
            if (moment := optimizer.state[parameter].get(key)) is not None:
                self._moments[name] = moment.clone()
        for group in optimizer.param_groups:
            if "betas" in group:
                first, *others = group["betas"]
                group["betas"] = (self._shorter(first), *others)
            else:
                before, group["momentum"] = group["momentum"], self._shorter(group["momentum"])
                group["lr"] = group["lr"] * (1.0 - group["momentum"]) / (1.0 - before)

    def after_step(self, at: Moment, weights: Named, before: Named) -> None:
        """See `Correction.after_step`."""
        optimizer, self._optimizer = self._optimizer, None
        moments, self._moments = self._moments, {}
        if optimizer is None:
            return
        for name, key, parameter, group in self._stepped(optimizer):
            # The first step of a parameter has nothing to be compared with.
            if name in moments:
                change = optimizer.state[parameter][key] - moments[name]
                if key == "exp_avg":
                    state = {**optimizer.state[parameter], key: change}
                    weights[name].sub_(
                        step_of_moments(group, state, parameter, False), alpha=self.strength
                    )
                else:
                    weights[name].sub_(change, alpha=self.strength * float(group["lr"]))

    def _shorter(self, beta: Any) -> Any:
        """Return a momentum whose memory is shorter."""
        return max(0.0, 1.0 - (1.0 - beta) / self.memory)

    def _stepped(
        self, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[str, str, Tensor, dict[str, Any]]]:
        """Yield of each parameter its name, that of its moving average, itself, and its group."""
        names = {id(p): name for name, p in self.parameters.items()}
        key = next(key for kind, key in _BUFFERS.items() if isinstance(optimizer, kind))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in names:
                    yield names[id(parameter)], key, parameter, group
