"""An exponential moving average of the weights, as `torch.optim.swa_utils` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pipedream_rt.messages.state_keys import StateKey, StepState
from pipedream_rt.stage.optimizer import like
from pipedream_rt.stage.rules.rule import Context, RuleOption, Update, UpdateRule
from pipedream_rt.stage.values import Outgoing

AVERAGE = "ema"
"""The part of the keys of averages."""


@dataclass(frozen=True, slots=True)
class Averaging(RuleOption):
    """The average that each stage makes of its weights.

    Attributes:
        decay: The decay of the average, as 0.999.
    """

    decay: float

    def rule(self, context: Context) -> Ema:
        return Ema(self.decay, context)


class Ema(UpdateRule):
    """The average of one stage's weights. It outlives the optimizer."""

    keeps = "weights"

    def __init__(self, decay: float, context: Context) -> None:
        self._decay = decay
        self._parameters = context.named
        self._average: dict[str, Tensor] = {}

    @torch.no_grad()
    def after(self, update: Update, optimizer: torch.optim.Optimizer | None) -> Outgoing:
        """Move the average towards the weights."""
        if update.skipped or optimizer is None:
            return {}
        if not self._average:
            self._average = {n: p.detach().clone() for n, p in self._parameters.items()}
        else:
            weights: Any = list(self._parameters.values())
            get_ema_multi_avg_fn(self._decay)(list(self._average.values()), weights, None)
        return {}

    def average(self) -> dict[str, Tensor]:
        """Return the average of the weights, by name; the weights themselves before any step."""
        return self._average or {n: p.detach() for n, p in self._parameters.items()}

    def state(self) -> StepState:
        return {StateKey(AVERAGE, name): tensor for name, tensor in self._average.items()}

    def load_state(self, state: Mapping[StateKey, Any], step: int) -> None:
        self._average = {
            name: like(parameter, state[StateKey(AVERAGE, name)])
            for name, parameter in self._parameters.items()
            if StateKey(AVERAGE, name) in state
        }
