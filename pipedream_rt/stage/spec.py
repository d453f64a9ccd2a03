"""What a stage is made of, as the coordinator sends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from pipedream_rt.schedules import Plan

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
"""``(output, target) -> scalar``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSettings:
    """What the user's script has set in torch for its whole process, and what changes bits."""

    default_dtype: torch.dtype
    deterministic: bool
    deterministic_warn_only: bool
    matmul_precision: str

    @classmethod
    def capture(cls) -> TorchSettings:
        """Read the settings of this process."""
        return cls(
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            matmul_precision=torch.get_float32_matmul_precision(),
        )

    def apply(self) -> None:
        """Set them in this process, where they differ: torch imports its compiler to set one."""
        current = TorchSettings.capture()
        if current == self:
            return
        torch.set_default_dtype(self.default_dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        if (current.deterministic, current.deterministic_warn_only) != (
            self.deterministic,
            self.deterministic_warn_only,
        ):
            torch.use_deterministic_algorithms(
                self.deterministic, warn_only=self.deterministic_warn_only
            )


OnNan: TypeAlias = Literal["raise", "ignore"]
"""What becomes of a training loss that is NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """What a stage is made of. Pickled with cloudpickle, so classes of a user's script work.

    Attributes:
        stage: Index, 0-based.
        layers: The layers with their names in the unsplit model.
        loss_fn: On the stage that computes the loss only.
        plan: Order, versions and edges.
        seed: For `layer_seed`.
        on_nan: What becomes of a training loss that is not finite.
        trace_spans: How many spans a worker keeps for a trace; 0 for none.
        settings: Of the user's process.
    """

    stage: int
    layers: nn.Sequential
    loss_fn: LossFunction | None
    plan: Plan
    seed: int
    on_nan: OnNan
    trace_spans: int = 0
    settings: TorchSettings = field(default_factory=TorchSettings.capture)
