"""Corrections that change the optimizer's options for one step, by the staleness of the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipedream_rt.stage.correction import Correction, Moment, require_number


@dataclass(eq=False)
class StalenessRate(Correction):
    """A learning rate that is divided by the staleness at first; the division fades out.

    In step k, with the staleness tau, the rate is divided by ``tau ** p``, where
    ``p = 1 - min(k / updates, 1)``. A staleness of 1 or less leaves the rate as it is.

    Source: Yang et al., PipeMare: Asynchronous Pipeline Parallel DNN Training (MLSys 2021),
    technique T1, section 3.1.

    Attributes:
        updates: The number of updates over which the division fades out, K.

    Raises:
        ConfigError: It is less than 1, or no number.
    """

    updates: int

    def __post_init__(self) -> None:
        require_number("updates", self.updates, 1)

    def before_step(self, at: Moment, optimizer: torch.optim.Optimizer) -> None:
        """See `Correction.before_step`."""
        power = 1.0 - min(at.update / self.updates, 1.0)
        if at.staleness > 1 and power > 0.0:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] / at.staleness**power


@dataclass(eq=False)
class StalenessDamping(Correction):
    """A learning rate that falls with the staleness of a step.

    With the staleness tau of a step, the rate is divided by ``(1 + tau) ** power``. The last stage,
    whose gradients are fresh, keeps the rate. So the rate may be that of synchronous training.

    Source: Zhang et al., Staleness-aware Async-SGD for Distributed Deep Learning (IJCAI 2016),
    which divides by the staleness itself.

    Attributes:
        power: The power p.

    Raises:
        ConfigError: It is negative.
    """

    power: float = 0.5

    def __post_init__(self) -> None:
        require_number("power", self.power, 0.0)

    def before_step(self, at: Moment, optimizer: torch.optim.Optimizer) -> None:
        """See `Correction.before_step`."""
        if at.staleness:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] / (1 + at.staleness) ** self.power


@dataclass(eq=False)
class StalenessMomentum(Correction):
    """A momentum that rises with the staleness of a step.

    The first of ``betas``, and ``momentum`` unless it is 0, becomes ``b + tau (top - b) / n`` with
    the staleness tau and n stages, and at most ``top``.

    Source: Ajanthan et al., Nesterov Method for Asynchronous Pipeline Parallel Optimization (ICML
    2025), the option ``adaptive_momentum`` of its code (AsyncPP).

    Attributes:
        top: The momentum at a staleness of n or more.

    Raises:
        ConfigError: It is no number from 0 to less than 1.
    """

    top: float = 0.99

    def __post_init__(self) -> None:
        require_number("top", self.top, 0.0, below=1.0)

    def before_step(self, at: Moment, optimizer: torch.optim.Optimizer) -> None:
        """See `Correction.before_step`."""
        share = min(at.staleness / at.num_stages, 1.0)
        for group in optimizer.param_groups:
            if "betas" in group:
                first, *others = group["betas"]
                group["betas"] = (first + share * (self.top - first), *others)
            if group.get("momentum"):  # an optimizer without momentum has no buffers for it
                group["momentum"] += share * (self.top - group["momentum"])


@dataclass(eq=False)
class StalenessRefresh(Correction):
    """Refreshes of `RotatedAdamW` that are more frequent on staler stages.

    With the staleness tau of a step and n stages, the option ``refresh`` r becomes
    ``r (n - 1) / (2 tau)``, and at least 1. On average over the stages of an asynchronous pipeline
    there are as many refreshes as without the correction. A stage without staleness is left as it
    is.

    Source: the budget by stage of the basis-rotation paper (ICML 2026), see `RotatedAdamW`.
    """

    def before_step(self, at: Moment, optimizer: torch.optim.Optimizer) -> None:
        """See `Correction.before_step`."""
        if at.staleness:
            for group in optimizer.param_groups:
                if "refresh" in group:
                    often = group["refresh"] * (at.num_stages - 1) / (2 * at.staleness)
                    group["refresh"] = max(1, round(often))
