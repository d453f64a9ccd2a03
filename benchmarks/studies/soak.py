"""Hours of a run in which everything happens at once: `make soak HOURS=2`.

Four worker processes train without a flush, with dropout, BatchNorm, a codec with feedback, an
average of the weights, checkpoints on the way, and an evaluation after each epoch. Meanwhile
processes of the run are killed at random, and the script itself, which is started again and goes
on. Memory, descriptors and threads of every process are read as long as it lives. At the end a run
without workers, checkpoints and faults does the same mini-batches, which takes as long again, and
must have the same bits.

Prints one JSON line; the exit status is 1 if bits differ or a process has grown.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt import Checkpoints, Layout, Pipeline, Recovery, Training
from pipedream_rt.codecs import Int8

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.family import family

WIDTH, BLOCKS, SAMPLES, EPOCH = 64, 4, 16, 200
SAMPLE_S, SETTLED_S, SCRIPT_S = 2.0, 60.0, (60.0, 1800.0)
"""Seconds between two looks, until a process has what it needs, and of a life of the script."""

LATEST_S = 600.0
MOST = {"MiB": 8, "descriptors": 4, "threads": 4}
"""By how much a process may grow."""


def options() -> dict[str, Any]:
    """What both runs have."""
    return {
        "stages": 4, "loss_fn": F.mse_loss, "optimizer": (torch.optim.AdamW, {"lr": 1e-3}),
        "schedule": "async-1f1b", "micro_batches": 2, "corrections": (), "seed": 1,
        "layout": Layout(codecs=Int8(feedback=True)),
        "training": Training(ema=0.99, verify=False),
    }  # fmt: skip


def model() -> nn.Sequential:
    """Blocks whose state and random numbers must go on too."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)
        )
        for _ in range(BLOCKS)
    ]  # fmt: skip
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def data(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Mini-batches."""
    torch.manual_seed(seed)
    return [(torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, 1)) for _ in range(count)]


def train(pipe: Pipeline, is_done: Callable[[], bool], pause_s: float = 0) -> dict[str, Any]:
    """Train whole epochs, at least to the end of one, with an evaluation after each.

    After each mini-batch it lets the machine rest for so long.

    Returns:
        What the run ended with.
    """
    mini_batches, held_out = data(EPOCH, 1), data(4, 2)
    while True:
        for _ in pipe.train_epoch(mini_batches):
            time.sleep(pause_s)  # noqa: TID251 (it waits for nothing)
        found = pipe.evaluate(held_out)
        if is_done():
            return {
                "step": pipe.step, "evaluation": found, "digest": pipe.fingerprint().digest,
            }  # fmt: skip


def script(folder: Path, pause_s: float) -> None:
    """The script that is disturbed; it ends after the epoch in which the file ``stop`` appears."""
    kept = Checkpoints(folder / "run", every=100, resume=True, attempts=None)
    with Pipeline(
        model(), **options(), workers="local", checkpoint=kept,
        recovery=Recovery(max_restarts=1_000_000),
    ) as pipe:  # fmt: skip
        ended = train(pipe, (folder / "stop").exists, pause_s)
    (folder / "end").write_text(json.dumps(ended))


Process = tuple[int, int | None]
"""The number of a process, and when it began, which tells it from later ones of that number."""


def begun_at(pid: int) -> int | None:
    """When a process began; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(fields[18])


def taken(pid: int) -> tuple[int, int, int]:
    """Resident MiB, descriptors and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident, threads = (
        int(status.partition(f"{name}:")[2].split()[0]) for name in ("VmRSS", "Threads")
    )
    return resident // 1024, len(os.listdir(f"/proc/{pid}/fd")), threads


class Disturbed:
    """A run whose processes are killed, and what each of them took while it lived."""

    def __init__(self, folder: Path, seed: int, pause_s: float) -> None:
        self._folder, self._random = folder, random.Random(seed)
        self._words = [sys.executable, "-W", "ignore", __file__, str(folder)]
        self._words += ["--pause-s", str(pause_s)]
        self._seen: dict[Process, list[tuple[float, tuple[int, int, int]]]] = defaultdict(list)
        self.killed, self.scripts = 0, 0

    def run(self, seconds: float) -> dict[str, Any]:
        """Disturb it for so long; return what it ended with."""
        begun = time.monotonic()
        while time.monotonic() < begun + seconds:
            life = self._random.uniform(*SCRIPT_S)
            self._live(min(life, begun + seconds - time.monotonic()), last=False)
        (self._folder / "stop").touch()
        self._live(LATEST_S, last=True)
        ended: dict[str, Any] = json.loads((self._folder / "end").read_text())
        return ended

    def _live(self, seconds: float, last: bool) -> None:
        """Let the script live for so long, or until its end."""
        self.scripts += 1
        process = subprocess.Popen(self._words)
        until, fault = time.monotonic() + seconds, time.monotonic() + 20
        known: set[Process] = set()  # a worker outlives the process that has forked it
        try:
            while time.monotonic() < until:
                try:
                    code = process.wait(SAMPLE_S)
                except subprocess.TimeoutExpired:
                    known |= {(pid, begun_at(pid)) for pid in family(process.pid)}
                    known = {each for each in known if each[1] and each[1] == begun_at(each[0])}
                    below = sorted(pid for pid, _ in known if pid != process.pid)
                    self._look(known)
                    if below and time.monotonic() > fault:
                        self._kill(self._random.choice(below))
                        fault = time.monotonic() + self._random.uniform(5, 40)
                    continue
                if code or not last:
                    raise RuntimeError(f"the script ended with {code}")
                return
            if last:
                raise RuntimeError(f"the script has not ended within {LATEST_S:g} s")
        finally:
            process.kill()
            process.wait()

    def _look(self, processes: set[Process]) -> None:
        for each in processes:
            try:
                self._seen[each].append((time.monotonic(), taken(each[0])))
            except (OSError, IndexError):
                continue  # it has ended meanwhile

    def _kill(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.killed += 1

    def grown(self) -> dict[str, int]:
        """The most that a process has grown by after it had settled, and how many have."""
        most, settled = [0, 0, 0], 0
        for looks in self._seen.values():
            after = [found for when, found in looks if when > looks[0][0] + SETTLED_S]
            if len(after) > 1:
                settled += 1
                most = [max(m, b - a) for m, a, b in zip(most, after[0], after[-1], strict=True)]
        return {"MiB": most[0], "descriptors": most[1], "threads": most[2], "processes": settled}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--hours", default=2.0, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the faults.")
@click.option(
    "--pause-s", default=0.0, show_default=True,
    help="After each mini-batch, for a machine that has more to do.",
)  # fmt: skip
def main(folder: Path | None, hours: float, seed: int, pause_s: float) -> None:
    """Run the soak; with FOLDER, be the script that is disturbed."""
    if folder is not None:
        script(folder, pause_s)
        return
    with tempfile.TemporaryDirectory() as place:
        run = Disturbed(Path(place), seed, pause_s)
        ended = run.run(3600 * hours)
    with Pipeline(model(), **options(), workers="serial") as pipe:
        calm = train(pipe, lambda: pipe.step >= ended["step"])
    grown = run.grown()
    print(
        json.dumps(
            {
                "hours": hours, "seed": seed, "pause_s": pause_s, "mini_batches": ended["step"],
                "killed": run.killed, "scripts": run.scripts, "grown": grown,
                "bits equal": calm == ended,
            }
        )
    )  # fmt: skip
    sys.exit(calm != ended or any(grown[what] > most for what, most in MOST.items()))


if __name__ == "__main__":
    main()
