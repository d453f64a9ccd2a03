"""Our pipeline on a workload, as the scripts in ``peers`` run others on it.

    python benchmarks/ours.py WORKLOAD_JSON SCHEDULE

With ``interleaved-1f1b`` a worker has two stages, as with the peers. The last line is one JSON
object: ``seconds`` and ``loss`` as there; ``steady_per_s``, micro-batches per second while the pipe
is full; and milliseconds of a processor for each micro-batch, which do not depend on what else the
machine does: of a ``worker`` (the mean of all), of its threads ``stages`` and ``links``, of the
``coordinator``, and of its ``main`` thread.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
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


def watched(
    pipe: Pipeline,
    train: Callable[[list[Any]], Iterator[Any]],
    warm: list[Any],
    data: list[Any],
    parts: int,
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Train from an empty pipe to an empty pipe, and measure.

    Args:
        pipe: The pipeline.
        train: Trains on mini-batches; yields when each is done.
        warm: Mini-batches that do not count.
        data: Those that do.
        parts: In how many each of them counts.

    Returns:
        ``seconds`` of all, and parts ``steady_per_s``; and the milliseconds of a processor for a
        part by thread, first of this process, then of each worker.
    """
    pids = (os.getpid(), *dict.fromkeys(pipe.on_stages(lambda module: os.getpid())))
    for _ in train(warm):
        pass
    pipe.flush()
    before, start = [processor_s(pid) for pid in pids], time.perf_counter()
    came = [time.perf_counter() for _ in train(data)]
    pipe.flush()
    seconds = time.perf_counter() - start
    after = [processor_s(pid) for pid in pids]
    first = len(came) // 3  # by then the pipe is full, and what comes does so at its own pace
    steady = (len(came) - 1 - first) * parts / (came[-1] - came[first])
    each = [used(b, a, len(came) * parts) for b, a in zip(before, after, strict=True)]
    return {"seconds": seconds, "steady_per_s": steady}, each


def run(w: Workload, schedule: str) -> dict[str, Any]:
    """Train, and measure from an empty pipe to an empty pipe."""
    data, (optimizer, options) = batches(w), optimizer_choice(w)
    with Pipeline(
        whole(w),
        stages=w.stages,
        loss_fn=loss_fn,
        optimizer=(optimizer, options),
        schedule=schedule,
        micro_batches=w.micro_batches,
        corrections=(),  # the schedule alone is measured
        workers="local",
        layout=Layout(
            stages_per_worker=2 if schedule in TWO_STAGES else None,
            # Nothing here depends on a late learning rate, and peers have the data already.
            credits=None if schedule.startswith("async") else 2,
        ),
    ) as pipe:
        # Where layers cost nothing, what a process does once would be much of what is seen.
        warm = WARM_UP if w.model == "transformer" or w.forward_s else len(data) // 3
        losses: list[float] = []

        def train(batches: list[Any]) -> Iterator[None]:
            for result in pipe.train_epoch(batches):
                yield losses.append(result.loss)

        timed, each = watched(pipe, train, data[:warm], data[warm:], w.micro_batches)
        versions = [counters["versions_kept_most"] for counters in pipe.statistics()]
    return {
        **timed,
        "loss": losses[-1],
        "worker_ms": statistics.fmean(sum(threads.values()) for threads in each[1:]),
        "stages_ms": statistics.fmean(of_part(threads, "stage", "worker") for threads in each[1:]),
        "links_ms": statistics.fmean(of_part(threads, "links") for threads in each[1:]),
        "coordinator_ms": sum(each[0].values()),
        "main_ms": each[0]["main"],
        "versions_kept": versions,
    }


def main() -> None:
    """Read the command line, run, and print the line of the result."""
    if len(sys.argv) != 3:
        raise SystemExit(f"usage: {sys.argv[0]} WORKLOAD_JSON SCHEDULE")
    torch.set_num_threads(1)
    print(json.dumps(run(Workload.from_json(sys.argv[1]), sys.argv[2])), flush=True)


if __name__ == "__main__":
    main()
