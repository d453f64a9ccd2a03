"""The kill matrix: what becomes of a training when a signal ends one of its workers.

A signal, the phase of the worker in which it comes, and who had started the worker. Each cell is a
training of three stages with checkpoints: ``same`` where it went on to the losses of a calm run,
else the exit code of the script; behind it the number of recoveries.

The phases: ``preparing``, while the worker unpickles its stage for the first time; ``computing``,
in a forward; ``idle``, between two epochs. The starters: ``local``, the script; ``run``,
``pipedream-rt run``; ``node``, the same on a second node, whose workers are its own; ``persist``,
a worker by hand with ``--persist``, beside a spare one; ``torchrun``, which starts all again, so
that the script resumes.

    python benchmarks/studies/kills.py [--python OTHER/.venv/bin/python] [--json]

For Linux; about five minutes on two cores.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grid import said  # from benchmarks/

STARTERS = ("local", "run", "node", "persist", "torchrun")
PHASES = ("preparing", "computing", "idle")
SIGNALS = ("KILL", "TERM", "SEGV", "exit 7")

SCRIPT = '''
import json, os, signal, sys
from pathlib import Path
import torch
from torch import nn
from pipedream_rt import Checkpoints, Pipeline, Recovery

FOLDER, PHASE, SIGNAL, WORKERS = Path(sys.argv[1]), *sys.argv[2:5]

def strike(phase):
    """End this process, once, where it is a worker's in the phase."""
    if phase != PHASE or os.environ.get("KILLS_SCRIPT") == str(os.getpid()):
        return
    try:
        (FOLDER / "struck").touch(exist_ok=False)
    except FileExistsError:
        return
    if SIGNAL == "exit 7":
        os._exit(7)
    os.kill(os.getpid(), getattr(signal, "SIG" + SIGNAL))

class Layer(nn.Linear):
    def __setstate__(self, state):
        super().__setstate__(state)
        if self.is_struck:
            strike("preparing")
    def forward(self, x):
        if self.is_struck and os.environ.get("KILLS_SCRIPT") != str(os.getpid()):
            (FOLDER / "pid").write_text(str(os.getpid()))
            with open(FOLDER / "calls", "a") as calls:
                if calls.write(".") and calls.tell() == 13:
                    strike("computing")
        return super().forward(x).tanh()

def main():
    if os.environ.get("RANK", "0") == "0":  # torchrun's other ranks become workers
        os.environ["KILLS_SCRIPT"] = str(os.getpid())
    torch.manual_seed(0)
    layers = [Layer(8, 8) for _ in range(3)]
    for number, layer in enumerate(layers):
        layer.is_struck = number == 2
    data = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(8)]
    losses = {}
    with Pipeline(
        nn.Sequential(*layers), stages=3, loss_fn=nn.functional.mse_loss, schedule="1f1b",
        optimizer=(torch.optim.SGD, {"lr": 0.1}), micro_batches=2,
        workers=None if WORKERS == "-" else WORKERS,
        checkpoint=Checkpoints(FOLDER / "checkpoints", every=2, resume=True),
        recovery=Recovery(max_restarts=2),
    ) as pipe:
        while pipe.epoch < 2:
            for result in pipe.train_epoch(data):
                losses[result.step] = float(result.loss)
            pipe.flush()
            if PHASE == "idle" and not (FOLDER / "struck").exists():
                (FOLDER / "struck").touch()
                os.kill(int((FOLDER / "pid").read_text()),
                        signal.SIGKILL if SIGNAL == "exit 7" else getattr(signal, "SIG" + SIGNAL))
        found = {"losses": losses, "restarts": [r.reason for r in pipe.restarts]}
    (FOLDER / "found.json").write_text(json.dumps(found))

if __name__ == "__main__":
    main()
'''

LIMIT_S = 120


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def started(*words: str | Path, **variables: str) -> Iterator[None]:
    """Start a process in a session of its own; nothing of it is left behind."""
    process = subprocess.Popen(
        list(map(str, words)),
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(timeout=10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def trained(python: Path, starter: str, phase: str, how: str) -> dict[str, object]:
    """Train with one fault, and return how it ended."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as others:
        folder, port = Path(name), free_port()
        script = folder / "train.py"
        script.write_text(SCRIPT)
        secret = {"PIPEDREAM_RT_SECRET": secrets.token_hex(32)}
        address, bin_ = f"127.0.0.1:{port}", python.parent
        words = [script, folder, phase, how, address if starter == "persist" else "-"]
        run = [bin_ / "pipedream-rt", "run"]
        if starter == "local":
            command, secret = [python, *words], {}
        elif starter == "run":
            command, secret = [*run, "--nproc-per-node", "3", *words], {}
        elif starter == "node":
            nodes = [*run, "--nnodes", "2", "--rdzv-endpoint", address, "--nproc-per-node", "2"]
            command = [*nodes, "--node-rank", "0", *words]
            others.enter_context(started(*nodes, "--node-rank", "1", *words, **secret))
        elif starter == "persist":
            command = [python, *words]
            worker = [python, "-m", "pipedream_rt.workers", address, "--persist"]
            for number in range(4):
                spare = ["--spare"] if number == 3 else []
                others.enter_context(started(*worker, "--name", f"w{number}", *spare, **secret))
        else:
            command, secret = [
                bin_ / "torchrun", "--nproc-per-node", "3", "--max-restarts", "2",
                "--master-port", str(port), *words,
            ], {}  # fmt: skip
        ended = said(list(map(str, command)), LIMIT_S, secret, apart=True)
        place = folder / "found.json"
        found = (
            json.loads(place.read_text()) if place.exists() else {"errors": ended.errors[-2000:]}
        )
        return {
            "starter": starter, "phase": phase, "signal": how,
            "code": "hangs" if ended.code is None else ended.code,
            "struck": (folder / "struck").exists(),
            **found,
        }  # fmt: skip


@click.command()
@click.option("--python", type=click.Path(path_type=Path), default=Path(sys.executable),
              help="The interpreter of the environment that is tried.")  # fmt: skip
@click.option("--starter", "starters", type=click.Choice(STARTERS), multiple=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def main(python: Path, starters: tuple[str, ...], as_json: bool) -> None:
    """Try each cell once, and print the table."""
    calm = trained(python, "local", "none", "KILL")["losses"]
    table = Table("starter", "phase", *SIGNALS)
    for starter in starters or STARTERS:
        for phase in PHASES:
            row = []
            for how in SIGNALS:
                found = trained(python, starter, phase, how)
                losses = found.pop("losses", None)
                # After a restart of the script, the losses from its last checkpoint on.
                same = bool(losses) and losses.items() <= calm.items()  # type: ignore
                found["same"] = same
                outcome = "same" if same and not found["code"] else f"code {found['code']}"
                if not found["struck"]:
                    outcome = "not struck"
                row.append(f"{outcome}, {len(found.get('restarts', ()))}")  # type: ignore
                if as_json:
                    click.echo(json.dumps(found))
            table.add_row(starter, phase, *row)
    if not as_json:
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
