"""What the workers that ``../after_kill.py`` kills have in common: a model, its data, and messages.

They tell what happens, with the time, by datagrams to a socket of the benchmark. Which one and how
long they train is in the environment, which every launcher hands on.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WORKERS = 3
WIDTH, SAMPLES, MICRO_BATCHES = 128, 384, 4

loss_fn = nn.MSELoss()


@dataclass(frozen=True)
class Job:
    """What a worker is to do.

    Args:
        folder: Where the socket is, and where checkpoints belong.
        steps: How many there are in all.
        every: A checkpoint after so many steps.
    """

    folder: str
    steps: int
    every: int

    @classmethod
    def read(cls) -> Job:
        """Read it from the environment."""
        torch.set_num_threads(1)
        return cls(**json.loads(os.environ["KILL_JOB"]))

    def tell(self, what: str, **facts: Any) -> None:
        """Send one message."""
        message = {"what": what, "at": time.monotonic(), "pid": os.getpid(), **facts}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            # A worker that outlives the benchmark does not wait for it.
            out.settimeout(10)
            out.sendto(json.dumps(message).encode(), f"{self.folder}/ear")

    @contextmanager
    def telling(self, rank: int) -> Iterator[None]:
        """Tell that a worker begins, and the error that ends it, if one does."""
        self.tell("began", rank=rank)
        try:
            yield
        except Exception as error:
            self.tell("error", rank=rank, text=f"{type(error).__name__}: {error}")
            raise

    def done(self, rank: int, tensors: Iterable[Tensor]) -> None:
        """Tell the digest of the weights at the end."""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        self.tell("done", rank=rank, digest=digest.hexdigest())

    def save(self, step: int, rank: int, state: Any) -> None:
        """Write a checkpoint of one rank so that it is there as a whole or not at all."""
        path = Path(self.folder) / f"rank-{rank}-step-{step}.pt"
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    def newest(self, rank: int) -> int:
        """Return the step of a rank's newest checkpoint, 0 if there is none."""
        names = [path.stem for path in Path(self.folder).glob(f"rank-{rank}-step-*.pt")]
        return max((int(name.rsplit("-", 1)[1]) for name in names), default=0)

    def load(self, step: int, rank: int) -> Any:
        """Read a checkpoint."""
        return torch.load(Path(self.folder) / f"rank-{rank}-step-{step}.pt")


def part_of(rank: int) -> nn.Sequential:
    """Make the layers of one rank."""
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer, the same one everywhere."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def batch(step: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Make the mini-batch of a step, which depends on nothing else."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(samples, WIDTH, generator=generator) for _ in range(2))
    return x, y


def share(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return one replica's part of the mini-batch of a step."""
    x, y = batch(step)
    return x.chunk(WORKERS)[rank], y.chunk(WORKERS)[rank]


def train(
    job: Job, rank: int, first: int, one: Callable[[int], Any], save: Callable[[int], Any]
) -> None:
    """Do the steps from one on, tell each, and make the checkpoints.

    Args:
        job: What to do.
        rank: Of this worker.
        first: The number of the first step; they count from 1.
        one: Does a step.
        save: Makes a checkpoint after a step.
    """
    for step in range(first, job.steps + 1):
        one(step)
        job.tell("step", rank=rank, step=step)
        if step % job.every == 0:
            save(step)
