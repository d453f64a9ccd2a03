"""FairScale's Pipe: GPipe by threads in one process, here with every partition on the CPU.

It has one thread for each distinct device, and the CPU is one device, so on a CPU its partitions
take turns. It checkpoints nothing here, as the other peers.
"""

from __future__ import annotations

import os
import warnings

import torch
from processes import Clock, main, unavailable
from workload import Workload, batches, loss_fn, optimizer_of, parts, whole


def run(w: Workload) -> dict[str, float]:
    """Train it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        from fairscale.nn import Pipe

        balance = [len(part) for part in parts(w)]
        devices = ["cpu"] * w.stages
        options = {"devices": devices, "chunks": w.micro_batches, "checkpoint": "never"}
        model = Pipe(whole(w), balance, **options)
        model(batches(w)[0][0])
    except Exception as error:
        unavailable(f"{type(error).__name__}: {error}")
    data, clock = batches(w), Clock()
    optimizer = optimizer_of(w, model.parameters())
    last = 0.0
    for x, y in clock.over(data):
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
    return {"seconds": clock.end_s - clock.start_s, "loss": last}


if __name__ == "__main__":
    main(run)
    # Its threads still wait for work; now and then one of them aborts an interpreter that ends.
    os._exit(0)
