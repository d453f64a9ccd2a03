"""Ours: the same training as that of ``kill_pipelining.py``, on local workers, for comparison."""

from __future__ import annotations

import logging
from datetime import timedelta

import torch
from kill_support import MICRO_BATCHES, WORKERS, Job, batch, loss_fn, part_of
from torch import nn

from pipedream_rt import Checkpoints, Pipeline, Recovery


def main() -> None:
    """Train, and tell each step; the coordinator is never killed."""
    logging.basicConfig(format="%(message)s")
    job = Job.read()
    model = nn.Sequential(*(nn.Sequential(*part_of(rank)) for rank in range(WORKERS)))
    data = [batch(step) for step in range(1, job.steps + 1)]
    with Pipeline(
        model, stages=WORKERS, loss_fn=loss_fn, optimizer=(torch.optim.AdamW, {"lr": 1e-3}),
        schedule="1f1b", micro_batches=MICRO_BATCHES, workers="local",
        checkpoint=Checkpoints(f"{job.folder}/run", every=job.every),
        recovery=Recovery(max_restarts=3, answer=timedelta(seconds=60)),
    ) as pipe:  # fmt: skip
        processes = pipe._group.cluster._local.processes  # type: ignore[attr-defined]
        for rank, stage in enumerate(pipe.stages):
            job.tell("began", rank=rank, pid=processes[stage.worker].pid)
        for result in pipe.train_epoch(data):
            job.tell("step", step=result.step + 1)
        job.done(0, pipe.state_dict().values())


if __name__ == "__main__":
    main()
