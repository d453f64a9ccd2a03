"""Cutting mini-batches into micro-batches: what is fed of each, and the factor of its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from pipedream_rt.batches.cutting import (
    Lists,
    cut_batch,
    is_cut_elsewhere,
    micro_batch_sizes,
    samples_of,
    unmarked,
)
from pipedream_rt.batches.forwards import TOTAL, Cache, Forwards
from pipedream_rt.batches.items import Accumulated, Batch
from pipedream_rt.batches.weighing import Samples, Weighing, has_ignored, shares_of
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.head import WITH_LOSS, Mode, OfLoss
from pipedream_rt.messages.tree import NOTHING, Value, flat_copy, flatten


class MicroBatch(NamedTuple):
    """A micro-batch that is to be fed: copies of its inputs and its target.

    Attributes:
        program: The number of the program that it follows.
        samples: 0 for an empty one, which fills up a short mini-batch.
        weight: Its weight in a mean of losses, such as its samples or the labels that count.
        share: The factor of its loss.
        only_labels: Whether the model's own loss is a mean over labels and nothing else.
        numbers: The numbers of the program that follow from the sizes of its inputs.
        loss: What its loss is computed of.
    """

    program: int
    inputs: Value
    target: Value
    samples: int = 1
    weight: float = 1.0
    share: float = 1.0
    only_labels: bool = False
    numbers: tuple[int, ...] = ()
    loss: OfLoss = OfLoss.PARTS


EMPTY = MicroBatch(0, NOTHING, NOTHING, samples=0, weight=0, share=0.0)


class CutBatch(NamedTuple):
    """A mini-batch in micro-batches.

    Attributes:
        batch: The mini-batch that was cut, with its total if the model takes that; of several
            parts, the first.
        parts: The micro-batches, with empty ones at the end of a short mini-batch.
        told: Whether the model has divided losses by the total already: then they only add up.
        first_part: The first part, cut alone, where the mini-batch is of several parts; else None.
    """

    batch: Batch
    parts: list[MicroBatch]
    told: bool = False
    first_part: CutBatch | None = None

    @property
    def filled(self) -> dict[int, MicroBatch]:
        """The micro-batches with samples, by place in ``parts``."""
        return {i: part for i, part in enumerate(self.parts) if part.samples}

    @property
    def is_whole(self) -> bool:
        """Whether its loss is computed of all its micro-batches together."""
        return self.parts[0].loss is OfLoss.WHOLE

    @property
    def with_loss(self) -> list[int]:
        """The places of the micro-batches that have a loss: the last one has that of the whole."""
        filled = self.filled
        return [max(filled)] if self.is_whole else [i for i, part in filled.items() if part.share]

    def first(self, count: int) -> list[tuple[Batch, int]]:
        """Return the first ``count`` micro-batches as one, then each alone; with their samples."""
        sizes = [part.samples for part in list(self.filled.values())[:count]]
        rest = sum(part.samples for part in self.filled.values()) - sum(sizes)
        whole = cut_batch(self.batch, [sum(sizes), rest])[0]
        parts = cut_batch(self.batch, [*sizes, rest])[:-1]
        return [(whole, sum(sizes)), *zip(parts, sizes, strict=True)]


class Cutter:
    """Cuts mini-batches; ``pairs`` says which of them need two samples in each micro-batch."""

    def __init__(
        self,
        forwards: Forwards,
        weighing: Weighing,
        per_update: int,
        pairs: Callable[[Batch], bool] = lambda batch: False,
    ) -> None:
        self._pairs, self._lists = pairs, Lists()
        self._forwards = forwards
        self._weighing = weighing
        self._per_update = per_update

    def part(
        self,
        batch: Batch,
        mode: Mode,
        training: bool | None,
        samples: int = 1,
        clear: Samples | None = None,
        other: Weighing | None = None,
    ) -> MicroBatch:
        """Flatten a copy of a micro-batch: the caller may change its tensors afterwards.

        ``other`` weighs it for another loss than that of training.
        """
        marked, batch = batch, unmarked(batch)
        inputs = flat_copy(self._forwards.inputs(batch))
        # With another loss, the model need not compute its own.
        kind = mode if other is None else Mode.INFER
        program, labels, only_labels, numbers = self._forwards.follow(inputs, kind, training)
        if mode not in WITH_LOSS:
            return MicroBatch(program, inputs, NOTHING, numbers=numbers)
        weighing = other or self._weighing
        weight = weighing.counted(batch, labels) if weighing.counts else labels
        if weight is None and clear is not None:
            clear.require_clear(marked)
        return MicroBatch(
            program=program,
            inputs=inputs,
            target=flat_copy(batch.target),
            samples=samples,
            weight=samples if weight is None else weight,
            only_labels=only_labels,
            numbers=numbers,
        )

    def cached(self, batch: Batch, cache: Cache, length: int) -> MicroBatch:
        """Flatten a copy of the inputs of one forward of a generation."""
        inputs = flat_copy(self._forwards.inputs(batch))
        return MicroBatch(self._forwards.cached(inputs, cache, length), inputs, NOTHING)

    def cut(
        self, batch: Batch | Accumulated, training: bool | None, adds: bool = False
    ) -> CutBatch:
        """Cut a mini-batch for training; ``adds`` says that the losses of a part only add up."""
        k = self._per_update
        if isinstance(batch, Batch):
            return self._cut(batch, k, training)
        if len(batch.parts) > batch.of:
            raise ConfigError(
                f"an accumulated mini-batch has {len(batch.parts)} parts, and at most {batch.of} "
                "were announced; give of= the number of its parts"
            )
        if batch.of > k:
            raise ConfigError(
                f"an accumulated mini-batch of up to {batch.of} parts needs at least {batch.of} "
                f"micro-batches, and is cut into {k}; give micro_batches={batch.of} or more"
            )
        found = [
            self._cut(part, k // batch.of + (i < k % batch.of), training, adds)
            for i, part in enumerate(batch.parts)
        ]
        if batch.of == 1 and batch.factor == 1:
            return found[0]
        parts = [
            part._replace(share=part.share * batch.factor)
            for cut in found
            for part in cut.filled.values()
        ]
        parts += [EMPTY] * (k - len(parts))
        return found[0]._replace(parts=parts, first_part=found[0])

    def uncut(self, batch: Batch, training: bool | None) -> CutBatch:
        """Return a mini-batch as one micro-batch, followed by empty ones."""
        cut = self._cut(batch, 1, training)
        return cut._replace(parts=[*cut.parts, *[EMPTY] * (self._per_update - 1)])

    def parts(self, batch: Batch, count: int, training: bool | None) -> list[MicroBatch]:
        """Return the micro-batches, up to ``count``, of a forward to train on."""
        return [*self._cut(batch, count, training).filled.values()]

    def _cut(self, batch: Batch, k: int, training: bool | None, adds: bool = False) -> CutBatch:
        """Cut a mini-batch, or a part of one, into some number of micro-batches."""
        samples = samples_of(batch)
        if samples == 0:
            raise ConfigError("a mini-batch without samples cannot be trained on")
        if samples is None and k > 1:
            flatten(tuple(unmarked(batch)))  # raises for what cannot be sent at all
            raise ConfigError(
                "the mini-batch has no tensor with a dimension, so it cannot be cut into "
                f"{k} micro-batches; give tensors of (samples, ...), mark a list by Along(list), "
                'or give micro_batches=1, schedule="gpipe"'
            )
        if k == 1 or samples is None:
            return CutBatch(batch, [self.part(batch, Mode.TRAIN, training, samples or 1)])
        self._lists.refuse_unclear(batch, samples)
        sizes = micro_batch_sizes(samples, k)
        # BatchNorm over samples alone cannot be trained on a single sample.
        if 1 in sizes and sizes[0] > 1 and self._pairs(batch):
            sizes = micro_batch_sizes(samples, k, pairs=True)
        parts = self._parts(batch, sizes, training)
        if adds:
            return CutBatch(batch, parts, told=True)
        weights = [part.weight for part in parts]
        if not self._forwards.takes_total or TOTAL in batch.kwargs or sizes[0] == samples:
            shares = shares_of(weights, sizes)
            return CutBatch(
                batch, [p._replace(share=share) for p, share in zip(parts, shares, strict=True)]
            )
        # Cut once more, since the total is known only when all micro-batches were weighed. On the
        # CPU, whatever default device the script has set.
        total = {TOTAL: torch.tensor(sum(weights), device="cpu")}
        batch = Batch(batch.args, batch.kwargs | total, batch.target)
        return CutBatch(batch, self._parts(batch, sizes, training), told=True)

    def _parts(self, batch: Batch, sizes: Sequence[int], training: bool | None) -> list[MicroBatch]:
        return [
            self.part(each, Mode.TRAIN, training, size) if size else EMPTY
            for each, size in zip(cut_batch(batch, sizes), sizes, strict=True)
        ]


class LossChecks:
    """Chooses mini-batches whose loss is compared with those of their micro-batches.

    These are the first ``count``, and the first with ignored labels, which often comes later.
    """

    def __init__(self, count: int) -> None:
        self._left = count
        self._looks_for_ignored = count > 0
        self._taken: set[int] = set()  # their numbers, until their losses came

    def takes(self, cut: CutBatch, number: int) -> bool:
        """Whether to compare a mini-batch; call it once for each, in order."""
        if len(cut.filled) < 2 or is_cut_elsewhere(cut.batch):
            return False
        is_ignored = self._looks_for_ignored and any(
            has_ignored((*part.inputs.tensors, *part.target.tensors))
            for part in cut.filled.values()
        )
        if is_ignored:
            self._looks_for_ignored = False
        self._left -= (is_first := self._left > 0)
        if is_first or is_ignored:
            self._taken.add(number)
        return number in self._taken

    def came(self, number: int, losses: Iterable[float]) -> None:
        """Choose one more mini-batch if the losses of a chosen one were not finite."""
        if number in self._taken:
            self._taken.remove(number)
            self._left += not all(map(math.isfinite, losses))
