"""Versions of the weights that are kept for as long as the script reads them."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Any

from pipedream_rt.coordinator.feed.feeder import Feeder
from pipedream_rt.coordinator.recovery.group import WorkerGroup
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.message import CommandName
from pipedream_rt.messages.state_keys import by_key
from pipedream_rt.stage.rules.ema import AVERAGE

_numbers = itertools.count(1)


class KeptVersion:
    """A copy of weights and buffers that the stages keep, while training goes on.

    `Pipeline.keep_version` returns it. Each stage has a copy of its part until `drop`, or until the
    body of a ``with`` ends. A copy is in no checkpoint: a recovery goes back to a point before the
    copy was made, so the log of what was fed grows while one is kept.

    Attributes:
        step: The number of mini-batches that its weights were trained on.
        average: Whether it is the average of the weights.
    """

    def __init__(self, group: WorkerGroup, feeder: Feeder, *, average: bool) -> None:
        self._group = group
        self._number = next(_numbers)
        self.average = average
        feeder.flush()
        self.step = feeder.step
        self._loads = group.feed.loads
        group.feed.log.hold()
        try:
            borrowed = _averages_of_ties(group) if average else {}
            argument = {"number": self._number, "average": average, "borrowed": borrowed}
            group.command(CommandName.KEEP, argument)
        except BaseException:  # also Ctrl-C: nobody has this object, to drop it
            self.drop()
            raise

    def number_for(self, group: WorkerGroup) -> int:
        """Return the number under which the stages have the copy.

        Raises:
            ConfigError: It was dropped, or is of another pipeline, or others were loaded since.
        """
        if group is not self._group:
            raise ConfigError("the version is one of another pipeline")
        if not self._number:
            raise ConfigError(f"the version of step {self.step} was dropped; keep another one")
        if self._group.feed.loads != self._loads:
            raise ConfigError(
                f"the kept version of step {self.step} was made before load() or "
                "load_state_dict() replaced the weights, and cannot be read any more; call "
                "keep_version() again"
            )
        return self._number

    def drop(self) -> None:
        """Let the stages forget the copy, and wait for none of them. Idempotent."""
        number, self._number = self._number, 0
        if number and not self._group.life.is_over:
            self._group.feed.command(CommandName.DROP, number)
            self._group.feed.log.release()

    def __enter__(self) -> KeptVersion:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.drop()

    def __repr__(self) -> str:
        what = "average of the weights" if self.average else "weights"
        return f"<the {what} after step {self.step}{'' if self._number else ', dropped'}>"


def _averages_of_ties(group: WorkerGroup) -> dict[str, Any]:
    """Return the averages of tied weights, by name in the whole model."""
    if not group.plan.ties:
        return {}
    found: dict[str, Any] = {}
    for part in group.command(CommandName.OPTIMIZER_STATE):
        state = by_key(part)
        found.update({key.name: value for key, value in state.items() if key.part == AVERAGE})
    return {tie.name: found[tie.name] for tie in group.plan.ties if tie.name in found}
