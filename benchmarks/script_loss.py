"""A loss that the script computes, on a workload, beside the same one on the last stage.

    python benchmarks/script_loss.py WORKLOAD_JSON SCHEDULE PLACE

PLACE is ``stage`` or ``script`` for the mean loss of the workload, or ``contrastive`` for one over
all pairs of samples of a mini-batch, which only a script can compute. The last line is one JSON
object: ``seconds`` from an empty pipe to an empty pipe, ``steady_per_s``, mini-batches per second
of the last two thirds, and milliseconds of a processor for each of them: of a ``worker`` (the mean
of all), and of the ``coordinator``.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from ours import watched
from torch import Tensor
from workload import WARM_UP, Workload, batches, loss_fn, optimizer_choice, whole

from pipedream_rt import Pipeline


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss of each sample against all others: its target is the nearest to it."""
    similar = F.normalize(output, dim=1) @ F.normalize(target, dim=1).T
    return F.cross_entropy(similar / 0.1, torch.arange(len(output)))


def trained(pipe: Pipeline, place: str, data: list[tuple[Tensor, Tensor]]) -> Iterator[Any]:
    """Train, and yield when each mini-batch is done."""
    if place == "stage":
        yield from pipe.train_epoch(data)
        return
    compute = contrastive if place == "contrastive" else loss_fn
    for output, (_, y) in pipe.outputs(data):
        yield compute(output, y).backward()


def run(w: Workload, schedule: str, place: str) -> dict[str, Any]:
    """Train, and measure from an empty pipe to an empty pipe."""
    data = batches(w)
    with Pipeline(
        whole(w),
        stages=w.stages,
        loss_fn=loss_fn if place == "stage" else None,
        optimizer=optimizer_choice(w),
        schedule=schedule,
        micro_batches=w.micro_batches,
        corrections=(),  # the schedule alone is measured
        workers="local",
    ) as pipe:
        train = partial(trained, pipe, place)
        timed, used = watched(pipe, train, data[:WARM_UP], data[WARM_UP:], parts=1)
        text = pipe.explain()
    each = [sum(threads.values()) for threads in used]
    return {
        **timed,
        "coordinator_ms": each[0],
        "worker_ms": statistics.fmean(each[1:]),
        "explained": next((line for line in text.splitlines() if "script computes" in line), ""),
    }


def main() -> None:
    """Read the command line, run, and print the line of the result."""
    if len(sys.argv) != 4:
        raise SystemExit(f"usage: {sys.argv[0]} WORKLOAD_JSON SCHEDULE stage|script|contrastive")
    torch.set_num_threads(1)
    print(json.dumps(run(Workload.from_json(sys.argv[1]), *sys.argv[2:])), flush=True)


if __name__ == "__main__":
    main()
