"""Scaling losses, so that small gradients in float16 do not become zero.

It does what `torch.amp.GradScaler` does: the loss is multiplied by a scale before the backward, and
gradients are divided by it before the update. If a gradient is not finite, no stage applies the
update, and the scale falls; after many updates without that, it rises.

Whether an update is skipped is known once all stages have measured their gradients. It travels with
the total norm for clipping (`totals.py`), which is known at the same time. So scales are numbered
like weight versions: the scale of version v is the one after v updates. A micro-batch has the scale
of the version that the first micro-batch of its update reads on the last stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.state_keys import StateKey, StepState
from pipedream_rt.stage.rules.rule import (
    Context,
    MicroBatchRule,
    RuleOption,
    Update,
    UpdateRule,
)
from pipedream_rt.stage.rules.totals import NOT_FINITE, Norms, Totals
from pipedream_rt.torch_private import find_non_finite_and_unscale

_KEY = StateKey("scaling", path=("scales",))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale(RuleOption):
    """How losses are scaled, with the arguments of `torch.amp.GradScaler`.

    Attributes:
        init_scale: The first scale.
        growth_factor: The factor of the scale after ``growth_interval`` updates in a row without a
            skip.
        backoff_factor: The factor of the scale after an update that was skipped.
        growth_interval: The number of updates without a skip after which the scale grows.

    Raises:
        ConfigError: A value makes no sense.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{name} of LossScale must be a positive number, not {value!r}")
        if self.growth_factor <= 1 or self.backoff_factor >= 1:
            raise ConfigError("growth_factor must be more than 1, and backoff_factor less than 1")

    def rule(self, context: Context) -> Scaling:
        """Return the rule that scales on one stage."""
        return Scaling(self, context)

    def needs_totals(self, num_stages: int) -> bool:
        """Return True, since whether an update is skipped comes with the totals."""
        return True


class Scaling(UpdateRule, MicroBatchRule):
    """The scales of one stage. All stages learn the same totals, so all have the same scales."""

    keeps = "run"

    def __init__(self, scale: LossScale, context: Context) -> None:
        self._options = scale
        assert isinstance(context.totals, Totals)
        self._plan = context.plan
        self._is_first = context.stage == 0
        self._device = next((p.device for p in context.named.values()), torch.device("cpu"))
        # By version: the scale, the updates since it last changed, and those skipped so far.
        self._states: dict[int, tuple[float, int, int]] = {0: (_single(scale.init_scale), 0, 0)}
        context.totals.measured_by(self._measure)
        context.totals.tell(self._learn)

    def statistics(self) -> dict[str, int]:
        """Return the number of updates that were skipped so far."""
        return {"updates_skipped": self._states[max(self._states)][2]}

    def of_update(self, update: int) -> float:
        plan = self._plan
        version = plan.reads(plan.num_stages - 1, update * plan.per_update)
        # Once weights were loaded, the first forwards read a later version than the plan says.
        known = min(self._states)
        return self._states[max(version, known)][0]

    def loss(self, update: int, loss: Tensor) -> Tensor:
        # A scalar on the host goes with a loss on any device.
        return loss * torch.full((), self.of_update(update), device="cpu")

    def _measure(self, update: Update) -> Norms:
        """Unscale the gradients; return a number that is not 0 if one of them is not finite."""
        return {NOT_FINITE: self._unscale(update.gradients, update.number)}

    @torch.no_grad()
    def _unscale(self, gradients: Iterable[Tensor | None], update: int) -> Tensor:
        """Divide the gradients of an update by its scale, in place."""
        device = self._device
        # As GradScaler does: the reciprocal is rounded once, from float64 to float32.
        inverse = torch.full((), self.of_update(update), device=device)
        inverse = inverse.double().reciprocal().float()
        found = torch.zeros((), device=device)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            if gradient is not None:
                values = gradient._values() if gradient.is_sparse else gradient
                by_dtype.setdefault(values.dtype, []).append(values)
        for alike in by_dtype.values():
            find_non_finite_and_unscale(alike, found, inverse)
        return found

    def change(self, update: Update) -> None:
        """Skip an update if a gradient of some stage is not finite."""
        number = update.number
        update.skipped = self._states[number + 1][2] > self._states[number][2]

    def _learn(self, update: int, total: float) -> None:
        """Make the scale after an update, whose total is not finite if it is skipped."""
        newest = max(self._states)
        if update < newest:  # it was known
            return
        scale, since, skipped = self._states[newest]
        options = self._options
        if not math.isfinite(total):
            state = (_single(scale * options.backoff_factor), 0, skipped + 1)
        elif since + 1 == options.growth_interval:
            grown = _single(scale * options.growth_factor)
            state = (grown if math.isfinite(grown) else scale, 0, skipped)
        else:
            state = (scale, since + 1, skipped)
        self._states[update + 1] = state
        oldest = update - 2 * self._plan.in_flight(0) - 2
        for version in [v for v in self._states if v < oldest]:
            del self._states[version]

    def state(self) -> StepState:
        """Return the scales, which stage 0 keeps for all."""
        if not self._is_first or not max(self._states):  # nothing was learned
            return {}
        return {_KEY: [[version, *s] for version, s in sorted(self._states.items())]}

    def load_state(self, state: Mapping[StateKey, Any], step: int) -> None:
        """Go on with the scales up to the version of the checkpoint."""
        saved = state.get(_KEY, [])
        states = {v: (scale, since, skipped) for v, scale, since, skipped in saved if v <= step}
        if states:
            self._states = states
        elif step not in self._states:  # the run has scaled nothing so far
            self._states = {step: (_single(self._options.init_scale), 0, 0)}


def _single(scale: float) -> float:
    """Round a scale to float32, in which GradScaler keeps it."""
    return float(torch.tensor(scale, dtype=torch.float32, device="cpu"))
