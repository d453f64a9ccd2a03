"""A contrastive loss over the whole mini-batch, whose forwards and backwards run in micro-batches.

Each sample must find its other view among all samples of its mini-batch (InfoNCE, as in SimCLR), so
the loss is no mean over parts of it, and cannot be computed on the last stage. The script computes
it from the joined output, and the gradients go back to the stages. At the end, the same is done in
one process, to show that the weights are the same, bit for bit::

    python examples/contrastive.py
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream_rt import Pipeline

PARTS, RATE = 4, 2e-3


def pairs(count: int, samples: int) -> list[Tensor]:
    """Mini-batches (samples, 2, 64): of each sample two views, which are noisy in other places."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(8, 64, generator=generator)
    found = []
    for _ in range(count):
        shown = torch.randn(samples, 1, 8, generator=generator) @ mixing
        found.append(shown + 3 * torch.randn(samples, 2, 64, generator=generator))
    return found


def encoder() -> nn.Sequential:
    """Make of each view a point in 16 dimensions."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(64, 128), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 16))


def info_nce(output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of all samples against each other, and the share that finds its view."""
    one, other = F.normalize(output, dim=-1).unbind(1)
    logits, mine = one @ other.T / 0.1, torch.arange(len(one))
    return F.cross_entropy(logits, mine), (logits.argmax(1) == mine).float().mean()


def in_one_process(model: nn.Module, data: list[Tensor]) -> dict[str, Tensor]:
    """Do in plain PyTorch what the pipeline does: backwards of parts, in the order of the parts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for views in data:
        optimizer.zero_grad()
        outputs = [model(part) for part in views.tensor_split(PARTS)]
        joined = torch.cat([output.detach() for output in outputs]).requires_grad_()
        info_nce(joined)[0].backward()
        for output, gradient in zip(outputs, joined.grad.tensor_split(PARTS), strict=True):
            output.backward(gradient)
        optimizer.step()
    return model.state_dict()


@click.command()
@click.option("--stages", default=2, show_default=True)
@click.option("--workers", default="local", show_default=True)
@click.option("--steps", default=60, show_default=True)
def main(stages: int, workers: str, steps: int) -> None:
    """Train, and say how many samples find their other view."""
    torch.set_num_threads(1)  # as many as each stage has, for the comparison at the end
    data = pairs(steps, 128)
    with Pipeline(
        encoder(), stages=stages, optimizer=(torch.optim.AdamW, {"lr": RATE}),
        schedule="gpipe", micro_batches=PARTS, workers=workers,
    ) as pipe:  # fmt: skip
        seen = []
        for output, _ in pipe.outputs(data, prepare=lambda views: (views, None)):
            loss, found = info_nce(output)
            loss.backward()
            seen.append((loss.item(), found.item()))
        weights = pipe.state_dict()
    for when, (loss_then, found_then) in (("at first", seen[0]), ("at last", seen[-1])):
        print(f"{when}: loss {loss_then:.3f}, of 128 samples {found_then:.0%} find their view")
    plain = in_one_process(encoder(), data)
    same = all(map(torch.equal, weights.values(), plain.values()))
    print("the same weights as in one process:", same)


if __name__ == "__main__":
    main()
