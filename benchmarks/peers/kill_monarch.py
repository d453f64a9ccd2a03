"""Monarch: three processes in a mesh, whose gradients the calling script averages.

Given ``respawn``, the script does what Monarch leaves to it: it takes a fault of the mesh for
handled, makes new processes, and gives them its last checkpoint. Without, it catches the error of
the call, and Monarch ends it all the same.
"""

from __future__ import annotations

import sys
from typing import Any

import monarch.actor
import torch
from kill_support import WORKERS, Job, loss_fn, optimizer_of, part_of, share
from monarch.actor import Actor, current_rank, endpoint, this_host
from torch import Tensor

DEADLINE_S = 100


class Replica(Actor):
    """One replica."""

    def __init__(self) -> None:
        self.job, self.rank = Job.read(), current_rank().rank
        self.model = part_of(0)
        self.optimizer = optimizer_of(self.model)
        self.job.tell("began", rank=self.rank)

    @endpoint
    def load(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    @endpoint
    def state(self) -> dict[str, Any]:
        """Return the state."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @endpoint
    def gradients(self, step: int) -> list[Tensor]:
        """Compute those of this replica's share."""
        self.optimizer.zero_grad()
        x, y = share(step, self.rank)
        loss_fn(self.model(x), y).backward()
        return [p.grad for p in self.model.parameters()]

    @endpoint
    def update(self, means: list[Tensor]) -> None:
        """Take a step with the means of all gradients."""
        for p, mean in zip(self.model.parameters(), means, strict=True):
            p.grad = mean
        self.optimizer.step()


def made() -> tuple[Any, Any]:
    """Make processes, and a replica in each."""
    processes = this_host().spawn_procs(per_host={"cpus": WORKERS})
    return processes, processes.spawn("replica", Replica)


def trained(job: Job, replicas: Any, first: int) -> None:
    """Train, with a checkpoint of the first replica's state, which is that of all."""
    for step in range(first, job.steps + 1):
        found = [each for _, each in replicas.gradients.call(step).get(timeout=DEADLINE_S)]
        means = [torch.stack(same).mean(0) for same in zip(*found, strict=True)]
        replicas.update.call(means).get(timeout=DEADLINE_S)
        job.tell("step", step=step)
        if step % job.every == 0:
            state = replicas.slice(cpus=0).state.call_one().get(timeout=DEADLINE_S)
            job.save(step, 0, state)


def main(respawn: bool) -> None:
    """Train, and go on after an error."""
    job = Job.read()
    if respawn:
        monarch.actor.unhandled_fault_hook = lambda fault: job.tell("error", text=str(fault))
    processes, replicas = made()
    first = 1
    for _ in range(3):
        try:
            trained(job, replicas, first)
            break
        except Exception as error:
            job.tell("error", text=f"{type(error).__name__}: {error}")
        processes, replicas = made()
        if at := job.newest(0):
            replicas.load.call(job.load(at, 0)).get(timeout=DEADLINE_S)
        first = at + 1
    state = replicas.slice(cpus=0).state.call_one().get(timeout=DEADLINE_S)
    job.done(0, state["model"].values())
    processes.stop().get(timeout=DEADLINE_S)


if __name__ == "__main__":
    main("respawn" in sys.argv[1:])
