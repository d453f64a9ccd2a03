"""What stages in the thread of the script cost beside the work itself (workers="serial").

The transformer of `learning.py` is trained by a plain loop, and by pipelines of more and more
stages in one thread. Processor time for each mini-batch, repeats in turn. The time to copy all
weights once, which an update of an asynchronous schedule must do, is measured too.

    python benchmarks/serial.py
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import click
import torch
from learning import task_named
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pipedream_rt import Pipeline

Data = list[tuple[Tensor, Tensor]]
OPTIMIZER = {"lr": 1e-3, "fused": True}


def plain(data: Data) -> float:
    """Seconds of processor time for each mini-batch of a plain loop."""
    task = task_named("transformer")
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)

    def train(batches: Data) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            task.loss_fn(model(x), y).backward()
            optimizer.step()

    train(data[:10])
    start = time.process_time()
    train(data)
    return (time.process_time() - start) / len(data)


def piped(data: Data, stages: int, schedule: str) -> float:
    """The same of a pipeline in this thread."""
    task = task_named("transformer")
    torch.manual_seed(0)
    with Pipeline(
        task.model(),
        stages=stages,
        loss_fn=task.loss_fn,
        optimizer=(torch.optim.AdamW, OPTIMIZER),
        schedule=schedule,  # type: ignore[arg-type]
        workers="serial",
    ) as pipe:
        for _ in pipe.train_epoch(data[:10]):
            pass
        pipe.flush()
        start = time.process_time()
        for _ in pipe.train_epoch(data):
            pass
        pipe.flush()
        return (time.process_time() - start) / len(data)


def copying() -> float:
    """Seconds to copy all weights of the model once."""
    weights = [p.detach() for p in task_named("transformer").model().parameters()]
    copies = [w.clone() for w in weights]
    start = time.process_time()
    for _ in range(100):
        for new, old in zip(copies, weights, strict=True):
            new.copy_(old)
    return (time.process_time() - start) / 100


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--batches", default=60, show_default=True)
def main(as_json: bool, repeats: int, batches: int) -> None:
    """Print the ratios to the plain loop."""
    torch.set_num_threads(1)
    data = list(task_named("transformer").batches(batches, 16, 0))
    kinds: list[tuple[str, Any]] = [("a plain loop", lambda: plain(data))]
    for schedule, stages in (("1f1b", 1), ("1f1b", 8), ("async-1f1b", 8), ("async-1f1b", 16)):
        text = f"{schedule}, {stages} stages"
        kinds.append((text, lambda s=schedule, n=stages: piped(data, n, s)))
    found: dict[str, list[float]] = {text: [] for text, _ in kinds}
    for _ in range(repeats):
        for text, measure in kinds:
            found[text].append(1e3 * measure())
    base = found["a plain loop"]
    shown = Table("", "ms for each mini-batch", "of the plain loop", "max - min")
    for text, times in found.items():
        ratios = [t / b for t, b in zip(times, base, strict=True)]
        line = {
            "what": text,
            "ms": statistics.median(times),
            "ratio": statistics.median(ratios),
            "spread": max(ratios) - min(ratios),
        }
        if as_json:
            print(json.dumps(line), flush=True)
        cells = (f"{line['ms']:.1f}", f"{line['ratio']:.2f}", f"{line['spread']:.2f}")
        shown.add_row(text, *cells)
    if not as_json:
        Console().print(shown, f"copying all weights once: {1e3 * copying():.2f} ms")


if __name__ == "__main__":
    main()
