"""The limit: every stage's own part in its own process, all at once, and no communication.

A part's inputs are made once from the parts before it, and the gradient of its outputs is a fixed
tensor. The last part computes its loss, as it does in a pipeline. So this is the speed that the
stages' layers reach alone where their processes share the machine.
"""

from __future__ import annotations

import torch
from processes import Clock, Worker, main, measure, micro_batches
from torch import Tensor, nn
from workload import WARM_UP, Workload, batches, loss_fn, optimizer_of, parts


def inputs(w: Workload, before: list[nn.Sequential]) -> list[tuple[Tensor, Tensor]]:
    """Return what reaches a part in one mini-batch, and the targets."""
    out = []
    with torch.no_grad():
        for x, y in micro_batches(w, batches(w)[0]):
            for part in before:
                x = part(x)
            out.append((x.requires_grad_() if before else x, y))
    return out


def work(worker: Worker, w: Workload) -> tuple[Clock, None]:
    """Train one part alone."""
    every = parts(w)
    part, last = every[worker.rank], worker.rank == w.stages - 1
    given = inputs(w, every[: worker.rank])
    with torch.no_grad():
        gradient = torch.full_like(part(given[0][0]), 1e-3)
    optimizer = optimizer_of(w, part.parameters())
    clock = Clock(worker.barrier)
    for _ in clock.over([None] * (WARM_UP + w.updates)):
        for x, y in given:
            out = part(x)
            if last:
                (loss_fn(out, y) / w.micro_batches).backward()
            else:
                out.backward(gradient)
            x.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return clock, None


def run(w: Workload) -> dict[str, float]:
    """Run one process for each part; the time is that of the slowest."""
    return measure(work, w.stages, w)


if __name__ == "__main__":
    main(run)
