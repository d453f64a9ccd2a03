"""Translates `transformers.TrainingArguments` into options of a pipeline, and refuses the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from transformers import TrainingArguments, __version__

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.defaults import PER_STAGE
from pipedream_rt.job.options import Training
from pipedream_rt.paths import refuse_address
from pipedream_rt.stage.rules.clipping import Clip

_REFUSED: tuple[tuple[str, Callable[[Any], object], str], ...] = (
    ("deepspeed", lambda args: args.deepspeed, "the pipeline takes its place"),
    ("fsdp", lambda args: args.fsdp, "the pipeline takes its place"),
    ("parallelism_config", lambda args: args.parallelism_config, "the pipeline takes its place"),
    (
        "fp16",
        lambda args: args.fp16,
        "float16 needs a scale of losses, which every stage must have: leave fp16 out, and give "
        "pipeline={'training': Training(autocast=torch.float16, loss_scale=LossScale())}; or "
        "bf16=True, which needs none",
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
    (
        "debug",
        lambda args: any("underflow" in str(getattr(each, "value", each)) for each in args.debug),
        "its hooks would be called in the script; Training(on_nan='raise') ends a run at a NaN",
    ),
    (
        "optim of a layer each",
        lambda args: any(part in str(args.optim).lower() for part in ("layerwise", "lomo")),
        "it steps inside of a backward, and a stage steps once for each mini-batch",
    ),
)  # fmt: skip
"""Arguments that a pipeline cannot honour: name, whether it is asked for, and why not."""

OTHER: Mapping[str, str] = {
    "gradient_accumulation_steps": "each accumulated batch is cut into its share of "
    "`micro_batches`; with as many of these as batches, the bits are those of the plain Trainer",
    "optim": "one that steps in a backward, as LOMO and those of a layer each do, is refused",
    "label_smoothing_factor": "the loss is computed in the script",
    "max_grad_norm": "`Clip(norm=...)`; asynchronous schedules without vertical sync clip by an "
    "estimate of the norm (around-training.md)",
    "bf16": "`Training(autocast=torch.bfloat16)`",
    "activation_checkpointing": "`Training(recompute=True)`: the stages recompute everything",
    "activation_checkpointing_kwargs": "no effect",
    "gradient_checkpointing": "`Training(recompute=True)`: the stages recompute everything",
    "gradient_checkpointing_kwargs": "no effect",
    "torch_compile": "`Training(compile=True)`",
    "torch_compile_backend": "no effect",
    "torch_compile_mode": "no effect",
    "seed": "the seed of the stages too, by which layers draw numbers of their own: a dropout has "
    "other masks than in plain PyTorch, the same in each run",
    "logging_nan_inf_filter": "and `Training(on_nan='ignore')`",
    "torch_empty_cache_steps": "no effect: nothing is computed in the script",
    "skip_memory_metrics": "the memory is that of the script; `pipe.statistics()` has the stages'",
    "use_cpu": "the stages compute on `devices` of `pipeline=`, or where the model is",
}
"""Arguments that have another, or a further, meaning over a pipeline; with that meaning."""

_NAMES = """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1
    adam_beta2 adam_epsilon optim_target_modules average_tokens_across_devices bf16_full_eval
    fp16_full_eval tf32 use_liger_kernel liger_kernel_config use_cache logging_strategy
    logging_steps logging_first_step log_on_each_node include_num_input_tokens_seen log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size
    prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object
    eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_strategy
    save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token
    hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint full_determinism data_seed accelerator_config
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
    dataloader_in_order remove_unused_columns label_names train_sampling_strategy
    length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers
    ddp_static_graph ddp_backend ddp_timeout fsdp_config do_train do_eval do_predict
    resume_from_checkpoint local_rank warmup_ratio logging_dir save_safetensors group_by_length
    torchdynamo use_mps_device overwrite_output_dir tpu_num_cores past_index jit_mode_eval
    half_precision_backend bf16_backend fp16_backend fp16_opt_level push_to_hub_model_id
    push_to_hub_organization push_to_hub_token mp_parameters ray_scope
    include_inputs_for_metrics include_tokens_per_second split_batches dispatch_batches
"""
_KNOWN = frozenset(_NAMES.split())
"""Arguments of transformers 5 that concern only the Trainer itself, or mean the same."""


def known_arguments() -> dict[str, tuple[str, str]]:
    """Return what becomes of each argument of the installed transformers, by name.

    That is ``"same"``, ``"other"``, ``"refused"`` or ``"unknown"``, and an explanation.
    """
    refused = {name.split()[0]: reason for name, _, reason in _REFUSED}
    found = {}
    for each in fields(TrainingArguments):
        name = each.name
        if name in _KNOWN:
            found[name] = "same", ""
        elif name in OTHER:
            found[name] = "other", OTHER[name]
        elif name in refused:
            found[name] = "refused", refused[name]
        else:
            found[name] = "unknown", "refused, unless it has its default"
    return found


def refuse_arguments(args: Any, given: Mapping[str, Any]) -> None:
    """Refuse arguments that a pipeline cannot honour; ``given`` are the options of the pipeline."""
    for name, holds, reason in _REFUSED:
        if holds(args):
            raise ConfigError(f"PipelineTrainer cannot do {name}: {reason}")
    if args.output_dir is not None:
        refuse_address(args.output_dir, "output_dir")
    unknown = [name for name, (kind, _) in known_arguments().items() if kind == "unknown"]
    for each in fields(TrainingArguments):
        if each.name in unknown and getattr(args, each.name) != each.default:
            raise ConfigError(
                f"PipelineTrainer cannot do {each.name}: this argument of transformers "
                f"{__version__} is not known here; leave it out, or take a version of "
                "transformers that was tested (constraints.txt)"
            )
    parts, count = args.gradient_accumulation_steps, given.get("micro_batches")
    if isinstance(count, int) and count < parts:
        raise ConfigError(
            f"pipeline={{'micro_batches': {count}}} is less than gradient_accumulation_steps="
            f"{parts}: each accumulated batch is at least one micro-batch; leave one of them out"
        )


def asked_of(args: Any) -> tuple[Any, ...]:
    """Return the arguments that `options_of` reads, to see whether they have changed."""
    names = ("max_grad_norm", "bf16", "torch_compile", "logging_nan_inf_filter")
    return *(getattr(args, name) for name in names), _recomputes(args)


def _recomputes(args: Any) -> bool:
    """Whether activations are recomputed. The argument's name depends on the version."""
    return bool(getattr(args, "activation_checkpointing", args.gradient_checkpointing))


def options_of(
    args: Any, given: Mapping[str, Any], weigh: Callable[..., Any] | None
) -> dict[str, Any]:
    """Return the options of a pipeline that arguments mean. Those in ``given`` win.

    ``weigh``: what weighs a micro-batch; None where the script computes the loss.
    """
    training: dict[str, Any] = {} if "loss_fn" in given or weigh is None else {"weigh": weigh}
    # Infinite where nothing is clipped, so that the norm is still computed for the logs.
    largest = args.max_grad_norm
    training["clip"] = Clip(norm=largest if largest and largest > 0 else math.inf)
    if args.bf16:
        training["autocast"] = torch.bfloat16
    if _recomputes(args):
        training["recompute"] = True
    if args.torch_compile:
        training["compile"] = True
    if args.logging_nan_inf_filter:
        training["on_nan"] = "ignore"
    group = given.get("training", Training())
    left_out = {k: v for k, v in training.items() if getattr(group, k) == getattr(Training(), k)}
    options = {**given, "training": replace(group, **left_out)}
    parts, stages = args.gradient_accumulation_steps, given["stages"]
    if parts > 1 and "micro_batches" not in given:
        # Each accumulated batch is at least one micro-batch.
        cuts = stages - 1 if isinstance(stages, int) else 0 if stages == "auto" else len(stages)
        count = cuts + 1
        usual = {None: PER_STAGE * count, "async-1f1b": count, "2bw": count}
        if (least := usual.get(given.get("schedule"), 1)) < parts or given.get("schedule"):
            options["micro_batches"] = max(parts, least)
    return options
