"""The split of a model into stages, whichever way it can be cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from pipedream_rt.batches.cutting import unmarked
from pipedream_rt.batches.forwards import Forwards, SequenceForwards, default_example
from pipedream_rt.batches.items import Batch, Items, Prepare, Takes
from pipedream_rt.batches.recorded_forwards import RecordedForwards, picked
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.messages.head import Mode
from pipedream_rt.models import (
    Layers,
    find_layers,
    first_layer,
    listed_points,
    split_points,
)
from pipedream_rt.models.cut import StageProgram
from pipedream_rt.models.modes import Modes
from pipedream_rt.models.preserving_state import MANUAL
from pipedream_rt.models.program import Program
from pipedream_rt.models.recording import record, refuse_changing
from pipedream_rt.models.split import (
    NO_INNER,
    Inner,
    balanced_firsts,
    has_hooks,
    inner_layers,
    refuse_inner,
)
from pipedream_rt.models.work import work_of_update
from pipedream_rt.stage.spec import LossFunction, has_own_loss
from pipedream_rt.telling import log_of
from pipedream_rt.torch_private import NormWithBuffers

Stages: TypeAlias = int | Sequence[int | str]
"""The number of stages; or the first layer of every stage but the first, by index or by name."""


_log = log_of(__name__)


class Split(NamedTuple):
    """A model split into stages.

    Attributes:
        layers: By stage, the names of its layers, and of parameters and buffers beside them.
        links: The pairs of a producer and a consumer; None for a chain.
        entries: The stages that take inputs of the model; empty for the first alone.
        inner: The layers at which no stage can begin.
        work: The work of each layer, by which the stages were balanced; empty if by something else.
    """

    layers: tuple[tuple[str, ...], ...]
    links: tuple[tuple[int, int], ...] | None
    entries: tuple[int, ...]
    forwards: Forwards
    modes: Modes
    inner: Inner = NO_INNER
    work: Mapping[str, int] = MappingProxyType({})

    @property
    def how(self) -> str:
        """How the stages were balanced, in words; empty where nothing was counted."""
        whole = sum(self.work.values())
        if not whole or len(self.layers) == 1:
            return ""
        shares = (sum(self.work.get(name, 0) for name in names) / whole for names in self.layers)
        return (
            "the stages are balanced by work, as counted in the forward of the example: "
            + ", ".join(f"{share:.0%}" for share in shares)
        )

    def programs(self, stage: int) -> tuple[StageProgram, ...]:
        """Return the programs with which a stage begins; none for a sequence."""
        return self.forwards.stage_programs(stage)


class ForwardOptions(NamedTuple):
    """How forwards are recorded.

    Attributes:
        trains: Whether the model is trained.
        may_own_loss: Whether the model computes the loss itself if it returns one for the example.
        loss_fn: The loss function; one that picks a value of the output leaves that to the model.
    """

    trains: bool = False
    may_own_loss: bool = False
    autocast: torch.dtype | None = None
    loss_fn: LossFunction | None = None


def items_of(model: UnsplitModel, loss_fn: Any, prepare: Prepare | None = None) -> Items:
    """Return what reads the items of loaders for a model."""
    forward = Takes.of(model.whole) if model.sequence is None else None
    return Items(forward, loss_fn, prepare)


def split_model(
    model: UnsplitModel, stages: Stages, example: Any, options: ForwardOptions, items: Items
) -> Split:
    """Split a model; ``items`` reads the example."""
    if model.sequence is not None:
        inner = _inner_of_sequence(model.sequence) if options.trains else NO_INNER
        work = _work_of_sequence(model, stages, example, options, items)
        points = split_points(model.sequence, stages, model.elements, inner, work)
        names = list(model.sequence)
        bounds = [*points, len(names)]
        layers = tuple(tuple(names[a:b]) for a, b in pairwise(bounds))
        modes = model.modes(model.sequence.values())
        return Split(layers, None, (), SequenceForwards(), modes, NO_INNER, work)
    batch = default_example(model.whole) if example is None else items.example(example)
    if batch is None:
        raise ConfigError(
            f"the forward of {type(model.whole).__name__} must be run once to find out what passes "
            "between its layers: give example=, a mini-batch as the loader yields it, or "
            f"the DataLoader. {MANUAL}"
        )
    return _split_whole(model, stages, unmarked(batch), options)


def _split_whole(
    model: UnsplitModel, stages: Stages, batch: Batch, options: ForwardOptions
) -> Split:
    """Split a model that is no sequence."""
    points = listed_points(stages) if not isinstance(stages, int) else []
    named = [point for point in points if isinstance(point, str)]
    layers = find_layers(model.whole, named)
    modes = [Mode.TRAIN, Mode.EVALUATE] if options.trains else [Mode.INFER]
    try:
        set_apart, forwards, programs, work = _recorded(model, layers, batch, options, modes)
    except ConfigError as error:
        # An opened layer may do what cannot be recorded, such as to read values: keep it whole.
        kept = find_layers(model.whole, named, opens=False)
        if kept.keys() == layers.keys():
            raise
        _log.info("a layer that holds most of the model is not cut inside: %s", error)
        layers = kept
        set_apart, forwards, programs, work = _recorded(model, layers, batch, options, modes)
    forwards.returns_loss = has_own_loss(programs[0].output)
    forwards.own_loss = options.may_own_loss and forwards.returns_loss
    if options.loss_fn is not None and picked(options.loss_fn, programs[0].output) is not None:
        forwards.own_loss, forwards.picks = True, options.loss_fn
    called = programs[0].layers()
    work = _with_updates({name: work[name] for name in called}, layers, options)
    inner = _inner_of_program(programs[0], layers, model.whole)
    firsts = _first_layers(stages, programs[0], work, model, inner)
    forwards.begin(batch, dict(zip(modes, programs, strict=True)), firsts)
    return Split(
        _names_by_stage(model.whole, layers, forwards, len(firsts) + 1),
        forwards.links,
        forwards.entries,
        forwards,
        set_apart,
        inner,
        work if isinstance(stages, int) else {},
    )


def _recorded(
    model: UnsplitModel,
    layers: dict[str, nn.Module],
    batch: Batch,
    options: ForwardOptions,
    modes: Sequence[Mode],
) -> tuple[Modes, RecordedForwards, list[Program], dict[str, int]]:
    """Record the forwards of a model in some modes, between layers that stay whole.

    The last value is the work of each layer, in the first mode.
    """
    set_apart = model.modes(layers.values())
    forwards = RecordedForwards(model.whole, layers, options.autocast, modes=set_apart)
    work: dict[str, int] = {}
    first, *others = modes
    programs = [forwards.record(batch, first, work=work)]
    programs += [forwards.record(batch, mode) for mode in others]
    # Recorded twice, to find a forward that changes from call to call.
    refuse_changing(programs[0], forwards.record(batch, first))
    return set_apart, forwards, programs, work


def _work_of_sequence(
    model: UnsplitModel, stages: Stages, example: Any, options: ForwardOptions, items: Items
) -> dict[str, int]:
    """Return the work of the layers of a sequence; none where it need not or cannot be counted."""
    layers = model.sequence
    if layers is None or example is None or not isinstance(stages, int) or stages == 1:
        return {}
    # Nothing else calls the layers of a sequence here, and code of the user's may count its calls.
    if not all(_is_torchs_own(each) for layer in layers.values() for each in layer.modules()):
        return {}
    found: dict[str, int] = {}
    try:
        batch = unmarked(items.example(example))
        SequenceForwards().inputs(batch)
        record(model.whole, layers, batch.args, {}, grad=options.trains, work=found)
    # Nothing else needs the forward of a sequence, so what cannot be recorded is no error.
    except ConfigError as error:
        _log.info("the stages are balanced by parameters, as no work was counted: %s", error)
        return {}
    # A layer that stands in several places has one name in what was counted.
    names = {id(layer): name for name, layer in layers.items()}
    places = Counter(map(id, layers.values()))
    work = {
        name: found.get(names[id(layer)], 0) // places[id(layer)] for name, layer in layers.items()
    }
    return _with_updates(work, layers, options)


def _is_torchs_own(module: nn.Module) -> bool:
    """Whether a call of a module runs no code but torch's."""
    own = type(module).__module__.startswith("torch.nn.") and "forward" not in vars(module)
    return own and not has_hooks(module)


def _with_updates(
    work: Mapping[str, int], layers: Mapping[str, nn.Module], options: ForwardOptions
) -> dict[str, int]:
    """Add the work of updates to that of layers; a weight of several counts for the first."""
    seen: set[int] = set()
    found = {}
    for name, amount in work.items():
        own = [p for p in layers[name].parameters() if id(p) not in seen and p.requires_grad]
        seen.update(map(id, own))
        found[name] = amount + (work_of_update(own) if options.trains else 0)
    return found


def _first_layers(
    stages: Stages,
    program: Program,
    work: Mapping[str, int],
    model: UnsplitModel,
    inner: Inner,
) -> list[str]:
    """Return the first layer of every stage but the first."""
    called = list(work)
    if isinstance(stages, int):
        if isinstance(stages, bool) or not 1 <= stages <= max(1, len(called)):
            raise ConfigError(
                f"stages must be from 1 to the number of layers that the forward calls, "
                f"{len(called)}, not {stages}; the layers are {', '.join(called)}"
            )
        return balanced_firsts(work, stages, inner)[1:] if called else []
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
    refuse_inner(firsts, called, inner)
    return firsts


def _inner_of_program(program: Program, layers: dict[str, nn.Module], whole: nn.Module) -> Inner:
    """Return the layers inside of a span that one stage must have, as norms called twice."""
    moved = {name for step in program.steps for name in step.moves}
    of_buffer = {id(buffer): name for name, buffer in whole.named_buffers() if name in moved}
    first: dict[str, int] = {}
    users: dict[str, list[int]] = {}
    for number, step in enumerate(program.steps):
        used = [name for name in step.held if name in moved]
        if step.layer is not None:
            first.setdefault(step.layer, number)
            own = layers[step.layer].buffers()
            used += [of_buffer[id(b)] for b in own if id(b) in of_buffer]
        for name in used:
            users.setdefault(name, []).append(number)
    return inner_layers(first, users)


def _inner_of_sequence(layers: Layers) -> Inner:
    """Return the layers of a sequence between two that share a norm, which changes its buffers."""
    users: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for place, (name, layer) in enumerate(layers.items()):
        for where, module in layer.named_modules(prefix=name):
            if isinstance(module, NormWithBuffers) and module.training:
                for short, buffer in module.named_buffers(where):
                    names.setdefault(id(buffer), short)
                    users.setdefault(id(buffer), []).append(place)
    first = {name: place for place, name in enumerate(layers)}
    return inner_layers(first, {names[each]: places for each, places in users.items()})


def _names_by_stage(
    model: nn.Module, layers: dict[str, nn.Module], forwards: RecordedForwards, count: int
) -> tuple[tuple[str, ...], ...]:
    """Return, by stage, the names of its layers and of what it holds beside them."""
    users: dict[str, set[int]] = {}
    for made in forwards.cuts.values():
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
