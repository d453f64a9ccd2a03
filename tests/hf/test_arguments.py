"""Each argument of the installed transformers: the same bits over a pipeline, or refused."""

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch
from support.trainers import (
    CALM,
    EVALUATED,
    SAVED,
    arguments,
    as_plain,
    bert,
    classes,
    llama,
    padded,
    rows,
    trained,
    trainer_of,
)
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import SchedulerType

from pipedream_rt import Clip, ConfigError, Training
from pipedream_rt.hf import PipelineTrainer
from pipedream_rt.hf import arguments as arguments_module
from pipedream_rt.hf.__main__ import page
from pipedream_rt.hf.arguments import known_arguments, options_of

pytestmark = CALM


UNEQUAL = {"train": rows(least=4), "evaluated": rows(6, 2, least=4), "data_collator": padded}

TOGETHER = {
    "defaults": {
        "average_tokens_across_devices": False, "tf32": None, "use_cache": True, "use_cpu": True,
        "torch_empty_cache_steps": 2, "full_determinism": False, "skip_memory_metrics": True,
    },
    "length": {"max_steps": 7, "logging_strategy": "epoch", "eval_strategy": "epoch"},
    "part of an epoch": {
        "num_train_epochs": 1.5, "gradient_accumulation_steps": 2, "gradient_checkpointing": True,
    },
    "optimizer": {
        "seed": 11, "learning_rate": 1e-3, "weight_decay": 0.1, "adam_beta1": 0.5,
        "adam_beta2": 0.5, "adam_epsilon": 1e-3, "warmup_steps": 3, "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4},
    },
    "another optimizer": {"optim": "adafactor", "activation_checkpointing": True},
    "its arguments": {"optim": "sgd", "optim_args": "momentum=0.9", "bf16": True},
    "logs": {
        "logging_steps": 3, "logging_first_step": True, "logging_nan_inf_filter": False,
        "include_num_input_tokens_seen": "all",
    },
    "evaluation": {
        "eval_strategy": "steps", "eval_steps": 3, "eval_delay": 4, "eval_on_start": True,
        "per_device_eval_batch_size": 2, "eval_do_concat_batches": False,
        "eval_use_gather_object": True, "eval_accumulation_steps": 1, "label_names": ["labels"],
    },
    "evaluation in bfloat16": {"bf16_full_eval": True, **EVALUATED},
    "evaluation in float16": {"fp16_full_eval": True, **EVALUATED},
    "saving, losses alone": {
        **SAVED, **EVALUATED, "save_only_model": True, "save_total_limit": 1,
        "prediction_loss_only": True,
    },
    "saving the best": {"save_strategy": "best", "metric_for_best_model": "loss", **EVALUATED},
    "loading the best": {**SAVED, **EVALUATED, "load_best_model_at_end": True},
    "loading the worst": {
        **SAVED, **EVALUATED, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    },
    "data": {
        "per_device_train_batch_size": 3, "gradient_accumulation_steps": 3, "data_seed": 11,
        "dataloader_drop_last": True, "dataloader_num_workers": 1, "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    },
    "smoothed labels": {"label_smoothing_factor": 0.1, **EVALUATED},
    "lengths": {"train_sampling_strategy": "group_by_length"},
}  # fmt: skip
"""Each argument that can change something in one process without network, with others that leave it
its effect."""

ELSEWHERE = """
    optim_target_modules activation_checkpointing_kwargs gradient_checkpointing_kwargs torch_compile
    torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config log_on_each_node
    log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id include_for_metrics batch_eval_metrics
    save_on_each_node enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id
    hub_strategy hub_always_push hub_revision ignore_data_skip
    restore_callback_states_from_checkpoint accelerator_config dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers
    ddp_static_graph ddp_backend ddp_timeout fsdp_config do_train do_eval do_predict
    resume_from_checkpoint local_rank
"""
"""Arguments of the network, of other processes, of the screen, or of a resume; see below."""

REFUSED = {
    "fp16": {"fp16": True},
    "neftune_noise_alpha": {"neftune_noise_alpha": 1.0},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "debug": {"debug": "underflow_overflow"},
    "optim": {"optim": "adalomo"},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 3},
}


def test_every_argument_is_known_and_tried():
    names = {each.name for each in dataclasses.fields(TrainingArguments)}
    unknown = [name for name, (kind, _) in known_arguments().items() if kind == "unknown"]
    assert not unknown
    refused = {name for name, (kind, _) in known_arguments().items() if kind == "refused"}
    tried = {"output_dir"}.union(*TOGETHER.values())
    assert names - refused <= tried | set(ELSEWHERE.split())


@pytest.mark.parametrize("name", TOGETHER)
def test_arguments_give_the_bits_and_logs_of_the_plain_trainer(name, tmp_path):
    known = vars(arguments(tmp_path))  # older versions lack some
    options = {key: value for key, value in TOGETHER[name].items() if key in known}

    def compared(options):
        given = {
            "options": {"max_grad_norm": 0.0, **options},
            **(UNEQUAL if name == "lengths" else {}),
        }
        parts = options.get("gradient_accumulation_steps", 1)
        as_plain(trained(tmp_path, pipeline={"micro_batches": parts}, **given))

    def is_equal_without(key):
        with contextlib.suppress(Exception):
            compared({other: value for other, value in options.items() if other != key})
            return True
        return False

    try:
        compared(options)
    except AssertionError as error:
        found = [key for key in options if is_equal_without(key)]
        raise AssertionError(f"equal without one of {found}") from error


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_is_refused_by_name(name, tmp_path):
    given = {"micro_batches": 2} if name == "gradient_accumulation_steps" else {}
    with (
        pytest.raises(ConfigError, match=name),
        trainer_of(PipelineTrainer, tmp_path, options=REFUSED[name], pipeline=given),
    ):
        pass


@pytest.mark.parametrize(("name", "value"), [("deepspeed", {}), ("fsdp", ["full_shard"])])
def test_other_parallelism_is_refused_before_transformers_has_an_error(name, value, tmp_path):
    args = arguments(tmp_path)
    setattr(args, name, value or {"zero_optimization": {"stage": 2}})
    with pytest.raises(ConfigError, match=f"cannot do {name}: the pipeline takes its place"):
        PipelineTrainer(model=bert(), args=args, train_dataset=classes(), pipeline={"stages": 2})


def test_an_address_to_write_to_is_refused(tmp_path, monkeypatch):
    """The Trainer would make folders of that name here."""
    monkeypatch.chdir(tmp_path)
    args = arguments("s3://bucket/run")
    with pytest.raises(ConfigError, match="output_dir is 's3://bucket/run', an address"):
        PipelineTrainer(model=bert(), args=args, train_dataset=classes(), pipeline={"stages": 2})


def test_an_argument_that_a_new_version_brings_is_refused(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    monkeypatch.setattr(arguments_module, "_KNOWN", arguments_module._KNOWN - {"weight_decay"})
    PipelineTrainer(model=bert(), args=args, train_dataset=classes(), pipeline={"stages": 2})
    args.weight_decay = 0.5
    with pytest.raises(ConfigError, match="weight_decay: this argument of transformers"):
        PipelineTrainer(model=bert(), args=args, train_dataset=classes(), pipeline={"stages": 2})


OF_SCHEDULES = {
    "polynomial": {"lr_end": 1e-5},
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 3, "num_stable_steps": 3},
}


OFTEN = ("polynomial", "reduce_lr_on_plateau", "warmup_stable_decay", "greedy")
"""Two of the schedules that are functions of the step, and those that follow the evaluations."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(each.value, marks=() if each.value in OFTEN else pytest.mark.stress)
        for each in SchedulerType
    ],
)
def test_every_schedule_of_the_learning_rate_is_the_same(kind, tmp_path):
    options = {
        "lr_scheduler_type": kind, "lr_scheduler_kwargs": OF_SCHEDULES.get(kind),
        "warmup_steps": 2, "logging_steps": 1, "metric_for_best_model": "eval_loss", **EVALUATED,
    }  # fmt: skip
    as_plain(trained(tmp_path, options=options))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("kind", ["lengths", "classes"])
def test_accumulated_batches_keep_their_shapes_and_weights(kind, parts, tmp_path):
    of_classes = {"model": bert, "train": classes(), "evaluated": classes(6, 2)}
    given = UNEQUAL if kind == "lengths" else of_classes
    options = {"gradient_accumulation_steps": parts, "max_grad_norm": 0.0, "logging_steps": 1}
    as_plain(trained(tmp_path, options=options, pipeline={"micro_batches": parts}, **given))


@pytest.mark.parametrize(("make", "count"), [(llama, 4), (llama, 7), (bert, 4), (bert, 5)])
def test_batches_that_are_cut_further_train_the_same_up_to_rounding(make, count, tmp_path):
    """A model that divides by the number that it is told, and one that takes no notice of it."""
    does = trained(
        tmp_path, model=make, train=rows() if make is llama else classes(),
        options={"gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "optim": "sgd"},
        pipeline={"micro_batches": count},
    )  # fmt: skip
    (weights, logs, _), (found, ours, _) = does(Trainer), does(PipelineTrainer)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    losses = [[row["loss"] for row in each if "loss" in row] for each in (logs, ours)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# -- the page -----------------------------------------------------------------------------------


def test_the_page_has_the_table_of_the_versions_that_are_tested():
    text = (Path(__file__).parents[2] / "docs" / "guide" / "trainer.md").read_text()
    _, _, rest = text.partition("<!-- what python -m pipedream_rt.hf prints: begin -->\n")
    assert rest.partition("<!-- end -->")[0].strip() == page().strip()


@pytest.mark.parametrize(
    ("parts", "given", "count"),
    [
        (1, {"stages": 4}, None),
        (2, {"stages": 4}, None),
        (3, {"stages": 2, "schedule": "async-1f1b"}, 3),
        (3, {"stages": 4, "schedule": "async-1f1b"}, 4),
        (2, {"stages": ["a", "b"], "schedule": "2bw"}, 3),
        (2, {"stages": 4, "micro_batches": 8}, 8),
    ],
    ids=str,
)
def test_each_accumulated_batch_is_at_least_one_micro_batch(parts, given, count, tmp_path):
    options = options_of(arguments(tmp_path, gradient_accumulation_steps=parts), given, sum)
    assert options.get("micro_batches") == count


def test_what_is_given_to_the_pipeline_wins(tmp_path):
    args = arguments(tmp_path, bf16=True, max_grad_norm=0.5)
    own = Training(autocast=torch.float16)
    found = options_of(args, {"stages": 2, "training": own}, sum)["training"]
    assert (found.autocast, found.clip, found.weigh) == (torch.float16, Clip(norm=0.5), sum)
    with_loss = options_of(args, {"stages": 2, "loss_fn": max}, sum)["training"]
    assert with_loss.weigh == Training().weigh
