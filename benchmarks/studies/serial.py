"""What stages in the thread of the script cost beside the work itself (workers="serial").

The transformer of `learning.py` is trained by a plain loop and by pipelines of more and more stages
in one thread, which take short turns. Processor time for each mini-batch. The time to copy all
weights once, which an update of an asynchronous schedule must do, is measured too.

    python benchmarks/studies/serial.py
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pipedream_rt import Pipeline

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from learning import task_named

Data = list[tuple[Tensor, Tensor]]
OPTIMIZER = {"lr": 1e-3, "fused": True}


def plain() -> Callable[[Data], None]:
    """What trains the model on mini-batches by a plain loop."""
    task = task_named("transformer")
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)

    def train(batches: Data) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            task.loss_fn(model(x), y).backward()
            optimizer.step()

    return train


def piped(stack: ExitStack, stages: int, schedule: str) -> Callable[[Data], None]:
    """What does so by a pipeline in this thread."""
    task = task_named("transformer")
    torch.manual_seed(0)
    pipe = Pipeline(
        task.model(),
        stages=stages,
        loss_fn=task.loss_fn,
        optimizer=(torch.optim.AdamW, OPTIMIZER),
        schedule=schedule,  # type: ignore[arg-type]
        micro_batches=1,
        corrections=(),  # the schedule alone is measured
        workers="serial",
    )
    stack.enter_context(pipe)

    def train(batches: Data) -> None:
        for _ in pipe.train_epoch(batches):
            pass
        pipe.flush()

    return train


def turn(train: Callable[[Data], None], data: Data) -> float:
    """Seconds of processor time for each mini-batch."""
    start = time.process_time()
    train(data)
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
@click.option("--turns", default=30, show_default=True)
@click.option("--batches", default=12, show_default=True, help="In a turn.")
def main(as_json: bool, turns: int, batches: int) -> None:
    """Print the ratios to the plain loop."""
    torch.set_num_threads(1)
    data = list(task_named("transformer").batches(batches, 16, 0))
    with ExitStack() as stack:
        kinds = {"a plain loop": plain()}
        for schedule, stages in (("1f1b", 1), ("1f1b", 8), ("async-1f1b", 8), ("async-1f1b", 16)):
            kinds[f"{schedule}, {stages} stages"] = piped(stack, stages, schedule)
        found: dict[str, list[float]] = {text: [] for text in kinds}
        for number in range(-1, turns):
            for text, train in kinds.items():
                taken = 1e3 * turn(train, data)
                if number >= 0:  # the first round warms up
                    found[text].append(taken)
    base = found["a plain loop"]
    shown = Table("", "ms for each mini-batch", "of the plain loop", "middle half")
    for text, times in found.items():
        ratios = [t / b for t, b in zip(times, base, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        line = {
            "what": text,
            "ms": statistics.median(times),
            "ratio": statistics.median(ratios),
            "spread": quartiles[2] - quartiles[0],
        }
        if as_json:
            print(json.dumps(line), flush=True)
        cells = (f"{line['ms']:.1f}", f"{line['ratio']:.2f}", f"{line['spread']:.2f}")
        shown.add_row(text, *cells)
    if not as_json:
        Console().print(shown, f"copying all weights once: {1e3 * copying():.2f} ms")


if __name__ == "__main__":
    main()
