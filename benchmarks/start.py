"""How long it takes to open a pipeline on local workers: the first, and a group of workers alone.

The first pipeline of a script starts the process that forks workers, which imports torch. In every
later group, as in a recovery, workers are forked, meet, and build their stages.

Prints a table, or with --json one JSON line.
"""

from __future__ import annotations

import json
import statistics
import time

import click
import torch
import torch.nn.functional as F
from torch import nn

import pipedream_rt.pipeline as face
from pipedream_rt import Pipeline
from pipedream_rt.cluster.fork_server import ForkServer


class _Kept(ForkServer):
    """A fork server that outlives the pipelines that use it."""

    def close(self) -> None:
        """Stay; `main` ends it."""


def opened_in(workers: int) -> float:
    """Open and close a pipeline; the seconds until it was open."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(workers)))
    start = time.perf_counter()
    with Pipeline(
        model, stages=workers, loss_fn=F.mse_loss, optimizer=(torch.optim.SGD, {"lr": 0.1})
    ):
        return time.perf_counter() - start


@click.command()
@click.option("--workers", default=4, show_default=True)
@click.option("--groups", default=30, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def main(workers: int, groups: int, as_json: bool) -> None:
    """Open pipelines one after another."""
    forks = _Kept(())
    face.ForkServer = lambda modules: forks  # type: ignore[assignment, misc]
    try:
        first = opened_in(workers)
        later = [opened_in(workers) for _ in range(groups)]
    finally:
        ForkServer.close(forks)
    found = {"workers": workers, "first_s": first, "group_ms": 1e3 * statistics.median(later)}
    if as_json:
        print(json.dumps(found))
    else:
        print(f"{workers} workers: the first {first:.2f} s, a group {found['group_ms']:.0f} ms")


if __name__ == "__main__":
    main()
