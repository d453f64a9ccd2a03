"""How long each engine takes from the command to the first loss, and to recover from a killed node.

The script is `tests/support/everywhere.py`, three stages on three nodes that are processes of this
machine: a real Slurm, Ray's own cluster for tests, the manifest for JobSet with a kubelet that is
played, and `run --nnodes`. Told are the seconds from the command to the first loss; from the
SIGKILL of another node's command to the next loss; and from the SIGKILL of the first node's, the
script with it, to the next loss. A new start takes the place of what was killed at once by hand;
elsewhere that is the engine's own time.

    python benchmarks/studies/engines.py --engine nodes --engine slurm --engine ray
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.nodes import RUN, SCRIPT, expected, nodes  # noqa: E402
from support.two_hosts import why_not  # noqa: E402

STEPS = 1200

Wait = Callable[[str], object]
"""Waits for a line of the script that has certain words, after the one waited for last."""


def timed(start: Callable[[], Wait], kill: Callable[[str], Wait | None]) -> dict[str, float]:
    """Run the job once.

    Args:
        start: Gives the command, and returns what waits for the script.
        kill: Kills ``"other"`` or ``"first"``, and starts it again if no engine does; returns what
            waits for the script from then on, if that is another one.
    """
    began = time.monotonic()
    wait = start()
    wait("step 0")
    found = {"first_loss_s": time.monotonic() - began}
    wait("step 200")
    for which, words in (("other", "recovered in"), ("first", "began at")):
        killed = time.monotonic()
        wait = kill(which) or wait
        wait(words)
        wait("step")
        found[f"after_{which}_s"] = time.monotonic() - killed
    wait(expected(STEPS))
    return found


@contextmanager
def of_nodes(folder: Path) -> Iterator[dict[str, float]]:
    """Nodes that are told where they stand, as by systemd."""
    with nodes(folder / "run", steps=STEPS) as job:
        started: dict[int, Any] = {}

        def start() -> Wait:
            started.update({rank: job.start(rank) for rank in (1, 2, 0)})
            return started[0].wait_for

        def kill(which: str) -> Wait | None:
            rank = 1 if which == "other" else 0
            started[rank].signal(signal.SIGKILL)
            started[rank].ended()
            started[rank] = job.start(rank)
            return started[0].wait_for if rank == 0 else None

        yield timed(start, kill)
        for each in started.values():
            assert each.ended() == 0


@contextmanager
def of_kubernetes(folder: Path) -> Iterator[dict[str, float]]:
    """The manifest for JobSet: two containers of four are killed, and a node is lost."""
    from support.kubelet import kubelet

    script = [SCRIPT, str(folder / "run"), "--steps", str(STEPS)]
    with kubelet(ROOT / "workers" / "jobset.yaml", folder, script) as pods:

        def start() -> Wait:
            pods.start_all()
            return pods.containers["train-first-0-0"].wait_for

        def kill(which: str) -> Wait | None:
            if which == "other":
                for name in ("train-others-0-0", "train-others-0-1"):  # one may have no stage
                    pods.containers[name].signal(signal.SIGKILL)
                    pods.containers[name].ended()
                    pods.start(name)
                return None
            pods.lose("train-first-0-0")
            return pods.start("train-first-0-0").wait_for

        yield timed(start, kill)


@contextmanager
def of_slurm(folder: Path) -> Iterator[dict[str, float]]:
    """A real Slurm, and the batch file that users get."""
    from support.slurm import Slurm
    from support.slurm_job import Job

    with Slurm(folder / "slurm", nodes=3) as slurm:
        made: list[Job] = []
        place = 0

        def wait(words: str) -> None:
            nonlocal place
            place = made[0].wait_for(words, place)

        def start() -> Wait:
            made.append(Job(slurm, folder / "job", steps=STEPS))
            return wait

        def kill(which: str) -> None:
            made[0].kill_run("n2" if which == "other" else "n1")

        yield timed(start, kill)


@contextmanager
def of_ray(folder: Path) -> Iterator[dict[str, float]]:
    """Ray's cluster for tests, in a process of its own; the processes of two nodes are killed."""
    command = [sys.executable, str(ROOT / "tests" / "support" / "ray_scenarios.py"), "serve"]
    cluster = subprocess.Popen(
        [*command, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    running: list[subprocess.Popen[str]] = []
    try:
        assert cluster.stdout is not None
        address = next(line for line in cluster.stdout if line.startswith("up")).split()[1]
        script = [*RUN, "--ray", "3", "--resume", SCRIPT, str(folder / "run")]
        script += ["--steps", str(STEPS)]

        def wait(words: str) -> None:
            assert running[0].stdout is not None
            assert any(words in line for line in running[0].stdout), words

        def start() -> Wait:
            environment = {**os.environ, "RAY_ADDRESS": address, "RAY_DEDUP_LOGS": "0"}
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            running.append(subprocess.Popen(script, env=environment, text=True, **output))
            return wait

        def kill(which: str) -> None:
            rank = "1" if which == "other" else "0"
            for place in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    words = place.read_bytes().decode().split("\0")
                    own = str(folder / "run") in words and "--node-rank" in words
                    if own and words[words.index("--node-rank") + 1] == rank:
                        os.kill(int(place.parent.name), signal.SIGKILL)

        yield timed(start, kill)
        running[0].wait(60)
    finally:
        for each in running:
            each.kill()
            each.wait()
        cluster.communicate("end\n", timeout=120)


ENGINES = {
    "nodes": of_nodes, "kubernetes": of_kubernetes, "slurm": of_slurm, "ray": of_ray
}  # fmt: skip


@click.command()
@click.option("--engine", "names", multiple=True, type=click.Choice(list(ENGINES)))
def main(names: tuple[str, ...]) -> None:
    """Print a JSON line for each engine."""
    for name in names or ENGINES:
        if name in ("kubernetes", "slurm") and (reason := why_not()):
            raise click.ClickException(reason)
        with tempfile.TemporaryDirectory() as folder, ENGINES[name](Path(folder)) as found:
            click.echo(json.dumps({"engine": name, **found}))


if __name__ == "__main__":
    main()
