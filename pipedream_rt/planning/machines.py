"""The workers that a plan may use, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipedream_rt.errors import ConfigError

MOST_WORKERS = 64
"""Workers that a plan may have: the time to plan grows with the cube of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker.

    Attributes:
        speed: Its speed relative to the machine of the profile: at 2.0 everything takes half.
        memory: The bytes that it may use; infinite for no limit.
        server: The number of the machine that it is on.

    Raises:
        ConfigError: A number is out of range.
    """

    speed: float = 1.0
    memory: float = math.inf
    server: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 < self.speed < math.inf:
            raise ConfigError(f"the speed of a worker must be above 0, not {self.speed!r}")
        if not self.memory > 0:
            raise ConfigError(f"the memory of a worker must be above 0, not {self.memory!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCodec:
    """What a codec makes of a link, as `measure_codec` measures it.

    Attributes:
        ratio: Bytes sent for a byte of the value, at most 1.
        seconds_per_byte: The seconds that both ends together spend on a byte of the value.
    """

    ratio: float
    seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"the ratio of a codec is above 0 and at most 1, not {self.ratio!r}")
        if not 0 <= self.seconds_per_byte < math.inf:
            raise ConfigError(
                f"the seconds per byte of a codec are at least 0, not {self.seconds_per_byte!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The workers, and the links between them.

    A stage gets workers that follow each other, so the order counts: put those of one server side
    by side, and workers that differ in the order in which the stages are to have them.

    Attributes:
        workers: The workers, in order.
        bandwidth: The bytes per second between two workers of different servers, each way.
        bandwidth_within: The same between two workers of one server.
        latency: The seconds that a message is under way on top of that, between servers.
        latency_within: The same within a server.
        codec: A codec, which edges get where it pays; None for none.

    Raises:
        ConfigError: There is no worker, or a number is out of range.
    """

    workers: tuple[Worker, ...]
    bandwidth: float = math.inf
    bandwidth_within: float = math.inf
    latency: float = 0.0
    latency_within: float = 0.0
    codec: LinkCodec | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 1 <= len(self.workers) <= MOST_WORKERS:
            raise ConfigError(
                f"a plan has from 1 to {MOST_WORKERS} workers, not {len(self.workers)}"
            )
        for name in ("bandwidth", "bandwidth_within"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)!r}")
        for name in ("latency", "latency_within"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0, not {getattr(self, name)!r}")

    def __len__(self) -> int:
        """Return the number of workers."""
        return len(self.workers)

    @property
    def are_alike(self) -> bool:
        """Whether it makes no difference which workers a stage gets."""
        return len(set(self.workers)) == 1

    def _one_server(self, workers: Sequence[int]) -> bool:
        """Whether some workers are on one server."""
        return len({self.workers[w].server for w in workers}) == 1

    def bandwidth_of(self, workers: Sequence[int]) -> float:
        """Return the bandwidth of the slowest link among some workers."""
        narrow = min(self.bandwidth, self.bandwidth_within)
        return self.bandwidth_within if self._one_server(workers) else narrow

    def latency_of(self, workers: Sequence[int]) -> float:
        """Return the longest latency among some workers."""
        longest = max(self.latency, self.latency_within)
        return self.latency_within if self._one_server(workers) else longest
