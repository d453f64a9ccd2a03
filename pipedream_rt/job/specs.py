"""The specifications from which the workers build their stages, pickled before a worker starts."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.corrections import Correction
from pipedream_rt.corrections.advice import advised
from pipedream_rt.corrections.base import overrides, refuse_nonsense
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.given_optimizer import Parts
from pipedream_rt.job.requirements import require_instance
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
from pipedream_rt.models.modes import Modes
from pipedream_rt.models.pretrained import Pretrained
from pipedream_rt.models.record import MANUAL
from pipedream_rt.models.settings import refuse_global_hooks, settings_now
from pipedream_rt.models.shipping import Range
from pipedream_rt.schedules import Plan
from pipedream_rt.schedules.placement import LOSS_LAYER
from pipedream_rt.stage.parameters import GradientHook
from pipedream_rt.stage.rules.base import RuleOption
from pipedream_rt.stage.rules.clipping import Clip
from pipedream_rt.stage.rules.corrections import Correcting
from pipedream_rt.stage.rules.ema import Averaging
from pipedream_rt.stage.rules.scaling import LossScale
from pipedream_rt.stage.spec import LossFunction, OnNan, StageSpec

_log = logging.getLogger(__name__)


def refuse_autocast(autocast: Any) -> None:
    """Refuse an argument ``autocast`` of `Pipeline` that makes no sense.

    Raises:
        ConfigError: It does not.
    """
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ConfigError(f"autocast must be torch.bfloat16 or torch.float16, not {autocast!r}")


def scaling(
    scale: Any, autocast: Any, plan: Plan, parameters: Iterable[Tensor]
) -> LossScale | None:
    """Return how losses are scaled, of the argument ``loss_scale`` of `Pipeline`.

    Raises:
        ConfigError: It makes no sense, or updates are read before all stages can know whether they
            are skipped.
    """
    if scale is None and autocast is torch.float16:
        scale = LossScale()
    if scale is None:
        return None
    require_instance("loss_scale", scale, LossScale)
    if not plan.reads_late:
        raise ConfigError(
            f"losses are scaled, for float16 needs that, and {plan.name} reads updates before all "
            "stages know whether they are skipped; use bfloat16, a schedule that flushes, or "
            "schedule_options=ScheduleOptions(vertical_sync=True)"
        )
    if any(p.dtype is torch.float16 for p in parameters):
        raise ConfigError(
            "a parameter is float16, whose gradients cannot be scaled back; keep parameters in "
            "float32 and let autocast make float16 of them"
        )
    return scale  # type: ignore[no-any-return]


def with_norms(plan: Plan, clip: Clip | None, scale: LossScale | None) -> Plan:
    """Return a plan with the norm of all gradients, if gradients are clipped or scaled by it.

    Raises:
        ConfigError: Replicas read weights before all stages know the norm.
    """
    if scale is None and (clip is None or not clip.of_model):
        return plan
    if plan.shape.shard_optimizer and plan.replicated:
        raise ConfigError(
            "with shard_optimizer a replica sends weights at its step, and these steps would wait "
            'for the norm of all gradients of the model; use Clip(..., over="stage") and no '
            "scaling of losses, or shard_optimizer=False"
        )
    needs_all = scale is not None or plan.num_stages > 1
    if plan.replicated and not plan.flushes and needs_all:
        raise ConfigError(
            f"with {plan.title}, replicas step before the norm of all gradients of the model can "
            'be known; use Clip(..., over="stage") and no scaling of losses, or a schedule that '
            "flushes, such as 1f1b"
        )
    if scale is not None and plan.per_update < max(plan.replicas):
        raise ConfigError(
            f"with {plan.title}, some replicas have no micro-batch of an update and know its scale "
            "too late; give at least as many micro-batches per update as a stage has replicas"
        )
    return plan.with_norms()


def rule_options(
    scale: LossScale | None,
    clip: Clip | None,
    corrections: tuple[Correction, ...],
    ema: float | None,
) -> tuple[RuleOption, ...]:
    """Return the options of which stages make rules; a new one gets its line here."""
    return (
        *([] if scale is None else [scale]),
        *([] if clip is None else [clip]),
        *([Correcting(corrections)] if corrections else []),
        *([] if ema is None else [Averaging(ema)]),
    )


def may_replicate(
    model: nn.Module,
    schedule: object,
    clip: Clip | None,
    scale: LossScale | None,
    corrections: Any,
) -> bool:
    """Whether stages may have replicas: nothing of what a script gives is refused then.

    Args:
        model: The unsplit model.
        schedule: The schedule.
        clip: How gradients are clipped.
        scale: How losses are scaled.
        corrections: The corrections for staleness; those of ``"auto"`` are looked at later.
    """
    flushes = schedule in ("1f1b", "gpipe")
    named = [p for _, p in model.named_parameters(remove_duplicate=False)]
    shared = len(named) > len(set(map(id, named)))  # perhaps by layers of several stages
    given = corrections if isinstance(corrections, list | tuple) else ()
    of_gradients = any(overrides(each, "after_backward") for each in given)
    of_model = scale is not None or (clip is not None and clip.of_model)
    hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    if shared or hooked or sparse:
        return False
    return flushes or (schedule in ("async-1f1b", "2bw") and not (of_gradients or of_model))


def refuse_sharding(plan: Plan, corrections: Any, ema: float | None) -> None:
    """Refuse what needs all weights of a stage at a step of which a replica does a part alone.

    Raises:
        ConfigError: There is something.
    """
    if not (plan.shape.shard_optimizer and plan.replicated):
        return
    if ema is not None or corrections:
        what = "ema" if ema is not None else "corrections"
        raise ConfigError(
            f"{what} need all weights of a stage after a step, of which each replica has done a "
            "part alone; use shard_optimizer=False"
        )


def correcting(
    corrections: Any,
    plan: Plan,
    optimizer: Parts | None,
    clip: Clip | None,
    scale: LossScale | None,
) -> tuple[Correction, ...]:
    """Return the corrections, of the argument ``corrections`` of `Pipeline`.

    Raises:
        ConfigError: It makes no sense; or a correction of gradients needs weights that are not
            there yet, or gradients that are not scaled.
    """
    if corrections is None or corrections == "auto":
        stalest = max(map(plan.staleness, range(plan.num_stages)))
        by_default = corrections is None
        corrections = []
        alone = plan.shape.shard_optimizer and plan.replicated
        if optimizer is not None and not (by_default and alone):
            groups = [{**optimizer.kwargs, **options} for _, options in optimizer.groups]
            corrections = advised(optimizer.optimizer_class, groups, stalest)
    if isinstance(corrections, Correction) or not isinstance(corrections, list | tuple):
        raise ConfigError(
            f'corrections must be "auto" or a list of Correction objects, not {corrections!r}'
        )
    for each in corrections:
        if not isinstance(each, Correction):
            raise ConfigError(f"corrections must be Correction objects, not {each!r}")
        refuse_nonsense(each)
        if optimizer is not None:
            for _, options in optimizer.groups:
                each.require_fit(optimizer.optimizer_class, {**optimizer.kwargs, **options})
        if plan.flushes or not overrides(each, "after_backward"):
            continue
        name = type(each).__name__
        if plan.replicated:
            raise ConfigError(
                f"{name} needs the weights that a gradient is applied to, and replicas add their "
                "gradients up before these are there; leave it out, or use no replicas"
            )
        if scale is not None:
            raise ConfigError(
                f"{name} changes gradients as they come, and losses are scaled: the gradients are "
                "not those of the loss; use bfloat16"
            )
        if clip is not None and clip.of_model and plan.reads_late:
            raise ConfigError(
                f"{name} needs the weights that a gradient is applied to, and with {plan.name} and "
                "Clip(norm=...) over the model updates wait for the norm of all gradients, so they "
                'are not there yet; use Clip(..., over="stage"), or another schedule'
            )
    return tuple(corrections)


def compiling(compile: Any, modules: Iterable[nn.Module]) -> dict[str, Any] | None:
    """Return the arguments with which layers are compiled, of the argument ``compile``.

    Raises:
        ConfigError: It makes no sense; or a module was compiled in place, which pickling undoes.
    """
    if not isinstance(compile, bool | dict):
        raise ConfigError(
            f"compile must be True, False or a dict of arguments of torch.compile, not {compile!r}"
        )
    for name, module in (each for whole in modules for each in whole.named_modules()):
        if module._compiled_call_impl is not None:
            raise ConfigError(
                f"{name or type(module).__name__} was compiled in place, by its method compile(), "
                "and would come to a worker as it was before; give the model as it was, and "
                "compile=True, or compile=dict(...) with the arguments: then each worker compiles "
                "its layers"
            )
    return dict(compile) if isinstance(compile, dict) else ({} if compile else None)


def recomputing(recompute: Any, plan: Plan) -> frozenset[int]:
    """Return the stages that compute activations again, of the argument ``recompute``.

    Raises:
        ConfigError: It makes no sense, or the schedule cuts a backward in two: the first half would
            have to compute the activations, and the second once more.
    """
    stages = range(plan.num_stages)
    if isinstance(recompute, bool):
        recompute = stages if recompute else ()
    chosen = list(recompute) if isinstance(recompute, Collection) else [recompute]
    if isinstance(recompute, str) or any(isinstance(s, bool) or s not in stages for s in chosen):
        raise ConfigError(
            f"recompute must be True, False or a list of stages from 0 to {stages[-1]}, not "
            f"{recompute!r}"
        )
    if chosen and plan.cuts_backward:
        raise ConfigError(
            f"{plan.name} computes gradients in two halves, each of which would compute the "
            "activations again; use recompute with another schedule"
        )
    return frozenset(chosen)


def pickled_specs(
    model: UnsplitModel,
    plan: Plan,
    parts: Sequence[nn.Module],
    *,
    loss_fn: LossFunction | None,
    seed: int,
    on_nan: OnNan,
    trace_spans: int,
    autocast: torch.dtype | None,
    recompute: Collection[int],
    compile: dict[str, Any] | None,
    rules: tuple[RuleOption, ...],
    pretrained: Pretrained | None,
    programs: Sequence[tuple[StageProgram, ...]],
    modes: Modes,
    compared: bool,
) -> list[tuple[Tensor, ...]]:
    """Pickle the `StageSpec` of every stage.

    Args:
        model: The unsplit model.
        plan: The plan.
        parts: By stage, its layers as one module, to which the loss is added if it is a module.
        loss_fn: The loss function; None for a pipeline that only infers.
        seed: The seed of random numbers, as in `StageSpec`.
        on_nan: What to do about a loss that is not finite, as in `StageSpec`.
        trace_spans: The number of spans that each worker keeps, as in `StageSpec`.
        autocast: As in `StageSpec`.
        recompute: The stages that compute activations again.
        compile: The arguments with which layers are compiled; None to compile none.
        rules: The options of which stages make rules for their updates.
        pretrained: Where the workers read weights; None for nowhere.
        programs: By stage, what a forward does, as in `StageSpec`.
        modes: As in `StageSpec`.
        compared: Whether workers are other processes, which compare their code with the script's.

    Returns:
        For each stage a tensor of bytes, and one for the memory of each of its tensors. They share
        nothing with the model.

    Raises:
        ConfigError: A layer or the loss function does not pickle, or takes a weight of another
            stage along; the message says which.
    """
    pickled = []
    shared, owners = shared_buffers(parts), _owners(parts)
    weights = _weights(model)
    corrections = [c for rule in rules if isinstance(rule, Correcting) for c in rule.corrections]
    refuse_global_hooks()
    settings = settings_now()
    for stage, names in enumerate(plan.layers):
        part, loss = parts[stage], loss_fn if stage in plan.exits else None
        modules = {
            name: module for name in names if (module := module_named(part, name)) is not None
        }
        if isinstance(loss, nn.Module):
            part.add_module(LOSS_LAYER, loss)
        spec = StageSpec(
            stage=stage,
            layers=part,
            loss_fn=None if isinstance(loss, nn.Module) else loss,
            plan=plan,
            seed=seed,
            on_nan=on_nan,
            programs=programs[stage],
            blueprint=dataclasses.replace(model.blueprint, seed=seed),
            autocast=autocast,
            recompute=stage in recompute,
            compile=compile,
            rules=rules,
            pretrained=pretrained,
            names={n: model.names[id(p)] for n, p in part.named_parameters() if p.requires_grad},
            numbers=_numbers(model, part),
            trace_spans=trace_spans,
            hooks=_hooks(part, plan, corrections),
            shared=shared[stage],
            aliases=_aliases(model, parts, plan, stage),
            modes=modes,
            settings=settings,
        )
        if compared:
            spec = dataclasses.replace(spec, code=spec.own_code())
        pieces = [
            *((f"layer {name}", module) for name, module in modules.items()),
            *(
                piece
                for p in programs[stage]
                for step in p.steps
                for piece in (
                    (f"{step.name} at {step.where}", step.target),
                    (f"an argument of {step.name} at {step.where}", (step.args, step.kwargs)),
                )
            ),
            ("what the forward returns", [p.output for p in programs[stage]]),
            ("loss_fn", loss),
            *((f"the hook of {hook.parameter}", hook.call) for hook in spec.hooks),
            *((f"the correction {type(each).__name__}", each) for each in corrections),
        ]
        try:
            buffers: list[pickle.PickleBuffer] = []
            data, tensors = dumps(spec, buffers.append)
        except Exception as error:  # a foreign class may raise anything when pickled
            raise ConfigError(_unpicklable(pieces, error)) from error
        if foreign(tensors, owners, stage):
            raise ConfigError(_takes_along(pieces, owners, stage))
        if alias(tensors, weights):
            raise ConfigError(_lies_over(pieces, weights))
        pickled.append(tuple(_copied(each) for each in (data, *(b.raw() for b in buffers))))
    return pickled


def _copied(data: Any) -> Tensor:
    """Return a tensor of bytes with a copy of some."""
    made = torch.empty(len(data), dtype=torch.uint8)
    made.numpy().data[:] = data
    return made


def _owners(parts: Sequence[nn.Module]) -> dict[int, tuple[set[int], str]]:
    """Return, by ``id`` of each weight and buffer, the stages that have it and a name of it."""
    owners: dict[int, tuple[set[int], str]] = {}
    for stage, part in enumerate(parts):
        for key, tensor in tensors_of(part, ""):
            owners.setdefault(id(tensor), (set(), key))[0].add(stage)
    return owners


def _weights(model: UnsplitModel) -> dict[int, tuple[Range, str]]:
    """Return, by ``id`` of each weight and buffer, where it lies and a name of it."""
    return {
        id(tensor): (range_of(tensor), key)
        for name, layer in model.modules.items()
        for key, tensor in tensors_of(layer, name)
    }


def _aliases(
    model: UnsplitModel, parts: Sequence[nn.Module], plan: Plan, stage: int
) -> dict[str, tuple[str, ...]]:
    """Return the keys under which other stages have weights that a stage owns; see `StageSpec`."""
    found = {}
    for tie in plan.ties:
        if tie.stages[0] == stage:
            own = model.parameters[tie.name]
            here, *others = (
                [key for key, p in parts[s].named_parameters(remove_duplicate=False) if p is own]
                for s in tie.stages
            )
            keys = dict.fromkeys(key for keys in others for key in keys)
            found[here[0]] = tuple(key for key in keys if key not in here)
    return found


def _numbers(model: UnsplitModel, part: nn.Module) -> dict[str, int]:
    """Return the places of the trainable parameters of a stage in the whole model, by name."""
    order = {each: number for number, each in enumerate(model.names)}
    return {model.names[id(p)]: order[id(p)] for p in part.parameters() if id(p) in order}


def _lies_over(pieces: Sequence[tuple[str, object]], weights: dict[int, tuple[Range, str]]) -> str:
    """Find the layer, the loss function or the hook with a tensor over a weight's memory."""
    for what, value in pieces:
        if weight := alias(dumps(value)[1], weights):
            old = weight.endswith("_orig")  # as the old ways to change how a weight is made have it
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


def _hooks(
    part: nn.Module, plan: Plan, corrections: Sequence[Correction]
) -> tuple[GradientHook, ...]:
    """Return the hooks on the parameters of a stage.

    Raises:
        ConfigError: The schedule cuts a backward in two, and a hook would run for a part of it; or
            a hook on accumulated gradients would find those of one micro-batch alone.
    """
    found: list[GradientHook] = []
    for name, parameter in part.named_parameters():
        if parameter.requires_grad:
            # Pickle leaves these out.
            before: Any = getattr(parameter, "_backward_hooks", None) or {}
            after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            found += [GradientHook(name, False, hook) for hook in before.values()]
            found += [GradientHook(name, True, hook) for hook in after.values()]
    if found and plan.cuts_backward:
        raise ConfigError(
            f"{found[0].parameter} has a hook on its gradient, and {plan.name} computes gradients "
            "in two halves; remove the hook, or use a schedule that does not split the backward"
        )
    alone = [each for each in corrections if overrides(each, "after_backward")]
    accumulated = [hook for hook in found if hook.after_sum]
    if accumulated and plan.replicated:
        raise ConfigError(
            f"{accumulated[0].parameter} has a hook on its accumulated gradient, and each replica "
            "would call it with what it has summed alone; remove the hook, or use no replicas"
        )
    if accumulated and alone and plan.per_update > 1:
        raise ConfigError(
            f"{accumulated[0].parameter} has a hook on its accumulated gradient, and "
            f"{type(alone[0]).__name__} changes gradients before they are added up, so the hook "
            "would find those of one micro-batch; remove one of the two, or use micro_batches=1"
        )
    return tuple(found)


def _unpicklable(pieces: Sequence[tuple[str, object]], error: Exception) -> str:
    """Find the layer, the loss function or the hook that does not pickle, and say so."""
    for what, value in pieces:
        try:
            dumps(value)
        except Exception as reason:  # as above
            return (
                f"{what} ({type(value).__name__}) cannot be pickled, so it cannot reach a worker: "
                f"{why_unpicklable(value, reason)}"
            )
    return f"the stage cannot be pickled: {error}"


def _takes_along(
    pieces: Sequence[tuple[str, object]], owners: dict[int, tuple[set[int], str]], stage: int
) -> str:
    """Find the layer, the loss function or the hook that takes a foreign weight along."""
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
