"""What the tests of the commands share."""

import pytest
from click.testing import CliRunner

from pipedream_rt.cli import main


@pytest.fixture(scope="session")
def call():
    """Run a command in this process, as a user types it; return what it prints."""

    def run(*words, code=0):
        done = CliRunner().invoke(main, [str(word) for word in words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, done.output
        return done.output

    return run


@pytest.fixture
def trace(call, tmp_path):
    """The file of a simulated trace."""
    path = tmp_path / "run.trace"
    call("simulate", "--schedule", "1f1b", "--stages", 4, "--micro-batches", 8, "--latency", "1ms",
         "--updates", 10, "--output", path)  # fmt: skip
    return path
