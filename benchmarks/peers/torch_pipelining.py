"""torch.distributed.pipelining, one process for each rank, messages by gloo over loopback.

With gpipe and 1f1b a rank has one stage. With the others it has two virtual stages, so there are
half as many processes as the workload has stages.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from processes import Clock, Worker, main, measure
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from workload import Workload, batches, loss_fn, optimizer_of, parts

ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
TWO_STAGES = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zero-bubble-v": ScheduleZBVZeroBubble,
}


def stages_of(rank: int, w: Workload, schedule: str) -> list[int]:
    """Return which stages a rank has."""
    ranks = ranks_of(w, schedule)
    if schedule in ONE_STAGE:
        return [rank]
    # In the V the first rank has the first stage and the last.
    return [rank, w.stages - 1 - rank if schedule == "zero-bubble-v" else rank + ranks]


def ranks_of(w: Workload, schedule: str) -> int:
    """Return how many processes there are."""
    return w.stages if schedule in ONE_STAGE else w.stages // 2


def schedule_of(name: str, mine: list[PipelineStage], w: Workload) -> Any:
    """Make the schedule; it divides gradients by the number of micro-batches, as by default."""
    options = {"n_microbatches": w.micro_batches, "loss_fn": loss_fn}
    if name in ONE_STAGE:
        return ONE_STAGE[name](mine[0], **options)
    return TWO_STAGES[name](mine, **options)


def work(worker: Worker, w: Workload, name: str) -> tuple[Clock, float | None]:
    """Train the stages of one rank."""
    worker.join_group()
    every, indices = parts(w), stages_of(worker.rank, w, name)
    mine = nn.ModuleList(every[i] for i in indices)
    del every
    device = torch.device("cpu")
    stages = [PipelineStage(part, i, w.stages, device) for part, i in zip(mine, indices)]
    schedule = schedule_of(name, stages, w)
    optimizer = optimizer_of(w, mine.parameters())
    data, clock = batches(w), Clock(worker.barrier)
    losses: list[Tensor] = []
    for x, y in clock.over(data):
        losses.clear()
        inputs = (x,) if 0 in indices else ()
        targets = {"target": y, "losses": losses} if w.stages - 1 in indices else {}
        schedule.step(*inputs, **targets, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
    loss = statistics.fmean(each.item() for each in losses) if losses else None
    worker.leave_group()
    return clock, loss


def run(w: Workload, schedule: str) -> dict[str, float]:
    """Run one process for each rank."""
    if schedule in TWO_STAGES and w.stages % 2:
        raise SystemExit(f"{schedule} has two stages on a rank, not {w.stages} in all; give a pair")
    return measure(work, ranks_of(w, schedule), w, schedule)


if __name__ == "__main__":
    main(run, *ONE_STAGE, *TWO_STAGES)
