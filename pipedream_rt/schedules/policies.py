"""The version policies: the formulas for the weight version that a forward reads.

The backward of a micro-batch reads the version that its forward read. A schedule is an order with a
policy, so no pair of them needs a class of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules.shape import Shape


class VersionPolicy(Protocol):
    """The formulas for the version that a forward reads, and for the number of versions kept."""

    def reads(self, stage: int, shape: Shape, micro_batch: int) -> int:
        """Return the version that a micro-batch reads; it never falls from one to the next."""

    def kept(self, stage: int, shape: Shape) -> int:
        """Return the largest number of versions that a stage keeps at a time."""

    def require(self, shape: Shape) -> None:
        """Refuse a shape for which the policy makes no sense.

        Raises:
            ConfigError: The policy makes no sense for the shape.
        """


class _AnyShape:
    """The base of policies that make sense for every shape."""

    __slots__ = ()

    def require(self, shape: Shape) -> None: ...


def _behind(lag: int, shape: Shape, micro_batch: int) -> int:
    """Return the version that an order with a lag has made by the forward of a micro-batch.

    After T synchronous updates, which read the newest version, it is max(T, (m - lag) // k).
    """
    if micro_batch < shape.first_asynchronous:
        return micro_batch // shape.per_update
    return max(shape.synchronous, (micro_batch - lag) // shape.per_update)


@dataclass(frozen=True, slots=True)
class WeightStashing(_AnyShape):
    """The newest version that the stage's own 1F1B order has made by the time of the forward.

    Micro-batch m reads version max(0, (m - lag) // k). The lag (`Shape.lag`) is w(s) for one
    replica: at the forward of m in the steady phase, the backwards of all micro-batches before
    m - w(s) are done. The version depends on m alone, not on when the pipe was flushed.

    Source: Narayanan et al., PipeDream (SOSP 2019), section 3.3 (weight stashing).
    """

    def reads(self, stage: int, shape: Shape, micro_batch: int) -> int:
        return _behind(shape.lag(stage), shape, micro_batch)

    def kept(self, stage: int, shape: Shape) -> int:
        """Return ceil(lag/k) + 1: the updates that so many micro-batches span, and the newest."""
        return -(-shape.lag(stage) // shape.per_update) + 1


@dataclass(frozen=True, slots=True)
class VerticalSync(_AnyShape):
    """The version that the first stage reads, at every stage, so that one model sees a micro-batch.

    Micro-batch m reads version max(0, (m - w(0)) // k). All stages keep as many versions as the
    first. With replicas, w(0) becomes the longest lag of a stage.

    Source: Narayanan et al., PipeDream (SOSP 2019), section 3.3 (vertical sync).
    """

    def reads(self, stage: int, shape: Shape, micro_batch: int) -> int:
        return _behind(shape.longest_lag, shape, micro_batch)

    def kept(self, stage: int, shape: Shape) -> int:
        """Return ceil(w(0)/k) + 1, the number of versions that the first stage keeps."""
        return -(-shape.longest_lag // shape.per_update) + 1


@dataclass(frozen=True, slots=True)
class TwoVersions:
    """The version before the newest: mini-batch t reads max(0, t-1) at every stage.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (ICML 2021),
    PipeDream-2BW (double-buffered weights).
    """

    def reads(self, stage: int, shape: Shape, micro_batch: int) -> int:
        update = micro_batch // shape.per_update
        return update if update < shape.synchronous else max(shape.synchronous, update - 1)

    def kept(self, stage: int, shape: Shape) -> int:
        return 2

    def require(self, shape: Shape) -> None:
        """Refuse k <= the longest lag: more than two versions would be read at a time."""
        needed = shape.longest_lag + 1
        if shape.per_update < needed:
            if shape.replicas:
                raise ConfigError(
                    f"2bw with {'-'.join(map(str, shape.replicas))} replicas needs at least "
                    f"{needed} micro-batches per update: micro_batches is {shape.per_update}"
                )
            slack = f" with a slack of {sum(shape.slack)} in all" if shape.slack else ""
            raise ConfigError(
                f"2bw needs at least as many micro-batches per update as stages, and one more for "
                f"each unit of slack: micro_batches is {shape.per_update}, {shape.workers} "
                f"stages{slack} need {needed}"
            )


@dataclass(frozen=True, slots=True)
class Flushed(_AnyShape):
    """The newest version after a flush: every micro-batch of mini-batch t reads version t."""

    def reads(self, stage: int, shape: Shape, micro_batch: int) -> int:
        return micro_batch // shape.per_update

    def kept(self, stage: int, shape: Shape) -> int:
        return 1
