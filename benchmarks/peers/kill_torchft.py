"""One replica group of torchft, data parallel over gloo; each is under a torchrun of its own."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torchft.ddp
from kill_support import Job, loss_fn, optimizer_of, part_of, share
from torchft import Manager, Optimizer, ProcessGroupGloo

MIN_REPLICAS = 2


def main(wrapper: str) -> None:
    """Train one replica, as in torchft's own example, with one of its two wrappers of a model."""
    job, rank = Job.read(), int(os.environ["REPLICA_GROUP_ID"])
    model = part_of(0)
    plain = optimizer_of(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=MIN_REPLICAS,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"replica_{rank}",
        timeout=timedelta(seconds=30),
    )
    replica = getattr(torchft.ddp, wrapper)(manager, model)
    optimizer = Optimizer(manager, plain)
    with job.telling(rank):
        while (before := manager.current_step()) < job.steps:
            optimizer.zero_grad()
            x, y = share(before + 1, rank)
            loss_fn(replica(x), y).backward()
            optimizer.step()
            after, members = manager.current_step(), manager.num_participants()
            what = "step" if after > before else "refused"
            job.tell(what, rank=rank, step=after, members=members)
    job.done(rank, model.parameters())
    manager.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
