"""The split of a model into stages, whichever way it can be cut."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from pipedream_rt.batches.forwards import Forwards, SequenceForwards, default_example, sizes_of
from pipedream_rt.batches.items import Batch, example_of
from pipedream_rt.batches.recorded_forwards import RecordedForwards
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.messages.message import Mode
from pipedream_rt.models import (
    balanced,
    find_layers,
    first_layer,
    listed_points,
    split_points,
)
from pipedream_rt.models.cut import StageProgram
from pipedream_rt.models.modes import Modes
from pipedream_rt.models.preserving_state import MANUAL
from pipedream_rt.models.program import Program
from pipedream_rt.models.recording import refuse_changing
from pipedream_rt.stage.spec import has_own_loss

Stages: TypeAlias = int | Sequence[int | str]
"""The number of stages; or the first layer of every stage but the first, by index or by name."""


_log = logging.getLogger(__name__)


class Split(NamedTuple):
    """A model split into stages.

    Attributes:
        layers: By stage, the names of its layers, and of parameters and buffers beside them.
        links: The pairs of a producer and a consumer; None for a chain.
        entries: The stages that take inputs of the model; empty for the first alone.
    """

    layers: tuple[tuple[str, ...], ...]
    links: tuple[tuple[int, int], ...] | None
    entries: tuple[int, ...]
    forwards: Forwards
    modes: Modes

    def programs(self, stage: int) -> tuple[StageProgram, ...]:
        """Return the programs with which a stage begins; none for a sequence."""
        return self.forwards.stage_programs(stage)


class ForwardOptions(NamedTuple):
    """How forwards are recorded.

    Attributes:
        trains: Whether the model is trained.
        may_own_loss: Whether the model computes the loss itself if it returns one for the example.
    """

    trains: bool = False
    may_own_loss: bool = False
    autocast: torch.dtype | None = None


def split_model(
    model: UnsplitModel, stages: Stages, example: Any, options: ForwardOptions
) -> Split:
    if model.sequence is not None:
        points = split_points(model.sequence, stages, model.elements)
        names = list(model.sequence)
        bounds = [*points, len(names)]
        layers = tuple(tuple(names[a:b]) for a, b in pairwise(bounds))
        return Split(layers, None, (), SequenceForwards(), model.modes(model.sequence.values()))
    batch = default_example(model.whole) if example is None else example_of(example)
    if batch is None:
        raise ConfigError(
            f"the forward of {type(model.whole).__name__} must be run once to find out what passes "
            "between its layers: give example=, a mini-batch as the loader yields it, or "
            f"the DataLoader. {MANUAL}"
        )
    return _split_whole(model, stages, batch, options)


def _split_whole(
    model: UnsplitModel, stages: Stages, batch: Batch, options: ForwardOptions
) -> Split:
    """Split a model that is no sequence."""
    points = listed_points(stages) if not isinstance(stages, int) else []
    named = [point for point in points if isinstance(point, str)]
    layers = find_layers(model.whole, named)
    modes = [Mode.TRAIN, Mode.EVALUATE] if options.trains else [Mode.INFER]
    try:
        set_apart, forwards, programs = _recorded(model, layers, batch, options, modes)
    except ConfigError as error:
        # An opened layer may do what cannot be recorded, such as to read values: keep it whole.
        kept = find_layers(model.whole, named, opens=False)
        if kept.keys() == layers.keys():
            raise
        _log.info("a layer that holds most of the model is not cut inside: %s", error)
        layers = kept
        set_apart, forwards, programs = _recorded(model, layers, batch, options, modes)
    forwards.returns_loss = has_own_loss(programs[0].output)
    forwards.own_loss = options.may_own_loss and forwards.returns_loss
    firsts = _first_layers(stages, programs[0], layers, model)
    forwards.begin(batch, dict(zip(modes, programs, strict=True)), firsts)
    return Split(
        _names_by_stage(model.whole, layers, forwards, len(firsts) + 1),
        forwards.links,
        forwards.entries,
        forwards,
        set_apart,
    )


def _recorded(
    model: UnsplitModel,
    layers: dict[str, nn.Module],
    batch: Batch,
    options: ForwardOptions,
    modes: Sequence[Mode],
) -> tuple[Modes, RecordedForwards, list[Program]]:
    """Record the forwards of a model in some modes, between layers that stay whole."""
    set_apart = model.modes(layers.values())
    forwards = RecordedForwards(model.whole, layers, options.autocast, modes=set_apart)
    programs = [forwards.record(batch, mode) for mode in modes]
    # Recorded twice, to find a forward that changes from call to call.
    refuse_changing(programs[0], forwards.record(batch, modes[0]))
    return set_apart, forwards, programs


def _first_layers(
    stages: Stages, program: Any, layers: dict[str, nn.Module], model: UnsplitModel
) -> list[str]:
    """Return the first layer of every stage but the first."""
    sizes = sizes_of(program, layers)
    called = list(sizes)
    if isinstance(stages, int):
        if isinstance(stages, bool) or not 1 <= stages <= max(1, len(called)):
            raise ConfigError(
                f"stages must be from 1 to the number of layers that the forward calls, "
                f"{len(called)}, not {stages}; the layers are {', '.join(called)}"
            )
        return [called[i] for i in balanced(list(sizes.values()), stages)[1:]] if called else []
    modules = dict(model.whole.named_modules())
    places_of = model.elements or called  # an index into a sequence is that of model[1]
    firsts = []
    for point in listed_points(stages):
        if isinstance(point, int) and not 0 < point < len(places_of):
            raise ConfigError(f"split points lie between 1 and {len(places_of) - 1}, found {point}")
        name = point if isinstance(point, str) else places_of[point]
        firsts.append(first_layer(name, program, modules))
    places = [called.index(name) for name in firsts]
    if any(a >= b for a, b in pairwise([0, *places])):
        raise ConfigError(
            f"split points must rise in the order in which the forward calls the layers, which is "
            f"{', '.join(called)}; found {list(stages)}"
        )
    return firsts


def _names_by_stage(
    model: nn.Module, layers: dict[str, nn.Module], forwards: RecordedForwards, count: int
) -> tuple[tuple[str, ...], ...]:
    """Return, by stage, the names of its layers and of what it holds beside them."""
    users: dict[str, set[int]] = {}
    for made in forwards.cuts:
        for stage, used in enumerate(made.used):
            for name in used:
                users.setdefault(name, set()).add(stage)
    # A parameter that the forward itself uses may be of a layer, as a tied embedding is.
    for name in [name for name in users if name not in layers]:
        owner = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if owner is not None:
            users.setdefault(owner, set()).update(users.pop(name))
    found: list[list[str]] = [[] for _ in range(count)]
    # What no forward uses goes where its neighbour in the model is.
    last = {0}
    for name in units_of(model, layers):
        last = users.get(name, last if len(last) == 1 else {min(last)})
        for stage in last:
            found[stage].append(name)
    return tuple(map(tuple, found))


def units_of(model: nn.Module, layers: dict[str, nn.Module]) -> list[str]:
    """Return the names of the layers of a model, and of the tensors beside them, in its order."""
    of_layer = {id(module): name for name, module in layers.items()}
    units: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        units.extend(f"{prefix}{short}" for short in (*module._parameters, *module._buffers))
        for key, child in module._modules.items():
            if child is None:
                continue
            if id(child) in of_layer:
                units.append(of_layer[id(child)])
            else:
                visit(child, f"{prefix}{key}.")

    visit(model, "")
    return list(dict.fromkeys(units))
