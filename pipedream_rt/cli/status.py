"""The command ``status``: shows the pipelines that run on this machine."""

from __future__ import annotations

import json
import shutil
import sys
import threading

import click

from pipedream_rt.coordinator.recovery.status_server import Status, ask, running
from pipedream_rt.errors import ConfigError
from pipedream_rt.tracing.summary import WORKER_HEAD, table, worker_rows


@click.command(short_help="Show your pipelines that run here.")
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(min=0.1),
              help="Seconds over which the rate is measured.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True,
              help="Write a line of JSON for each pipeline, at once.")  # fmt: skip
def status(interval: float, as_json: bool) -> None:
    """Show the pipelines of this user that run on this machine, with their workers."""
    try:
        found = list(running())
    except OSError as error:
        raise ConfigError(f"the pipelines of this user cannot be found: {error}") from error
    if as_json:
        for _, record in found:
            click.echo(json.dumps(record))
        return
    if not found:
        click.echo("no pipeline is running on this machine (of this user, on worker processes)")
        return
    threading.Event().wait(interval)
    for path, before in found:
        try:
            now = ask(path)
        except (OSError, ValueError):
            continue  # the pipeline has ended meanwhile
        click.echo(_described(before, now))


def _described(before: Status, now: Status) -> str:
    """Describe one pipeline in words and a table of its workers."""
    seconds = max(1, now["ns"] - before["ns"]) / 1e9
    rate = (now["losses"] - before["losses"]) / seconds
    head = (
        f"pid {now['pid']}: {now['schedule']}, generation {now['generation']}, "
        f"{now['restarts']} restarts; micro-batch {now['losses']} done, {now['fed']} fed, "
        f"{rate:.3g} micro-batches/s"
    )
    # A wide terminal shows more of what a worker does; a file shows all of it.
    room = max(60, shutil.get_terminal_size().columns - 60) if sys.stdout.isatty() else 300
    rows = [WORKER_HEAD, *worker_rows(now["workers"], room)]
    return f"{head}\n{table(rows)}"
