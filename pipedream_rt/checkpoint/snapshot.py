"""The snapshot of a stage: what a checkpoint holds of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipedream_rt.messages.keys import StepState


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a stage after an update, as if nothing were in flight. It owns its tensors."""

    weights: dict[str, Tensor]
    steps: StepState
    versions: dict[int, dict[str, Tensor]]
    hidden: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
