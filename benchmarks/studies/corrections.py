"""What corrections for staleness cost: the time of a step, and memory, measured and as documented.

Stages with large matrices are trained on tiny inputs in one thread, so that steps are most of the
work. A run without corrections and one with each take turns of a few updates, and the medians of
their differences are compared with what is documented: a number of passes over the weights, over
the bandwidth of the memory that is measured here too, between the turns.

    python benchmarks/studies/corrections.py
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import ExitStack
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipedream_rt import Pipeline
from pipedream_rt.corrections import (
    Correction,
    DelayCompensation,
    ErrorFeedback,
    Extrapolation,
    StalenessNesterov,
    StalenessRate,
    WeightPrediction,
)

STAGES = 3

CORRECTIONS: tuple[Correction, ...] = (
    StalenessRate(updates=10),
    ErrorFeedback(),
    Extrapolation(),
    WeightPrediction(),
    StalenessNesterov(),
    DelayCompensation(),
    DelayCompensation(adaptive=True),
)


def bandwidth(tensors: list[Tensor]) -> float:
    """Bytes per second that an addition of tensors, of more than the caches, reads and writes."""
    count = len(tensors)
    start = time.process_time()
    for i in range(count):
        torch.add(
            tensors[i], tensors[(i + count // 3) % count], out=tensors[(i + count // 2) % count]
        )
    return 3 * count * tensors[0].nbytes / (time.process_time() - start)


def opened(corrections: list[Correction], width: int) -> Pipeline:
    """A pipe whose stages have one matrix each."""
    torch.manual_seed(0)
    return Pipeline(
        nn.Sequential(*(nn.Linear(width, width) for _ in range(STAGES))),
        stages=STAGES,
        loss_fn=mse_loss,
        optimizer=(torch.optim.AdamW, {"lr": 1e-6}),
        corrections=corrections,
        workers="serial",
    )


def turn(pipe: Pipeline, data: list[tuple[Tensor, Tensor]]) -> float:
    """Seconds of processor time for an update of all stages."""
    start = time.process_time()
    for _ in pipe.train_epoch(data):
        pass
    pipe.flush()
    return (time.process_time() - start) / len(data)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--width", default=1024, show_default=True)
@click.option("--turns", default=25, show_default=True)
@click.option("--updates", default=8, show_default=True, help="In a turn.")
def main(as_json: bool, width: int, turns: int, updates: int) -> None:
    """Print measured and documented costs."""
    torch.set_num_threads(1)
    data = [(torch.randn(1, width), torch.randn(1, width))] * updates
    memory = [torch.ones(width, width) for _ in range(32)]
    speeds, times = [], []
    with ExitStack() as stack:
        made = [[], *([each] for each in CORRECTIONS)]
        pipes = [stack.enter_context(opened(each, width)) for each in made]
        for number in range(-1, turns):
            speed, taken = bandwidth(memory), [turn(pipe, data) for pipe in pipes]
            if number >= 0:  # the first round makes the states
                speeds.append(speed)
                times.append(taken)
        firsts = [pipe.statistics()[0] for pipe in pipes]
    base, speed = statistics.median(taken[0] for taken in times), statistics.median(speeds)
    shown = Table("correction", "ms measured", "ms documented", "copies measured", "documented")
    for number, (correction, first) in enumerate(zip(CORRECTIONS, firsts[1:], strict=True), 1):
        # What depends on staleness is not done on the last stage.
        acting = STAGES if isinstance(correction, ErrorFeedback) else STAGES - 1
        copies = correction.copies + correction.copies_per_version * first["versions_kept"]
        line: dict[str, Any] = {
            "correction": repr(correction),
            "step_ms": 1e3 * base,
            "measured_ms": 1e3 * statistics.median(taken[number] - taken[0] for taken in times),
            "documented_ms": 1e3 * acting * correction.passes * first["weight_bytes"] / speed,
            "measured_copies": first["correction_bytes"] / first["weight_bytes"],
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
        text = f"an update without: {1e3 * base:.2f} ms; memory: {speed / 1e9:.1f} GB/s"
        Console(width=110).print(text, shown)


if __name__ == "__main__":
    main()
