"""What a pipeline says at the start of a run, and of its first mini-batch.

A sentence is said where something was chosen for the user, or where a choice costs more than one
would think; it shows what to type. Nothing depends on what is said here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from pipedream_rt.batches.cutting import kept_by_forward, micro_batch_sizes
from pipedream_rt.job.defaults import ASYNCHRONOUS, OF_SCRIPT, time_of_flush
from pipedream_rt.job.samples import samples_taken
from pipedream_rt.job.unsplit_model import UnsplitModel, inside_of_layers, module_named
from pipedream_rt.models.communication import communicates
from pipedream_rt.schedules import Plan
from pipedream_rt.schedules.placement import LOSS_LAYER
from pipedream_rt.schedules.recipes import RECIPES
from pipedream_rt.stage.correction import Correction
from pipedream_rt.torch_private import BatchNorm

_HEAVY = 1.5
"""How many times the parameters of an average stage a layer holds that is called too large."""


LEFT_OUT = (
    "stages= was left out, so the model is one stage, which one worker computes as one process "
    'would: stages=2, or more, cuts it, and stages="auto" with example= chooses for this machine; '
    "stages=1 says that one is meant"
)
"""What is said where the user has not said how many stages there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisabledFeatures:
    """Which options of `Pipeline` the user has left out."""

    schedule: bool
    micro_batches: bool
    corrections: bool


def choice_line(chosen: Mapping[str, object], why: str) -> str:
    """Return the line that says which options were chosen for a run, as one types them, and why."""
    named = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
    return f"chosen: {named}: {why}".replace("'", '"')


class _Named(tuple[Correction, ...]):
    """Corrections, by their classes."""

    def __repr__(self) -> str:
        return "+".join(type(each).__name__ for each in self)


def about_choice(
    plan: Plan, corrections: Sequence[Correction], left_out: DisabledFeatures, optimizer: type
) -> str:
    """Say in a line what was chosen for a run that trains, and why; "" for nothing."""
    if plan.workers == 1:
        return 'one stage, so one worker does it all; stages=2 or stages="auto" cuts the model'
    if plan.flushes and not left_out.schedule:
        return ""
    chosen: dict[str, object] = {}
    if left_out.schedule:
        chosen["schedule"] = plan.name
    if left_out.micro_batches:
        chosen["micro_batches"] = plan.per_update
    if left_out.corrections and corrections:
        chosen["corrections"] = _Named(corrections)
    if not chosen:
        return ""
    if plan.loss_in_script:
        return choice_line(chosen, "the script computes the loss of whole mini-batches")
    if plan.name == OF_SCRIPT and left_out.schedule:
        return choice_line(chosen, "it learns as plain PyTorch does, whatever the loss compares")
    if plan.flushes:
        return choice_line(chosen, "it learns as plain PyTorch does")
    cost = _cost(plan, plan.name, optimizer, corrected=bool(corrections))
    return choice_line(chosen, f"no worker waits, for {cost}")


def about_alternative(
    plan: Plan, left_out: DisabledFeatures, optimizer: type, corrected: bool = True
) -> str:
    """Say what the schedule that was not chosen would give and cost; "" where none was chosen.

    ``corrected``: whether stale gradients would be corrected as by default.
    """
    if plan.workers == 1 or not (plan.flushes and left_out.schedule) or plan.loss_in_script:
        return ""
    saved = 1 - 1 / time_of_flush(plan.num_stages, plan.per_update / max(plan.replicas))
    return (
        f'with schedule="{ASYNCHRONOUS}" no worker waits for another, which saves {saved:.0%} of '
        f"the time, for {_cost(plan, ASYNCHRONOUS, optimizer, corrected)} ({optimizer.__name__})"
    )


def _cost(plan: Plan, schedule: str, optimizer: type, corrected: bool) -> str:
    """Say how many samples an asynchronous schedule takes, by micro-batches per stage."""
    of_replica = plan.per_update / max(plan.replicas)
    samples = samples_taken(schedule, optimizer, of_replica / plan.num_stages, corrected)
    if samples is None:
        return "more samples, of which nobody has measured how many"
    return "as many samples" if samples <= 1 else f"up to {samples:.2f} times the samples"


def about_whole_loss(why: str, cut: bool) -> str:
    """Say that the loss is of whole mini-batches from the first one on, and why.

    ``cut``: whether the layers compute micro-batches all the same.
    """
    weighs = "Training(weigh=...) says of what it is a weighed mean, if it is one"
    if cut:
        return choice_line({"loss": "whole"}, f"{why}; {weighs}")
    return (
        f"chosen: whole mini-batches, of which the model computes its loss: {why}. No two workers "
        f"compute at once; {weighs}"
    )


def about_plan(plan: Plan, left_out: DisabledFeatures) -> list[str]:
    """Say what a schedule costs beyond what one would think."""
    if plan.workers == 1:
        return []
    stalest = max(map(plan.staleness, range(plan.num_stages)))
    if plan.flushes:
        # Of a loss in the script, other schedules take one micro-batch alone.
        more = not plan.loss_in_script or plan.name == OF_SCRIPT
        one = left_out.micro_batches and plan.per_update == 1
        return _about_flushes(plan) if one and more else []
    said = []
    if stalest > 1:
        enough = plan.shape.longest_lag + 1
        helps = plan.name in RECIPES and enough > plan.per_update and not plan.loss_in_script
        said.append(
            f"gradients are up to {stalest} updates stale, which costs samples; "
            + (
                f"with micro_batches={enough} they are one update stale at most"
                if helps
                else "a schedule that flushes, such as 1f1b, has no staleness"
            )
        )
    return said


def _about_flushes(plan: Plan) -> list[str]:
    """Say what a schedule that flushes costs with one micro-batch per update."""
    return [
        f"{plan.name} with micro_batches=1, as nothing else was given: the bits are those of plain "
        f"PyTorch, and no two workers compute at once. With micro_batches={2 * plan.workers} they "
        "do; the gradients of the micro-batches are then added up, which is rounded otherwise"
    ]


def about_balance(
    model: UnsplitModel, layers: Sequence[Sequence[str]], work: Mapping[str, int]
) -> list[str]:
    """Say if one layer has most of a model that was cut by work, or else by parameters.

    ``layers`` are by stage.
    """
    if len(layers) == 1:
        return []
    sizes = work or {
        name: sum(p.numel() for p in layer.parameters())
        for of_stage in layers
        for name in of_stage
        if (layer := module_named(model.whole, name)) is not None
    }
    name = max(sizes, key=lambda each: sizes[each], default="")
    share = sizes.get(name, 0) / max(1, sum(sizes.values()))
    if share * len(layers) < _HEAVY or share <= 0.5:
        return []
    layer = module_named(model.whole, name)
    inside = [each for each, _ in layer.named_children()] if layer is not None else []
    given = model.given
    if isinstance(given, nn.Sequential) and model.sequence is not None and inside_of_layers(given):
        what = "With example=, a mini-batch as the loader yields it, it is cut inside"
    elif len(inside) > 1 and model.sequence is None:
        what = f'stages=["{name}.{inside[-1]}"] would begin a stage inside of it'
    elif len(inside) > 1:
        what = "Give what is in it as layers of the sequence, or the whole as one nn.Module"
    else:
        what = "It cannot be cut, so fewer stages would be as fast"
        if not work:
            what = (
                "It cannot be cut. Where it takes little time, as an embedding does, "
                'stages="auto" cuts by measured times; else fewer stages would be as fast'
            )
    holds = f"does {share:.0%} of the work" if work else f"holds {share:.0%} of the parameters"
    so = "" if work else ", so its stage has most of the work"
    return [f"layer {name}, a {type(layer).__name__}, {holds}{so}. {what}"]


def about_cores(workers: int, threads: int, cores: int) -> list[str]:
    """Say if workers of this machine have to share its cores."""
    if workers * threads <= cores or workers == 1:
        return []
    of_each = f" of {threads} threads" if threads > 1 else ""
    return [
        f"{workers} workers{of_each} share {cores} core{'s' * (cores > 1)} of this machine, so no "
        f"more than {max(1, cores // threads)} of them compute at a time; fewer stages would be as "
        "fast"
    ]


def about_process_group(
    model: UnsplitModel, layers: Sequence[Sequence[str]], loss_fn: object
) -> list[str]:
    """Say if layers or the loss ask torch.distributed, where the script has a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    named = {name: module_named(model.whole, name) for of_stage in layers for name in of_stage}
    inside = loss_fn.modules() if isinstance(loss_fn, nn.Module) else (loss_fn,)
    asking = [
        f"layer {where}, a {type(each).__name__}"
        for name, layer in named.items()
        for where, each in ([] if layer is None else layer.named_modules(prefix=name))
        if communicates(each)
    ] + ["the loss"] * any(map(communicates, inside))
    if not asking:
        return []
    return [
        f"{_some(asking)} may ask torch.distributed, which says rank {dist.get_rank()} of "
        f"{dist.get_world_size()} in this script. Worker processes have no process group, or under "
        "torchrun another rank, so the code may go another way there: ask in the script, and keep "
        'the answer in an attribute; or take workers="serial"'
    ]


def about_workers(used: int, started: int) -> list[str]:
    """Say if there may be more workers than the stages need."""
    if started <= used:
        return []
    return [
        f"there may be {started} workers, and the stages use {used}: give Pipeline more stages, or "
        f"--nproc-per-node {used}"
    ]


def about_micro_batches(
    modules: Mapping[str, nn.Module], samples: int, per_update: int, is_marked: bool = False
) -> list[str]:
    """Say if layers of a model see that mini-batches are cut, or micro-batches are empty.

    ``is_marked`` says that the user has marked how inputs are cut.
    """
    sizes = micro_batch_sizes(samples, per_update)
    size = sizes[0]
    if size == samples:
        return []
    named = [pair for name, whole in modules.items() for pair in whole.named_modules(prefix=name)]
    said = []
    if 2 * sizes.count(0) >= per_update:
        said.append(
            f"a mini-batch of {samples} samples leaves {sizes.count(0)} of {per_update} "
            f"micro-batches empty; micro_batches={per_update - sizes.count(0)} does the same"
        )
    norms = [name for name, each in named if isinstance(each, BatchNorm) and each.training]
    if norms:
        said.append(
            f"BatchNorm ({_some(norms)}) sees micro-batches of {size} samples, not mini-batches of "
            f"{samples}, and its statistics move {per_update} times per update; micro_batches=1, "
            'schedule="gpipe" gives it whole mini-batches'
        )
    kept = {name: own + buffers for name, (own, buffers) in _kept(named).items() if own or buffers}
    if kept:
        said.append(
            f"{_changes(kept)}, {per_update} times per update, with micro-batches of {size} "
            f"samples, where plain PyTorch does it once with mini-batches of {samples}; "
            'micro_batches=1, schedule="gpipe" gives it whole mini-batches'
        )
    in_time = [name for name, each in named if getattr(each, "batch_first", True) is False]
    if in_time and not is_marked:
        said.append(
            f"mini-batches are cut along dimension 0, which is {samples} long, and "
            f"{_some(in_time)} takes time there (batch_first=False); if dimension 0 of what the "
            'loader yields is time, put samples first, or use micro_batches=1, schedule="gpipe"'
        )
    return said


def about_state(model: UnsplitModel) -> list[str]:
    """Say which layers count or remember in plain attributes, of which the script has others."""
    named = [pair for n, whole in model.modules.items() for pair in whole.named_modules(prefix=n)]
    kept = {name: own for name, (own, _) in _kept(named).items() if own}
    if not kept:
        return []
    return [
        f"{_changes(kept)} on its stage, and that of the script stays as it is: to set or to read "
        "it, as at the start of an epoch, call pipe.on_stages(function)"
    ]


def _kept(named: Iterable[tuple[str, nn.Module]]) -> dict[str, tuple[list[str], list[str]]]:
    """Return, by name of a module, what its forward changes; see `kept_by_forward`."""
    return {name: kept_by_forward(each) for name, each in named}


def _changes(kept: Mapping[str, list[str]]) -> str:
    """Say what the forward of a module changes, and of how many more."""
    name, own = next(iter(kept.items()))
    more = f" (and so do {len(kept) - 1} more)" if len(kept) > 1 else ""
    where = "the loss" if name == LOSS_LAYER else f"layer {name}" if name else "the model"
    return f"the forward of {where} changes {', '.join(map(repr, own))}{more}"


def _some(names: Sequence[str]) -> str:
    """Return the first of some names of modules, and how many more there are."""
    return (names[0] or "the model") + (f" and {len(names) - 1} more" if len(names) > 1 else "")
