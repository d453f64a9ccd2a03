"""A schedule: one order with one version policy, for one shape. A pure value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.schedules.actions import Action, Kind, until
from pipedream_rt.schedules.orders import (
    Async1F1B,
    Flushed1F1B,
    GPipe,
    Interleaved1F1B,
    Order,
    ZeroBubbleH1,
    most_in_flight,
)
from pipedream_rt.schedules.policies import (
    Flushed,
    TwoVersions,
    VersionPolicy,
    VerticalSync,
    WeightStashing,
)
from pipedream_rt.schedules.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a schedule's name stands for; n workers, k micro-batches per update, w = n-1-s.

    Attributes:
        order: The order of actions.
        versions: Which weight version is read.
        flushes: Whether the pipe is empty at every update.
        summary: A few words for people.
        kept_text, bubble_text, staleness_text: Versions kept at stage s, idle share, staleness.
        stages_per_worker: If not told otherwise.
    """

    order: Order
    versions: VersionPolicy
    flushes: bool
    summary: str
    kept_text: str = "1"
    bubble_text: str = "(n-1)/(k+n-1)"
    staleness_text: str = "0"
    stages_per_worker: int = 1

    def line(self) -> str:
        """One line for people."""
        return (
            f"{self.summary}; versions kept {self.kept_text}; bubble {self.bubble_text}; "
            f"staleness {self.staleness_text}"
        )


_VERTICAL_SYNC = "+vertical-sync"

RECIPES: dict[str, Recipe] = {
    "async-1f1b": Recipe(
        order=Async1F1B(),
        versions=WeightStashing(),
        flushes=False,
        summary="PipeDream, never a flush",
        kept_text="ceil(w/k)+1",
        bubble_text="0",
        staleness_text="up to ceil(w/k)",
    ),
    "async-1f1b" + _VERTICAL_SYNC: Recipe(
        order=Async1F1B(),
        versions=VerticalSync(),
        flushes=False,
        summary="the same, all stages read the version that the first reads",
        kept_text="ceil((n-1)/k)+1",
        bubble_text="0",
        staleness_text="ceil((n-1)/k)",
    ),
    "2bw": Recipe(
        order=Async1F1B(),
        versions=TwoVersions(),
        flushes=False,
        summary="PipeDream-2BW, k >= n",
        kept_text="2",
        bubble_text="0",
        staleness_text="1",
    ),
    "1f1b": Recipe(
        order=Flushed1F1B(),
        versions=Flushed(),
        flushes=True,
        summary="PipeDream-Flush, a flush at every update",
    ),
    "gpipe": Recipe(
        order=GPipe(),
        versions=Flushed(),
        flushes=True,
        summary="as 1f1b, with all k activations kept at once",
    ),
    "interleaved-1f1b": Recipe(
        order=Interleaved1F1B(),
        versions=Flushed(),
        flushes=True,
        summary="Megatron, v stages on each worker, k a multiple of n",
        bubble_text="(n-1)/(vk+n-1)",
        stages_per_worker=2,
    ),
    "zero-bubble": Recipe(
        order=ZeroBubbleH1(),
        versions=Flushed(),
        flushes=True,
        summary="ZB-H1, backward in two halves",
        bubble_text="(n-1)/(3k+n-1) for F=I=W",
    ),
}
"""The schedules by name."""


def describe_schedules() -> str:
    """One line for each schedule, and what the letters mean."""
    width = max(map(len, RECIPES))
    lines = [f"  {name:<{width}}  {recipe.line()}" for name, recipe in RECIPES.items()]
    letters = "(n workers, k micro-batches per update, w = n-1-s at stage s)"
    return "\n".join((*lines, f"  {letters}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What every worker does and every stage reads.

    Attributes:
        name: As given to `schedule_named`, or of the class that a user wrote.
        shape: Workers, stages, micro-batches per update.
        recipe: The order and the policy.
    """

    name: str
    shape: Shape
    recipe: Recipe

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return self.shape.num_stages

    @property
    def per_update(self) -> int:
        """Micro-batches per update, k."""
        return self.shape.per_update

    def order(self, worker: int, start: int = 0, stop: int | None = None) -> Iterator[Action]:
        """Yield what a worker does, in order.

        Args:
            worker: Index, 0-based; that of its stage, where each worker has one.
            start: First micro-batch, a multiple of ``per_update``; nothing is in flight before it.
            stop: One past the last micro-batch, a multiple of ``per_update``; None for no end.

        Returns:
            The actions, lazily.
        """
        endless = self.recipe.order.order(worker, self.shape, start)
        if stop is None:
            return endless
        k = self.per_update
        left = self.shape.stages_per_worker * (stop - start + (stop - start) // k)
        return until(endless, stop, k, left)

    def reads(self, stage: int, micro_batch: int) -> int:
        """Return the weight version that a micro-batch reads at a stage."""
        return self.recipe.versions.reads(stage, self.shape, micro_batch)

    def kept(self, stage: int) -> int:
        """Return the most weight versions that a stage holds."""
        return self.recipe.versions.kept(stage, self.shape)

    def in_flight(self, stage: int) -> int:
        """Return the most micro-batches in flight on a stage."""
        return self.recipe.order.in_flight(stage, self.shape)

    def credits(self) -> int:
        """Return how many mini-batches to inject before the first result is waited for.

        Enough that the first stage never waits for the coordinator, and one where the pipe is
        flushed anyway: then a learning rate set after a result applies to the very next
        mini-batch, as in a plain training loop.
        """
        return 1 if self.recipe.flushes else -(-self.in_flight(0) // self.per_update) + 1


def schedule_named(
    name: str,
    *,
    num_stages: int,
    per_update: int = 1,
    stages_per_worker: int | None = None,
    vertical_sync: bool = False,
) -> Schedule:
    """Look a schedule up.

    Args:
        name: A key of `RECIPES`.
        num_stages: Number of stages, at least 1.
        per_update: Micro-batches per update, at least 1.
        stages_per_worker: For interleaved-1f1b, 2 if None.
        vertical_sync: Means ``name + "+vertical-sync"``, for async-1f1b: every stage reads the
            version that the first one reads.

    Returns:
        The schedule.

    Raises:
        ConfigError: Unknown name, a number out of range, or no such schedule for these numbers.
    """
    if name not in RECIPES:
        raise ConfigError(f"unknown schedule {name!r}; the known ones are\n{describe_schedules()}")
    if vertical_sync and not name.endswith(_VERTICAL_SYNC):
        if name + _VERTICAL_SYNC not in RECIPES:
            raise ConfigError(f"vertical_sync is an option of async-1f1b, not of {name}")
        name += _VERTICAL_SYNC
    return _fitted(name, RECIPES[name], num_stages, per_update, stages_per_worker)


def _fitted(
    name: str, recipe: Recipe, num_stages: int, per_update: int, stages_per_worker: int | None
) -> Schedule:
    """Make a schedule of a recipe, if there is one for these numbers."""
    each = recipe.stages_per_worker if stages_per_worker is None else stages_per_worker
    if isinstance(each, int) and each > 1 and num_stages % each:
        raise ConfigError(
            f"{num_stages} stages cannot be dealt to workers with {each} each; choose a multiple "
            f"of {each}, or another stages_per_worker"
        )
    Shape(workers=num_stages, stages_per_worker=each)  # both numbers, in words of the caller
    shape = Shape(workers=num_stages // each, per_update=per_update, stages_per_worker=each)
    recipe.order.require(shape)
    recipe.versions.require(shape)
    return Schedule(name=name, shape=shape, recipe=recipe)


class _Written:
    """The order of a class that a user wrote, which need have no method but ``order``."""

    def __init__(self, written: Any) -> None:
        """Args: written: The user's object."""
        self._written = written

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        """What the class yields, each one checked to be an action of this worker.

        Raises:
            ScheduleError: It is none, or the class raises.
        """
        where = f"the order of worker {worker}"
        try:
            actions = iter(self._written.order(worker, shape, start))
        except Exception as error:  # the user's code
            raise ScheduleError(f"{where} cannot be had: {error!r}") from error
        while True:
            try:
                action = next(actions, None)
            except Exception as error:  # as above
                raise ScheduleError(f"{where} raised {error!r}") from error
            if action is None:
                return
            self._check(where, worker, shape, action)
            yield action

    @staticmethod
    def _check(where: str, worker: int, shape: Shape, action: Any) -> None:
        """Refuse what the worker cannot do."""
        if not isinstance(action, Action) or not isinstance(action.kind, Kind):
            raise ScheduleError(f"{where} yielded {action!r}, which is no Action")
        if type(action.index) is not int or action.index < 0:
            raise ScheduleError(f"{where} yielded {action!r}, whose index counts nothing")
        stage = worker if action.stage is None else action.stage
        if stage not in shape.stages_of(worker):
            raise ScheduleError(
                f"{where} yielded {action}, but it hosts stages {[*shape.stages_of(worker)]}"
            )

    def in_flight(self, stage: int, shape: Shape) -> int:
        """What the class says, or what is counted over enough micro-batches, also after a flush."""
        if hasattr(self._written, "in_flight"):
            said = self._written.in_flight(stage, shape)
            if type(said) is not int:
                raise ScheduleError(f"in_flight of the schedule returned {said!r}, no integer")
            return said
        stop, k = proof_length(shape, self._written), shape.per_update
        most = 0
        for start in {0, stop // 2 // k * k}:
            left = shape.stages_per_worker * (stop - start + (stop - start) // k)
            order = self.order(shape.worker_of(stage), shape, start)
            # A wrong order may be endless and never end a micro-batch.
            actions = islice(until(order, stop, k, left), 8 * (left + stop))
            most = max(most, most_in_flight(actions, stage))
        return most

    def require(self, shape: Shape) -> None:
        """What the class says, if anything."""
        if hasattr(self._written, "require"):
            self._written.require(shape)


def proof_length(shape: Shape, written: object) -> int:
    """How many micro-batches show a schedule's warm-up, steady state and drain.

    Args:
        shape: Of the schedule.
        written: A user's schedule, which may have an end: ``micro_batches``.

    Raises:
        ConfigError: It ends before its first update.
    """
    k = shape.per_update
    enough = k * max(3, -(-4 * shape.num_stages // k))
    end = getattr(written, "micro_batches", enough)
    if type(end) is not int or end < k:
        raise ConfigError(
            f"a written schedule must do one update at least, {k} micro-batches; "
            f"its micro_batches is {end!r}"
        )
    return min(enough, end // k * k)


def schedule_written(
    written: Any, *, num_stages: int, per_update: int = 1, stages_per_worker: int | None = None
) -> Schedule:
    """Take a schedule that a user wrote; `check` it before it is used.

    Args:
        written: An object with ``order(worker, shape, start)`` as `Order` has. It may also have
            ``in_flight`` and ``require`` of `Order`, ``versions`` (a `VersionPolicy`; `Flushed` if
            none), ``name``, and ``micro_batches``, where its order ends.
        num_stages: Number of stages.
        per_update: Micro-batches per update.
        stages_per_worker: 1 if None.

    Returns:
        The schedule.

    Raises:
        ConfigError: It has no method ``order``, or does not want this shape.
    """
    if isinstance(written, type) or not callable(getattr(written, "order", None)):
        raise ConfigError(
            "schedule must be a name or an object with a method order(worker, shape, start), not "
            f"{written!r}; the names are\n{describe_schedules()}"
        )
    versions = getattr(written, "versions", None) or Flushed()
    methods = ("reads", "kept", "require")
    if isinstance(versions, type) or not all(hasattr(versions, name) for name in methods):
        raise ConfigError(
            f"versions of a schedule must be an object with {', '.join(methods)}, as the policies "
            f"in pipedream_rt.schedules.policies, not {versions!r}"
        )
    recipe = Recipe(
        order=_Written(written),
        versions=versions,
        flushes=isinstance(versions, Flushed),
        summary="written by the user",
        kept_text="?",
        bubble_text="?",
        staleness_text="?",
    )
    name = str(getattr(written, "name", type(written).__name__))
    return _fitted(name, recipe, num_stages, per_update, stages_per_worker)
