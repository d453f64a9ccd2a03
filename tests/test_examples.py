"""The examples that show how a habit of another library is done here run as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import LATEST_S

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

RUNS = {
    "sequential_classifier.py": (
        ["--workers=serial", "--epochs=2", "--samples=512"], "accuracy here: "
    ),
    "split_points.py": (["--workers=serial", "--steps=20"], "at last"),
    "balance.py": (["--workers=serial", "--steps=8", "--width=64"], "mini-batches/s"),
    "slow_link.py": (["--workers=serial", "--stages=2", "--steps=12"], "async-1f1b, slack 2"),
    "own_codec.py": ([], "Signs: loss"),
    "tensor_parallel.py": (["--workers=serial"], "at last"),
    "rpc_resnet.py": ([], "by hand the same: True"),
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs(name, tmp_path):
    options, told = RUNS[name]
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *options], cwd=tmp_path, capture_output=True, text=True,
        timeout=LATEST_S,
    )  # fmt: skip
    busy = "Other processes may be using the machine" in done.stderr
    if name == "balance.py" and busy:
        pytest.skip("the machine is too busy for layers to be measured")
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


@pytest.mark.parametrize("name", RUNS)
def test_an_example_is_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 100
