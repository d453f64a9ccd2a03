"""What the tests of the commands share."""

import subprocess
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from support import forked

from pipedream_rt.cli import compare_schedules, main, profile


@pytest.fixture(scope="session")
def call():
    """Run a command in this process, as a user types it; return what it prints.

    The terminal has 100 columns and no colours, whatever the tests run in.
    """

    def run(*words, code=0):
        variables = {"COLUMNS": "100", "FORCE_COLOR": None, "TTY_COMPATIBLE": None}
        runner = CliRunner(env=variables)
        done = runner.invoke(main, [str(word) for word in words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, done.output
        return done.output

    return run


@pytest.fixture
def forking(monkeypatch):
    """Let commands that run scripts fork these, in place of starting interpreters."""
    popen = SimpleNamespace(Popen=forked.Popen, TimeoutExpired=subprocess.TimeoutExpired)
    for command in (compare_schedules, profile):
        monkeypatch.setattr(command, "subprocess", popen)


@pytest.fixture(scope="session")
def trace(call, tmp_path_factory):
    """The file of a simulated trace, which no test changes."""
    path = tmp_path_factory.mktemp("traces") / "run.trace"
    call("simulate", "--schedule", "1f1b", "--stages", 4, "--micro-batches", 8, "--latency", "1ms",
         "--updates", 10, "--output", path)  # fmt: skip
    return path
