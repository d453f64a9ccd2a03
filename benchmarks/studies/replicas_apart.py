"""What replicas lose that meet at every H-th update alone, with an outer optimizer (DiLoCo).

Douillard et al. 2023, https://arxiv.org/abs/2311.08105: each replica trains with an inner optimizer
on data of its own; after H updates the mean of how far they have come is a gradient for an outer
optimizer, SGD with Nesterov momentum, of the weights that all of them go on from.

Four replicas train the transformer of learning.py, each on a quarter of the samples of an update,
in one process. With H = 1 and no outer optimizer that is synchronous training. A line of JSON for
each run.

    python benchmarks/studies/replicas_apart.py --jobs 2
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from learning import method_named, task_named

RESULTS = Path(__file__).resolve().parents[1] / "results" / "replicas_apart.jsonl"
REPLICAS, UPDATES, BATCH, SEED = 4, 1200, 16, 0
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""Those of the paper."""

RATES = {"adamw": 0.006, "muon": 0.012}
"""The best ones of synchronous training, on this task."""


def trained(given: tuple[str, int]) -> dict[str, Any]:
    """Train with an inner optimizer and so many updates between two meetings."""
    from train_charlm import learning_rate_factor

    method, every = given
    torch.set_num_threads(1)
    task = task_named("transformer")
    torch.manual_seed(SEED)
    shared = task.model()
    (kind, options, *groups), _ = method_named(method, shared)
    apart = every > 1
    count = REPLICAS if apart else 1
    replicas = [copy.deepcopy(shared) for _ in range(count)]
    inner = [_optimizer(kind, options, groups, replica) for replica in replicas]
    outer = torch.optim.SGD(shared.parameters(), **OUTER)
    curve: list[tuple[int, float]] = []
    start = time.process_time()
    for number, (x, y) in enumerate(task.batches(UPDATES, BATCH, SEED), 1):
        rate = RATES[method] * learning_rate_factor(number - 1, UPDATES, 10)
        parts = zip(replicas, inner, x.chunk(count), y.chunk(count), strict=True)
        for replica, optimizer, x_of, y_of in parts:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            task.loss_fn(replica(x_of), y_of).backward()
            nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
            optimizer.step()
        if apart and (number % every == 0 or number == UPDATES):
            meet(shared, replicas, outer)
        if number % (UPDATES // 8) == 0:
            model = mean_of(replicas) if apart else replicas[0]
            with torch.no_grad():
                losses = [task.loss_fn(model(x), y).item() for x, y in task.validation()]
            curve.append((number, sum(losses) / len(losses)))
    return {
        "method": method, "sync_every": every, "replicas": REPLICAS, "curve": curve,
        "final": curve[-1][1], "processor_s": round(time.process_time() - start, 1),
    }  # fmt: skip


def _optimizer(kind: Any, options: Any, groups: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Make the inner optimizer of a replica, with the groups that a pipeline would make."""
    named = dict(model.named_parameters())
    made, left = [], dict(named)
    for chosen, own in groups[0] if groups else ():
        picked = {name: p for name, p in left.items() if chosen(name, p)}
        left = {name: p for name, p in left.items() if name not in picked}
        made.append({"params": list(picked.values()), **own})
    found: torch.optim.Optimizer = kind([*made, {"params": list(left.values())}], **options)
    return found


@torch.no_grad()
def meet(shared: nn.Module, replicas: list[nn.Module], outer: torch.optim.Optimizer) -> None:
    """Step the shared weights by the mean of how far the replicas have come, and begin there."""
    rows = zip(shared.parameters(), *(r.parameters() for r in replicas), strict=True)
    for weight, *theirs in rows:
        weight.grad = weight - torch.stack([each.detach() for each in theirs]).mean(0)
    outer.step()
    rows = zip(shared.parameters(), *(r.parameters() for r in replicas), strict=True)
    for weight, *theirs in rows:
        for each in theirs:
            each.copy_(weight)


@torch.no_grad()
def mean_of(replicas: list[nn.Module]) -> nn.Module:
    """Return a model with the mean of the weights."""
    found = copy.deepcopy(replicas[0])
    for weight, *theirs in zip(found.parameters(), *(r.parameters() for r in replicas)):
        weight.copy_(torch.stack([each.detach() for each in theirs]).mean(0))
    return found


@click.command()
@click.option("--jobs", default=2, show_default=True)
@click.option("--every", multiple=True, type=int, default=(1, 8, 32, 128), show_default=True)
def main(jobs: int, every: tuple[int, ...]) -> None:
    """Do the runs that are not done yet."""
    kept = [json.loads(line) for line in RESULTS.open()] if RESULTS.exists() else []
    there = {(line["method"], line["sync_every"]) for line in kept}
    todo = [(m, h) for h in every for m in RATES if (m, h) not in there]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for line in pool.imap_unordered(trained, todo):
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            click.echo(f"{line['method']}, every {line['sync_every']}: {line['final']:.4f}")


if __name__ == "__main__":
    main()
