"""The conversion of times on a peer's clock to the coordinator's clock, with a bound on the error.

Each process counts nanoseconds on its own monotonic clock. A question and its answer bound the
difference of two clocks: the peer reads its clock at some instant between the coordinator's sending
and receiving, so the middle of the two is wrong by half the round trip at most (Cristian's
algorithm). Of several round trips the shortest counts. A trace has such a reading at its start and
at its end. In between the difference is interpolated linearly, because clocks drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Reading:
    """One question for a peer's clock, and its answer. All times are in nanoseconds.

    Attributes:
        sent: On the coordinator's clock.
        answered: On the peer's clock.
        received: On the coordinator's clock.
    """

    sent: int
    answered: int
    received: int

    @property
    def offset(self) -> int:
        """The difference of the clocks: the peer's minus the coordinator's."""
        return self.answered - (self.sent + self.received) // 2

    @property
    def error(self) -> int:
        """The largest possible error of the offset."""
        return (self.received - self.sent + 1) // 2


def best(readings: Iterable[Reading]) -> Reading:
    """Return the reading with the shortest round trip."""
    return min(readings, key=lambda reading: reading.error)


@dataclass(frozen=True, slots=True)
class ClockMap:
    """The conversion by a reading at the start of a trace and one at its end."""

    first: Reading
    last: Reading

    @property
    def error(self) -> int:
        """The largest possible error of a time between the two readings, in nanoseconds."""
        return max(self.first.error, self.last.error)

    def to_ours(self, times: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return integer nanoseconds on the peer's clock as those on the coordinator's clock."""
        a, b = self.first, self.last
        span = b.answered - a.answered
        # Relative to the first reading: a float cannot hold all digits of a time.
        share = (times - a.answered) / span if span > 0 else np.zeros(len(times))
        offset = a.offset + np.rint(share * (b.offset - a.offset)).astype(np.int64)
        # 0 stands for what did not happen, and stays.
        ours: npt.NDArray[np.int64] = np.where(times == 0, 0, times - offset)
        return ours
