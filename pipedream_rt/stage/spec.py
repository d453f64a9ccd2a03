"""The specification of a stage, which the coordinator sends to the stage's worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from pipedream_rt.schedules import Plan

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
"""``loss_fn(output, target)`` returns the loss, a tensor with one element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSettings:
    """Settings of torch that hold for a whole process and change the bits of results.

    Attributes:
        default_dtype: The dtype of new floating-point tensors.
        deterministic: Whether torch uses deterministic algorithms alone.
        deterministic_warn_only: Whether it warns, rather than raises, where there is none.
        matmul_precision: The precision of float32 matrix products.
    """

    default_dtype: torch.dtype
    deterministic: bool
    deterministic_warn_only: bool
    matmul_precision: str

    @classmethod
    def capture(cls) -> TorchSettings:
        """Return the settings of this process."""
        return cls(
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            matmul_precision=torch.get_float32_matmul_precision(),
        )

    def apply(self) -> None:
        """Apply the settings to this process.

        Only where they differ, because torch imports its compiler to set one of them.
        """
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
"""What a stage does about a training loss that is NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """The specification of a stage. cloudpickle pickles it, so a script's own classes may be in it.

    Attributes:
        stage: Index of the stage, 0-based.
        layers: The layers, under their names in the unsplit model.
        loss_fn: The loss function, on the stage that computes the loss; None on the others.
        plan: The plan of the pipeline.
        seed: The seed of the pipeline, for `layer_seed`.
        on_nan: What the stage does about a training loss that is NaN or infinite.
        trace_spans: Number of spans that a worker keeps for a trace; 0 for no trace.
        settings: The settings of torch in the user's process.
    """

    stage: int
    layers: nn.Sequential
    loss_fn: LossFunction | None
    plan: Plan
    seed: int
    on_nan: OnNan
    trace_spans: int = 0
    settings: TorchSettings = field(default_factory=TorchSettings.capture)
