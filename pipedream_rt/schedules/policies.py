"""The version policies: which weight version the forward of a micro-batch reads.

Apart from the orders, so that a schedule is one order with one policy and no class per pair.
A version is the number of updates applied; the backward reads what its own forward read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules.shape import Shape


class VersionPolicy(Protocol):
    """Says which version to read and how many are kept for that."""

    def reads(self, stage: int, shape: Shape, micro_batch: int) -> int:
        """Return the version that a micro-batch reads; never falls from one to the next."""

    def kept(self, stage: int, shape: Shape) -> int:
        """Return the most versions that a stage holds at once."""

    def require(self, shape: Shape) -> None:
        """Raise ConfigError if the policy makes no sense for a shape."""


class _AnyShape:
    """A policy for every shape."""

    __slots__ = ()

    def require(self, shape: Shape) -> None:
        """See `VersionPolicy.require`."""


@dataclass(frozen=True, slots=True)
class WeightStashing(_AnyShape):
    """The newest version there is when the stage's own 1F1B order reaches the forward.

    max(0, (m - w(s)) // k), with w(s) as `Shape.warm_up` returns it: when the forward of m comes in
    steady state, the backwards of all micro-batches before m - w(s) are done. The version depends
    on m alone, not on when the pipe was flushed.

    Source: Narayanan et al., PipeDream (SOSP 2019), section 3.3 (weight stashing).
    """

    def reads(self, stage: int, shape: Shape, micro_batch: int) -> int:
        """See `VersionPolicy.reads`."""
        return max(0, (micro_batch - shape.warm_up(stage)) // shape.per_update)

    def kept(self, stage: int, shape: Shape) -> int:
        """See `VersionPolicy.kept`: the updates that w(s) micro-batches span, and the newest."""
        return -(-shape.warm_up(stage) // shape.per_update) + 1


@dataclass(frozen=True, slots=True)
class VerticalSync(_AnyShape):
    """The version that the first stage reads, at every stage: one model for each micro-batch.

    max(0, (m - w(0)) // k). All stages keep as many versions as the first.

    Source: Narayanan et al., PipeDream (SOSP 2019), section 3.3 (vertical sync).
    """

    def reads(self, stage: int, shape: Shape, micro_batch: int) -> int:
        """See `VersionPolicy.reads`."""
        return max(0, (micro_batch - shape.warm_up(0)) // shape.per_update)

    def kept(self, stage: int, shape: Shape) -> int:
        """See `VersionPolicy.kept`: as many as the first stage keeps."""
        return -(-shape.warm_up(0) // shape.per_update) + 1


@dataclass(frozen=True, slots=True)
class TwoVersions:
    """Mini-batch t reads version max(0, t-1) at every stage; two versions are kept.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (ICML 2021),
    PipeDream-2BW (double-buffered weights).
    """

    def reads(self, stage: int, shape: Shape, micro_batch: int) -> int:
        """See `VersionPolicy.reads`."""
        return max(0, micro_batch // shape.per_update - 1)

    def kept(self, stage: int, shape: Shape) -> int:
        """Two."""
        return 2

    def require(self, shape: Shape) -> None:
        """With k < w(0) + 1 more than two versions would be read at a time."""
        needed = shape.warm_up(0) + 1
        if shape.per_update < needed:
            slack = f" with a slack of {sum(shape.slack)} in all" if shape.slack else ""
            raise ConfigError(
                f"2bw needs at least as many micro-batches per update as stages, and one more for "
                f"each unit of slack: micro_batches is {shape.per_update}, {shape.workers} "
                f"stages{slack} need {needed}"
            )


@dataclass(frozen=True, slots=True)
class Flushed(_AnyShape):
    """Every micro-batch of mini-batch t reads version t; one version is kept."""

    def reads(self, stage: int, shape: Shape, micro_batch: int) -> int:
        """See `VersionPolicy.reads`."""
        return micro_batch // shape.per_update

    def kept(self, stage: int, shape: Shape) -> int:
        """One."""
        return 1
