"""The command ``certificate``: makes a certificate for TLS between machines."""

from __future__ import annotations

from pathlib import Path

import click

from pipedream_rt.cluster.environment import TLS
from pipedream_rt.transport.tls import make_certificate


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--days", default=365, show_default=True, type=click.IntRange(1, 36500),
              help="For how long it is valid.")  # fmt: skip
def certificate(folder: Path, days: int) -> None:
    """Make a certificate and its key in FOLDER, for the members of a job on several machines.

    Copy the folder to every machine by a way that nobody else can read, and name it to the script
    and to the workers by PIPEDREAM_RT_TLS.
    """
    make_certificate(folder, days)
    click.echo(f"{folder} has a certificate for {days} days; export {TLS}={folder.absolute()}")
