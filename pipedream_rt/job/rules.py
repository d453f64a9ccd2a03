"""The options of the rules of stages (what these do to updates), from those of `Pipeline`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from pipedream_rt import extras
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.codecs import Codecs
from pipedream_rt.job.given_optimizer import OptimizerParts
from pipedream_rt.job.options import Training
from pipedream_rt.schedules import Plan
from pipedream_rt.stage.correction import Correction, refuse_nonsense
from pipedream_rt.stage.rules.corrections import Correcting
from pipedream_rt.stage.rules.ema import Averaging
from pipedream_rt.stage.rules.rule import RuleOption
from pipedream_rt.stage.rules.scaling import LossScale


def scale_of(training: Training) -> LossScale | None:
    """Return how losses are scaled, by default if autocast is to float16; None for not at all."""
    if training.loss_scale is None and training.autocast is torch.float16:
        return LossScale()
    return training.loss_scale


def rule_options(
    training: Training, corrections: tuple[Correction, ...], codecs: Codecs
) -> tuple[RuleOption, ...]:
    """Return the options from which stages make rules; a new one gets its line here."""
    scale, clip, ema = scale_of(training), training.clip, training.ema
    return (
        *([] if scale is None else [scale]),
        *([] if clip is None else [clip]),
        *([Correcting(corrections)] if corrections else []),
        *([] if ema is None else [Averaging(ema)]),
        *codecs.rules,
    )


def correcting(
    corrections: Any, plan: Plan, optimizer: OptimizerParts | None
) -> tuple[Correction, ...]:
    """Return the corrections that the argument ``corrections`` of `Pipeline` asks for."""
    if corrections is None or corrections == "auto":
        stalest = max(map(plan.staleness, range(plan.num_stages)))
        by_default = corrections is None
        corrections = []
        # Where each replica steps a part alone no correction is possible. The default then is none;
        # what "auto" advises is left to the table of conflicts.
        alone = plan.shape.shard_optimizer and plan.replicated
        if stalest and optimizer is not None and not (by_default and alone):
            corrections = extras.advised(optimizer.optimizer_class, optimizer.options, stalest)
    if isinstance(corrections, Correction) or not isinstance(corrections, list | tuple):
        raise ConfigError(
            f'corrections must be "auto" or a list of Correction objects, not {corrections!r}'
        )
    for each in corrections:
        if not isinstance(each, Correction):
            raise ConfigError(f"corrections must be Correction objects, not {each!r}")
        refuse_nonsense(each)
        if optimizer is not None:
            for options in optimizer.options:
                each.require_fit(optimizer.optimizer_class, options)
    return tuple(corrections)


def compiling(
    compile: bool | dict[str, Any], modules: Iterable[nn.Module]
) -> dict[str, Any] | None:
    """Return the arguments with which layers are compiled; None if they are not."""
    for name, module in (each for whole in modules for each in whole.named_modules()):
        if module._compiled_call_impl is not None:
            raise ConfigError(
                f"{name or type(module).__name__} was compiled in place, by its method compile(), "
                "and would come to a worker as it was before;\ngive the model as it was, and "
                "Training(compile=True), or a dict with the arguments: then each worker compiles "
                "its layers"
            )
    return dict(compile) if isinstance(compile, dict) else ({} if compile else None)


def recomputing(recompute: Any, num_stages: int) -> frozenset[int]:
    """Return the stages that compute activations again, by the option ``recompute``."""
    stages = range(num_stages)
    if isinstance(recompute, bool):
        recompute = stages if recompute else ()
    chosen = list(recompute) if isinstance(recompute, Collection) else [recompute]
    if isinstance(recompute, str) or any(isinstance(s, bool) or s not in stages for s in chosen):
        raise ConfigError(
            f"recompute must be True, False or a list of stages from 0 to {stages[-1]}, not "
            f"{recompute!r}"
        )
    return frozenset(chosen)
