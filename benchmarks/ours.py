"""Our pipeline on a workload, as the scripts in ``peers`` run others on it.

    python benchmarks/ours.py WORKLOAD_JSON SCHEDULE [PLACE]

With ``interleaved-1f1b`` a worker has two stages, as with the peers. PLACE is where the loss is
computed: ``stage``, ``script``, or ``contrastive`` for one in the script over all pairs of samples
of a mini-batch, which nothing else can compute. Where it is given, mini-batches are counted in the
place of micro-batches.

The last line is one JSON object: ``seconds`` and ``loss`` as there; ``steady_per_s``, micro-batches
per second while the pipe is full; and milliseconds of a processor for each micro-batch, which do
not depend on what else the machine does: of a ``worker`` (the mean of all), of its threads
``stages`` and ``links``, of the ``coordinator``, and of its ``main`` thread.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from workload import WARM_UP, Workload, batches, loss_fn, optimizer_choice, whole

from pipedream_rt import Layout, Pipeline

TWO_STAGES = ("interleaved-1f1b",)
"""The schedules with two stages on each worker."""

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> dict[str, float]:
    """Seconds of a processor that each thread of a process has used, by the thread's name."""
    found: dict[str, float] = {}
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        if pid == os.getpid() and stat.parent.name == str(pid):
            name = "main"
        found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) * TICK_S
    return found


def used(before: dict[str, float], after: dict[str, float], count: int) -> dict[str, float]:
    """Milliseconds for each of so many micro-batches, by thread."""
    return {name: 1e3 * (s - before.get(name, 0.0)) / count for name, s in after.items()}


def of_part(threads: dict[str, float], *beginnings: str) -> float:
    """The times of those threads whose names begin with one of some texts."""
    return sum(ms for name, ms in threads.items() if name.startswith(beginnings))


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss of each sample against all others: its target is the nearest to it."""
    similar = F.normalize(output, dim=1) @ F.normalize(target, dim=1).T
    return F.cross_entropy(similar / 0.1, torch.arange(len(output)))


LOSSES = {"script": loss_fn, "contrastive": contrastive}
"""By the place, the loss that the script computes."""


def trained(pipe: Pipeline, data: list[Any], place: str) -> Iterator[float]:
    """Train; yield each loss when its mini-batch is done."""
    if place not in LOSSES:
        yield from (result.loss for result in pipe.train_epoch(data))
        return
    for output, (_, y) in pipe.outputs(data):
        loss = LOSSES[place](output, y)
        loss.backward()
        yield loss.item()


def run(w: Workload, schedule: str, place: str = "") -> dict[str, Any]:
    """Train, and measure from an empty pipe to an empty pipe."""
    data = batches(w)
    # Where layers cost nothing, what a process does once would be much of what is seen.
    warm = WARM_UP if w.model == "transformer" or w.forward_s else len(data) // 3
    # Nothing here depends on a late learning rate, and peers have the data already.
    credits = None if place or schedule.startswith("async") else 2
    with Pipeline(
        whole(w),
        stages=w.stages,
        loss_fn=None if place in LOSSES else loss_fn,
        optimizer=optimizer_choice(w),
        schedule=schedule,
        micro_batches=w.micro_batches,
        corrections=(),  # the schedule alone is measured
        workers="local",
        layout=Layout(stages_per_worker=2 if schedule in TWO_STAGES else None, credits=credits),
    ) as pipe:
        pids = (os.getpid(), *dict.fromkeys(pipe.on_stages(lambda module: os.getpid())))
        for _ in trained(pipe, data[:warm], place):
            pass
        pipe.flush()
        before, start = [processor_s(pid) for pid in pids], time.perf_counter()
        losses, came = [], []
        for loss in trained(pipe, data[warm:], place):
            losses.append(loss)
            came.append(time.perf_counter())
        pipe.flush()
        seconds = time.perf_counter() - start
        after = [processor_s(pid) for pid in pids]
        versions = [counters["versions_kept_most"] for counters in pipe.statistics()]
        text = pipe.explain().splitlines() if place else []
    parts = 1 if place else w.micro_batches
    here, *each = (used(b, a, len(came) * parts) for b, a in zip(before, after, strict=True))
    first = len(came) // 3  # by then the pipe is full, and what comes does so at its own pace
    return {
        "seconds": seconds,
        "loss": losses[-1],
        "steady_per_s": (len(came) - 1 - first) * parts / (came[-1] - came[first]),
        "worker_ms": statistics.fmean(sum(threads.values()) for threads in each),
        "stages_ms": statistics.fmean(of_part(threads, "stage", "worker") for threads in each),
        "links_ms": statistics.fmean(of_part(threads, "links") for threads in each),
        "coordinator_ms": sum(here.values()),
        "main_ms": here["main"],
        "versions_kept": versions,
        **({"explained": " ".join(x for x in text if "script computes" in x)} if place else {}),
    }


def main() -> None:
    """Read the command line, run, and print the line of the result."""
    given = sys.argv[1:]
    if len(given) not in (2, 3) or given[2:] not in ([], ["stage"], *([each] for each in LOSSES)):
        raise SystemExit(f"usage: {sys.argv[0]} WORKLOAD_JSON SCHEDULE [stage|{'|'.join(LOSSES)}]")
    torch.set_num_threads(1)
    print(json.dumps(run(Workload.from_json(given[0]), *given[1:])), flush=True)


if __name__ == "__main__":
    main()
