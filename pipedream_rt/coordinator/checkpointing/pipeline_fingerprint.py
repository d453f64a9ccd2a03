"""The fingerprint of a whole pipeline, made of those of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipedream_rt.schedules import Plan
from pipedream_rt.stage.fingerprint import total


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFingerprint:
    """The fingerprints of one stage, each 32 hex digits.

    Attributes:
        version: Number of the newest weight version.
        weights: Of the newest version of the parameters, frozen ones too.
        rest: Of each value that modules give as extra state, or that the optimizer keeps in its
            groups and attributes.
        older: Of each older version that is kept, by its number.
    """

    version: int
    weights: str
    buffers: str
    optimizer: str
    rest: tuple[str, ...]
    older: dict[int, str]


def of_stages(plan: Plan, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fingerprints of each stage from those of all addresses, as plain data."""
    made = []
    for stage in range(plan.num_stages):
        first = plan.address_of(stage)
        one = found[first]  # replicas have equal weights; the buffers of replica 0 count
        parts = [found[address] for address in (first, *plan.others(first))]
        # What each replica keeps for its steps differs: a part of a sharded optimizer, residuals.
        if len({part["optimizer"] for part in parts}) > 1:
            optimizer = total(part["optimizer"] for part in parts)
            rest = sorted({each for part in parts for each in part["rest"]})
            one = {**one, "optimizer": optimizer, "rest": rest}
        made.append(one)
    return made


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The fingerprint of a state of a pipeline: equal states have equal ones, others do not.

    ``digest`` does not depend on the split of the model; the fingerprints of the stages do.

    Attributes:
        stages: The fingerprints of the stages.
    """

    stages: tuple[StageFingerprint, ...]

    @property
    def digest(self) -> str:
        """One number for the newest weights, buffers, optimizer and extra state, in hex."""
        return total((self.weights, self.buffers, self.optimizer, self.rest))

    @property
    def weights(self) -> str:
        """The fingerprint of the newest weights."""
        return total(stage.weights for stage in self.stages)

    @property
    def buffers(self) -> str:
        """The fingerprint of the buffers."""
        return total(stage.buffers for stage in self.stages)

    @property
    def optimizer(self) -> str:
        """The fingerprint of the optimizer state."""
        return total(stage.optimizer for stage in self.stages)

    @property
    def rest(self) -> str:
        """The fingerprint of extra state and of what optimizers keep for all their parameters.

        What is the same on several stages counts once, so it does not depend on the split.
        """
        return total({each for stage in self.stages for each in stage.rest})

    def __str__(self) -> str:
        return self.digest

    @staticmethod
    def of_plain(stages: Sequence[dict[str, Any]]) -> Fingerprint:
        """Return a fingerprint from the plain data of each stage, as a manifest keeps it."""
        return Fingerprint(
            tuple(
                StageFingerprint(
                    **{
                        **stage,
                        "rest": tuple(stage["rest"]),
                        "older": {int(v): each for v, each in stage["older"].items()},
                    }
                )
                for stage in stages
            )
        )

    def first_difference(self, other: Fingerprint) -> str:
        """Name the first stage and part in which two fingerprints differ; empty if in none."""
        if len(self.stages) != len(other.stages):
            parts = [p for p in _PARTS if getattr(self, p) != getattr(other, p)]
            return f"{' and '.join(parts)} (of other splits)" if parts else ""
        for number, (one, two) in enumerate(zip(self.stages, other.stages, strict=True)):
            parts = [p for p in (*_PARTS, "older") if getattr(one, p) != getattr(two, p)]
            if parts:
                return f"stage {number}: {' and '.join(parts)}"
        return ""


_PARTS = ("weights", "buffers", "optimizer", "rest")
