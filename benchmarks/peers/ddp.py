"""PyTorch's DistributedDataParallel: the whole model in as many processes as there are stages.

Each has its share of every mini-batch's micro-batches, so an update has the same samples.
"""

from __future__ import annotations

import contextlib

from processes import Clock, Worker, main, measure, micro_batches
from torch.nn.parallel import DistributedDataParallel
from workload import Workload, batches, loss_fn, optimizer_of, whole


def work(worker: Worker, w: Workload) -> tuple[Clock, float]:
    """Train one replica."""
    worker.join_group()
    model, data, clock = DistributedDataParallel(whole(w)), batches(w), Clock(worker.barrier)
    optimizer = optimizer_of(w, model.parameters())
    total = 0.0
    for batch in clock.over(data):
        total = 0.0
        mine = micro_batches(w, batch)[worker.rank :: worker.count]
        for i, (x, y) in enumerate(mine):
            # Gradients are averaged over the replicas once, in the last backward.
            with contextlib.nullcontext() if i == len(mine) - 1 else model.no_sync():
                loss = loss_fn(model(x), y) / len(mine)
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    worker.leave_group()
    return clock, total


def run(w: Workload) -> dict[str, float]:
    """Run one process for each replica; the loss is the mean of theirs."""
    if w.micro_batches % w.stages:
        raise SystemExit(
            f"{w.micro_batches} micro-batches do not divide over {w.stages} replicas; "
            "give a multiple"
        )
    return measure(work, w.stages, w)


if __name__ == "__main__":
    main(run)
