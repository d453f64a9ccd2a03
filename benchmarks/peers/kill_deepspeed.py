"""DeepSpeed's pipeline engine over gloo, with its checkpoints, under its launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from kill_support import (
    MICRO_BATCHES,
    SAMPLES,
    WORKERS,
    Job,
    batch,
    loss_fn,
    optimizer_of,
    part_of,
    train,
)


def main() -> None:
    """Train one stage."""
    job = Job.read()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    rank = int(os.environ["RANK"])
    module = PipelineModule(
        [part_of(i) for i in range(WORKERS)],
        num_stages=WORKERS,
        loss_fn=loss_fn,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    engine = deepspeed.initialize(model=module, optimizer=optimizer_of(module), config=config)[0]
    checkpoints, at = f"{job.folder}/checkpoints", 0
    if (Path(checkpoints) / "latest").exists():
        engine.load_checkpoint(checkpoints)
        at = engine.global_steps

    def one(step: int) -> None:
        x, y = batch(step)
        parts = zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True)
        feed: Iterator[Any] = iter(list(parts))
        engine.train_batch(feed)

    with job.telling(rank):
        train(job, rank, at + 1, one, lambda step: engine.save_checkpoint(checkpoints))
    job.done(rank, module.parameters())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
