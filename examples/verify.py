"""What `pipe.verify` says of programs that would train something else on stages, class by class."""

import random
import sys

import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt import Along, Pipeline, PipelineError, Training, Whole

DATA = [torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(i)).unbind() for i in range(3)]
KEPT = {}


class Draws(nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.uniform(0.5, 1.5)  # Python's numbers: nobody seeds them


class WithTable(nn.Linear):
    def forward(self, given):
        x, table = given
        return super().forward(x) + table.mean(0)


class LooksAround(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Skip(nn.Linear):
    def __init__(self, kept):
        super().__init__(8, 8)
        self.kept = kept

    def forward(self, x):
        x = x + self.kept.get("x", 0)
        self.kept["x"] = x.detach()
        return super().forward(x)


class Counting(torch.optim.SGD):
    count = 0

    def step(self, closure=None):
        Counting.count += 1  # once for each stage
        for group in self.param_groups:
            group["lr"] = 0.1 / Counting.count
        return super().step(closure)


class Attentive(nn.Module):
    """No sequence: its forward between the layers is recorded."""

    def __init__(self):
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8)

    def forward(self, x):
        return self.two(F.dropout(self.drop(torch.tanh(self.one(x))), 0.3, self.training) + x)


def with_table(mark):
    return [((x, mark(torch.randn(8, 8))), y) for x, y in DATA]


random.seed(0)
torch.manual_seed(0)
LINEAR = nn.Linear(8, 8)
PROGRAMS = {
    "a recorded model with dropout": {"model": Attentive()},
    "BatchNorm in micro-batches": {"model": nn.Sequential(LINEAR, nn.BatchNorm1d(8), LINEAR)},
    "Python's random numbers in a layer": {"model": nn.Sequential(Draws(8, 8), LINEAR)},
    "a table with as many rows": {"model": [WithTable(8, 8), LINEAR], "data": with_table(Along)},
    "the same, marked": {"model": [WithTable(8, 8), LINEAR], "data": with_table(Whole)},
    "samples that look at each other": {"model": nn.Sequential(LooksAround(8, 8), LINEAR)},
    "a dict that two stages share": {"model": nn.Sequential(Skip(KEPT), Skip(KEPT))},
    "an optimizer that counts in its class": {"optimizer": (Counting, {"lr": 0.1})},
}


def main() -> None:
    for name, program in PROGRAMS.items():
        options = {"model": nn.Sequential(LINEAR, nn.Tanh(), nn.Linear(8, 8)), **program}
        data, model = options.pop("data", DATA), options.pop("model")
        try:
            with Pipeline(
                model, stages=2, example=data[0], loss_fn=F.mse_loss, schedule="1f1b",
                micro_batches=2, workers="serial", training=Training(verify=False),
                **{"optimizer": (torch.optim.SGD, {"lr": 0.1}), **options},
            ) as pipe:  # fmt: skip
                print(f"{name}: {pipe.verify(data)}\n")
        except PipelineError as error:
            print(f"{name}: refused: {str(error).splitlines()[0]}\n")


if __name__ == "__main__":
    sys.exit(main())
