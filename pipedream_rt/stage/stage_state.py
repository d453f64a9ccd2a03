"""The state of a stage, as it is read and replaced between two actions.

Checkpoints, state dicts, kept versions, fingerprints and recoveries go through these functions.
Names are those of the unsplit model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.messages.state_keys import StateKey, StepState
from pipedream_rt.stage.buffers import load_buffers, names_of_buffers
from pipedream_rt.stage.buffers import load_state as load_module_state
from pipedream_rt.stage.fingerprint import fingerprint, fingerprints_of
from pipedream_rt.stage.hyper import packed_extra
from pipedream_rt.stage.rules.ema import Ema
from pipedream_rt.stage.stage import Stage

_NONE_BORROWED: Mapping[int, dict[int, dict[str, Tensor]]] = {}

# -- weights and buffers ------------------------------------------------------------------------


def state_dict(stage: Stage, version: int = 0) -> dict[str, Any]:
    """Return the stage's own weights, under all their keys, and buffers; 0 is the newest."""
    copies = stage.kept.copies(version)
    borrowed = stage.weights.borrowed.values()
    foreign = {id(p) for weights in borrowed for p in weights.named.values()}
    state = {
        key: copies.get(key, value).detach() if isinstance(value, Tensor) else value
        for key, value in stage.module.state_dict(keep_vars=True).items()
        if id(value) not in foreign
    }
    for name, others in stage.spec.aliases.items():
        state.update(dict.fromkeys(others, state[name]))
    return state


@torch.no_grad()
def load_state(stage: Stage, state: dict[str, Tensor]) -> None:
    """Load weights and buffers while nothing is in flight, and forget older versions."""
    stage.parameters.reset(lambda: load_module_state(stage.module, state))
    for weights in stage.weights.borrowed.values():
        weights.reset(lambda: None)


@torch.no_grad()
def restore(
    stage: Stage,
    step: int,
    weights: dict[str, Tensor],
    older: dict[int, dict[str, Tensor]],
    buffers: dict[str, Tensor],
    borrowed: Mapping[int, dict[int, dict[str, Tensor]]] = _NONE_BORROWED,
) -> None:
    """Go on with the state after `step` updates, while nothing is in flight."""
    # `older` has versions of the stage's own weights, `borrowed` the same of other owners.
    load_buffers(stage.module, buffers, stage.runner.device)
    stage.parameters.restore(step, older, lambda: load_module_state(stage.module, weights))
    for owner, of_owner in stage.weights.borrowed.items():
        of_owner.restore(step, borrowed[owner], lambda: None)
    stage.restored(step)


def owned(stage: Stage, by_key: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, by name in the unsplit model, the parameters that a stage owns, frozen ones too."""
    foreign = {name for weights in stage.weights.borrowed.values() for name in weights.named}
    names = stage.weights.names
    keys = ((key, names.get(key, key)) for key, _ in stage.module.named_parameters())
    return {n: by_key[key] for key, n in keys if key in by_key and n not in foreign}


def buffers_set_to_none(stage: Stage) -> list[str]:
    """Return the names of the buffers that a forward has replaced by None."""
    return sorted(stage.guards.filled - names_of_buffers(stage.module))


def keep(stage: Stage, number: int, average: bool, borrowed: Mapping[str, Tensor]) -> None:
    """Keep a copy of the newest weights, or of their average, and of the buffers."""
    # `borrowed` has averages of tied weights by name: for those that other stages own.
    values: dict[int, Tensor] = {}
    if average:
        ema, own = stage.rule(Ema), stage.parameters.named
        assert ema is not None
        values = {id(own[n]): t for n, t in ema.average().items()}
        for weights in stage.weights.borrowed.values():
            values |= {id(p): borrowed[n] for n, p in weights.named.items() if n in borrowed}
    stage.kept.keep(number, values)


# -- the optimizer and the rules ----------------------------------------------------------------


def optimizer_state(stage: Stage) -> StepState:
    """Return the state of the optimizer, and the average of the weights."""
    if stage.optimizer is None:
        return {}
    found = stage.optimizer.state()
    for rule in stage.rules:
        if rule.keeps == "weights":
            found.update(rule.state())
    return found


def step_state(stage: Stage) -> StepState:
    """Return the state of the optimizer and of all rules."""
    if stage.optimizer is None:
        return {}
    found = stage.optimizer.state()
    for rule in stage.rules:
        found.update(rule.state())
    return found


def load_step_state(stage: Stage, state: Mapping[StateKey, Any], step: int) -> None:
    """Load what `step_state` has returned, after `restore`."""
    if stage.optimizer is not None:
        stage.optimizer.load_state(state)
    for rule in stage.rules:
        rule.load_state(state, step)


def load_totals(stage: Stage, state: Mapping[StateKey, Any], step: int) -> None:
    """Load the state of the rules that does not belong to an optimizer."""
    for rule in stage.rules:
        if rule.keeps == "run":
            rule.load_state(state, step)


# -- fingerprints -------------------------------------------------------------------------------


@torch.no_grad()
def fingerprints(stage: Stage) -> dict[str, Any]:
    """Return the fingerprints of a stage as it is now."""
    parameters = stage.parameters
    return fingerprints_of(
        owned(stage, dict(stage.module.named_parameters())),
        dict(stage.module.named_buffers()),
        step_state(stage),
        parameters.older(),
        parameters.ledger.newest,
        packed_extra({**stage.module.state_dict(), **dict.fromkeys(buffers_set_to_none(stage))}),
    )


@torch.no_grad()
def fingerprint_of(stage: Stage, micro_batch: int) -> str:
    """Return the fingerprint of the weights that a micro-batch in flight reads, and of buffers."""
    # Neither depends on timing or on a flush: the plan says which version is read, and buffers
    # change in the order of the forwards.
    leaves = stage.parameters.leaves(micro_batch)
    weights = dict(zip(stage.parameters.named, leaves, strict=True))
    return fingerprint({**weights, **dict(stage.module.named_buffers())})
