"""The snapshot of a stage: what a checkpoint holds of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipedream_rt.messages.keys import StepState


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a stage after an update, as if nothing were in flight. It owns its tensors.

    Attributes:
        weights: State dict of the stage, newest version, under the keys of the unsplit model.
        steps: What its optimizer and its rules keep for the next steps.
        versions: Older versions of the trainable weights that later micro-batches read, by version
            and name.
        hidden: Buffers that are in no state dict, by name.
        extra: What modules give by ``get_extra_state`` that is no tensor, packed by `pack_hyper`,
            by key of the state dict.
    """

    weights: dict[str, Tensor]
    steps: StepState
    versions: dict[int, dict[str, Tensor]]
    hidden: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
