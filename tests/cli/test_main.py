"""The command itself."""

from click.testing import CliRunner

from pipedream_rt.cli import main


def test_help_names_every_verb():
    done = CliRunner().invoke(main, ["--help"])
    for verb in ("run", "worker", "schedule", "simulate", "status", "timeline", "checkpoint"):
        assert verb in done.output
