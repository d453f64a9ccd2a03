"""The schedule and the number of micro-batches, where the user leaves them out.

What counts is the time to a loss: the samples that it takes, times the time of a sample. A schedule
that flushes takes the samples of plain training, but its workers wait: with n of them, k
micro-batches take (k + n - 1) / k times as long. An asynchronous schedule waits for nothing and
takes more samples; how many more depends on the optimizer (`corrections/advice.py`). With many
micro-batches both are cheap, and a flush then gives the bits of plain training.

Where BatchNorm sees micro-batches they must be few: with 8 of a mini-batch of 32 samples plain
training took 1.25 times the samples. So there are as many as stages; with so few, a flush costs
more than staleness does. The same holds for layers of the user's with a state, as a moving average
or a warm-up that they count, which advances with each micro-batch.

The measurements are printed by ``python benchmarks/first_touch.py table choice batch-norm``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from pipedream_rt.batches.cutting import keeps_state
from pipedream_rt.corrections.advice import samples_taken
from pipedream_rt.job.options import Options
from pipedream_rt.schedules.plan import replicas_of
from pipedream_rt.schedules.recipes import ScheduleName

ASYNCHRONOUS: ScheduleName = "async-1f1b"
FLUSHED: ScheduleName = "1f1b"
OF_SCRIPT: ScheduleName = "gpipe"
"""What is chosen where the script computes the loss: all outputs come before the first backward."""

PER_STAGE = 4
"""Micro-batches for each stage. With fewer, a flush costs more time and staleness more samples;
with more, each is smaller and most models compute longer."""

AHEAD = 1.1
"""How many times sooner an asynchronous schedule must reach a loss to be the default. Below that,
having the bits of one stage is worth more."""


def with_schedule(
    options: Options,
    optimizer: type | None,
    stages: int,
    modules: Iterable[nn.Module],
    in_script: bool = False,
) -> Options:
    """Choose the schedule if it is left out, and with it the number of micro-batches.

    ``in_script``: whether the script computes the loss, which is of the whole mini-batch.
    """
    if options.schedule is not None:
        # The gradient of a mini-batch comes from the script when all of it has been forward.
        one = in_script and options.micro_batches is None
        return replace(options, micro_batches=1) if one else options
    count, given = options.micro_batches, options.layout.replicas
    few = count is not None and count < stages
    # Without training nothing is stale; with few micro-batches workers idle at a flush; the last
    # two options are for asynchronous schedules.
    asynchronous = options.corrections or options.layout.synchronous_updates
    if in_script and asynchronous:
        return replace(options, schedule=ASYNCHRONOUS, micro_batches=1 if count is None else count)
    if optimizer is None or (few and not in_script) or asynchronous:
        return replace(options, schedule=ASYNCHRONOUS)
    # A replica computes its share of the micro-batches.
    replicas = 1 if given == "auto" else max(replicas_of(given, stages), default=1)
    if count is None and stages * replicas > 1:
        # One stage has no bubble that more micro-batches would fill.
        whole = stages == 1 or any(map(keeps_state, modules))
        count = replicas * stages * (1 if whole else PER_STAGE)
    if in_script:
        return replace(options, schedule=OF_SCRIPT, micro_batches=count)
    each = (count or 1) / replicas
    samples = samples_taken(ASYNCHRONOUS, optimizer, each / stages)
    sooner = 0.0 if samples is None else time_of_flush(stages, each) / samples
    schedule = ASYNCHRONOUS if sooner >= AHEAD else FLUSHED
    return replace(options, schedule=schedule, micro_batches=count)


def time_of_flush(stages: int, micro_batches: float) -> float:
    """Return how many times as long a flush makes a mini-batch take, if all stages are equal."""
    return (micro_batches + stages - 1) / micro_batches
