"""What it costs a run to be watched: plain, and recorded with a live page that a client follows.

Page and client are processes of their own, as with `pipedream-rt watch --web` and a browser. Pairs
are run in turn in one call; the last line is a JSON object with the medians: ``rate``, the watched
run's mini-batches per second over those of the plain one, and ``ms``, the milliseconds of a
processor that the script's process uses more for each mini-batch, of the ``mini_batch_ms`` that one
takes.

    python benchmarks/watching.py --pairs 5
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt import Observe, Pipeline

WATCH = [sys.executable, "-c", "from pipedream_rt.cli import main; main()", "watch"]


def train(width: int, steps: int, record: Path | None) -> tuple[float, float, float]:
    """Train, and return the seconds, those of a processor in this process, and the last loss.

    Args:
        width: The width of the layers.
        steps: The number of mini-batches.
        record: Where to record the run, and watch it meanwhile; None for neither.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)), nn.Linear(width, 4))
    x = torch.randn(64, width)
    y = torch.randint(4, (64,))
    data = [(x, y)] * steps
    with Pipeline(
        model, stages=2, loss_fn=F.cross_entropy, optimizer=(torch.optim.SGD, {"lr": 1e-3}),
        observe=Observe(trace=record is not None, record=record),
    ) as pipe:  # fmt: skip
        list(pipe.train_epoch(data[:20]))
        watcher = None if record is None else _Watcher(record)
        begun, used = time.perf_counter(), time.process_time()
        *_, last = pipe.train_epoch(data)
        seconds, processor = time.perf_counter() - begun, time.process_time() - used
        if watcher is not None:
            watcher.close()
    return seconds, processor, last.loss


CLIENT = """
import sys, urllib.request
count = 0
try:
    for line in urllib.request.urlopen(sys.argv[1], timeout=60):
        count += len(line)
except OSError:
    pass
print(count)
"""
"""Reads what the page sends until it goes, and says how much that was."""


class _Watcher:
    """A page of a run, and a client that reads what it sends."""

    def __init__(self, record: Path) -> None:
        """Serve, and read."""
        self._page = subprocess.Popen(
            [*WATCH, str(record), "--web"], stdout=subprocess.PIPE, text=True
        )
        assert self._page.stdout is not None
        address = self._page.stdout.readline().strip().replace("/?", "/events?")
        self._client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, address], stdout=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        """End both.

        Raises:
            RuntimeError: The page has sent next to nothing, so nothing was measured.
        """
        self._page.terminate()
        self._page.communicate(timeout=30)
        count = int(self._client.communicate(timeout=30)[0])
        if count < 10_000:
            raise RuntimeError(f"the page has sent {count} bytes")


@click.command()
@click.option("--pairs", default=5, show_default=True)
@click.option("--width", default=512, show_default=True)
@click.option("--steps", default=500, show_default=True)
def main(pairs: int, width: int, steps: int) -> None:
    """Measure, and print one JSON object."""
    rates, more, plain_ms = [], [], []
    for number in range(pairs):
        found: dict[bool, tuple[float, float, float]] = {}
        for watched in (False, True) if number % 2 else (True, False):
            with tempfile.TemporaryDirectory() as folder:
                found[watched] = train(width, steps, Path(folder) / "run" if watched else None)
        plain, seen = found[False], found[True]
        if plain[2] != seen[2]:
            raise RuntimeError("a run that is watched has other bits")
        rates.append(plain[0] / seen[0])
        more.append(1e3 * (seen[1] - plain[1]) / steps)
        plain_ms.append(1e3 * plain[0] / steps)
    line: dict[str, Any] = {
        "rate": statistics.median(rates),
        "rates": [round(rate, 3) for rate in rates],
        "ms": statistics.median(more),
        "mini_batch_ms": statistics.median(plain_ms),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
