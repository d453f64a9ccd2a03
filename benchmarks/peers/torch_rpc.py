"""A pipeline by torch.distributed.rpc, as in PyTorch's tutorial on it.

A master holds references to the stages, each in a process of its own, and passes references to
micro-batches through them without waiting; distributed autograd runs the backward of the mean loss,
and DistributedOptimizer makes one step. Unlike in the tutorial the last stage computes the loss, so
that outputs need not travel. The master is one process more than there are stages; it only waits.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from processes import DEADLINE_S, Clock, Worker, main, measure, micro_batches
from torch import Tensor, nn
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer
from workload import Workload, batches, loss_fn, optimizer_of, parts


class Shard(nn.Module):
    """One stage, made where it lives."""

    def __init__(self, text: str, index: int) -> None:
        super().__init__()
        self.part = parts(Workload.from_json(text))[index]
        self.one = threading.Lock()

    def forward(self, x: Any) -> Tensor:
        """Compute the output of the micro-batch that a reference names."""
        here = x.to_here(DEADLINE_S)
        with self.one:
            return self.part(here)

    def loss(self, x: Any, target: Tensor) -> Tensor:
        """Compute the loss of the micro-batch that a reference names."""
        here = x.to_here(DEADLINE_S)
        with self.one:
            return loss_fn(self.part(here), target)

    def parameter_references(self) -> list[Any]:
        """Return references to the parameters, for the distributed optimizer."""
        return [rpc.RRef(p) for p in self.parameters()]


def train(w: Workload) -> tuple[Clock, float]:
    """Drive the stages from the master."""
    shards = [rpc.remote(f"stage{i}", Shard, args=(w.to_json(), i)) for i in range(w.stages)]
    references = [p for s in shards for p in s.rpc_sync().parameter_references()]
    # Not the class itself: DistributedOptimizer would replace it by one that cannot be fused.
    optimizer = DistributedOptimizer(functools.partial(optimizer_of, w), references)
    clock, last = Clock(), 0.0
    for batch in clock.over(batches(w)):
        with autograd.context() as context:
            futures = []
            for x, y in micro_batches(w, batch):
                reference = rpc.RRef(x)
                for shard in shards[:-1]:
                    reference = shard.remote().forward(reference)
                futures.append(shards[-1].rpc_async().loss(reference, y))
            loss = torch.stack(torch.futures.wait_all(futures)).mean()
            autograd.backward(context, [loss])
            optimizer.step(context)
            last = loss.item()
    return clock, last


def work(worker: Worker, w: Workload) -> tuple[Clock | None, float | None]:
    """Be the master, or wait for its calls."""
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=128, rpc_timeout=DEADLINE_S, init_method=worker.rendezvous
    )
    name = "master" if worker.rank == w.stages else f"stage{worker.rank}"
    rpc.init_rpc(name, rank=worker.rank, world_size=worker.count, rpc_backend_options=options)
    outcome = train(w) if name == "master" else (None, None)
    rpc.shutdown(timeout=DEADLINE_S)
    return outcome


def run(w: Workload) -> dict[str, float]:
    """Run the master and one process for each stage."""
    return measure(work, w.stages + 1, w)


if __name__ == "__main__":
    main(run)
