"""Which methods of a Trainer a subclass may override over a pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import Trainer, __version__

from pipedream_rt.hf.other_trainers import understood

_CONTEXT = "the stages compute, outside of it; bf16=True and pipeline= say how"
_NORM = "the stages clip, by max_grad_norm; a hook of a parameter (register_hook) goes along"
_MESH = "the pipeline takes the place of other parallelism"

NEVER_CALLED: Mapping[str, str] = {
    "compute_loss_context_manager": _CONTEXT,
    "autocast_smart_context_manager": _CONTEXT,
    "_clip_grad_norm": _NORM,
    "_mixed_mesh_grad_norm": _NORM,
    "_has_mixed_mesh_grads": _NORM,
    "_prepare_context_parallel_inputs": _MESH,
    "_sync_replicated_trainable_parameters": _MESH,
    "_defer_fsdp_gradient_reduction": _MESH,
    "_wrap_model": _MESH,
    "hyperparameter_search": "make a PipelineTrainer for each trial",
}
"""Methods that a pipeline does not call, so overriding them is refused; and what to do instead."""

IN_SCRIPT: Mapping[str, str] = {
    "training_step": "called in the script, as is `compute_loss`",
    "compute_loss": "called in the script, with the model's output; with gradients the model is "
    "called once for each batch, which is not cut by default if it gets labels too",
}
"""Methods that are called if they are overridden, instead of a loss on the last stage; and how."""

REPLACED: Mapping[str, tuple[str, ...]] = {
    "_run_epoch": (
        "self", "model", "epoch", "train_dataloader", "steps_in_epoch",
        "num_update_steps_per_epoch", "trial", "ignore_keys_for_eval", "start_time",
        "resume_from_checkpoint", "epochs_trained", "steps_trained_in_current_epoch",
    ),
    "_prepare_for_training": (
        "self", "max_steps", "train_dataloader", "resume_from_checkpoint",
    ),
    "_save_optimizer_and_scheduler": ("self", "output_dir"),
    "_maybe_log_save_evaluate": (
        "self", "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval",
        "start_time", "learning_rate",
    ),
}  # fmt: skip
"""Methods that the pipeline overrides or calls, with the parameters that it expects."""

_OTHERS = """
    __init__ _build_accelerator_args _determine_best_metric _evaluate _finalize_training
    _finish_current_push _get_collator_with_removed_columns _get_dataloader _get_eval_sampler
    _get_grad_norm _get_learning_rate _get_num_items_in_batch _get_output_dir _get_train_sampler
    _hp_search_setup _init_training_state _inner_training_loop _issue_warnings_after_load
    _load_best_model _load_callback_state _load_from_checkpoint _load_optimizer_and_scheduler
    _load_rng_state _load_scaler _move_model_to_device _prepare_input _prepare_inputs
    _push_from_checkpoint _remove_unused_columns _report_to_hp_search _save _save_checkpoint
    _save_rng_state _save_scaler _set_signature_columns_if_needed _track_num_input_tokens
    _tune_save_checkpoint _update_auto_batch_size _validate_args add_callback call_model_init
    create_accelerator_and_postprocess create_model_card create_optimizer
    create_optimizer_and_scheduler create_scheduler end evaluate evaluation_loop floating_point_ops
    get_batch_samples get_cp_size get_decay_parameter_names get_eval_dataloader get_learning_rates
    get_num_trainable_parameters get_optimizer_cls_and_kwargs get_optimizer_group get_sp_size
    get_test_dataloader get_total_train_batch_size get_tp_size get_train_dataloader init_hf_repo
    is_local_process_zero is_world_process_zero log log_metrics metrics_format num_examples
    pop_callback predict prediction_step push_to_hub remove_callback save_metrics save_model
    save_state set_initial_training_values store_flos train
"""
SAME = frozenset(_OTHERS.split())
"""Methods that transformers calls over a pipeline just as without one."""


def problems_of(cls: type, mixin: type, own: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the methods of a trainer that a pipeline could not take into account, and why.

    ``mixin`` is `PipelineMixin`, and ``own`` are the attributes of the trainer object itself.
    """
    for name, known in REPLACED.items():
        there = getattr(Trainer, name, None)
        found = () if there is None else tuple(inspect.signature(there).parameters)
        if found != known:
            yield (
                f"the training of transformers {__version__}",
                f"its Trainer.{name} takes {found}, and {known} was expected: take a version of "
                "transformers that was tested (constraints.txt)",
            )
    above, theirs = _users(cls, mixin)
    for name in sorted(vars(Trainer).keys() | NEVER_CALLED.keys()):
        if not callable(getattr(Trainer, name, None)) or name in _OF_OBJECTS:
            continue
        users = [each for each in above if name in vars(each) and not issubclass(mixin, each)]
        others = [each for each in theirs if name in vars(each)]
        if name in own:
            users = [cls]
        if name in NEVER_CALLED and users:
            yield f"an own {name}", NEVER_CALLED[name]
        elif name in NEVER_CALLED and (strange := [c for c in others if understood(c) is None]):
            yield f"{strange[0].__name__}.{name}", NEVER_CALLED[name]
        elif name in REPLACED and name in vars(mixin) and others:
            yield f"{others[0].__name__}.{name}", "the pipeline has a method of its own for it"
        elif name not in _KNOWN and (users or others):
            yield (
                f"an own {name}",
                f"it is a method of transformers {__version__} that is not known here",
            )


def owns_loss(cls: type, mixin: type, own: Mapping[str, Any]) -> bool:
    """Whether a trainer computes its loss by methods that the last stage knows nothing of."""
    above, theirs = _users(cls, mixin)
    classes = [*above, *(each for each in theirs if understood(each) is None)]
    return any(name in names for name in IN_SCRIPT for names in (own, *map(vars, classes)))


def _users(cls: type, mixin: type) -> tuple[list[type], list[type]]:
    """Return the classes of a trainer before ``mixin``, and the trainers of others behind it."""
    order = [each for each in cls.__mro__ if each not in (mixin, Trainer)]
    above = order[: cls.__mro__.index(mixin)]
    return above, [each for each in order if issubclass(each, Trainer) and each not in above]


_KNOWN = SAME | NEVER_CALLED.keys() | IN_SCRIPT.keys() | REPLACED.keys()
_OF_OBJECTS = frozenset(vars(object)) - {"__init__"}
