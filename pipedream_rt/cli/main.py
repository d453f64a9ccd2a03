"""The command group ``pipedream-rt``. It imports no torch, so that it starts at once."""

from __future__ import annotations

import io
import sys

import click

from pipedream_rt import __version__
from pipedream_rt.cli.checkpoint import checkpoint
from pipedream_rt.cli.doctor import doctor
from pipedream_rt.cli.init import init
from pipedream_rt.cli.plan import plan
from pipedream_rt.cli.profile import profile
from pipedream_rt.cli.run import run, worker
from pipedream_rt.cli.schedule import schedule
from pipedream_rt.cli.show import report, watch
from pipedream_rt.cli.simulate import simulate
from pipedream_rt.cli.status import status
from pipedream_rt.cli.timeline import timeline
from pipedream_rt.errors import PipelineError


class _Commands(click.Group):
    """Shows an error of the library as an error of the command, without a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PipelineError as error:
            raise click.ClickException(str(error)) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of their use, below


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Asynchronous pipeline-parallel training for PyTorch."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The name of a file may be no text at all: it is printed as standard error prints it.
        sys.stdout.reconfigure(errors="backslashreplace")


for _command in (
    init,
    run,
    watch,
    status,
    report,
    checkpoint,
    timeline,
    doctor,
    worker,
    schedule,
    simulate,
    profile,
    plan,
):
    main.add_command(_command)
