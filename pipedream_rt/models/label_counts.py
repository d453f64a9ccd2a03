"""How many labels a model's own loss is a mean over, read from its recorded forward.

A model of transformers computes the mean of cross entropies over labels. Labels of -100 do not
count, and the first label of each text is often dropped. The recorded forward shows which labels
the cross entropy gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipedream_rt.models.program import Program, Slot, Step, filled, numbered, put

CROSS_ENTROPIES = (F.cross_entropy, F.nll_loss)
"""Losses that are means over the labels that count."""

IGNORED = -100
"""The label that does not count, if ``ignore_index`` is not given."""


class LabelCount(NamedTuple):
    """How to count the labels of a forward.

    Attributes:
        steps: The steps that make the labels from the inputs, in order.
        slot: The slot of the labels.
        ignored: The label that does not count.
        mean: The slot of the mean over the others.
    """

    steps: tuple[Step, ...]
    slot: int
    ignored: int
    mean: int

    def of(self, inputs: Sequence[Tensor], numbers: Sequence[int] = ()) -> int:
        """Return how many labels count, given the tensors of a micro-batch and its numbers."""
        values: dict[int, Any] = {**dict(enumerate(inputs)), **numbered(numbers)}
        with torch.no_grad():
            for step in self.steps:
                assert callable(step.target)
                args, kwargs = filled((step.args, step.kwargs), values, {})
                put(step, step.target(*args, **kwargs), values)
        return int((values[self.slot] != self.ignored).sum())


def label_count_of(program: Program) -> LabelCount | None:
    """Return how to count the labels of a program's loss.

    None if the program has not one unweighted mean of cross entropies, or its labels do not come
    from the inputs alone.
    """
    means = [step for step in program.steps if step.target in CROSS_ENTROPIES]
    if len(means) != 1:
        return None
    (mean,) = means
    weighted = len(mean.args) > 2 or mean.kwargs.get("weight") is not None
    if weighted or not is_mean(mean.kwargs):
        return None
    target = mean.args[1] if len(mean.args) > 1 else mean.kwargs.get("target")
    if not isinstance(target, Slot):
        return None
    made_by = {slot: step for step in program.steps for slot in step.filled}
    needed: list[Step] = []
    waiting = [target.number]
    while waiting:
        step = made_by.get(waiting.pop())
        if step is None or step in needed:
            continue
        # Only such steps give the same labels when they are done alone, beside the forward.
        if not (step.free and callable(step.target)) or step.changes or step.after:
            return None
        needed.append(step)
        waiting += step.taken
    ordered = tuple(step for step in program.steps if step in needed)
    ignored = mean.kwargs.get("ignore_index", IGNORED)
    return LabelCount(ordered, target.number, ignored, mean.filled[0])


def is_mean(given: Mapping[str, Any]) -> bool:
    """Whether the arguments of a cross entropy ask for a mean over labels."""
    # Deprecated names, which override ``reduction``.
    old = any(given.get(name) is not None for name in ("size_average", "reduce"))
    return not old and given.get("reduction", "mean") == "mean"
