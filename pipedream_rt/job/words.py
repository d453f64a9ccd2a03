"""What the options of other trainers are called here."""

from __future__ import annotations

from collections.abc import Mapping

_LOOP = "the script has the loop: for epoch in range(epochs), and in it train_epoch(loader)"

_MEANINGS = {
    "amp use_amp precision mixed_precision bf16 bfloat16 half dtype torch_dtype":
        "for bfloat16 give training=Training(autocast=torch.bfloat16)",
    "fp16 float16 scaler grad_scaler loss_scaling":
        "give training=Training(autocast=torch.float16), which scales losses by LossScale()",
    "gradient_accumulation_steps accumulate_grad_batches accumulate_grad_steps grad_accum "
    "grad_accumulation_steps accumulation_steps accum_steps accum_iter update_freq":
        "each mini-batch of the loader is one update, so let the loader make larger ones, and cut "
        "them by micro_batches=",
    "chunks n_chunks num_chunks microbatches num_microbatches n_microbatches num_micro_batches "
    "n_micro_batches":
        "give micro_batches=, their number",
    "micro_batch_size microbatch_size train_micro_batch_size_per_gpu":
        "give micro_batches=, which is their number and not their size",
    "batch_size train_batch_size global_batch_size per_device_train_batch_size":
        "the loader makes the mini-batches: DataLoader(dataset, batch_size=...)",
    "epoch epochs n_epochs num_epochs max_epochs num_train_epochs": _LOOP,
    "max_steps num_steps n_steps total_steps train_steps iterations max_iters steps":
        f"{_LOOP}, which a break ends after so many results",
    "clip clip_grad grad_clip clip_grads clip_norm clip_grad_norm max_grad_norm max_norm "
    "gradient_clip gradient_clipping gradient_clip_val":
        "give training=Training(clip=Clip(1.0)), the largest norm",
    "clip_value clip_grad_value gradient_clip_value":
        "give training=Training(clip=Clip(value=1.0))",
    "world_size nproc nprocs nproc_per_node num_processes num_workers n_workers num_nodes nnodes "
    "num_devices n_gpus num_gpus ngpus gpus":
        "give stages=, their number: each has a worker. Where workers are started elsewhere, "
        "`pipedream-rt run --nproc-per-node` says how many",
    "rank local_rank node_rank backend init_method process_group":
        "one script feeds all workers, so there are no ranks and no process group: leave it out",
    "num_stages n_stages pp pp_size pp_degree pipeline_parallel_size pipeline_parallel_degree "
    "partitions num_partitions":
        "give stages=, their number",
    "balance split splits cuts split_points split_spec partition":
        "give stages= a list with the first layer of each stage but the first, as stages=[3, 5]; "
        "or their number",
    "dp dp_size ddp num_replicas data_parallel data_parallel_size":
        "give layout=Layout(replicas=2), of each stage",
    "fsdp zero zero_stage sharded shard sharding":
        "give layout=Layout(replicas=2, shard_optimizer=True)",
    "tp tp_size tensor_parallel tensor_parallel_size":
        "each layer is computed by one worker; give stages=, their number",
    "strategy parallelism parallel":
        "schedule= says how the workers take turns, and stages= how many there are",
    "accelerator device device_ids":
        'give devices=, as "cuda"; without it the stages compute where the model is',
    "lr learning_rate weight_decay momentum betas":
        "the optimizer has it: optimizer=(torch.optim.AdamW, {'lr': 1e-3})",
    "optim opt optimizers optimizer_class":
        "give optimizer=(torch.optim.AdamW, {'lr': 1e-3}), or a torch optimizer over the model",
    "scheduler lr_scheduler lr_schedule":
        "make it with pipe.optimizer, as StepLR(pipe.optimizer, 10), and step it for each result; "
        "schedule= is the order in which the workers work",
    "loss criterion loss_func loss_function objective": "give loss_fn=, called with output and y",
    "loader dataloader data_loader train_loader train_dataloader train_dataset dataset data":
        "pipe.train_epoch(loader) takes it; example=loader shows the pipeline its first item",
    "metrics compute_metrics":
        "pipe.train_epoch(loader, metrics=...) and pipe.evaluate(loader, metrics=...) take them",
    "callbacks callback logger loggers log_dir logging_dir":
        "give observe=Observe(to=[...]), observers or functions; the loop is the script's",
    "verbose progress progress_bar enable_progress_bar":
        "pipe.train_epoch(loader, progress=True) shows a bar",
    "checkpoint_dir ckpt_path ckpt_dir save_dir save_path output_dir default_root_dir "
    "checkpoint_every save_every save_steps resume_from_checkpoint":
        "give checkpoint=Checkpoints(folder, every=100); a folder alone has what pipe.save writes",
    "activation_checkpointing gradient_checkpointing checkpoint_activations remat "
    "checkpointing":
        "give training=Training(recompute=True)",
    "torch_compile jit": "give training=Training(compile=True)",
}  # fmt: skip

MEANINGS: Mapping[str, str] = {
    word: said for words, said in _MEANINGS.items() for word in words.split()
}
"""By name of an option of others, what to write."""
