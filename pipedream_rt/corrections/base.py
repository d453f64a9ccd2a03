"""What a correction for staleness is, and what it is told.

A gradient is *stale* if it was computed on older weights than those that it is applied to. A
correction is an object that changes what a stage does about that. It has four hooks, each of which
changes what it is given in place; a class overrides those that it needs::

    before_forward   the weights that micro-batches will read
    after_backward   the gradient of one micro-batch
    before_step      the options of the optimizer: rates, momentum
    after_step       the weights that the optimizer has made

A hook is told numbers alone (`Moment`), never a clock, so that a run with corrections gives the
same bits whatever the timing. What a correction remembers, it keeps in ``self.state``: that goes
into checkpoints, and comes back after the death of a worker.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipedream_rt.errors import ConfigError

Named: TypeAlias = dict[str, Tensor]
"""Tensors of the shapes of parameters, by the names of the parameters in the unsplit model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The place in a run at which a hook is called.

    Attributes:
        stage: Index of the stage, 0-based.
        num_stages: The number of stages.
        micro_batches: The number of micro-batches per update, k.
        update: Number of the update that the gradient is a part of, 0-based. It is applied to
            version ``update`` of the weights and makes version ``update + 1``.
        read: The weight version that the gradient is, or will be, computed on. For a step: the mean
            of those that the micro-batches of the update have read.
    """

    stage: int
    num_stages: int
    micro_batches: int
    update: int
    read: float

    @property
    def staleness(self) -> float:
        """The number of updates between the version that is read and the one that is stepped on.

        For a step that is the mean over the micro-batches of the update: with ``async-1f1b`` and as
        many micro-batches per update as stages, it is below 1 everywhere.
        """
        return self.update - self.read


class Correction:
    """The base of corrections, of which each stage has an instance of its own.

    A user may write one, as this, which makes smaller steps where gradients are stale::

        class Damped(Correction):
            def before_step(self, at, optimizer):
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] / (1 + at.staleness)

    Instances are pickled to reach the stages, so their attributes must be plain values. Weights
    that several stages use (tied weights) are left out of `before_forward` and `after_backward`.

    Attributes:
        parameters: The parameters of the stage that the corrections are for, by name; set before
            the first hook.
        copies: The memory that ``state`` takes on a stage, in copies of its weights, once the stage
            has made some updates.
        copies_per_version: The memory that the weights of `before_forward` take, in copies for each
            version that a stage keeps.
        passes: The time of the correction in an update, as a number of times that all weights, or
            as much other memory, are read or written: its time in the simulator
            (`Costs.corrected`). Those of this package are measured, so that memory that must be
            newly found counts too.
        state: What the correction remembers, by name of a parameter, then by a name of its own:
            tensors and numbers.
    """

    copies: float = 0.0
    copies_per_version: float = 0.0
    passes: float = 0.0
    parameters: Mapping[str, Tensor]
    state: dict[str, dict[str, Any]]

    def require_fit(self, optimizer: type, group: Mapping[str, Any]) -> None:
        """Refuse an optimizer that the correction is not for; called before anything starts.

        Args:
            optimizer: The class of the optimizer.
            group: The options of a parameter group that were given.

        Raises:
            ConfigError: The correction is not for it.
        """

    def before_forward(self, at: Moment, weights: Named, optimizer: torch.optim.Optimizer) -> None:
        """Change the weights that micro-batches will read in the place of a version.

        It is called when the step that makes the version is done, once for each staleness above 0
        with which the version will be read. The backward of such a micro-batch uses the changed
        weights too, and the optimizer never sees them.

        Args:
            at: The moment; ``at.read`` is the version, ``at.update`` the update that the gradient
                on these weights will be a part of.
            weights: Copies of the weights of the version, to be changed in place.
            optimizer: The optimizer after the step, with the options that the step had. Its
                parameters have the values of the version. ``optimizer.state[parameter]`` is empty
                for parameters without a gradient so far.
        """

    def after_backward(self, at: Moment, gradients: Named, read: Named, newest: Named) -> None:
        """Change the gradient of one micro-batch before it is added to those of its update.

        It is called only if the gradient is stale.

        Args:
            at: The moment.
            gradients: The gradients, to be changed in place; without parameters that have none.
                They are those of the loss times the micro-batch's share of the mini-batch.
            read: The weights on which they were computed.
            newest: The weights to which the update will be applied.
        """

    def before_step(self, at: Moment, optimizer: torch.optim.Optimizer) -> None:
        """Change options in ``optimizer.param_groups`` for one step; after it they are as before.

        Args:
            at: The moment.
            optimizer: The optimizer, with the options that travelled with the micro-batch.
        """

    def after_step(self, at: Moment, weights: Named, before: Named) -> None:
        """Change the weights that a step has made.

        Args:
            at: The moment.
            weights: The weights after the step, to be changed in place.
            before: Copies of them as they were before the step.
        """


HOOKS = ("before_forward", "after_backward", "before_step", "after_step")
"""The names of the hooks."""


def require_number(name: str, value: object, least: float, below: float = math.inf) -> None:
    """Refuse an attribute that is no number in a range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value < below:  # type: ignore[operator]  # NaN is neither
        most = "" if below == math.inf else f", and less than {below:g}"
        raise ConfigError(f"{name} must be a number of at least {least:g}{most}, not {value!r}")


def refuse_nonsense(correction: Correction) -> None:
    """Refuse a correction that would do nothing, or whose hooks would not be called."""
    name, known = type(correction).__name__, ", ".join(HOOKS)
    for found in {*dir(type(correction)), *vars(correction)}:
        on_object = found in HOOKS and found in vars(correction)
        if on_object or (found.startswith(("before_", "after_")) and found not in HOOKS):
            raise ConfigError(
                f"{name} has {found!r}, which would never be called; hooks are methods of the "
                f"class, and their names are {known}"
            )
    if not any(overrides(correction, hook) for hook in HOOKS):
        raise ConfigError(f"{name} corrects nothing: it has none of the hooks {known}")
    try:
        probe = copy.copy(correction)
        probe.state, probe.parameters = {}, {}
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be given its state, as by correction.state = {{}}: {error}; a "
            "dataclass must not be frozen"
        ) from error


def overrides(correction: Correction, hook: str) -> bool:
    """Whether a correction has a hook of its own."""
    return getattr(type(correction), hook) is not getattr(Correction, hook)
