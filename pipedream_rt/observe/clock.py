"""Brings times of another machine onto the coordinator's clock, and says how far off they may be.

Each process counts nanoseconds on its own monotonic clock. A question and its answer bound the
difference of two clocks: the peer read its clock at some instant between our sending and our
receiving, so taking the middle is wrong by half the round trip at most (Cristian's algorithm). The
shortest of several round trips is used, once at the start and once at the end of a trace; in
between the difference is drawn as a line, since clocks drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Reading:
    """One question and its answer.

    Attributes:
        sent: When we asked, on our clock, in nanoseconds.
        answered: The peer's clock.
        received: When the answer came, on our clock.
    """

    sent: int
    answered: int
    received: int

    @property
    def offset(self) -> int:
        """The peer's clock minus ours."""
        return self.answered - (self.sent + self.received) // 2

    @property
    def error(self) -> int:
        """The offset is wrong by this at most."""
        return (self.received - self.sent + 1) // 2


def best(readings: Iterable[Reading]) -> Reading:
    """The reading with the shortest round trip."""
    return min(readings, key=lambda reading: reading.error)


@dataclass(frozen=True, slots=True)
class ClockMap:
    """From a peer's clock to ours.

    Attributes:
        first: Reading at the start.
        last: Reading at the end.
    """

    first: Reading
    last: Reading

    @property
    def error(self) -> int:
        """Bound on the error of a time between the two readings, in nanoseconds."""
        return max(self.first.error, self.last.error)

    def to_ours(self, times: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Bring times of the peer onto our clock.

        Args:
            times: Integers, nanoseconds; 0 means never, and stays.

        Returns:
            As many integers.
        """
        a, b = self.first, self.last
        span = b.answered - a.answered
        # Relative to the first reading, so that a float has digits to spare.
        share = (times - a.answered) / span if span > 0 else np.zeros(len(times))
        offset = a.offset + np.rint(share * (b.offset - a.offset)).astype(np.int64)
        ours: npt.NDArray[np.int64] = np.where(times == 0, 0, times - offset)
        return ours
