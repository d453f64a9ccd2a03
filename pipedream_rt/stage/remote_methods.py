"""The methods that a reference to a stage reaches; the stage runs them at their turn of the feed.

That is between two micro-batches, as for every command. None of these methods changes anything, so
a recovery need not repeat them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from torch import Tensor

from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.tree import Value, flatten, unflatten
from pipedream_rt.stage.process_memory import peak_memory_bytes
from pipedream_rt.stage.stage import Stage


def forward(stage: Stage, x: Any) -> Any:
    """Return the output of a stage of a sequence: eval mode, newest weights, no gradient."""
    structure, tensors = flatten(x)
    (made,) = stage.passes.infer(0, [Value(structure, tuple(tensors), (False,) * len(tensors))])
    return unflatten(made.structure, made.tensors)


def parameter_names(stage: Stage) -> list[str]:
    """Return the names of the stage's parameters in the unsplit model."""
    return [name for name, _ in stage.module.named_parameters()]


def parameter(stage: Stage, name: str) -> Any:
    """Return a copy of the newest value of a parameter."""
    found = dict(stage.module.named_parameters()).get(name)
    if found is None:
        names = ", ".join(parameter_names(stage)) or "none"
        raise ConfigError(f"stage {stage.index} has no parameter {name!r}; it has {names}")
    return found.detach().clone()


def state_dict(stage: Stage) -> dict[str, Any]:
    """Return copies of the newest weights and the buffers, by name in the unsplit model."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in stage.module.state_dict().items()
    }


def num_parameters(stage: Stage) -> int:
    """Return how many elements the stage's parameters have together."""
    return sum(parameter.numel() for parameter in stage.module.parameters())


def memory(stage: Stage) -> dict[str, int]:
    """Return the bytes of one weight version, and the peak of the stage's process."""
    weights = sum(p.numel() * p.element_size() for p in stage.module.parameters())
    return {"weights_bytes": weights, "peak_memory_bytes": peak_memory_bytes()}


def versions(stage: Stage) -> list[int]:
    """Return the numbers of the weight versions that the stage holds, oldest first."""
    return sorted(stage.parameters.ledger.kept)


METHODS: Mapping[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        forward, parameter_names, parameter, state_dict, num_parameters, memory, versions,
    )
}  # fmt: skip
"""The methods, by name."""


def ask(stage: Stage, asked: int, method: str, inputs: list[Any], named: Mapping[str, Any]) -> Any:
    """Call a method if this stage is the one that is asked, by index."""
    if stage.index != asked:
        return None
    try:
        signature(METHODS[method]).bind(stage, *inputs, **named)
    except TypeError as error:
        raise ConfigError(f"{method} of a stage does not take these arguments: {error}") from error
    try:
        return METHODS[method](stage, *inputs, **named)
    except ConfigError:
        raise
    except Exception as error:  # a user's module may raise anything; a refusal ends no run
        raise ConfigError(f"{method} of stage {asked}: {type(error).__name__}: {error}") from error
