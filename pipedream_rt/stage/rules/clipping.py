"""Clipping gradients before an update: by value, by the norm of a stage, by that of the model.

The norm of the model's gradients comes with the totals (`totals.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.rules.rule import Context, RuleOption, Update, UpdateRule
from pipedream_rt.stage.rules.totals import Norms, Totals, place
from pipedream_rt.torch_private import norms_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(RuleOption):
    """How gradients are clipped before each update, as by `torch.nn.utils.clip_grad_norm_`.

    Attributes:
        norm: The largest norm of gradients; larger ones are scaled down by one factor.
        value: The largest absolute value of an element of a gradient; give this or ``norm``.
        over: What the norm is taken over: all gradients of the ``"model"``, or those of each
            ``"stage"`` by itself.
        norm_type: The p of the p-norm; may be ``inf``.

    Raises:
        ConfigError: A value makes no sense, or both or neither of ``norm`` and ``value`` are given.
    """

    norm: float | None = field(default=None, kw_only=False)
    value: float | None = None
    over: Literal["model", "stage"] = "model"
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        """Check the values."""
        if (self.norm is None) == (self.value is None):
            raise ConfigError("Clip needs norm= or value=, and not both")
        for name in ("norm", "value", "norm_type"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and value > 0):
                raise ConfigError(f"{name} of Clip must be a positive number, not {value!r}")
        if self.over not in ("model", "stage"):
            raise ConfigError(f'over of Clip must be "model" or "stage", not {self.over!r}')

    def rule(self, context: Context) -> Clipping:
        """Return the rule that clips on one stage."""
        return Clipping(self, context)

    def needs_totals(self, num_stages: int) -> bool:
        """Whether it clips by a norm over several stages."""
        return self.of_model and num_stages > 1

    @property
    def of_model(self) -> bool:
        """Whether it clips by the norm of all gradients of the model."""
        return self.norm is not None and self.over == "model"


class Clipping(UpdateRule):
    """The clipping of the gradients of one stage."""

    def __init__(self, clip: Clip, context: Context) -> None:
        self._clip = clip
        self._named, self._numbers = context.named, context.numbers
        self._totals: Totals | None = None
        self._alone = clip.of_model and context.plan.num_stages == 1
        self._norms: deque[tuple[int, Tensor]] = deque(maxlen=2)
        if clip.needs_totals(context.plan.num_stages):
            assert isinstance(context.totals, Totals)
            self._totals = context.totals
            self._totals.measured_by(self._measure, clip.norm_type)

    def _measure(self, update: Update) -> Norms:
        """Return the norm of each gradient."""
        found = {
            place(self._numbers[name], gradient): gradient
            for name, gradient in zip(self._named, update.gradients, strict=True)
            if gradient is not None
        }
        norms = norms_of(list(found.values()), self._clip.norm_type) if found else []
        return dict(zip(found, norms, strict=True))

    def change(self, update: Update) -> None:
        """Clip the gradients, which are on the parameters."""
        found = [p for p in self._named.values() if p.grad is not None]
        if update.skipped or not found:
            return
        if self._clip.value is not None:
            nn.utils.clip_grad_value_(found, self._clip.value)
            return
        assert self._clip.norm is not None
        total = None if self._totals is None else self._totals.of(update.number)
        # The stage clips by its own norm, or is the only one.
        if total is None:
            total = nn.utils.get_total_norm(
                [p.grad for p in found if p.grad is not None], self._clip.norm_type
            )
            self._norms.append((update.number, total))
        nn.utils.clip_grads_with_norm_(found, self._clip.norm, total)

    def statistics(self) -> dict[str, Any]:
        """Return the norms of the last two updates, where this is the only stage."""
        newest = [[update, float(norm)] for update, norm in self._norms]
        return {"grad_norms": newest} if self._alone else {}
