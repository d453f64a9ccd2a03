"""The examples that show how a habit of another library is done here run as they stand."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import LATEST_S

from pipedream_rt import ConfigError

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

HERE = {
    "sequential_classifier.py": (["--epochs=2", "--samples=512"], "accuracy here: "),
    "split_points.py": (["--steps=20"], "at last"),
    "balance.py": (["--steps=8", "--width=64"], "mini-batches/s"),
    "slow_link.py": (["--stages=2", "--steps=12"], "async-1f1b, slack 2"),
}
"""Those whose stages are in the thread of the script, which is that of the test."""

WITH_PROCESSES = {
    "own_codec.py": ([], "Signs: loss"),
    "tensor_parallel.py": (["--workers=serial"], "at last"),
    "rpc_resnet.py": ([], "by hand the same: True"),
}


@pytest.mark.parametrize("name", HERE)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    options, told = HERE[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [name, "--workers=serial", *options])
    with pytest.raises((SystemExit, ConfigError)) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    if name == "balance.py" and "Other processes may be using the machine" in str(ended.value):
        pytest.skip("the machine is too busy for layers to be measured")
    assert ended.type is SystemExit, ended.value
    assert ended.value.code == 0
    assert told in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize("name", WITH_PROCESSES)
def test_an_example_runs_with_processes(name, tmp_path):
    options, told = WITH_PROCESSES[name]
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *options], cwd=tmp_path, capture_output=True, text=True,
        timeout=LATEST_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


@pytest.mark.parametrize("name", [*HERE, *WITH_PROCESSES])
def test_an_example_is_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 100
