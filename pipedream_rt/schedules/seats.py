"""Which worker process does the work of which workers of a plan, where there may be fewer of them.

A plan has as many workers as its schedule has places. As a rule each is a process of its own. In an
elastic job there may be fewer processes: then some take several places, and do the work of each in
turn on one thread. The stages, their order and their versions stay those of the plan, and so do all
bits; only the time differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate, pairwise

from pipedream_rt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """How many worker processes there are to be.

    Attributes:
        most: How many there are at most.
        seats: The workers of the plan whose work each process does, where that is given; empty for
            neighbours.
    """

    fewest: int
    most: int
    wait: timedelta = timedelta()
    stays_open: bool = False
    seats: tuple[tuple[int, ...], ...] = ()

    def seated(self, workers: int, processes: int) -> Sequence[Sequence[int]]:
        """Return the workers of a plan whose work each of so many processes does; see `seated`."""
        return self.seats or seated(workers, processes)

    def within(self, there: int) -> Crew:
        """Return this crew where only so many processes can come, if those are enough."""
        return replace(self, most=min(self.most, max(self.fewest, there)))


def crew_for(
    workers: int,
    elastic: tuple[int, int] | None,
    wait: timedelta,
    seats: tuple[tuple[int, ...], ...] = (),
) -> Crew:
    """Return how many processes do the work of a plan."""
    if seats and elastic is not None:
        raise ConfigError(
            "workers that share a device share a process, so their number is fixed; leave elastic "
            "out, or give each worker a device of its own"
        )
    if elastic is None:
        count = len(seats) or workers
        return Crew(fewest=count, most=count, seats=seats)
    fewest, most = elastic
    if most > workers:
        raise ConfigError(
            f"elastic is {elastic}, and the plan has work for {workers} worker processes at most: "
            "give more stages, or smaller numbers"
        )
    return Crew(fewest=fewest, most=most, wait=wait, stays_open=True)


def seated(workers: int, processes: int) -> list[range]:
    """Return the workers of a plan whose work each process does.

    Neighbours share a process, so that what passes between them does not leave it. The numbers
    differ by one at most; the first processes have the larger ones, since the last stage has the
    loss to compute too.
    """
    each, more = divmod(workers, processes)
    ends = accumulate([each + (p < more) for p in range(processes)], initial=0)
    return [range(begin, end) for begin, end in pairwise(ends)]
