"""The corrections of one stage: when their hooks are called, and what becomes of their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.corrections.base import Correction, Moment, Named, overrides
from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules import Plan
from pipedream_rt.stage.optimizer import Hyper, like

_STATE = "(correction "
"""The beginning of the keys, beside the optimizer's state of a parameter, of corrections' state."""


class StageCorrections:
    """The corrections of one stage.

    Args:
        corrections: The corrections, in the order in which they are applied.
        plan: The plan of the pipeline.
        stage: Index of the stage.
        parameters: The trainable parameters that the stage owns, by name.
        tied: The names of those that other stages use too.
    """

    def __init__(
        self,
        corrections: Sequence[Correction],
        plan: Plan,
        stage: int,
        parameters: Mapping[str, nn.Parameter],
        tied: set[str],
    ) -> None:
        """Give every correction an empty state."""
        self._all = list(corrections)
        self._plan = plan
        self._stage = stage
        self._parameters = dict(parameters)
        self.names = [name for name in parameters if name not in tied]
        for correction in self._all:
            correction.state = {}
            correction.parameters = {name: parameters[name] for name in self.names}
        self._before_forward = self._with("before_forward")
        self._after_backward = self._with("after_backward")
        self._before_step = self._with("before_step")
        self._after_step = self._with("after_step")
        self._corrected: list[Hyper] = []  # the options that the last step had

    def _with(self, hook: str) -> list[Correction]:
        """Return the corrections that have a hook of their own."""
        return [each for each in self._all if overrides(each, hook)]

    def _moment(self, update: int, read: float) -> Moment:
        """Return the moment of an update on this stage."""
        shape = self._plan.shape
        return Moment(
            stage=self._stage,
            num_stages=shape.num_stages,
            micro_batches=shape.per_update,
            update=update,
            read=read,
        )

    # -- gradients ------------------------------------------------------------------------------

    def adjusts(self, update: int, read: int) -> bool:
        """Whether the gradient of a micro-batch is to be changed.

        Args:
            update: The update that it is a part of.
            read: The version that it was computed on.
        """
        return bool(self._after_backward) and update > read

    def adjust(self, update: int, read: int, gradients: Named, then: Named, now: Named) -> None:
        """Change the gradient of a micro-batch in place; see `Correction.after_backward`."""
        at = self._moment(update, read)
        mine = {name: gradients[name] for name in self.names if name in gradients}
        for correction in self._after_backward:
            correction.after_backward(at, mine, then, now)

    # -- steps ----------------------------------------------------------------------------------

    @contextmanager
    def stepping(
        self, update: int, read: float, optimizer: torch.optim.Optimizer
    ) -> Iterator[None]:
        """Call the hooks around a step, the body; then put the options back that they have changed.

        Args:
            update: Number of the update.
            read: The mean of the versions that its micro-batches have read.
            optimizer: The optimizer.
        """
        at = self._moment(update, read)
        kept = [_options(group) for group in optimizer.param_groups]
        before: Named = {}
        with torch.no_grad():
            for correction in self._before_step:
                correction.before_step(at, optimizer)
            if self._after_step:
                before = {name: p.clone() for name, p in self._parameters.items()}
        changed = [_options(group) for group in optimizer.param_groups]
        try:
            yield
            with torch.no_grad():
                weights = {name: p.detach() for name, p in self._parameters.items()}
                for correction in self._after_step:
                    correction.after_step(at, weights, before)
        finally:
            self._corrected = changed
            for group, was, became in zip(optimizer.param_groups, kept, changed, strict=True):
                for name, value in was.items():
                    if became.get(name) is not value and group.get(name) is became.get(name):
                        group[name] = value

    # -- views ----------------------------------------------------------------------------------

    def distances(self, version: int) -> list[int]:
        """Return the stalenesses above 0 with which micro-batches will read a version."""
        if not self._before_forward or not self.names:
            return []
        found: set[int] = set()
        k = self._plan.per_update
        for m in count(version * k):  # earlier ones read older versions
            read = self._plan.reads(self._stage, m)
            if read > version:
                return sorted(found)
            if read == version and m // k > version:
                found.add(m // k - version)
        raise AssertionError("a policy that names one version for ever")

    def look_ahead(
        self, version: int, distance: int, weights: Named, optimizer: torch.optim.Optimizer
    ) -> None:
        """Change copies of a version's weights; see `Correction.before_forward`.

        Args:
            version: The version, which a step has just made.
            distance: The staleness with which they will be read.
            weights: The copies.
            optimizer: The optimizer.
        """
        at = self._moment(version + distance, version)
        kept = [_options(group) for group in optimizer.param_groups]
        for group, options in zip(optimizer.param_groups, self._corrected, strict=True):
            group.update(options)
        mine = {name: weights[name] for name in self.names}
        for correction in self._before_forward:
            correction.before_forward(at, mine, optimizer)
        for group, options in zip(optimizer.param_groups, kept, strict=True):
            group.update(options)

    # -- state ----------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the state of all corrections, by name of a parameter and then by a key of ours.

        Raises:
            ConfigError: A correction has a state that belongs to no parameter of the stage.
        """
        found: dict[str, dict[str, Any]] = {}
        for number, correction in enumerate(self._all):
            for name, values in correction.state.items():
                if name not in self._parameters:
                    raise ConfigError(
                        f"{type(correction).__name__} keeps state under {name!r}, which is no "
                        f"parameter of stage {self._stage}; the keys of state are names of them"
                    )
                entries = {f"{_STATE}{number}) {key}": value for key, value in values.items()}
                found.setdefault(name, {}).update(entries)
        return found

    def nbytes(self) -> int:
        """Return the bytes of the tensors that corrections remember."""
        values = (v for each in self._all for named in each.state.values() for v in named.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the state of all corrections by what `state` has returned."""
        for number, correction in enumerate(self._all):
            correction.state = {}
            start = f"{_STATE}{number}) "
            for name, parameter in self._parameters.items():
                values = {
                    key.removeprefix(start): like(parameter, v) if isinstance(v, Tensor) else v
                    for key, v in state.get(name, {}).items()
                    if key.startswith(start)
                }
                if values:
                    correction.state[name] = values


def _options(group: Hyper) -> Hyper:
    """Return the options of a group."""
    return {name: value for name, value in group.items() if name != "params"}
