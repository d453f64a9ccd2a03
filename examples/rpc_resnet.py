"""Two halves of a ResNet on two workers, with RRefs to their parameters and an optimizer over them.

This is what torch's tutorial on pipeline parallelism by RPC does by hand, in this runtime: there,
two shards are made by ``rpc.remote``, a forward sends micro-batches through them with
``rpc_async``, and `dist_autograd` and torch's `DistributedOptimizer` step the parameters behind
``parameter_rrefs()``. Here the two halves are given as a list; the schedule, the versions of the
weights and recovery come with it. References to the stages are there for what is asked of them.

    python examples/rpc_resnet.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream_rt import DistributedOptimizer, Pipeline


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut (He et al., CVPR 2016, figure 5)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def half(inputs: int, groups: tuple[tuple[int, int], ...], ends: bool) -> nn.Sequential:
    """Half of a ResNet for small pictures: of each group, the width and the stride."""
    layers: list[nn.Module] = []
    if inputs == 3:
        inputs = groups[0][0]
        layers = [nn.Conv2d(3, inputs, 3, padding=1, bias=False), nn.BatchNorm2d(inputs), nn.ReLU()]
    for width, stride in groups:
        layers += [Bottleneck(inputs, width, stride), Bottleneck(4 * width, width, 1)]
        inputs = 4 * width
    if ends:
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)]
    return nn.Sequential(*layers)


def main() -> None:
    """Train for some mini-batches, and ask the two halves."""
    torch.manual_seed(0)
    pictures = torch.randn(256, 3, 16, 16)
    classes = pictures.mean((2, 3)).argmax(1)  # which of the three colours is the brightest?
    batches = [(pictures[i::8], classes[i::8]) for i in range(8)]
    halves = [half(3, ((8, 1), (16, 2)), ends=False), half(64, ((32, 2), (64, 2)), ends=True)]

    with Pipeline(
        halves,
        stages=2,
        loss_fn=F.cross_entropy,
        optimizer=(torch.optim.SGD, {"lr": 0.02}),
    ) as pipe:
        # As in the tutorial: an optimizer over references to the parameters of both halves.
        pipe.optimizer = DistributedOptimizer(
            torch.optim.SGD, pipe.parameter_rrefs(), lr=0.02, momentum=0.9
        )
        for epoch in range(6):
            losses = [result.loss for result in pipe.train_epoch(batches)]
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")

        # What the halves are, each asked through its reference, all at once.
        asked = [(s, s.rref.rpc_async().num_parameters()) for s in pipe.stages]
        for stage, count in asked:
            memory = stage.rref.rpc_sync().memory()["weights_bytes"] / 2**10
            print(
                f"stage {stage.index} on {stage.rref.owner_name()}: {count.wait()} parameters, "
                f"{memory:.0f} KiB, versions {stage.rref.rpc_sync().versions()}"
            )
        # One forward by hand, from half to half, is the forward of the pipeline.
        first, second = (stage.rref for stage in pipe.stages)
        by_hand = second.rpc_sync().forward(first.rpc_sync().forward(pictures[:4]))
        print("by hand the same:", torch.equal(by_hand, pipe(pictures[:4])))


if __name__ == "__main__":
    main()
