"""Seats: which process does the work of which workers of a plan.

As a rule each worker is a process of its own. In an elastic job there may be fewer processes: then
some have several seats, and do the work of each in turn on one thread. The stages, their order and
their versions stay those of the plan, and so do all bits; only the time differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate, pairwise

from pipedream_rt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAssignment:
    """How many worker processes there are to be.

    Attributes:
        fewest: With how many a generation may begin.
        wait: How long to wait for more, once there are enough to begin.
        stays_open: Whether late workers may wait for the next generation.
        seats: By process, the workers of the plan whose work it does; empty for neighbours.
    """

    fewest: int
    most: int
    wait: timedelta = timedelta()
    stays_open: bool = False
    seats: tuple[tuple[int, ...], ...] = ()

    def workers_by_process(self, workers: int, processes: int) -> Sequence[Sequence[int]]:
        """Return, by process, the workers of a plan whose work it does."""
        return self.seats or workers_by_process(workers, processes)

    def within(self, there: int) -> ProcessAssignment:
        """Cap the maximum at ``there``, but never below the minimum."""
        return replace(self, most=min(self.most, max(self.fewest, there)))


def assignment_for(
    workers: int,
    elastic: tuple[int, int] | None,
    wait: timedelta,
    seats: tuple[tuple[int, ...], ...] = (),
) -> ProcessAssignment:
    """Return how many processes do the work of a plan: one for each worker as a rule.

    ``elastic`` is the fewest and the most processes.
    """
    if seats and elastic is not None:
        raise ConfigError(
            "workers that share a device share a process, so their number is fixed; leave elastic "
            "out, or give each worker a device of its own"
        )
    if elastic is None:
        count = len(seats) or workers
        return ProcessAssignment(fewest=count, most=count, seats=seats)
    fewest, most = elastic
    if most > workers:
        raise ConfigError(
            f"elastic is {elastic}, and the plan has work for {workers} worker processes at most: "
            "give more stages, or smaller numbers"
        )
    return ProcessAssignment(fewest=fewest, most=most, wait=wait, stays_open=True)


def workers_by_process(workers: int, processes: int) -> list[range]:
    """Return, by process, the workers of a plan whose work it does."""
    # Neighbours share a process, so that what passes between them does not leave it. The first
    # processes have one more, since the last stage has the loss to compute too.
    each, more = divmod(workers, processes)
    ends = accumulate([each + (p < more) for p in range(processes)], initial=0)
    return [range(begin, end) for begin, end in pairwise(ends)]
