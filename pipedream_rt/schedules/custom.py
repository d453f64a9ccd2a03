"""Schedules that a user wrote: `plan_for` proves them, and each action is checked as it comes.

A proof covers a finite number of micro-batches, and an order may go on differently after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.schedules.actions import OF_ORDERS, Action, Kind, until
from pipedream_rt.schedules.orders import most_in_flight
from pipedream_rt.schedules.policies import Flushed
from pipedream_rt.schedules.recipes import RECIPES, Recipe, describe_schedules
from pipedream_rt.schedules.shape import Shape


class WrittenSchedule(Protocol):
    """A schedule that a user writes, which needs one method.

    It may also have:

    - ``in_flight(stage, shape)``: returns the largest number of micro-batches in flight on a stage;
      without it, they are counted;
    - ``require(shape)``: raises ConfigError for a shape that the schedule is not for;
    - ``versions``: a `VersionPolicy`; without it, `Flushed`;
    - ``name``: the name for messages and traces; without it, the name of the class;
    - ``takes_slack = True``: says that the order uses ``shape.warm_up(stage)``, which includes the
      slack; without it, slack is refused;
    - ``micro_batches``: the number of micro-batches after which the order ends; without it, the
      order is endless.
    """

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        """Yield a worker's actions from micro-batch ``start`` on, with an empty pipe."""


class _Written:
    """The `Order` of a user's object, which needs no method but ``order``."""

    def __init__(self, written: Any) -> None:
        self._written = written

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        """Yield the actions of the user's order, each checked."""
        where = f"the order of worker {worker}"
        try:
            actions = iter(self._written.order(worker, shape, start))
        except Exception as error:  # the user's code
            raise ScheduleError(f"{where} cannot be iterated: {error!r}") from error
        while True:
            try:
                action = next(actions, None)
            except Exception as error:  # the user's code
                raise ScheduleError(f"{where} raised {error!r}") from error
            if action is None:
                return
            self._check(where, worker, shape, action)
            yield action

    @staticmethod
    def _check(where: str, worker: int, shape: Shape, action: Any) -> None:
        """Refuse an object that is no action, and an action that the worker cannot do."""
        if not isinstance(action, Action) or not isinstance(action.kind, Kind):
            raise ScheduleError(f"{where} yielded {action!r}, which is no Action")
        if type(action.index) is not int or action.index < 0:
            raise ScheduleError(f"{where} yielded {action!r}, whose index must be an int >= 0")
        if action.kind not in OF_ORDERS:
            raise ScheduleError(
                f"{where} yielded {action}; the plan itself puts A, D and N where they belong, so "
                "leave them out"
            )
        stage = worker if action.stage is None else action.stage
        if stage not in shape.stages_of(worker):
            raise ScheduleError(
                f"{where} yielded {action}, but the worker hosts stages "
                f"{[*shape.stages_of(worker)]}"
            )

    def in_flight(self, stage: int, shape: Shape) -> int:
        """Return the number that the user's object gives, or else count it."""
        if hasattr(self._written, "in_flight"):
            count = self._written.in_flight(stage, shape)
            if type(count) is not int:
                raise ScheduleError(f"in_flight of the schedule returned {count!r}, not an int")
            return count
        stop, k = proof_length(shape, self._written), shape.per_update
        most = 0
        # From the start, and from the middle as after a flush: an order may differ there.
        for start in {0, stop // 2 // k * k}:
            worker = shape.worker_of(stage)
            left = shape.work(worker, start, stop)
            order = self.order(worker, shape, start)
            # The slice ends a wrong order that never ends a micro-batch.
            actions = islice(until(order, stop, k, left), 8 * (left + stop))
            most = max(most, most_in_flight(actions, stage))
        return most

    def require(self, shape: Shape) -> None:
        """Refuse slack that the order would ignore, and a shape that its ``require`` refuses."""
        if shape.slack and not getattr(self._written, "takes_slack", False):
            raise ConfigError(
                f"{type(self._written).__name__} does not say that it uses slack; give the class "
                "the attribute takes_slack = True if its order uses shape.warm_up(stage)"
            )
        if hasattr(self._written, "require"):
            self._written.require(shape)


def proof_length(shape: Shape, written: object) -> int:
    """Return a number of micro-batches that shows a schedule's warm-up, steady phase and drain.

    It is a multiple of k, and no larger than a ``micro_batches`` of the user's schedule.
    """
    k = shape.per_update
    deepest = max(shape.num_stages, shape.warm_up(0) + 1)
    enough = k * max(3, -(-4 * deepest // k))
    end = getattr(written, "micro_batches", enough)
    if type(end) is not int or end < k:
        raise ConfigError(
            f"a written schedule must do one update at least, so its micro_batches must be an "
            f"integer of at least {k}, not {end!r}"
        )
    return min(enough, end // k * k)


def written_recipe(written: Any) -> tuple[str, Recipe]:
    """Return the name and the recipe of a user's schedule, which is not proved yet."""
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
    if name in RECIPES:
        raise ConfigError(
            f"the schedule {type(written).__name__} calls itself {name!r}, which is the name of a "
            "schedule that is built in; give it another one, for traces and checkpoints go by it"
        )
    return name, recipe
