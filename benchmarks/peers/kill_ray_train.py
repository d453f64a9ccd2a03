"""Ray Train: a TorchTrainer with three workers on the CPU, data parallel over gloo."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from kill_support import WORKERS, Job, loss_fn, optimizer_of, part_of, share, train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig


def work(_: dict[str, Any]) -> None:
    """Train one replica."""
    job = Job.read()
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(part_of(0))
    optimizer = optimizer_of(model)
    at = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        at = state["step"]

    def one(step: int) -> None:
        x, y = share(step, rank)
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def save(step: int) -> None:
        if rank:
            ray.train.report({"step": step})
            return
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, Path(folder) / "state.pt")
            ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))

    with job.telling(rank):
        train(job, rank, at + 1, one, save)
    job.done(rank, model.parameters())


def main() -> None:
    """Run a Ray of this machine's own, and the trainer on it."""
    folder = Job.read().folder
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, _temp_dir=f"{folder}/ray")
    trainer = ray.train.torch.TorchTrainer(
        work,
        train_loop_config={},
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="run",
            storage_path=f"{folder}/results",
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
