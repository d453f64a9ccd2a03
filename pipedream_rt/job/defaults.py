"""The schedule and the number of micro-batches, where the user leaves them out.

What counts is the time to a loss: the samples that it takes, times the time of a sample. A schedule
that flushes takes the samples of plain training, and its workers wait: n of them with k
micro-batches take (k + n - 1) / k of the time. An asynchronous one waits for nothing, and takes
more samples, by how much depends on the optimizer (`corrections/advice.py`). With many
micro-batches both are cheap, and then a flush has the bits that one expects.

Where BatchNorm sees micro-batches there cannot be many: with 8 of a mini-batch of 32 samples plain
training took 1.25 times the samples. With few a flush costs most, and staleness less than that.

The measurements are printed by ``python benchmarks/first_touch.py table choice batch-norm``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from pipedream_rt.corrections.advice import samples_taken
from pipedream_rt.job.options import Options
from pipedream_rt.schedules.recipes import ScheduleName
from pipedream_rt.torch_private import BatchNorm

ASYNCHRONOUS: ScheduleName = "async-1f1b"
FLUSHED: ScheduleName = "1f1b"

PER_STAGE = 4
"""Micro-batches for each stage. With fewer a flush costs more time, and staleness more samples; the
layers of most models compute longer for more, smaller ones."""

FEW_SAMPLES = 1.05
"""How many times the samples of plain training an asynchronous schedule may take to be the default:
less than what a flush costs with two stages, the fewest, and `PER_STAGE` micro-batches for each."""


def with_schedule(
    options: Options, optimizer: type | None, stages: int, modules: Iterable[nn.Module]
) -> Options:
    """Return options that have a schedule.

    Args:
        options: The options, with or without one.
        optimizer: The class of the optimizer; None if nothing is trained.
        stages: The number of stages.
        modules: Those of the model.
    """
    if options.schedule is not None:
        return options
    given = options.micro_batches
    few = given < stages if given else any(_has_batch_norm(each) for each in modules)
    says_so = options.corrections or options.layout.synchronous_updates
    if optimizer is None or few or says_so:
        return replace(options, schedule=ASYNCHRONOUS)
    samples = samples_taken(optimizer, PER_STAGE)
    schedule = FLUSHED if samples is None or samples > FEW_SAMPLES else ASYNCHRONOUS
    if given is None and stages > 1:
        given = stages * PER_STAGE
    return replace(options, schedule=schedule, micro_batches=given)


def _has_batch_norm(module: nn.Module) -> bool:
    """Whether there is BatchNorm in a module."""
    return any(isinstance(each, BatchNorm) for each in module.modules())


def time_of_flush(stages: int, micro_batches: int) -> float:
    """Return how many times as long a flush lets workers take, who compute the same each."""
    return (micro_batches + stages - 1) / micro_batches
