"""The schedule and the number of micro-batches, where the user leaves them out.

What counts is the time to a loss: the samples that it takes, times the time of a sample. A schedule
that flushes takes the samples of plain training, but its workers wait: with n of them, k
micro-batches take (k + n - 1) / k times as long. An asynchronous schedule waits for nothing and
takes more samples; how many more depends on the optimizer (`samples.py`). With many
micro-batches both are cheap, and a flush then gives the bits of plain training.

Where BatchNorm sees micro-batches they must be few: with 8 of a mini-batch of 32 samples plain
training took 1.25 times the samples. So there are as many as stages; with so few, a flush costs
more than staleness does. The same holds for layers of the user's with a state, as a moving average
or a warm-up that they count, which advances with each micro-batch.

The measurements are printed by ``python benchmarks/first_touch.py table nesterov nesterov-sgd-2n
choice batch-norm``, and by ``python benchmarks/studies/batch_norm.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from pipedream_rt.batches.cutting import keeps_state
from pipedream_rt.batches.weighing import is_known_mean
from pipedream_rt.job.options import Options
from pipedream_rt.job.samples import (
    CORRECTED,
    has_momentum,
    known_base,
    measured,
    samples_taken,
)
from pipedream_rt.messages.head import OfLoss
from pipedream_rt.schedules.plan import replicas_of
from pipedream_rt.schedules.recipes import ScheduleName

ASYNCHRONOUS: ScheduleName = "async-1f1b"
FLUSHED: ScheduleName = "1f1b"
OF_SCRIPT: ScheduleName = "gpipe"
"""What is chosen for a loss of whole mini-batches: all outputs come before the first backward."""

PER_STAGE = 4
"""Micro-batches for each stage. With fewer, a flush costs more time and staleness more samples;
with more, each is smaller and most models compute longer."""

ENOUGH = 1.05
"""Up to so many times the samples, staleness is no reason for more micro-batches."""

AHEAD = 1.1
"""How many times sooner an asynchronous schedule must reach a loss to be the default. Below that,
having the bits of one stage is worth more."""


def with_schedule(
    options: Options,
    optimizer: type | None,
    stages: int,
    modules: Iterable[nn.Module],
    of_all: bool = False,
    groups: Sequence[Mapping[str, Any]] = (),
) -> Options:
    """Choose the schedule if it is left out, and with it the number of micro-batches.

    ``of_all``: whether the loss is of the whole mini-batch, or may be. ``groups``: the options of
    the optimizer's parameter groups.
    """
    tried = options.schedule if options.is_tried else None
    if options.schedule is not None and not tried:
        # The gradient of a mini-batch comes when all of it has been forward.
        one = of_all and options.micro_batches is None and options.schedule != OF_SCRIPT
        return replace(options, micro_batches=1) if one else options
    count, given = options.micro_batches, options.layout.replicas
    few = count is not None and count < stages
    # Without training nothing is stale; with few micro-batches workers idle at a flush; the last
    # two options are for asynchronous schedules.
    asynchronous = options.corrections or options.layout.synchronous_updates
    if tried:
        few = asynchronous = False
    if of_all and (asynchronous or tried == ASYNCHRONOUS):
        return replace(options, schedule=ASYNCHRONOUS, micro_batches=1 if count is None else count)
    if optimizer is None or (few and not of_all) or asynchronous:
        return replace(options, schedule=ASYNCHRONOUS)
    # A replica computes its share of the micro-batches.
    replicas = 1 if given == "auto" else max(replicas_of(given, stages), default=1)
    corrected = is_corrected(options, optimizer, groups, replicas)
    if count is None and stages * replicas > 1:
        # One stage has no bubble that more micro-batches would fill.
        whole = stages == 1 or any(map(keeps_state, modules))
        rows = {} if of_all or tried == FLUSHED else measured(ASYNCHRONOUS, optimizer, corrected)
        few_enough = next((n for n, taken in rows.items() if taken <= ENOUGH), PER_STAGE)
        count = replicas * stages * (1 if whole else few_enough)
    if of_all:
        return replace(options, schedule=OF_SCRIPT, micro_batches=count)
    each = (count or 1) / replicas
    samples = samples_taken(ASYNCHRONOUS, optimizer, each / stages, corrected)
    sooner = 0.0 if samples is None else time_of_flush(stages, each) / samples
    schedule = tried or (ASYNCHRONOUS if sooner >= AHEAD else FLUSHED)
    return replace(options, schedule=schedule, micro_batches=count)


def is_corrected(
    options: Options, optimizer: type | None, groups: Sequence[Mapping[str, Any]], replicas: int = 1
) -> bool:
    """Whether stale gradients are corrected as they were where samples were measured."""
    if options.corrections is not None and not options.corrections:
        return False
    # Where each replica steps a part alone, no correction is possible.
    if replicas > 1 and options.layout.shard_optimizer:
        return False
    name = known_base(optimizer, CORRECTED)
    return name is None or has_momentum(name, groups)


def of_loss_by(options: Options, optimizer: type | None) -> OfLoss:
    """Return of what the loss is computed, or that the first mini-batch is to decide it.

    Of a loss that torch does not bring, nobody knows whether it is a mean over samples.
    """
    training, layout = options.training, options.layout
    if training.loss == "whole":
        return OfLoss.WHOLE
    free = options.schedule is None and options.micro_batches is None
    # What another schedule must have.
    other = layout.synchronous_updates or layout.slack or layout.stages_per_worker
    stale = options.corrections or other
    one = layout.replicas in ((), 1) or layout.replicas == "auto"
    unsaid = training.loss is None and training.weigh is None and training.check_loss > 0
    unknown = optimizer is not None and not is_known_mean(options.loss_fn)
    return OfLoss.DECIDE if unknown and free and unsaid and one and not stale else OfLoss.PARTS


def time_of_flush(stages: int, micro_batches: float) -> float:
    """Return how many times as long a flush makes a mini-batch take, if all stages are equal."""
    return (micro_batches + stages - 1) / micro_batches
