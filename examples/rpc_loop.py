"""The loop of torch's tutorial on pipeline parallelism by RPC, by hand: forward, backward, step.

There, ``outputs = model(inputs)`` cuts the inputs into parts, sends each through two shards of a
ResNet, and joins what comes back; `dist_autograd.backward` goes through both shards, and
`DistributedOptimizer` steps the parameters on the workers. Here the shards are the stages of a
pipeline, a forward is that of one part, and the loss is anything that the script computes. With one
part, or two, the sums have no order, so the weights are those of the same loop in one process, bit
for bit. `rpc_resnet.py` trains such a model by the loop that keeps the pipe full::

    python examples/rpc_loop.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import torch
from rpc_resnet import half
from torch import Tensor, nn

from pipedream_rt import Pipeline

CLASSES, RATE = 10, 0.2


def shards() -> list[nn.Module]:
    """The two halves of a ResNet: `ResNetShard1` and `ResNetShard2` of the tutorial."""
    torch.manual_seed(0)
    return [half(3, ((8, 1), (16, 2)), ends=False), half(64, ((32, 2),), ends=True)]


def batch(draw: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
    """Pictures, and as one-hot labels which of their three colours is the brightest."""
    inputs = torch.randn(samples, 3, 16, 16, generator=draw)
    indices = inputs.mean((2, 3)).argmax(1, keepdim=True)
    return inputs, torch.zeros(samples, CLASSES).scatter_(1, indices, 1)


def run(
    model: Callable[..., Any], step: Callable[[], None], batches: int, parts: int
) -> list[float]:
    """Train as `run_master` of the tutorial does; return the losses."""
    loss_fn, draw, losses = nn.MSELoss(), torch.Generator().manual_seed(1), []
    for _ in range(batches):
        inputs, labels = batch(draw, 64)
        outputs = torch.cat([model(part) for part in inputs.tensor_split(parts)])
        loss = loss_fn(outputs, labels)
        loss.backward()  # there: dist_autograd.backward(context_id, [loss])
        step()  # there: opt.step(context_id)
        losses.append(loss.item())
    return losses


def run_in_one_process(model: nn.Module, batches: int, parts: int) -> list[float]:
    """Train in plain PyTorch; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return run(model, step, batches, parts)


@click.command()
@click.option("--workers", default="local", show_default=True)
@click.option("--batches", default=30, show_default=True)
@click.option("--parts", default=2, show_default=True)
def main(workers: str, batches: int, parts: int) -> None:
    """Train in the pipeline and in one process."""
    torch.set_num_threads(1)  # as many as each stage has, for the comparison
    with Pipeline(
        shards(), stages=2, optimizer=(torch.optim.SGD, {"lr": RATE}), schedule="gpipe",
        micro_batches=parts, workers=workers,
    ) as pipe:  # fmt: skip
        losses = run(pipe.forward, pipe.step, batches, parts)
        weights = pipe.state_dict()
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    model = nn.Sequential(*shards())
    print("the same losses as in one process:", run_in_one_process(model, batches, parts) == losses)
    same = all(map(torch.equal, weights.values(), model.state_dict().values()))
    print("the same weights as in one process:", same)


if __name__ == "__main__":
    main()
