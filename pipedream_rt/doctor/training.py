"""Ten steps of a small model on the workers of a job, of which one is killed on the way.

The command `doctor` runs it as the script of a job, in a process of its own; what was found goes to
a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipedream_rt.doctor.judgement import Finding
from pipedream_rt.job.options import Recovery, Training
from pipedream_rt.pipeline import Pipeline
from pipedream_rt.schema import printable, read_file
from pipedream_rt.tracing.summary import seconds_text

STEPS = 10

_KILLED_AFTER = 5

_WIDTH, _SAMPLES = 32, 16

_MORE_S = 120
"""Seconds for the training beside those for the workers to come."""

_LARGEST = 1 << 20
"""Bytes of what was found."""


def train_on(stages: int, patience: timedelta, run: Callable[[list[str]], int]) -> list[Finding]:
    """Let ``run`` train in a process of its own, and return what it has found.

    ``run`` is called with the command, and returns its exit code, as a shell has it.
    """
    seconds = int(patience.total_seconds()) + _MORE_S
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        code = "from pipedream_rt.doctor.training import main; main()"
        ended = run([sys.executable, "-c", code, str(stages), str(seconds), str(found)])
        try:
            return [Finding(**each) for each in json.loads(read_file(found, _LARGEST))]
        except (OSError, ValueError):
            text = f"its process has ended with {ended} before it had an answer"
            return [Finding("training", "", "fail", text, "see what it has written above")]


def main() -> None:
    """Train, and write what was found: the arguments are stages, seconds and a file."""
    stages, seconds, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

    def late(number: int, frame: object) -> NoReturn:
        raise TimeoutError(f"the training did not end within {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        found = examined(stages, timedelta(seconds=max(1, seconds - _MORE_S)))
    except Exception as error:  # whatever keeps a small model from training
        text = printable(f"{type(error).__name__}: {error}", 1000)
        remedy = "a job would end so too: see what stands above, and what the other machines say"
        found = [Finding("training", "", "fail", text, remedy)]
    signal.alarm(0)
    path.write_text(json.dumps([asdict(each) for each in found]))
    sys.exit(any(each.grade == "fail" for each in found))


def examined(stages: int, patience: timedelta) -> list[Finding]:
    """Train on the workers that the environment has, or local ones, and compare with one process.

    ``patience`` is for the workers to come.
    """
    weights, found = _trained(stages, None, patience)
    expected, _ = _trained(stages, "serial", patience)
    differing = [name for name, value in expected.items() if not torch.equal(value, weights[name])]
    what = f"of {len(expected)} weights"
    if differing:
        found.append(
            Finding(
                "bits", "", "fail", f"{len(differing)} {what} differ from those of one process, "
                f"first {differing[0]}",
                "are the machines of one kind, with the same versions? Kernels of others round "
                "otherwise",
            )
        )  # fmt: skip
    else:
        found.append(Finding("bits", "", "ok", f"all {what} are those of one process"))
    return found


def _trained(
    stages: int, workers: str | None, patience: timedelta
) -> tuple[dict[str, Tensor], list[Finding]]:
    """Train, and return the weights; kill one of the workers that are processes here."""
    torch.manual_seed(0)
    blocks = (
        (nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(max(2, stages))
    )
    data = [(torch.randn(_SAMPLES, _WIDTH), torch.randn(_SAMPLES, _WIDTH)) for _ in range(STEPS)]
    found: list[Finding] = []
    with Pipeline(
        nn.Sequential(*(nn.Sequential(*block) for block in blocks)),
        stages=list(range(1, stages)),
        loss_fn=F.mse_loss,
        optimizer=(torch.optim.AdamW, {"lr": 1e-2}),
        schedule="async-1f1b",
        corrections=(),
        workers=workers,
        recovery=Recovery(max_restarts=3, start=patience),
        training=Training(verify=False),
    ) as pipe:
        victim = None if workers == "serial" else _one_of_here(pipe.on_stages(_place))
        for result in pipe.train_epoch(data):
            if victim is not None and result.step == _KILLED_AFTER - 1:
                os.kill(victim[1], signal.SIGKILL)
        weights = pipe.state_dict()
        if workers != "serial":
            text = f"{STEPS} steps of a small model in {stages} stages"
            found = [Finding("training", "", "ok", text), _of_kill(victim, pipe)]
    return weights, found


def _of_kill(victim: tuple[int, int] | None, pipe: Pipeline) -> Finding:
    """Say how the run went on after the kill."""
    if victim is None:
        text = "no worker is a process of this machine, so none was killed"
        return Finding("recovery", "", "note", text)
    where = f"stage {victim[0]}"
    if not pipe.restarts:
        return Finding("recovery", where, "fail", "its worker was killed, and nobody noticed")
    seconds = seconds_text(sum(each.seconds for each in pipe.restarts))
    again = sum(each.replayed for each in pipe.restarts)
    return Finding(
        "recovery", where, "ok", f"its worker was killed after {_KILLED_AFTER} steps, and replaced "
        f"in {seconds}; {again} micro-batches were computed again",
    )  # fmt: skip


Place = tuple[str, int, int]
"""Where a process is: the boot of its kernel, its namespace of process numbers, and its number."""


def _place(module: object) -> Place:
    """Return where this process is."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.stat("/proc/self/ns/pid").st_ino, os.getpid()


def _one_of_here(places: Sequence[Place]) -> tuple[int, int] | None:
    """Return the last stage whose worker is a process of this machine, and its number."""
    here = _place(None)[:2]
    found = [(stage, place[2]) for stage, place in enumerate(places) if tuple(place[:2]) == here]
    return found[-1] if found else None
