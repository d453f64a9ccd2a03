"""A schedule: one order with one version policy, for a number of stages. A pure value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules.actions import Action, until
from pipedream_rt.schedules.orders import Async1F1B, Flushed1F1B, GPipe, Order
from pipedream_rt.schedules.policies import Flushed, VersionPolicy, WeightStashing


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a schedule's name stands for.

    Attributes:
        order: The order of actions.
        versions: Which weight version is read.
        flushes: Whether the pipe is empty at every update.
        summary: One line for people.
    """

    order: Order
    versions: VersionPolicy
    flushes: bool
    summary: str


RECIPES: dict[str, Recipe] = {
    "async-1f1b": Recipe(
        order=Async1F1B(),
        versions=WeightStashing(),
        flushes=False,
        summary="no flush, no bubble; n-s weight versions; staleness n-1-s updates (PipeDream)",
    ),
    "1f1b": Recipe(
        order=Flushed1F1B(),
        versions=Flushed(),
        flushes=True,
        summary="flush at every update; bubble (n-1)/(k+n-1); 1 version; no staleness",
    ),
    "gpipe": Recipe(
        order=GPipe(),
        versions=Flushed(),
        flushes=True,
        summary="as 1f1b, but all k activations are kept at once",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What every stage does and reads.

    Attributes:
        name: As given to `schedule_named`.
        num_stages: n.
        per_update: k, micro-batches per update.
        recipe: The order and the policy.
    """

    name: str
    num_stages: int
    per_update: int
    recipe: Recipe

    def order(self, stage: int, start: int = 0, stop: int | None = None) -> Iterator[Action]:
        """Yield what a stage does, in order.

        Args:
            stage: Index, 0-based.
            start: First micro-batch, a multiple of ``per_update``; nothing is in flight before it.
            stop: One past the last micro-batch, a multiple of ``per_update``; None for no end.

        Returns:
            The actions, lazily.
        """
        endless = self.recipe.order.actions(stage, self.num_stages, self.per_update, start)
        if stop is None:
            return endless
        return until(endless, stop, self.per_update, start, start // self.per_update)

    def reads(self, stage: int, micro_batch: int) -> int:
        """Return the weight version that a micro-batch reads at a stage."""
        return self.recipe.versions.reads(stage, self.num_stages, self.per_update, micro_batch)

    def kept(self, stage: int) -> int:
        """Return the most weight versions that a stage holds."""
        return self.recipe.versions.kept(stage, self.num_stages, self.per_update)

    def in_flight(self, stage: int) -> int:
        """Return the most micro-batches in flight on a stage."""
        return self.recipe.order.in_flight(stage, self.num_stages, self.per_update)

    def credits(self) -> int:
        """Return how many mini-batches to inject before the first result is waited for.

        Enough that the first stage never waits for the coordinator, and one where the pipe is
        flushed anyway: then a learning rate set after a result applies to the very next
        mini-batch, as in a plain training loop.
        """
        return 1 if self.recipe.flushes else -(-self.num_stages // self.per_update) + 1


def schedule_named(name: str, *, num_stages: int, per_update: int = 1) -> Schedule:
    """Look a schedule up.

    Args:
        name: A key of `RECIPES`.
        num_stages: Number of stages, at least 1.
        per_update: Micro-batches per update, at least 1.

    Returns:
        The schedule.

    Raises:
        ConfigError: Unknown name, or a number out of range.
    """
    if name not in RECIPES:
        known = "\n".join(f"  {key:<12}{recipe.summary}" for key, recipe in RECIPES.items())
        raise ConfigError(f"unknown schedule {name!r}; the known ones are\n{known}")
    for what, value in (("stages", num_stages), ("micro_batches", per_update)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{what} must be an integer of at least 1, not {value!r}")
    return Schedule(name=name, num_stages=num_stages, per_update=per_update, recipe=RECIPES[name])
