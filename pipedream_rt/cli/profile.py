"""The command ``profile``: measures the layers of a script's model by running the script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import click

from pipedream_rt.cli.shared_options import GivenPath
from pipedream_rt.cluster.environment import PROFILE
from pipedream_rt.cluster.subprocesses import end_processes
from pipedream_rt.cluster.worker_life import shell_code
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError
from pipedream_rt.planning import files

_END_TIMEOUT = timedelta(seconds=10)
"""For the script to end after SIGTERM; then it is killed."""


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Measure the layers of a script's model.",
)
@click.option("-o", "--output", default="model.profile", show_default=True,
              type=GivenPath(dir_okay=False, path_type=Path),
              help="The file of the profile; one of the same model stays.")  # fmt: skip
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def profile(output: Path, module: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Profile the model of SCRIPT, which is run with its ARGUMENTS up to the first mini-batch.

    No worker is started and nothing is trained. `pipedream-rt plan` reads the file.
    """
    if not module and not os.path.isfile(script):
        raise click.BadParameter(f"there is no file {script!r}", param_hint="SCRIPT")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"the profile cannot be written to {output}: there is no such folder")
    is_file = output.is_file() or not output.exists()  # a device or a pipe cannot be read again
    before = None
    if output.is_file():
        files.load(output)  # raises for anything but a profile, which must not be overwritten
        before = output.stat().st_mtime_ns
    named = ["-m", script] if module else [script]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    code = _run([sys.executable, *named, *arguments], {PROFILE: os.path.abspath(output)})
    if code:
        sys.exit(shell_code(code))
    if not is_file:
        return
    if not output.exists() or output.stat().st_mtime_ns == before:
        raise ConfigError(
            f"{script} has ended without a profile: it must make a Pipeline and give it a "
            "mini-batch (train_epoch or submit)"
        )
    found = files.load(output)
    click.echo(
        f"{len(found.layers)} layers, {found.compute:.4g} s for a micro-batch"
        + (f" of {found.micro_batch} samples" if found.micro_batch else "")
    )


def _run(command: list[str], settings: dict[str, str]) -> int:
    """Run a script to its end; return its exit code, negative for a signal."""
    process = subprocess.Popen(command, env={**os.environ, **settings})
    try:
        return process.wait()  # no deadline: as long as the user's script takes
    except BaseException:
        process.terminate()
        end_processes([process], Deadline(_END_TIMEOUT))
        raise
