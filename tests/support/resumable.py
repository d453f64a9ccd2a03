"""A script that may be killed at any time and started again, as a user of ``--resume`` writes it.

torch's generator shuffles the data, the learning rate follows a scheduler, the loop draws random
numbers of its own, and it evaluates from time to time.
"""

import argparse
import hashlib
import random

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from pipedream_rt import Checkpoints, Pipeline


def train(arguments):
    torch.manual_seed(0)
    random.seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(16, 16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 4),
    )
    inputs, labels = torch.randn(60, 8), torch.randint(4, (60,))
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=6, shuffle=True)
    with Pipeline(
        model, stages=2, loss_fn=F.cross_entropy, optimizer=(torch.optim.AdamW, {"lr": 1e-2}),
        workers=arguments.workers, checkpoint=Checkpoints(arguments.folder, every=arguments.every),
        micro_batches=arguments.micro_batches, corrections=(),
    ) as pipe:  # fmt: skip
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(pipe.optimizer, T_max=50)
        pipe.attach(scheduler=scheduler)
        for _ in range(pipe.epoch, arguments.epochs):
            for result in pipe.train_epoch(loader):
                scheduler.step()
                print("loss", result.step, result.loss.hex(), random.random(), flush=True)
                if result.step % 7 == 3:
                    pipe.evaluate([(inputs, labels)])
        state = pipe.state_dict()
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in state.values())).hexdigest()
    print("digest", digest, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--workers", default="serial")
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1)
    train(parser.parse_args())
