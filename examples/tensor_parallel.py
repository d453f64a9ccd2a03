"""Tensor parallelism inside a stage: two pipelines side by side, each with half of every matrix.

Two scripts build the same pipeline and feed it the same mini-batches. The two workers of a stage,
one from each script, share the matrices of its blocks as ``parallelize_module`` divides them. The
stages before and after hold whole layers, so both scripts compute those alike::

    python examples/tensor_parallel.py --schedule 1f1b
"""

from __future__ import annotations

import tempfile
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.multiprocessing import spawn

from pipedream_rt import Pipeline


class Block(nn.Module):
    """Two linear layers around a GELU, beside which the input goes on."""

    def __init__(self, width: int) -> None:
        """Make both layers."""
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden states, of the shape of `x`."""
        return x + self.down(nn.functional.gelu(self.up(x)))


class Halved(nn.Module):
    """A block of which this process has the half of rank `rank`, as plain parameters."""

    def __init__(self, width: int, rank: int, meeting: str) -> None:
        """Divide a new block. `meeting` is a file that both workers of the stage reach."""
        super().__init__()
        self.width, self.rank, self.meeting = width, rank, meeting
        self._divided: list[nn.Module] = []  # in a list, since its parameters are not trained
        for name, whole in Block(width).named_parameters():
            axis = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
            mine = whole if axis is None else whole.chunk(2, axis)[rank]
            self.register_parameter(name.replace(".", "_"), nn.Parameter(mine.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the whole block makes of `x`, which is the same in both processes."""
        if not self._divided:  # the first time in this worker: it meets that of the other script
            where = f"file://{self.meeting}"
            dist.init_process_group("gloo", init_method=where, rank=self.rank, world_size=2)
            styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            with torch.random.fork_rng():
                block = Block(self.width)
            self._divided.append(parallelize_module(block, DeviceMesh("cpu", [0, 1]), styles))
        halves = {
            name: DTensor.from_local(
                getattr(self, name.replace(".", "_")), whole.device_mesh, whole.placements
            )
            for name, whole in self._divided[0].named_parameters()
        }
        return functional_call(self._divided[0], halves, (x,))


def train(rank: int, folder: str, options: dict[str, Any]) -> None:
    """Train the half of rank `rank`; the other process trains the other one at the same time."""
    torch.manual_seed(0)  # both scripts: the same weights, the same mini-batches
    model = nn.Sequential(
        nn.Linear(8, 32), Halved(32, rank, f"{folder}/meeting"), nn.Linear(32, 2)
    )  # fmt: skip
    x = torch.randn(640, 8)
    data = [(x, (x.sum(1) > 0).long()) for x in x.split(32)]
    with Pipeline(
        model, stages=3, loss_fn=nn.functional.cross_entropy,
        optimizer=(torch.optim.AdamW, {"lr": 3e-3}), **options,
    ) as pipe:  # fmt: skip
        losses = [result.loss for result in pipe.train_epoch(data)]
    if rank == 0:
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")


@click.command()
@click.option("--schedule", default="async-1f1b", show_default=True)
@click.option("--workers", default="local", show_default=True)
def main(schedule: str, workers: str) -> None:
    """Start both scripts, here on one machine."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(train, (folder, {"schedule": schedule, "workers": workers}), nprocs=2)


if __name__ == "__main__":
    main()
