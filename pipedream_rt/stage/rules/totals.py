"""The number that stages agree on before an update: the norm of all gradients of the model.

Clipping needs that norm, and scaled losses need to know whether a gradient of any stage is not
finite. At its step, each stage measures the norm of each of its gradients and sends them, with
those of the stages behind it, to the stage before. Stage 0 makes the total, in the order of the
unsplit model, so that it has the bits of ``torch.nn.utils.clip_grad_norm_``, and sends it to all
others. The total is infinite for an update that is skipped.

Where the schedule leaves enough time until an update is read, the norm is *exact*: the update waits
for its total, and is applied just before the first forward that reads it. Elsewhere the norm is
*estimated*, except on stage 0, which has it. At its step, stage s knows the norm of the gradients
of the stages s, s+1, ... in update t, here called known(t), and the totals of the updates up to
t - D. It assumes that the gradients which it does not know yet have grown as the others have::

    total(t)  ~  known(t) * total(u) / known(u),    u = t - D

If total(u) / known(u) is missing or not finite, u is the newest update from t - 2 D on where it is
finite; if there is none, known(t) is taken. All of this depends on the plan and not on timing
(`Plan.with_norms`). An older total alone would miss gradients that are suddenly large, which is
what clipping is for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipedream_rt.messages.state_keys import StateKey, StepState
from pipedream_rt.schedules import EdgeKind, Plan
from pipedream_rt.schedules.edges import Address, Edge
from pipedream_rt.stage.rules.rule import Context, Packed, Update, UpdateRule
from pipedream_rt.stage.values import Outgoing
from pipedream_rt.torch_private import order_of_dtypes

Norms: TypeAlias = dict[int, Tensor]
"""Norms of gradients, by `place`."""

NOT_FINITE = -1
"""The slot of a flag among the norms: it is not zero if a gradient is not finite."""

_KEY = StateKey("totals", path=("totals",))


def _known_at(plan: Plan, stage: int) -> StateKey:
    """Return the key of the norms over all layers from the first one of a stage on."""
    # The stage is in the key too: a layer called on several stages may be the first one of each.
    return StateKey("totals", path=("known", stage, plan.layers[stage][0] if plan.layers else ""))


_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128
)  # fmt: skip


def place(number: int, gradient: Tensor) -> int:
    """Return the number of a gradient's norm: its parameter's place in the model, and its dtype.

    The dtype is there because torch's ``get_total_norm`` groups gradients by it.
    """
    kind = _DTYPES.index(gradient.dtype) if gradient.dtype in _DTYPES else len(_DTYPES)
    return number * _KINDS + kind


_KINDS = len(_DTYPES) + 1


def _in_groups(places: list[int]) -> list[int]:
    """Return places in the order in which torch combines their norms: dtype by dtype."""
    kinds = dict.fromkeys(each % _KINDS for each in places)
    if len(kinds) > 1 and len(_DTYPES) not in kinds:
        # Torch groups by a hash map, whose order is not documented, so torch is asked for it.
        stand_ins = [torch.empty(0, dtype=_DTYPES[each % _KINDS]) for each in places]
        kinds = dict.fromkeys(map(_DTYPES.index, order_of_dtypes(stand_ins)))
    return [each for kind in kinds for each in places if each % _KINDS == kind]


class Totals(UpdateRule):
    """The totals that one stage knows. The rules that need one say how gradients are measured."""

    channels = (EdgeKind.NORM, EdgeKind.TOTAL)
    keeps = "run"

    def __init__(self, context: Context) -> None:
        plan = context.plan
        self._is_first = context.stage == 0
        # D, if this stage estimates; 0 if it has each update's own total.
        self._delay = plan.delay if plan.norms == "estimated" and context.stage else 0
        self._dtype, self._key = context.norm_dtype, _known_at(plan, context.stage)
        # By update, the norm of the gradients of this stage and of those behind it: known(t).
        self._of_known: dict[int, float | Tensor] = {}
        self._measures: list[Callable[[Update], Norms]] = []
        self._norm_type = 2.0
        # How many updates back norms are kept, so that a checkpoint has all that later ones need.
        self._remembered = 2 * plan.delay + 2 + max(plan.replicas)
        self._newest = -1
        self._known: dict[int, float | Tensor] = {}
        self._listeners: list[Callable[[int, float], None]] = []
        self._behind: Norms = {}

    def measured_by(
        self, measure: Callable[[Update], Norms], norm_type: float | None = None
    ) -> None:
        """Add a measure of gradients; it has no ``norm_type`` if what it measures is no norm."""
        self._measures.append(measure)
        self._norm_type = self._norm_type if norm_type is None else norm_type

    def tell(self, listener: Callable[[int, float], None]) -> None:
        """Call a function with each update and its total, as soon as it is known."""
        self._listeners.append(listener)

    def pack(self, edge: Edge, value: Any) -> Packed:
        if edge.kind is EdgeKind.NORM:
            norms = torch.stack(list(value.values())) if value else torch.empty(0, device="cpu")
            return Packed(list(value), (norms,))
        _, total = value
        return Packed([total], ()) if isinstance(total, float) else Packed([], (total,))

    def open(self, edge: Edge, number: int, packed: Packed) -> Norms | tuple[int, float | Tensor]:
        values, tensors = packed
        if edge.kind is EdgeKind.NORM:
            return dict(zip(values, tensors[0].unbind(), strict=True))
        # A total on an accelerator stays a tensor, so that the host need not wait for it.
        (total,) = tensors or values
        is_there = isinstance(total, float) or not total.is_cpu
        return number, total if is_there else float(total)

    def receive(self, kind: EdgeKind, sender: Address, value: Any) -> None:
        """Take the norms of the stages behind, or a total."""
        if kind is EdgeKind.NORM:
            self._behind = dict(value)
        else:
            self._learn(*value)

    def collect(self, update: Update) -> Outgoing:
        """Measure the gradients, and on stage 0 make the total."""
        norms, self._behind = self._behind, {}
        for measure in self._measures:
            for number, norm in measure(update).items():
                before = norms.get(number) if number == NOT_FINITE else None
                norms[number] = norm if before is None else before + norm
        if self._delay and norms.keys() - {NOT_FINITE}:
            self._of_known[update.number] = self._norm(norms)
            self._forget(self._of_known, update.number)
        if not self._is_first:
            return {EdgeKind.NORM: norms}
        total = self._total(norms)
        self._learn(update.number, total)
        return {EdgeKind.NORM: norms, EdgeKind.TOTAL: (update.number, total)}

    def _total(self, norms: Norms) -> float | Tensor:
        """Return the total of all norms; infinite if a gradient is not finite."""
        if NOT_FINITE in norms and norms[NOT_FINITE].item():
            return math.inf
        return self._norm(norms)

    def _norm(self, norms: Norms) -> float | Tensor:
        """Return the norm of all gradients, in the order in which torch combines their norms."""
        ordered = [norms[each] for each in _in_groups(sorted(norms.keys() - {NOT_FINITE}))]
        if not ordered:
            return 0.0
        found = torch.linalg.vector_norm(torch.stack(ordered), self._norm_type)
        # On an accelerator it stays there, so that this thread does not wait for the device.
        return float(found) if found.is_cpu else found

    def _learn(self, update: int, total: float | Tensor) -> None:
        if update <= self._newest:  # it was known
            return
        self._newest = update
        self._known[update] = total
        for listener in self._listeners:
            listener(update, float(total))
        self._forget(self._known, update)

    def _forget(self, norms: dict[int, float | Tensor], update: int) -> None:
        """Forget the norms that no update after this one needs."""
        for old in [each for each in norms if each < update - self._remembered]:
            del norms[old]

    def of(self, update: int) -> Tensor | None:
        """Return the total, exact or estimated, that clips an update, where the gradients are.

        It is None if no stage from this one on has gradients.
        """
        own = (self._of_known if self._delay else self._known).get(update)
        if own is None:
            return None
        device = own.device if isinstance(own, Tensor) else torch.device("cpu")
        as_tensor = functools.partial(torch.as_tensor, dtype=self._dtype, device=device)
        known = found = as_tensor(own)
        # In rising order, so that the newest update with a finite ratio decides.
        for before in range(update - 2 * self._delay, update - self._delay + 1):
            if before in self._known and before in self._of_known:
                grown = as_tensor(self._known[before]) / as_tensor(self._of_known[before])
                found = torch.where(grown.isfinite(), known * grown, found)
        return found

    def statistics(self) -> dict[str, Any]:
        """Return the totals of the last updates, from stage 0, which knows them first."""
        newest = sorted(self._known.items()) if self._is_first else []
        return {"grad_norms": [[update, float(total)] for update, total in newest]}

    def state(self) -> StepState:
        """Return the norms that later updates may need; stage 0 keeps the totals for all."""
        kept = {_KEY: self._known if self._is_first else {}, self._key: self._of_known}
        return {
            key: [[update, float(norm)] for update, norm in sorted(norms.items())]
            for key, norms in kept.items()
            if norms
        }

    def load_state(self, state: Mapping[StateKey, Any], step: int) -> None:
        self._known.clear()
        self._newest = -1
        for update, total in state.get(_KEY, []):
            if update < step:
                self._learn(update, total)
        self._of_known = {u: norm for u, norm in state.get(self._key, []) if u < step}
