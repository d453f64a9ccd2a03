"""The examples that show how a habit of another library is done here run as they stand."""

import re
import sys

import pytest
from support import forked
from support.deadlines import LATEST_S
from support.examples import EXAMPLES, run_example

from pipedream_rt import ConfigError

HERE = {
    "sequential_classifier.py": (["--epochs=2", "--samples=512"], "accuracy here: "),
    "split_points.py": (["--steps=20"], "at last"),
    "balance.py": (["--steps=8", "--width=64"], "mini-batches/s"),
    "slow_link.py": (["--stages=2", "--steps=12"], "async-1f1b, slack 2"),
    "contrastive.py": ([], "the same weights as in one process: True"),
    "gan.py": ([], "the same weights as in one process: True"),
    "reinforce.py": ([], "go right"),
    "rpc_loop.py": (["--batches=12"], "the same weights as in one process: True"),
}
"""Those whose stages are in the thread of the script, which is that of the test."""

LEARNS = {
    "contrastive.py": (r"(\d+)% find", lambda first, last: first < 10 and last > 60),
    "gan.py": (r"made.* ([\d.]+) from", lambda first, last: last < first / 3),
    "reinforce.py": (r"(\d+)% of the walkers", lambda first, last: first < 20 and last > 90),
    "rpc_loop.py": (r"([\d.]+) at (?:first|last)", lambda first, last: last < first / 2),
}
"""What finds the figures of how well it does, and what must hold of the first and the last one."""

WITH_PROCESSES = {
    "own_codec.py": ([], "Signs: loss"),
    "tensor_parallel.py": (["--workers=serial"], "at last"),
    "rpc_resnet.py": ([], "by hand the same: True"),
    "demo.py": (["--stages=2", "--steps=6"], "are equal, bit for bit, though a worker was killed"),
}


@pytest.mark.parametrize("name", HERE)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    options, told = HERE[name]
    monkeypatch.chdir(tmp_path)
    try:
        run_example(name, ["--workers=serial", *options])
    except ConfigError as error:
        if name != "balance.py" or "Other processes may be using the machine" not in str(error):
            raise
        pytest.skip("the machine is too busy for layers to be measured")
    out = capsys.readouterr().out
    assert told in out
    if name in LEARNS:
        pattern, has_learned = LEARNS[name]
        figures = [float(figure) for figure in re.findall(pattern, out)]
        assert len(figures) > 1
        assert has_learned(figures[0], figures[-1]), figures


@pytest.mark.processes
@pytest.mark.parametrize("name", WITH_PROCESSES)
def test_an_example_runs_with_processes(name, tmp_path):
    options, told = WITH_PROCESSES[name]
    done = forked.run(
        [sys.executable, EXAMPLES / name, *options], cwd=tmp_path, capture_output=True, text=True,
        timeout=LATEST_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


@pytest.mark.parametrize("name", [*HERE, *WITH_PROCESSES])
def test_an_example_is_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 100
