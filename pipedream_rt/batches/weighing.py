"""The weight of a micro-batch in its mini-batch, and of a mini-batch in an evaluation.

The loss of a mini-batch is a mean: over its samples, or over the labels that count. The loss of
each micro-batch is multiplied by its share of these, so that together they give the gradient of
that mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipedream_rt.batches.cutting import samples_in, samples_of
from pipedream_rt.batches.items import Batch
from pipedream_rt.errors import ConfigError
from pipedream_rt.models.label_counts import CROSS_ENTROPIES, IGNORED, is_mean

Weigh: TypeAlias = Callable[..., Any]
"""A function of what a loader yields: ``x, y``, a dict, or ``args, kwargs, y``."""


_Counted: TypeAlias = Callable[[Any], "float | None"]
"""Returns the weight of a target in the mean of its loss; None if that is over samples."""


class Weighing:
    """Weighs batches by the user's function; else by the labels that count, if known.

    Attributes:
        is_given: Whether the user has given a function.
        counts: Whether `counted` has to look at a batch; else the labels count that the model
            names.
    """

    def __init__(self, weigh: Weigh | None, loss_fn: object = None) -> None:
        if weigh is not None and not callable(weigh):
            raise ConfigError(
                "weigh must be a function of a mini-batch that returns a number, as "
                f"lambda x, y: (y != -100).sum(), not {weigh!r}"
            )
        self._weigh = weigh
        self._counted = _counted_by(loss_fn)
        self.is_given = weigh is not None
        self.counts = self.is_given or self._counted is not None

    def for_loss(self, loss_fn: object) -> Weighing:
        """Return the weighing for another loss; the user's function holds for it too."""
        return Weighing(self._weigh, loss_fn)

    def counted(self, batch: Batch, labels: int | None) -> float | None:
        """Return the weight of a micro-batch or a mini-batch; None for its number of samples."""
        if self._weigh is None:
            if labels is None and self._counted is not None:
                return self._counted(batch.target)
            return labels
        try:
            found = self._weigh(*parts_of(batch))
            weight = float(found.item() if isinstance(found, Tensor) else found)
        except Exception as error:  # the user's code
            raise ConfigError(
                f"weigh raised {type(error).__name__}: {error}; it is called with what the loader "
                "yields: weigh(x, y), weigh(batch) for a dict, or weigh(args, kwargs, y)"
            ) from error
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"weigh must return a number of at least 0, it returned {found!r}")
        return weight


def is_known_mean(loss_fn: object) -> bool:
    """Whether a loss is one of torch's own, which are means over samples as they come."""
    if isinstance(loss_fn, nn.Module):
        of_torch = type(loss_fn).__module__ == nn.modules.loss.__name__
        return of_torch and is_mean(vars(loss_fn))
    function: Any = loss_fn
    options: Mapping[str, Any] = {}
    if isinstance(loss_fn, functools.partial):
        function, options = loss_fn.func, loss_fn.keywords
    of_torch = function is getattr(nn.functional, getattr(function, "__name__", ""), None)
    return callable(function) and of_torch and is_mean(options)


def _counted_by(loss_fn: object) -> _Counted | None:
    """Return a counter of the labels of a cross entropy of torch; None for any other loss."""
    if type(loss_fn) in (nn.CrossEntropyLoss, nn.NLLLoss):
        options = {name: getattr(loss_fn, name) for name in ("weight", "ignore_index", "reduction")}
    elif isinstance(loss_fn, functools.partial) and loss_fn.func in CROSS_ENTROPIES:
        options = loss_fn.keywords
    elif callable(loss_fn) and loss_fn in CROSS_ENTROPIES:
        options = {}
    else:
        return None
    if not is_mean(options):
        return None
    ignored, weight = options.get("ignore_index", IGNORED), options.get("weight")

    def counted(target: Any) -> float | None:
        """Count the labels, each as its class weighs; a target of probabilities has none."""
        if not isinstance(target, Tensor) or target.is_floating_point():
            return None
        counts = target != ignored
        return int(counts.sum()) if weight is None else float(weight[target[counts]].sum())

    return counted


def has_ignored(tensors: Iterable[Tensor]) -> bool:
    """Whether there is a label among some tensors that does not count, by torch's convention."""
    integers = (t for t in tensors if t.dtype in (torch.int64, torch.int32))
    return any(bool((t == IGNORED).any()) for t in integers)


def parts_of(batch: Batch) -> tuple[Any, ...]:
    """Return a mini-batch in the parts in which the loader yielded it; see `batch_of`."""
    if not batch.args and isinstance(batch.target, dict):
        return (batch.target,)
    if len(batch.args) == 1 and not batch.kwargs:
        return batch.args[0], batch.target
    return batch.args, batch.kwargs, batch.target


def shares_of(weights: Sequence[float], samples: Sequence[int]) -> list[float]:
    """Return the share of each micro-batch by weight; by samples where all weigh nothing.

    Without samples too, equal shares.
    """
    # If all labels are ignored, shares by samples make the loss what that of the whole would be.
    counted = next((each for each in (weights, samples) if sum(each)), [1] * len(weights))
    total: float = sum(counted)
    return [each / total for each in counted]


class Samples:
    """Refuses to weigh mini-batches by samples where the number of samples is ambiguous."""

    def __init__(self) -> None:
        self._first: tuple[int, int] | None = None

    def require_clear(self, batch: Batch) -> None:
        """Look at one more mini-batch, with its marks; refuse one that is not clear."""
        x, y = samples_of(batch), samples_in(batch.target)
        if x is None or y is None:
            return
        # Time may come first in an input, or the nodes of several graphs. That matters where
        # mini-batches differ in size: inputs and targets must then grow alike.
        self._first = first = self._first or (x, y)
        if x * first[1] != y * first[0]:
            raise ConfigError(
                f"the first dimension of the inputs is {first[0]} in the first mini-batch and {x} "
                f"in this one, that of the targets {first[1]} and {y}, so it is not clear what "
                "each weighs in the mean. Say it by Training(weigh=lambda x, y: len(y)), or mark "
                "the input in the loader, pipedream_rt.Along(x, dim=1) where time comes first"
            )


class WeighedMean:
    """A mean of numbers with weights."""

    def __init__(self) -> None:
        self.count = 0
        self._total = self._weight = 0.0

    def add(self, value: float, weight: float) -> None:
        """Add a number; what weighs nothing may be NaN."""
        self.count += 1
        if weight:
            self._total += value * weight
            self._weight += weight

    @property
    def value(self) -> float:
        """The mean; NaN of nothing."""
        return self._total / self._weight if self._weight else math.nan
