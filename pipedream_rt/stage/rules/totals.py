"""What all stages must agree on before an update: the norm of all gradients of the model.

Clipping by that norm needs it, and scaled losses need to know whether a gradient of some stage is
not finite. At its step, each stage measures the norm of each of its gradients and sends them, with
those of the stages behind it, to the stage before. Stage 0 makes the total of them, in the order of
the unsplit model, so that it has the bits of ``torch.nn.utils.clip_grad_norm_``, and sends it to
all others. It is infinite for an update that is skipped.

Where the schedule leaves enough time until an update is read, the norm is *exact*: the update waits
for its total, and is applied just before the first forward that reads it. Elsewhere it is
*delayed*: an update is clipped by the norm of the newest mini-batch whose total every stage can
have by then, which depends on the plan and not on timing (`Plan.with_norms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipedream_rt.messages.keys import Key, StepState
from pipedream_rt.schedules import EdgeKind
from pipedream_rt.schedules.edges import Address
from pipedream_rt.stage.rules.base import Context, Update, UpdateRule
from pipedream_rt.stage.values import Gifts
from pipedream_rt.torch_private import order_of_dtypes

Norms: TypeAlias = dict[int, Tensor]
"""Norms of gradients, by `place`."""

NOT_FINITE = -1
"""The place of the number that is not zero if a gradient is not finite."""

_KEY = Key("totals", path=("totals",))

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128
)  # fmt: skip


def place(number: int, gradient: Tensor) -> int:
    """Return under which number the norm of a gradient goes to other stages.

    It tells the place of the parameter in the model and the dtype, by which torch's
    ``get_total_norm`` puts norms in groups before it makes the total of them.
    """
    kind = _DTYPES.index(gradient.dtype) if gradient.dtype in _DTYPES else len(_DTYPES)
    return number * _KINDS + kind


_KINDS = len(_DTYPES) + 1


def _in_groups(places: list[int]) -> list[int]:
    """Return places in the order in which torch adds up what stands there: dtype by dtype."""
    kinds = dict.fromkeys(each % _KINDS for each in places)
    if len(kinds) > 1 and len(_DTYPES) not in kinds:
        # Torch groups by a hash map, whose order nobody states, so it is asked.
        stand_ins = [torch.empty(0, dtype=_DTYPES[each % _KINDS]) for each in places]
        kinds = dict.fromkeys(map(_DTYPES.index, order_of_dtypes(stand_ins)))
    return [each for kind in kinds for each in places if each % _KINDS == kind]


class Totals(UpdateRule):
    """The totals of one stage. Who needs one says how gradients are measured for it."""

    channels = (EdgeKind.NORM, EdgeKind.TOTAL)

    def __init__(self, context: Context) -> None:
        plan = context.plan
        self._is_first = context.stage == 0
        self._measures: list[Callable[[Update], Norms]] = []
        self._norm_type = 2.0
        # A checkpoint has those that updates after it need.
        self._remembered = 2 * plan.delay + 2 + max(plan.replicas)
        self._newest = -1
        self._known: dict[int, float | Tensor] = {}
        self._told: list[Callable[[int, float], None]] = []
        self._behind: Norms = {}

    def measured_by(
        self, measure: Callable[[Update], Norms], norm_type: float | None = None
    ) -> None:
        """Let the totals be made of further norms.

        Args:
            measure: Returns the norms of the gradients of an update.
            norm_type: The p of the p-norm; None for numbers that are no norms.
        """
        self._measures.append(measure)
        self._norm_type = self._norm_type if norm_type is None else norm_type

    def tell(self, listener: Callable[[int, float], None]) -> None:
        """Call a function with every update and its total, as soon as that is known."""
        self._told.append(listener)

    def receive(self, kind: EdgeKind, sender: Address, value: Any) -> None:
        """Take the norms of the stages behind, or a total."""
        if kind is EdgeKind.NORM:
            self._behind = dict(value)
        else:
            self._learn(*value)

    def collect(self, update: Update) -> Gifts:
        """Measure the gradients, and make the total on stage 0."""
        norms, self._behind = self._behind, {}
        for measure in self._measures:
            for number, norm in measure(update).items():
                before = norms.get(number) if number == NOT_FINITE else None
                norms[number] = norm if before is None else before + norm
        if not self._is_first:
            return {EdgeKind.NORM: norms}
        total = self._total(norms)
        self._learn(update.number, total)
        return {EdgeKind.NORM: norms, EdgeKind.TOTAL: (update.number, total)}

    def _total(self, norms: Norms) -> float | Tensor:
        """Return the total of all norms; on a device it stays there, if nobody has to know it."""
        ordered = [norms[each] for each in _in_groups(sorted(norms.keys() - {NOT_FINITE}))]
        if NOT_FINITE in norms and norms[NOT_FINITE].item():
            return math.inf
        if not ordered:
            return 0.0
        found = torch.linalg.vector_norm(torch.stack(ordered), self._norm_type)
        return float(found) if found.is_cpu else found

    def _learn(self, update: int, total: float | Tensor) -> None:
        """Note a total, and forget those that no update needs any more."""
        if update <= self._newest:  # it was known
            return
        self._newest = update
        self._known[update] = total
        for listener in self._told:
            listener(update, float(total))
        for old in [u for u in self._known if u < update - self._remembered]:
            del self._known[old]

    def of(self, update: int) -> float | Tensor | None:
        """Return the total of an update, a tensor where a device has made it; None for unknown."""
        return self._known.get(update)

    def state(self) -> StepState:
        """Return the totals that later updates may need; on stage 0, for all."""
        if not self._is_first or not self._known:
            return {}
        return {_KEY: [[update, float(total)] for update, total in sorted(self._known.items())]}

    def load_state(self, state: Mapping[Key, Any], step: int) -> None:
        """Go on with the totals of updates before the checkpoint."""
        self._known.clear()
        self._newest = -1
        for update, total in state.get(_KEY, []):
            if update < step:
                self._learn(update, total)
