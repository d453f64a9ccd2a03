"""One script for every engine: it trains from its newest checkpoint on, and prints a digest.

    python everywhere.py FOLDER [--steps N] [--workers WORKERS]

The folder has the checkpoints, and is shared by all machines. What the script prints last, is the
same wherever it ran and whatever was killed meanwhile. Where it has printed the end of a hundredth
mini-batch, there is a checkpoint of that or of a later one.
"""

import argparse
import hashlib
import os
from datetime import timedelta

import torch
from torch import nn

from pipedream_rt import Checkpoints, Pipeline, Recovery


def trained(folder, steps, workers):
    """Train to the end, and return the last line that is printed."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1)) for _ in range(3))
    )
    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(steps)]
    with Pipeline(
        model, stages=3, loss_fn=nn.functional.mse_loss, optimizer=(torch.optim.AdamW, {}),
        micro_batches=1, corrections=(), workers=workers,
        checkpoint=Checkpoints(folder, every=20, keep=2, resume=True),
        recovery=Recovery(
            max_restarts=20, heartbeat=timedelta(seconds=5), start=timedelta(seconds=120)
        ),
    ) as pipe:  # fmt: skip
        print(f"began at {pipe.step} pid {os.getpid()}", flush=True)
        for result in pipe.train_epoch(data):
            if result.step % 100 == 0:  # on a busy machine none that was due may be whole yet
                pipe.save()
            if result.step % 20 == 0:
                print("step", result.step, flush=True)
        state = pipe.state_dict()
        print("restarts", len(pipe.restarts), flush=True)
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in state.values())).hexdigest()
    return f"digest {digest}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", default=None)
    arguments = parser.parse_args()
    print(trained(arguments.folder, arguments.steps, arguments.workers), flush=True)


if __name__ == "__main__":
    main()
