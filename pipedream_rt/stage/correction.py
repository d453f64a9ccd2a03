"""What a correction for staleness is, and what it is told.

A gradient is *stale* if it was computed on older weights than those that it is applied to. A
correction is an object that changes what a stage does about that. It has four hooks, each of which
changes what it is given in place; a class overrides those that it needs::

    before_forward   the weights that micro-batches will read
    after_backward   the gradient of one micro-batch
    before_step      the options of the optimizer: rates, momentum
    after_step       the weights that the optimizer has made

A hook gets numbers alone (`Moment`), never a clock, so that a run with corrections gives the same
bits whatever the timing. A correction keeps what it remembers in ``self.state``, which goes into
checkpoints and is restored after a worker is lost.
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
"""Tensors by the names of parameters in the unsplit model, each of the shape of its parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The place in a run at which a hook is called.

    Attributes:
        stage: Index of the stage, 0-based.
        num_stages: The number of stages.
        micro_batches: The number of micro-batches per update, k.
        update: Number of the update that the gradient is a part of, 0-based. The update is applied
            to version ``update`` of the weights and makes version ``update + 1``.
        read: The weight version that the gradient is, or will be, computed on. In the hooks of a
            step: the mean of the versions that the micro-batches of the update have read.
    """

    stage: int
    num_stages: int
    micro_batches: int
    update: int
    read: float

    @property
    def staleness(self) -> float:
        """The number of updates from the version that is read to the one that is updated.

        In the hooks of a step it is the mean over the micro-batches of the update: with
        ``async-1f1b`` and as many micro-batches per update as stages, it is below 1 everywhere.
        """
        return self.update - self.read


class Correction:
    """The base of corrections; each stage has an instance of its own.

    A user may write one. This one makes smaller steps where gradients are stale::

        class Damped(Correction):
            def before_step(self, at, optimizer):
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] / (1 + at.staleness)

    Instances are pickled to reach the stages, so their attributes must be plain values. Weights
    that several stages use (tied weights) are left out of `before_forward` and `after_backward`.

    Attributes:
        parameters: The parameters of the stage that the corrections are for, by name; set before
            the first hook.
        copies: The memory of ``state`` on a stage, in copies of the stage's weights, once the stage
            has made some updates.
        copies_per_version: The memory of the weights of `before_forward`, in copies of the stage's
            weights for each version that the stage keeps.
        passes: The time that the correction adds to an update, in passes: one pass reads or writes
            as many bytes as the stage's weights have. The simulator uses it (`Costs.corrected`).
            The figures of this package are measured, so they include the allocation of memory.
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
            group: The options of a parameter group, as the user gave them: without defaults.

        Raises:
            ConfigError: The correction is not for it.
        """

    def before_forward(self, at: Moment, weights: Named, optimizer: torch.optim.Optimizer) -> None:
        """Change the weights that micro-batches will read in the place of a version.

        It is called after the step that makes the version, once for each staleness above 0 with
        which the version will be read. The backward of such a micro-batch uses the changed weights
        too. The optimizer never sees them.

        Args:
            at: The moment; ``at.read`` is the version, ``at.update`` the update that the gradient
                on these weights will be a part of.
            weights: Copies of the weights of the version, to be changed in place.
            optimizer: The optimizer after the step, with the options that the step had. Its
                parameters have the values of the version. ``optimizer.state[parameter]`` is empty
                for a parameter that has had no gradient so far.
        """

    def after_backward(self, at: Moment, gradients: Named, read: Named, newest: Named) -> None:
        """Change the gradient of one micro-batch before it is added to those of its update.

        It is called only if the gradient is stale.

        Args:
            at: The moment.
            gradients: The gradients, to be changed in place, of the loss times the micro-batch's
                share of the mini-batch. Parameters without a gradient are left out.
            read: The weights on which they were computed.
            newest: The weights to which the update will be applied.
        """

    def before_step(self, at: Moment, optimizer: torch.optim.Optimizer) -> None:
        """Change options in ``optimizer.param_groups`` for one step, after which they are restored.

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


def require_number(name: str, value: object, least: float, below: float = math.inf) -> None:
    """Refuse an attribute that is not a number from ``least`` to less than ``below``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value < below:  # type: ignore[operator]  # NaN fails both
        most = "" if below == math.inf else f", and less than {below:g}"
        raise ConfigError(f"{name} must be a number of at least {least:g}{most}, not {value!r}")


def refuse_nonsense(correction: Correction) -> None:
    """Refuse a correction that would do nothing, or whose hooks would not be called."""
    name, known = type(correction).__name__, ", ".join(HOOKS)
    # Hooks are looked up on the class (`overrides`), so one on the object would never be called;
    # nor would a misspelt one.
    for found in {*dir(type(correction)), *vars(correction)}:
        on_object = found in HOOKS and found in vars(correction)
        if on_object or (found.startswith(("before_", "after_")) and found not in HOOKS):
            raise ConfigError(
                f"{name} has {found!r}, which would never be called; hooks are methods of the "
                f"class, and their names are {known}"
            )
    if not any(overrides(correction, hook) for hook in HOOKS):
        raise ConfigError(f"{name} corrects nothing: it has none of the hooks {known}")
    # The stage sets both attributes later, where a frozen dataclass would fail.
    try:
        probe = copy.copy(correction)
        probe.state, probe.parameters = {}, {}
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be given its state, as by correction.state = {{}}: {error}; a "
            "dataclass must not be frozen"
        ) from error


def overrides(correction: Correction, hook: str) -> bool:
    """Whether the class of a correction has its own method for a hook."""
    return getattr(type(correction), hook) is not getattr(Correction, hook)
