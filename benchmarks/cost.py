"""What a micro-batch costs beside its layers: processor time, which no other process changes.

Stages of one small linear layer, trained with SGD on worker processes. The processor time of every
process is read from the kernel before and after.

    python benchmarks/cost.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt import Pipeline


def processor_s(pid: int | str) -> float:
    """Seconds of a processor that all threads of a process have used, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(stages: int, width: int, count: int) -> dict[str, Any]:
    """Milliseconds for each micro-batch, by process."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(stages)))
    x, y = torch.randn(8, width), torch.randn(8, width)
    with Pipeline(
        model,
        stages=stages,
        loss_fn=F.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 1e-3}),
        workers="local",
    ) as pipe:
        for _ in pipe.train_epoch([(x, y)] * 200):
            pass
        pipe.flush()
        processes = pipe._group.cluster._local.processes.values()  # type: ignore[attr-defined]
        pids: list[int | str] = ["self", *(process.pid for process in processes)]
        before = [processor_s(pid) for pid in pids]
        for _ in pipe.train_epoch([(x, y)] * count):
            pass
        pipe.flush()
        after = [processor_s(pid) for pid in pids]
    used = [1e3 * (b - a) / count for a, b in zip(before, after, strict=True)]
    return {
        "stages": stages,
        "width": width,
        "micro_batches": count,
        "coordinator_ms": used[0],
        "worker_ms": sum(used[1:]) / stages,
    }


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--stages", default=2, show_default=True)
@click.option("--width", default=256, show_default=True)
@click.option("--count", default=2000, show_default=True, help="Micro-batches.")
def main(as_json: bool, stages: int, width: int, count: int) -> None:
    """Measure processor time for each micro-batch."""
    line = measured(stages, width, count)
    if as_json:
        click.echo(json.dumps(line))
        return
    click.echo(
        f"{stages} stages, {count} micro-batches: {line['worker_ms']:.2f} ms of a processor for "
        f"each on a worker, {line['coordinator_ms']:.2f} ms on the coordinator"
    )


if __name__ == "__main__":
    main()
