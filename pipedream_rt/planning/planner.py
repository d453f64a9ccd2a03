"""The planner: the partitions that a user may choose from, the best one first."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.costing import SCHEDULES, Costing
from pipedream_rt.planning.cuts import Cuts
from pipedream_rt.planning.machines import Machines
from pipedream_rt.planning.partition import (
    DATA_PARALLEL,
    SLOWDOWNS,
    Partition,
    Slowdown,
    partition_of,
)
from pipedream_rt.planning.search import Limits, StageChoice, best_stages, stages_by_workers
from pipedream_rt.tracing.summary import bytes_text

CHOICES = (*SCHEDULES, DATA_PARALLEL)
"""The schedules that are compared, and `DATA_PARALLEL`."""


def partitions(
    cuts: Cuts,
    machines: Machines,
    *,
    choices: Sequence[str] = CHOICES,
    per_update: int | None = None,
    replicas: int | None = None,
    workers: Collection[int] | None = None,
    slowdown: Slowdown = SLOWDOWNS["corrected"],
    copies: float = 0.0,
) -> list[Partition]:
    """Return the best partition of each schedule; first the one that reaches a loss soonest.

    For each number of workers the plan with the least period is taken. Of these the best one has
    the most micro-batches per second, divided by the slowdown that its staleness causes. Data
    parallelism counts as a flush with one stage.

    Args:
        cuts: The cuts of the model.
        machines: The workers and their links.
        choices: The schedules that are compared, and `DATA_PARALLEL`.
        per_update: The micro-batches per update; None for as many as there are workers: then the
            staleness is 1 at most.
        replicas: The most replicas of a stage; None for any number.
        workers: The numbers of workers that a plan may use; None for any number.
        slowdown: The curve of the slowdown over the mean staleness.
        copies: The copies of the weights that corrections for staleness keep.

    Raises:
        ConfigError: No plan of any of them fits the memory of the workers, or one is unknown.
    """
    if unknown := set(choices) - {*CHOICES}:
        raise ConfigError(f"plans are made for {', '.join(CHOICES)}, not for {min(unknown)!r}")
    k = len(machines) if per_update is None else per_update
    found, reasons = [], []
    for choice in choices:
        schedule = "1f1b" if choice == DATA_PARALLEL else choice
        costing = Costing(cuts, machines, schedule, k, copies)
        try:
            if choice == DATA_PARALLEL:
                most = replicas or len(machines)
                found.append(_data_parallel(costing, most, workers, slowdown))
            else:
                found.append(_best(costing, Limits(replicas), workers, slowdown))
        except ConfigError as error:
            reasons.append(f"{choice}: {error}")
    if not found:
        raise ConfigError("\n".join(reasons))
    return sorted(found, key=lambda each: -each.worth)


def _best(
    costing: Costing, limits: Limits, numbers: Collection[int] | None, slowdown: Slowdown
) -> Partition:
    """Return the best partition for one schedule."""
    by_workers = stages_by_workers(costing, limits)
    rough = {
        used: partition_of(costing, stages, slowdown, rough=True)
        for used, stages in by_workers.items()
        if numbers is None or used in numbers
    }
    if not rough:
        raise _none_for(numbers or (), by_workers)
    # Formulas choose the number of workers; only the plans of that number are simulated.
    used = max(rough, key=lambda each: rough[each].worth)
    _, even = best_stages(costing, replace(limits, workers=used))
    both = [partition_of(costing, stages, slowdown) for stages in (even, by_workers[used])]
    return max(both, key=lambda each: each.worth)  # the first one, the even one, if both are equal


def _none_for(numbers: Collection[int], there: Iterable[int]) -> ConfigError:
    """Make the error for the case that no plan uses one of the numbers of workers."""
    return ConfigError(
        f"no plan uses {' or '.join(map(str, sorted(numbers)))} workers; there are plans for "
        f"{', '.join(map(str, there))}"
    )


def _data_parallel(
    costing: Costing, most: int, numbers: Collection[int] | None, slowdown: Slowdown
) -> Partition:
    """Return the best partition of one stage."""
    end, count = len(costing.cuts) - 1, len(costing.machines)
    needed = float(costing.memory(1, 0, (0, end)))
    roomy = [w for w in range(count) if costing.room([w]) >= needed]
    if not roomy:
        raise ConfigError(
            f"the whole model needs {bytes_text(needed)} ({math.ceil(needed):,} bytes) on a worker"
        )
    found: dict[int, Partition] = {}
    # The fastest workers first: the slowest replica sets the pace.
    roomy.sort(key=lambda w: -costing.machines.workers[w].speed)
    for used in range(1, min(most, len(roomy)) + 1):
        stage = StageChoice(-1, end, tuple(sorted(roomy[:used])))
        if float(costing.memory(used, 0, (0, end))) > costing.room(stage.workers):
            continue  # replicas hold the gradients of the others too
        found[used] = partition_of(costing, [stage], slowdown)
    allowed = [each for used, each in found.items() if numbers is None or used in numbers]
    if not allowed:
        raise _none_for(numbers or (), found)
    best = max(allowed, key=lambda each: each.worth)
    return replace(best, schedule=DATA_PARALLEL)
