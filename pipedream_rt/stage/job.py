"""What a stage is made of, as the coordinator sends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from pipedream_rt.schedules import Schedule

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
"""``(output, target) -> scalar``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageJob:
    """A stage, before it runs. Pickled with cloudpickle, so classes of a user's script work.

    Attributes:
        stage: Index, 0-based.
        layers: The layers with their names in the unsplit model.
        loss_fn: On the last stage only.
        schedule: Order and versions.
        seed: For `layer_seed`.
        on_nan: ``"raise"`` or ``"ignore"``.
    """

    stage: int
    layers: nn.Sequential
    loss_fn: LossFunction | None
    schedule: Schedule
    seed: int
    on_nan: str

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == self.schedule.num_stages - 1
