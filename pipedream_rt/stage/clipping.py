"""Clipping gradients before an update: by value, by the norm of a stage, by that of the model.

What all stages must agree on before an update is made here too: the total norm, and whether the
update is skipped because a gradient is not finite, where losses are scaled (`scaling.py`).

The norm of the model's gradients needs those of all stages. At its step, each stage measures the
norm of each of its gradients and sends them, with those of the stages behind it, to the stage
before. Stage 0 makes the total of them, in the order of the unsplit model, so that it has the bits
of ``torch.nn.utils.clip_grad_norm_``, and sends it to all others.

Where the schedule leaves enough time until an update is read, the norm is *exact*: the update waits
for its total, and is applied just before the first forward that reads it. Elsewhere it is
*delayed*: an update is clipped by the norm of the newest mini-batch whose total every stage can
have by then, which depends on the plan and not on timing (`Plan.with_norms`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules import Plan
from pipedream_rt.stage.scaling import LossScale, Scaler

_NOT_FINITE = -1
"""The place, among the norms of gradients, of the number that is not zero if one is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """How gradients are clipped before each update, as by `torch.nn.utils.clip_grad_norm_`.

    Attributes:
        norm: The largest norm of gradients; they are scaled by one factor to have it.
        value: The largest absolute value of an element of a gradient; give this or ``norm``.
        over: Of what the norm is taken: all gradients of the ``"model"``, or those of each
            ``"stage"`` by itself.
        norm_type: The p of the p-norm; may be ``inf``.

    Raises:
        ConfigError: A value makes no sense, or both or neither of ``norm`` and ``value`` are given.
    """

    norm: float | None = None
    value: float | None = None
    over: Literal["model", "stage"] = "model"
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        """Check the values."""
        if (self.norm is None) == (self.value is None):
            raise ConfigError("Clip needs norm= or value=, and not both")
        for name in ("norm", "value", "norm_type"):
            given = getattr(self, name)
            number = isinstance(given, int | float) and not isinstance(given, bool)
            if given is not None and not (number and given > 0):
                raise ConfigError(f"{name} of Clip must be a positive number, not {given!r}")
        if self.over not in ("model", "stage"):
            raise ConfigError(f'over of Clip must be "model" or "stage", not {self.over!r}')

    @property
    def of_model(self) -> bool:
        """Whether the norm of all gradients of the model is needed."""
        return self.norm is not None and self.over == "model"


class Clipper:
    """The clipping of the gradients of one stage, and their scaling back.

    Args:
        clip: How gradients are clipped; None for not at all.
        scale: How losses are scaled; None for not at all.
        plan: The plan of the pipeline.
        stage: Index of the stage.
        numbers: The place of each trainable parameter of the stage in the unsplit model, by name.

    Attributes:
        scaler: The scales of losses; None if they are not scaled.
        total: Whether something of all stages is needed.
        is_first: Whether this is the stage that makes the total.
    """

    def __init__(
        self,
        clip: Clip | None,
        scale: LossScale | None,
        plan: Plan,
        stage: int,
        numbers: Mapping[str, int],
    ) -> None:
        """Know no total."""
        self._clip = clip
        self._numbers = numbers
        self._delay = plan.delay if plan.norms == "delayed" else 0
        # A checkpoint has those that updates after it need.
        self._remembered = 2 * plan.delay + 2 + max(plan.replicas)
        self._learned = -1
        self._totals: dict[int, float] = {}
        self.scaler = None if scale is None else Scaler(scale, plan)
        self._norm = clip is not None and clip.of_model and plan.num_stages > 1
        self.total = self._norm or scale is not None
        self.is_first = stage == 0

    def measure(
        self, update: int, gradients: Mapping[str, Tensor | None], behind: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return the norms of gradients, by the places of their parameters in the model.

        Args:
            update: Number of the update.
            gradients: The gradients of the stage, by name; None where there is none. If losses are
                scaled, they are divided by the scale, in place.
            behind: The norms of the stages behind it.
        """
        norms = dict(behind)
        if self.scaler is not None:
            finite = self.scaler.unscale(gradients.values(), update)
            norms[_NOT_FINITE] = behind.get(_NOT_FINITE, torch.zeros(())) + (not finite)
        if self._norm:
            assert self._clip is not None
            for name, gradient in gradients.items():
                if gradient is not None:
                    norm = torch.linalg.vector_norm(gradient, self._clip.norm_type)
                    norms[self._numbers[name]] = norm
        return norms

    def add_up(self, update: int, norms: Mapping[int, Tensor]) -> float:
        """Make the total of an update, on stage 0; infinite if the update is skipped."""
        ordered = [norms[number] for number in sorted(norms) if number != _NOT_FINITE]
        total = 0.0
        if _NOT_FINITE in norms and norms[_NOT_FINITE].item():
            total = math.inf
        elif ordered:
            assert self._clip is not None
            total = torch.linalg.vector_norm(torch.stack(ordered), self._clip.norm_type).item()
        self.learn({update: total})
        return total

    def learn(self, totals: Mapping[int, float]) -> None:
        """Note totals, by update, and forget those that no update needs any more.

        Totals that were known, or forgotten, change nothing.
        """
        totals = {update: total for update, total in totals.items() if update > self._learned}
        if not totals:
            return
        self._learned = max(totals)
        self._totals.update(totals)
        if self.scaler is not None:
            for update, total in sorted(totals.items()):
                self.scaler.learn(update, math.isfinite(total))
        for update in [u for u in self._totals if u < max(self._totals) - self._remembered]:
            del self._totals[update]

    def forget(self) -> None:
        """Forget all totals, since the stage goes on from a checkpoint."""
        self._totals.clear()
        self._learned = -1

    def totals(self) -> dict[int, float]:
        """Return the totals that later updates may need, for a checkpoint."""
        return dict(self._totals)

    @property
    def skipped(self) -> int:
        """The number of updates that were skipped so far."""
        return 0 if self.scaler is None else self.scaler.skipped

    def skips(self, update: int) -> bool:
        """Whether an update is skipped, because a gradient of some stage is not finite."""
        return self.scaler is not None and self.scaler.skips(update)

    def clip(self, update: int, parameters: list[nn.Parameter]) -> None:
        """Clip the gradients of parameters for an update.

        Args:
            update: Number of the update.
            parameters: The parameters of the stage; those without a gradient are left out.
        """
        found = [p for p in parameters if p.grad is not None]
        if not found or self._clip is None:
            return
        if self._clip.value is not None:
            nn.utils.clip_grad_value_(found, self._clip.value, foreach=False)
            return
        assert self._clip.norm is not None
        known = self._totals.get(update - self._delay)
        if not self._norm or known is None:
            total = nn.utils.get_total_norm(
                [p.grad for p in found if p.grad is not None], self._clip.norm_type, foreach=False
            )
        else:
            assert found[0].grad is not None
            total = torch.tensor(known, dtype=found[0].grad.real.dtype)
        nn.utils.clip_grads_with_norm_(found, self._clip.norm, total, foreach=False)
