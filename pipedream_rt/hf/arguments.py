"""What `transformers.TrainingArguments` say, as options of a pipeline; what they may not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.options import Training
from pipedream_rt.stage.rules.clipping import Clip

_REFUSED: tuple[tuple[str, Callable[[Any], object], str], ...] = (
    ("deepspeed", lambda args: args.deepspeed, "the pipeline takes its place"),
    ("fsdp", lambda args: args.fsdp, "the pipeline takes its place"),
    ("parallelism_config", lambda args: args.parallelism_config, "the pipeline takes its place"),
    (
        "label_smoothing_factor",
        lambda args: args.label_smoothing_factor,
        "the model computes its loss on the last stage; let the model smooth its labels",
    ),
    (
        "neftune_noise_alpha",
        lambda args: args.neftune_noise_alpha,
        "its noise depends on the generator of the script's process",
    ),
    (
        "auto_find_batch_size",
        lambda args: args.auto_find_batch_size,
        "a stage that is out of memory has ended its run; give a smaller batch size",
    ),
    (
        "world_size > 1",
        lambda args: args.world_size > 1,
        "one script feeds the pipeline: start it by `python` or `pipedream-rt run`, not by "
        "accelerate or torchrun with several processes",
    ),
    ("n_gpu > 1", lambda args: args.n_gpu > 1, "DataParallel would copy the model; set "
     "CUDA_VISIBLE_DEVICES, and give the pipeline devices="),
    (
        "use_liger_kernel with skip_logits",
        lambda args: args.use_liger_kernel and args.prediction_loss_only,
        "its outputs have no logits to pass on",
    ),
)  # fmt: skip
"""Arguments that cannot be done: the name, whether it is asked for, and why not."""

_OVERRIDES = ("compute_loss", "training_step", "create_optimizer_and_scheduler")
"""Methods of Trainer that a pipeline does not call, so a subclass must not rely on them."""


def refuse(trainer: Any, base: type) -> None:
    """Refuse what a pipeline cannot do, by name.

    Args:
        trainer: The trainer.
        base: The class whose methods are known.

    Raises:
        ConfigError: Something was asked for that cannot be done; nothing was started.
    """
    for name, reason in _problems(trainer, base):
        raise ConfigError(f"PipelineTrainer cannot do {name}: {reason}")


def _problems(trainer: Any, base: type) -> Iterator[tuple[str, str]]:
    """Yield what was asked for and cannot be done, with the reason."""
    args = trainer.args
    for name, holds, reason in _REFUSED:
        if holds(args):
            yield name, reason
    if trainer.compute_loss_func is not None:
        yield (
            "compute_loss_func",
            (
                "the model computes its loss on the last stage; give pipeline={'loss_fn': ...}, a "
                "function of the model's output and the batch"
            ),
        )
    for name in _OVERRIDES:
        if getattr(type(trainer), name, None) is not getattr(base, name, None):
            yield (
                f"an own {name}",
                "stages compute the loss and step; the pipeline does not call it",
            )
    if getattr(trainer, "is_model_parallel", False):
        yield "a model on several devices (device_map)", "give the pipeline devices= instead"


def options_of(args: Any, given: Mapping[str, Any], weigh: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a pipeline that arguments mean; those that were given win.

    Args:
        args: The `TrainingArguments`.
        given: What the script has given as ``pipeline=``.
        weigh: See `Training`.
    """
    training: dict[str, Any] = {} if "loss_fn" in given else {"weigh": weigh}
    if args.max_grad_norm and args.max_grad_norm > 0:
        training["clip"] = Clip(norm=args.max_grad_norm)
    if args.bf16:
        training["autocast"] = torch.bfloat16
    if args.fp16:
        training["autocast"] = torch.float16
    if args.gradient_checkpointing:
        training["recompute"] = True
    if args.torch_compile:
        training["compile"] = True
    if args.logging_nan_inf_filter:
        training["on_nan"] = "ignore"
    group = given.get("training", Training())
    left_out = {k: v for k, v in training.items() if getattr(group, k) == getattr(Training(), k)}
    return {"seed": args.seed, **given, "training": replace(group, **left_out)}
