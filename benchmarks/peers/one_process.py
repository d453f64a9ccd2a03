"""Plain PyTorch: the whole model in one process with one thread, and gradient accumulation."""

from __future__ import annotations

import torch
from processes import Clock, main, micro_batches
from workload import Workload, batches, loss_fn, optimizer_of, whole


def run(w: Workload) -> dict[str, float]:
    """Train it."""
    torch.set_num_threads(1)
    model, data, clock = whole(w), batches(w), Clock()
    optimizer = optimizer_of(w, model.parameters())
    total = 0.0
    for batch in clock.over(data):
        total = 0.0
        for x, y in micro_batches(w, batch):
            loss = loss_fn(model(x), y) / w.micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return {"seconds": clock.end_s - clock.start_s, "loss": total}


if __name__ == "__main__":
    main(run)
