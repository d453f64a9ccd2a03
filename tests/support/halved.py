"""One of two scripts that train a model of halved blocks side by side, as a pipeline or in a loop.

Run as ``python halved.py FOLDER``: it starts both, each of which saves what it has trained.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import spawn

ROOT = Path(__file__).resolve().parent.parent.parent
OPTIONS = {"lr": 0.1, "momentum": 0.9}
WORKERS = {"async-1f1b": "local", "1f1b": "serial"}
SCHEDULES = {"async-1f1b": "async-1f1b", "1f1b": "flushed"}


def train(rank, folder):
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]
    from tensor_parallel import Halved

    from pipedream_rt import Pipeline
    from support.oracle import oracle

    torch.manual_seed(0)
    torch.set_num_threads(1)
    loss_fn = nn.functional.cross_entropy
    data = [(torch.randn(6, 4), torch.randint(0, 2, (6,))) for _ in range(8)]
    for schedule, reads in SCHEDULES.items():
        for in_pipeline in (True, False):
            name = f"{folder}/{schedule}-{in_pipeline}"
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(4, 8), Halved(8, rank, name), nn.Linear(8, 2))
            if in_pipeline:
                with Pipeline(
                    model, stages=3, loss_fn=loss_fn, optimizer=(torch.optim.SGD, OPTIONS),
                    schedule=schedule, micro_batches=2, corrections=(), workers=WORKERS[schedule],
                ) as pipe:  # fmt: skip
                    for x, y in data:
                        pipe.submit(x, y)
                    state = pipe.state_dict()
            else:
                state, _ = oracle(
                    model, (0, 1, 2), data, loss_fn, lambda p: torch.optim.SGD(p, **OPTIONS),
                    k=2, reads=reads,
                )  # fmt: skip
            if dist.is_initialized():
                dist.destroy_process_group()
            torch.save(dict(state), f"{name}-{rank}.pt")


if __name__ == "__main__":
    spawn(train, (sys.argv[1],), nprocs=2)
