"""torch.distributed.pipelining under torchrun, with a checkpoint of each rank's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from kill_support import MICRO_BATCHES, WORKERS, Job, batch, loss_fn, optimizer_of, part_of, train
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main() -> None:
    """Train one stage."""
    job = Job.read()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    part = part_of(rank)
    optimizer = optimizer_of(part)
    stage = PipelineStage(part, rank, WORKERS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_fn)
    # A rank may have died before it wrote what the others have written.
    newest = torch.tensor(job.newest(rank))
    dist.all_reduce(newest, dist.ReduceOp.MIN)
    if at := int(newest):
        state = job.load(at, rank)
        part.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def one(step: int) -> None:
        x, y = batch(step)
        inputs = (x,) if rank == 0 else ()
        targets: dict[str, Any] = {"target": y} if rank == WORKERS - 1 else {}
        schedule.step(*inputs, **targets, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    def save(step: int) -> None:
        job.save(step, rank, {"model": part.state_dict(), "optimizer": optimizer.state_dict()})

    with job.telling(rank):
        train(job, rank, at + 1, one, save)
    job.done(rank, part.parameters())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
