"""What corrections for staleness cost: the time of a step, and memory, measured and as documented.

Stages with large matrices are trained on tiny inputs in one thread, so that steps are most of the
work. Each correction is measured against the same run without it. The documented time is its number
of passes over the weights, over the bandwidth of the memory that is measured here too.

    python benchmarks/corrections.py
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import mse_loss

from pipedream_rt import Pipeline
from pipedream_rt.corrections import (
    Correction,
    DelayCompensation,
    ErrorFeedback,
    StalenessRate,
    WeightPrediction,
)

STAGES = 3


def bandwidth(nbytes: int) -> float:
    """Bytes per second that an addition of tensors of this size reads and writes."""
    tensors = [torch.ones(nbytes // 4) for _ in range(32)]
    times = []
    for i in range(128):
        a, b = tensors[i % 32], tensors[(i + 7) % 32]
        start = time.process_time()
        made = a + b
        times.append(time.process_time() - start)
        tensors[(i + 16) % 32] = made
    return 3 * nbytes / statistics.median(times)


def measured(corrections: list[Correction], width: int, updates: int) -> dict[str, float]:
    """Processor time of an update of all stages in seconds, and bytes on the first stage."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(STAGES)))
    data = [(torch.randn(1, width), torch.randn(1, width))] * updates
    with Pipeline(
        model,
        stages=STAGES,
        loss_fn=mse_loss,
        optimizer=(torch.optim.AdamW, {"lr": 1e-6}),
        corrections=corrections,
        workers="serial",
    ) as pipe:
        for _ in pipe.train_epoch(data[:8]):
            pass
        pipe.flush()
        times = []
        for _ in range(3):
            start = time.process_time()
            for _ in pipe.train_epoch(data):
                pass
            pipe.flush()
            times.append((time.process_time() - start) / updates)
        first = pipe.statistics()[0]
    return {
        "seconds": min(times),
        "bytes": first["correction_bytes"],
        "weight_bytes": first["weight_bytes"],
        "versions": first["versions_kept"],
    }


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--width", default=1024, show_default=True)
@click.option("--updates", default=30, show_default=True)
def main(as_json: bool, width: int, updates: int) -> None:
    """Print measured and documented costs."""
    shown = Table("correction", "ms measured", "ms documented", "copies measured", "documented")
    speed = bandwidth(4 * width * width)
    plain = measured([], width, updates)
    made: list[Correction] = [
        StalenessRate(updates=10),
        ErrorFeedback(),
        WeightPrediction(),
        DelayCompensation(),
        DelayCompensation(adaptive=True),
    ]
    for correction in made:
        found = measured([correction], width, updates)
        # What depends on staleness is not done on the last stage.
        acting = STAGES if isinstance(correction, ErrorFeedback) else STAGES - 1
        documented = acting * correction.passes * found["weight_bytes"] / speed
        copies = correction.copies + correction.copies_per_version * found["versions"]
        line: dict[str, Any] = {
            "correction": repr(correction),
            "step_ms": 1e3 * plain["seconds"],
            "measured_ms": 1e3 * (found["seconds"] - plain["seconds"]),
            "documented_ms": 1e3 * documented,
            "measured_copies": found["bytes"] / found["weight_bytes"],
            "documented_copies": copies,
        }
        if as_json:
            print(json.dumps(line), flush=True)
        shown.add_row(
            line["correction"],
            f"{line['measured_ms']:.2f}",
            f"{line['documented_ms']:.2f}",
            f"{line['measured_copies']:.2f}",
            f"{line['documented_copies']:.2f}",
        )
    if not as_json:
        text = f"an update without: {1e3 * plain['seconds']:.2f} ms; memory: {speed / 1e9:.1f} GB/s"
        Console(width=110).print(text, shown)


if __name__ == "__main__":
    main()
