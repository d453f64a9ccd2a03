"""Schedules that a user wrote: taken, watched while they are followed, and proved by `plan_for`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.schedules.actions import Action, Kind, until
from pipedream_rt.schedules.orders import most_in_flight
from pipedream_rt.schedules.plan import Plan, chain
from pipedream_rt.schedules.policies import Flushed
from pipedream_rt.schedules.recipes import Recipe, describe_schedules
from pipedream_rt.schedules.shape import Shape


class WrittenSchedule(Protocol):
    """A schedule that a user wrote; it needs one method.

    It may also have:

    - ``in_flight(stage, shape)``: the most micro-batches in flight; counted if it is not there;
    - ``require(shape)``: raises ConfigError for a shape that it does not want;
    - ``versions``: a `VersionPolicy`; `Flushed` if it is not there;
    - ``name``: for messages and traces; the name of the class if it is not there;
    - ``takes_slack = True``: its order goes by ``shape.warm_up(stage)``, which has the slack in it;
    - ``micro_batches``: where its order ends; endless if it is not there.
    """

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        """Yield what a worker does, from ``start`` on, where nothing is in flight."""


class _Written:
    """The order of a class that a user wrote, which need have no method but ``order``."""

    def __init__(self, written: Any) -> None:
        """Args: written: The user's object."""
        self._written = written

    def order(self, worker: int, shape: Shape, start: int) -> Iterator[Action]:
        """Yield what the class yields, each one checked to be an action of this worker.

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
        """See `Order.in_flight`: what the class says, or what is counted over enough micro-batches.

        It is counted from the start, and from the middle, as after a flush.
        """
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
        """See `Order.require`: what the class says, if anything.

        Slack that the class does not know of would be ignored without a word.
        """
        if shape.slack and not getattr(self._written, "takes_slack", False):
            raise ConfigError(
                f"{type(self._written).__name__} does not say that it uses slack; give the class "
                "the attribute takes_slack = True if its order goes by shape.warm_up(stage)"
            )
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


def plan_written(
    written: Any,
    *,
    num_stages: int,
    per_update: int = 1,
    stages_per_worker: int | None = None,
    slack: int | Sequence[int] = 0,
) -> Plan:
    """Make the plan of a chain of stages with a schedule that a user wrote; `check` it before use.

    Args:
        written: See `WrittenSchedule`.
        num_stages: Number of stages.
        per_update: Micro-batches per update.
        stages_per_worker: 1 if None.
        slack: Extra warm-up forwards before each hop.

    Returns:
        The plan.

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
    return chain(name, recipe, num_stages, per_update, stages_per_worker, slack)
