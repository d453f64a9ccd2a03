"""The command ``profile``, as a user types it, on scripts of a few lines."""

import os
import shutil
import stat

import pytest
from support import forked
from support.deadlines import LATEST_S
from support.nodes import COMMAND

from pipedream_rt.planning import files

SCRIPT = """
import sys
import torch
from torch import nn
from pipedream_rt import Pipeline

torch.manual_seed(0)
width = int(sys.argv[1])
model = nn.Sequential(nn.Linear(width, 8), nn.Linear(8, 8), nn.Linear(8, 2))
data = [(torch.randn(6, width), torch.randn(6, 2))] * 3
with Pipeline(model, stages=3, loss_fn=nn.MSELoss(), micro_batches=2,
              optimizer=(torch.optim.AdamW, {"lr": 1e-3})) as pipe:
    for result in pipe.train_epoch(data):
        print("trained")
print("the end")
"""

pytestmark = pytest.mark.processes


def profile(output, cwd):
    command = [*COMMAND, "profile", "-o", output, "train.py", "4"]
    return forked.run(command, cwd=cwd, capture_output=True, text=True, timeout=LATEST_S)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A folder with a script and the profile that it made, and what was said meanwhile."""
    folder = tmp_path_factory.mktemp("profiled")
    (folder / "train.py").write_text(SCRIPT)
    return folder, profile("my.profile", folder)


@pytest.fixture
def run(call, forking, capfd, profiled, monkeypatch, tmp_path):
    """Runs the command in a copy of that folder; returns what it and its script have said.

    The memory of a worker is not measured, since that starts an interpreter.
    """
    monkeypatch.chdir(shutil.copytree(profiled[0], tmp_path, dirs_exist_ok=True))
    quick = "from pipedream_rt.planning import profiling\nprofiling._process_bytes = lambda: 1e8\n"
    (tmp_path / "train.py").write_text(quick + SCRIPT)

    def run(*words, code=0):
        return call("profile", *words, code=code) + "".join(capfd.readouterr())

    return run


def test_the_script_runs_up_to_its_first_mini_batch(call, profiled):
    folder, first = profiled
    assert first.returncode == 0, first.stderr
    assert "3 layers" in first.stdout
    assert "of 3 samples" in first.stdout
    assert "trained" not in first.stdout
    assert "the end" not in first.stdout
    made = files.load(folder / "my.profile")
    assert [layer.parameter_bytes for layer in made.layers] == [160, 288, 72]
    assert made.layers[1].optimizer_bytes > 2 * 288
    assert 5e7 < made.process_bytes < 2e9  # of a worker without a stage
    assert "micro-batches/s" in call("plan", folder / "my.profile", "--workers", 2)


def test_the_same_model_again_costs_nothing_and_another_one_is_measured(run, profiled):
    made, file = files.load("my.profile"), profiled[0] / "my.profile"
    again = profile(file, profiled[0])
    assert "has the profile of this model already" in again.stderr  # the profile may go to stdout
    assert files.load(file) == made
    run("-o", "my.profile", "train.py", "5")
    assert files.load("my.profile").layers[0].parameter_bytes == 192


def test_scripts_that_make_no_profile_say_so(run, tmp_path):
    (tmp_path / "empty.py").write_text("")
    assert "it must make a Pipeline and give it a mini-batch" in run("empty.py", code=1)
    (tmp_path / "bad.py").write_text("raise SystemExit(7)")
    run("bad.py", code=7)
    # A profile that was there before is not taken for this script's.
    assert "has ended without a profile" in run("-o", "my.profile", "empty.py", code=1)
    mine = (tmp_path / "train.py").read_text()
    run("-o", "train.py", "empty.py", code=1)
    assert (tmp_path / "train.py").read_text() == mine
    assert "there is no file 'none.py'" in run("none.py", code=2)
    assert "there is no such folder" in run("-o", "no/such/x", "empty.py", code=1)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("output", ["/dev/stdout", "/dev/null"])
def test_a_profile_goes_to_a_device(output, profiled):
    done = profile(output, profiled[0])
    assert done.returncode == 0, done.stderr
    assert ('"pipedream-rt profile": 1' in done.stdout) == (output == "/dev/stdout")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
