"""The specifications from which the workers build their stages, pickled before a worker starts."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Collection, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.unsplit_model import UnsplitModel, module_named
from pipedream_rt.models import (
    alias,
    dumps,
    foreign,
    range_of,
    shared_buffers,
    tensors_of,
    why_unpicklable,
)
from pipedream_rt.models.cut import StageProgram
from pipedream_rt.models.holders import Holder
from pipedream_rt.models.parcel import Parcel, weights_in
from pipedream_rt.models.preserving_state import MANUAL
from pipedream_rt.models.settings import refuse_global_hooks
from pipedream_rt.models.shipping import Range
from pipedream_rt.models.tensors import gradient_hooks
from pipedream_rt.schedules import Plan
from pipedream_rt.schedules.placement import LOSS_LAYER
from pipedream_rt.stage.parameters import GradientHook
from pipedream_rt.stage.spec import LossFunction, StageSpec


class PackedStage(NamedTuple):
    """What is packed for a stage.

    Attributes:
        spec: Its `StageSpec`, pickled: the pickle, and the memory of each tensor in it.
        parcel: All that the stage goes by.
        holders: What holds values of the script in it, by the numbers that micro-batches name.
    """

    spec: tuple[Tensor, ...]
    parcel: Parcel
    holders: dict[int, Holder]


def packed_stages(
    model: UnsplitModel,
    parts: Sequence[nn.Module],
    common: StageSpec,
    *,
    loss_fn: LossFunction | None,
    recompute: Collection[int],
    programs: Sequence[tuple[StageProgram, ...]],
    compared: bool,
) -> list[PackedStage]:
    """Pickle the `StageSpec` of each stage."""
    refuse_global_hooks()
    shared, owners, weights = shared_buffers(parts), _owners(parts), weights_of(model)
    made: list[tuple[StageSpec, list[tuple[str, object]]]] = []
    for stage, part in enumerate(parts):
        loss = loss_fn if stage in common.plan.exits else None
        named = {name: module_named(part, name) for name in common.plan.layers[stage]}
        layers = {name: layer for name, layer in named.items() if layer is not None}
        if isinstance(loss, nn.Module):
            # As a layer: its weights are then trained and saved with those of the stage.
            part.add_module(LOSS_LAYER, loss)
        spec = dataclasses.replace(
            common,
            stage=stage,
            layers=part,
            loss_fn=None if isinstance(loss, nn.Module) else loss,
            programs=programs[stage],
            recompute=stage in recompute,
            names={n: model.names[id(p)] for n, p in part.named_parameters() if p.requires_grad},
            numbers=_numbers(model, part),
            hooks=_hooks(part),
            shared=shared[stage],
            aliases=_aliases(model, parts, common.plan, stage),
        )
        if compared:
            spec = dataclasses.replace(spec, code=spec.own_code())
        made.append((spec, list(_pieces(spec, layers, loss))))
    spared = weights_in(model.modules.values())
    parcels = [Parcel(_roots(spec, pieces), spared) for spec, pieces in made]
    found = [parcel.found for parcel in parcels]
    numbers: dict[Any, int] = {}  # a holder that several stages have gets one number
    for of_stage in found:
        for each in of_stage:
            numbers.setdefault(each, len(numbers))
    packed = []
    for stage, ((spec, pieces), of_stage) in enumerate(zip(made, found, strict=True)):
        along: set[int] = set()
        _dumped(spec, pieces, along=along)
        # Only pickling shows what goes along: an object may leave things out, as a connection.
        mine = {
            numbers[each]: h
            for each, h in of_stage.items()
            if id(h.value) in along or isinstance(h.value, ModuleType | type)
        }
        others = {
            numbers[each] for s, each_of in enumerate(found) if s != stage for each in each_of
        }
        spec = dataclasses.replace(
            spec, holders=mine, shared_holders=tuple(sorted(mine.keys() & others))
        )
        buffers: list[pickle.PickleBuffer] = []
        data, tensors = _dumped(spec, pieces, buffers.append)
        if foreign(tensors, owners, stage):
            raise ConfigError(_takes_along(pieces, owners, stage))
        if alias(tensors, weights):
            raise ConfigError(_lies_over(pieces, weights))
        memory = tuple(_copied(each) for each in (data, *(b.raw() for b in buffers)))
        packed.append(PackedStage(memory, parcels[stage], mine))
    return packed


def _dumped(
    spec: StageSpec, pieces: Sequence[tuple[str, object]], *how: Any, **more: Any
) -> tuple[bytes, dict[int, Range]]:
    """Pickle a specification; an error names the piece that cannot be pickled."""
    try:
        return dumps(spec, *how, **more)
    except Exception as error:  # a foreign class may raise anything when pickled
        raise ConfigError(_unpicklable(pieces, error)) from error


def _roots(spec: StageSpec, pieces: Sequence[tuple[str, object]]) -> list[tuple[str, object]]:
    """Return the user's objects whose values the script may change, or stages share."""
    # Not those of rules and codecs, which nobody can reach on a stage.
    of_rules = {id(thing) for rule in spec.rules for thing in rule.things()}
    codecs = {id(codec) for codec in spec.codecs.values()}
    return [(what, each) for what, each in pieces if id(each) not in of_rules | codecs]


def _pieces(
    spec: StageSpec, layers: dict[str, nn.Module], loss: LossFunction | None
) -> Iterator[tuple[str, object]]:
    """Yield the user's objects in a specification, each with what it is called in an error."""
    for name, layer in layers.items():
        yield f"layer {name}", layer
    for program in spec.programs:
        for step in program.steps:
            yield f"{step.name} at {step.where}", step.target
            yield f"an argument of {step.name} at {step.where}", (step.args, step.kwargs)
    yield "what the forward returns", [program.output for program in spec.programs]
    yield "loss_fn", loss
    for hook in spec.hooks:
        yield f"the hook of {hook.parameter}", hook.call
    for codec in spec.codecs.values():
        yield f"the codec {type(codec).__name__}", codec
    for rule in spec.rules:
        for thing in rule.things():
            yield f"the {rule.called} {type(thing).__name__}", thing


def _copied(data: Any) -> Tensor:
    """Return a tensor with a copy of some bytes."""
    made = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    made.numpy().data[:] = data
    return made


def _owners(parts: Sequence[nn.Module]) -> dict[int, tuple[set[int], str]]:
    """Return, by ``id`` of each weight and buffer, the stages that have it and a name of it."""
    owners: dict[int, tuple[set[int], str]] = {}
    for stage, part in enumerate(parts):
        for key, tensor in tensors_of(part, ""):
            owners.setdefault(id(tensor), (set(), key))[0].add(stage)
    return owners


def weights_of(model: UnsplitModel) -> dict[int, tuple[Range, str]]:
    """Return, by ``id`` of each weight and buffer, where it lies and a name of it."""
    return {
        id(tensor): (range_of(tensor), key)
        for name, layer in model.modules.items()
        for key, tensor in tensors_of(layer, name)
    }


def _aliases(
    model: UnsplitModel, parts: Sequence[nn.Module], plan: Plan, stage: int
) -> dict[str, tuple[str, ...]]:
    """Return the keys under which other stages have the tied weights that a stage owns."""
    found = {}
    for tie in plan.ties:
        if tie.stages[0] == stage:  # the first stage owns it
            own = model.parameters[tie.name]
            here, *others = (
                [key for key, p in parts[s].named_parameters(remove_duplicate=False) if p is own]
                for s in tie.stages
            )
            keys = dict.fromkeys(key for keys in others for key in keys)
            found[here[0]] = tuple(key for key in keys if key not in here)
    return found


def _numbers(model: UnsplitModel, part: nn.Module) -> dict[str, int]:
    """Return, by name, the position in the whole model of each trainable parameter of a stage."""
    order = {each: number for number, each in enumerate(model.names)}
    return {model.names[id(p)]: order[id(p)] for p in part.parameters() if id(p) in order}


def _lies_over(pieces: Sequence[tuple[str, object]], weights: dict[int, tuple[Range, str]]) -> str:
    """Say which layer, loss or hook holds a tensor over the memory of a weight."""
    for what, value in pieces:
        if weight := alias(dumps(value)[1], weights):
            old = weight.endswith("_orig")  # torch.nn.utils.spectral_norm renames it so
            return (
                f"{what} holds a tensor over the memory of {weight}, such as a detached or sliced "
                "one, in an attribute or a closure; on a worker the two would part. "
                + (
                    "torch.nn.utils.parametrizations has what torch.nn.utils.spectral_norm did, "
                    "without that"
                    if old
                    else "Take it in forward, from the parameter or buffer itself"
                )
            )
    return (
        "what a stage is sent holds a tensor over the memory of a weight, and on a worker the two "
        f"would part; none of its layers does by itself. {MANUAL}"
    )


def _hooks(part: nn.Module) -> tuple[GradientHook, ...]:
    """Return the hooks on the parameters of a stage."""
    return tuple(
        GradientHook(name, after_sum, hook)
        for name, parameter in part.named_parameters()
        if parameter.requires_grad
        for after_sum, hooks in zip((False, True), gradient_hooks(parameter), strict=True)
        for hook in hooks
    )


def _unpicklable(pieces: Sequence[tuple[str, object]], error: Exception) -> str:
    """Say which layer, loss or hook does not pickle, and why."""
    for what, value in pieces:
        try:
            dumps(value)
        except Exception as reason:  # as above
            return (
                f"{what} ({type(value).__name__}) cannot be pickled, so it cannot reach a worker: "
                f"{_deepest_unpicklable(what, value)}{why_unpicklable(value, reason)}"
            )
    return f"the stage cannot be pickled: {error}"


def _deepest_unpicklable(what: str, value: object) -> str:
    """Say which attribute, global or variable in a value does not pickle; "" if none by itself."""
    # The walk goes breadth first, so in the last one nothing deeper fails.
    parcel, deepest = Parcel([(what, value)]), ""
    for holder in parcel.found.values():
        for key, each in holder.raw().items() if holder.kind != "state" else ():
            try:
                dumps(each)
            except Exception:
                deepest = f"a {type(each).__name__} is held as {holder.called(key)}: "
    return deepest


def _takes_along(
    pieces: Sequence[tuple[str, object]], owners: dict[int, tuple[set[int], str]], stage: int
) -> str:
    """Say which layer, loss or hook takes a weight of another stage along."""
    for what, value in pieces:
        if weight := foreign(dumps(value)[1], owners, stage):
            return (
                f"{what} of stage {stage} refers to {weight}, by a closure, a tuple, a list or an "
                "attribute that is no submodule, or is a module that is passed along; its stage "
                "would have a copy that is never trained. Put both into one stage, or pass the "
                "value along"
            )
    return (
        f"what stage {stage} is sent holds a weight of another stage, of which it would have a "
        f"copy that is never trained; none of its layers does by itself. {MANUAL}"
    )
