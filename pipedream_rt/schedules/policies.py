"""The version policies: which weight version the forward of a micro-batch reads.

Apart from the orders, so that a schedule is one order with one policy and no class per pair.
A version is the number of updates applied; the backward reads what its own forward read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class VersionPolicy(Protocol):
    """Says which version to read and how many are kept for that."""

    def reads(self, stage: int, num_stages: int, per_update: int, micro_batch: int) -> int:
        """Return the version that a micro-batch reads; never falls from one to the next."""

    def kept(self, stage: int, num_stages: int, per_update: int) -> int:
        """Return the most versions that a stage holds at once."""


@dataclass(frozen=True, slots=True)
class WeightStashing:
    """The newest version there is when the stage's own 1F1B order reaches the forward.

    max(0, (m - w(s)) // k), with w(s) = n-1-s: in steady state every stage reads the version that
    w(s) later backwards will not touch. It depends on m alone, not on when the pipe was flushed.

    Source: Narayanan et al., PipeDream (SOSP 2019), section 3.3 (weight stashing).
    """

    def reads(self, stage: int, num_stages: int, per_update: int, micro_batch: int) -> int:
        """See `VersionPolicy.reads`."""
        return max(0, (micro_batch - (num_stages - 1 - stage)) // per_update)

    def kept(self, stage: int, num_stages: int, per_update: int) -> int:
        """w(s) + 1 with k = 1; the updates that w(s) micro-batches span, and the newest, else."""
        return -(-(num_stages - 1 - stage) // per_update) + 1


@dataclass(frozen=True, slots=True)
class Flushed:
    """Every micro-batch of mini-batch t reads version t; one version is kept."""

    def reads(self, stage: int, num_stages: int, per_update: int, micro_batch: int) -> int:
        """See `VersionPolicy.reads`."""
        return micro_batch // per_update

    def kept(self, stage: int, num_stages: int, per_update: int) -> int:
        """One."""
        return 1
