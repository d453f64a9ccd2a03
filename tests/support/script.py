"""A user's script that defines its model and its dataclass itself, so that they are in __main__."""

import argparse
import hashlib
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream_rt import Pipeline, Recovery

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is started as a program

from support.inside import members


@dataclass
class Hidden:
    value: Tensor
    kept: Tensor


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        value = self.linear(x)
        return Hidden(value, value > 0)


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden):
        assert isinstance(hidden, Hidden)
        return self.linear(hidden.value * hidden.kept)


def loss_fn(output, target):
    return F.mse_loss(output, target)


def lose(pipe, number):
    """Send a worker a signal, of which it ends or falls silent."""
    os.kill(int(members(pipe)[1].description.split()[1]), number)


def train(pipelines=1, steps=16, workers="serial", lost_by=None):
    """Train, and return the last line that is printed."""
    torch.manual_seed(0)
    model = nn.Sequential(First(), Second())
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(8)]
    for _ in range(pipelines):
        with Pipeline(
            model, stages=2, loss_fn=loss_fn, optimizer=(torch.optim.Adam, {}), workers=workers,
            micro_batches=1, corrections=(),
            recovery=Recovery(heartbeat=timedelta(seconds=1)) if lost_by else Recovery(),
        ) as pipe:  # fmt: skip
            print("ready", *(s.worker for s in pipe.stages), flush=True)
            for _ in range(steps // 8):
                for result in pipe.train_epoch(data):
                    if lost_by and result.step == 5:
                        lose(pipe, lost_by)
            state = pipe.state_dict()
            print(len(pipe.restarts), "restarts")
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in state.values())).hexdigest()
    return f"digest {digest}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipelines", type=int, default=1)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--workers")
    parser.add_argument("--lose", type=int, help="signal to a worker after six mini-batches")
    arguments = parser.parse_args()
    print(train(arguments.pipelines, arguments.steps, arguments.workers, arguments.lose))
