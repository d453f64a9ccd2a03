"""The state of a stage, as it is read and replaced between two actions.

Checkpoints, state dicts, kept versions, fingerprints and recoveries go through these functions.
Names are those of the unsplit model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipedream_rt.messages.snapshot import Snapshot, Wanted, fitting, replica_name
from pipedream_rt.messages.state_keys import StepState
from pipedream_rt.stage.buffers import buffer_slots, load_buffers, names_of_buffers
from pipedream_rt.stage.buffers import load_state as load_module_state
from pipedream_rt.stage.fingerprint import fingerprint, fingerprints_of
from pipedream_rt.stage.hyper import packed_extra, unpack_hyper
from pipedream_rt.stage.rules.ema import Ema
from pipedream_rt.stage.stage import Stage
from pipedream_rt.torch_private import EXTRA_STATE

Copy: TypeAlias = Callable[[Tensor], Tensor]
"""How a snapshot takes a tensor of the stage."""


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _nothing() -> None:
    """Load nothing: other stages own these weights."""


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


def snapshot(stage: Stage) -> Snapshot:
    """Return the state of a stage as it is now; its tensors are the stage's own."""
    return completed(stage, begun(stage, _itself), _itself)


@torch.no_grad()
def begun(stage: Stage, copy: Copy) -> Snapshot:
    """Return the part of a snapshot that forwards change: buffers, and extra state."""
    module = stage.module
    buffers, names = {id(b) for b in module.buffers()}, buffer_slots(module)
    state = module.state_dict(keep_vars=True)
    # The other entries are weights, or made of them by a layer's own state dict.
    rest = {
        name: value
        for name, value in state.items()
        if name in names
        or id(value) in buffers
        or name.endswith(EXTRA_STATE)
        or not isinstance(value, Tensor)
    }
    return Snapshot(
        buffers={name: copy(t) for name, t in rest.items() if isinstance(t, Tensor)},
        hidden={name: copy(b) for name, b in module.named_buffers() if name not in state},
        extra=packed_extra({**rest, **dict.fromkeys(buffers_set_to_none(stage))}),
    )


@torch.no_grad()
def completed(stage: Stage, begun: Snapshot, copy: Copy) -> Snapshot:
    """Return a snapshot with the part that updates change.

    Versions and steps in it were taken before the update, and stay.
    """
    return replace(
        begun,
        weights={
            key: copy(tensor)
            for key, tensor in state_dict(stage).items()
            if key not in begun.extra and key not in begun.buffers
        },
        steps=begun.steps
        | {k: copy(v) if isinstance(v, Tensor) else v for k, v in step_state(stage).items()},
        versions=begun.versions
        | {
            version: {name: copy(tensor) for name, tensor in named.items()}
            for version, named in stage.parameters.older().items()
            if version not in begun.versions
        },
    )


def wanted(stage: Stage) -> Wanted:
    """Return the parts of a checkpoint that a stage takes."""
    slots, state = buffer_slots(stage.module), stage.module.state_dict()
    replica = stage.plan.replica_of(stage.address)
    return Wanted(
        weights=[k for k, v in state.items() if k not in slots and isinstance(v, Tensor)],
        parameters=list(stage.parameters.named),
        versions=[name for _, weights in stage.weights.by_owner for name in weights.named],
        buffers=list(slots),
        replica=replica_name(replica, stage.plan.replicas[stage.index]) if replica else "",
        others=[name for rule in stage.rules for name in rule.names],
    )


@torch.no_grad()
def restore(
    stage: Stage,
    snapshot: Snapshot,
    step: int,
    floor: int,
    with_optimizer: bool = True,
    source: str = "the snapshot",
) -> bool:
    """Go on with the state after `step` updates, while nothing is in flight.

    Micro-batches to come read no version older than ``floor``, and the newest in the place of one
    that is missing. Return whether all versions were there. Errors name the ``source``.
    """
    plan, module = stage.plan, stage.module
    whole, older = True, dict[int, dict[int, dict[str, Tensor]]]()
    for owner, weights in stage.weights.by_owner:
        read = max(floor, plan.reads(owner, step * plan.per_update))
        named = {
            version: {name: found[name] for name in weights.named}
            for version in (range(read, step) if weights.named else ())
            if weights.named.keys() <= (found := snapshot.versions.get(version, {})).keys()
        }
        is_whole = len(named) == len(range(read, step)) or not weights.named
        whole, older[owner] = whole and is_whole, named if is_whole else {}
    slots, there = buffer_slots(module), module.state_dict()
    with fitting(source):
        extra = {key: unpack_hyper(value) for key, value in snapshot.extra.items()}
    for name in slots.keys() & extra.keys():  # where a forward had put None
        owner_of, _, short = name.rpartition(".")
        module.get_submodule(owner_of)._buffers[short] = None
    extra = {key: value for key, value in extra.items() if key in there and key not in slots}
    load_buffers(module, snapshot.hidden | snapshot.buffers, stage.runner.device)
    for owner, weights in stage.weights.by_owner:
        own = owner == stage.index
        state = {**snapshot.weights, **extra}
        load = partial(load_module_state, module, state) if own else _nothing
        weights.restore(step, older[owner], load)
    stage.restored(step)
    with fitting(source):
        if with_optimizer and stage.optimizer is not None:
            stage.optimizer.load_state(snapshot.steps)
        for rule in stage.rules:
            if with_optimizer or rule.keeps == "run":
                rule.load_state(snapshot.steps, step)
    # Without the optimizer no views are loaded: another one would have made others.
    stage.parameters.loaded = floor if with_optimizer else step
    return whole and not any(rule.lacks_views() for rule in stage.rules)


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


# -- fingerprints -------------------------------------------------------------------------------


@torch.no_grad()
def fingerprints(stage: Stage) -> dict[str, Any]:
    """Return the fingerprints of a stage as it is now."""
    module, newest = stage.module, stage.parameters.ledger.newest
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return _fingerprints(stage, tensors, snapshot(stage), newest)


def fingerprints_at(stage: Stage, state: Snapshot, step: int) -> dict[str, Any]:
    """Return the fingerprints of a snapshot after ``step`` updates."""
    return _fingerprints(stage, {**state.weights, **state.buffers, **state.hidden}, state, step)


def _fingerprints(
    stage: Stage, tensors: Mapping[str, Tensor], state: Snapshot, step: int
) -> dict[str, Any]:
    buffers = [name for name, _ in stage.module.named_buffers()]
    return fingerprints_of(
        owned(stage, tensors),
        {name: tensors[name] for name in buffers if name in tensors},
        state.steps,
        state.versions,
        step,
        state.extra,
    )


@torch.no_grad()
def fingerprint_of(stage: Stage, micro_batch: int) -> str:
    """Return the fingerprint of the weights that a micro-batch in flight reads, and of buffers."""
    # Neither depends on timing or on a flush: the plan says which version is read, and buffers
    # change in the order of the forwards.
    leaves = stage.parameters.leaves(micro_batch)
    weights = dict(zip(stage.parameters.named, leaves, strict=True))
    return fingerprint({**weights, **dict(stage.module.named_buffers())})
