"""A worker opens no pipelines of its own: else each of its workers would open the next one."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from support.deadlines import LATEST_S
from torch import nn

from pipedream_rt import ConfigError, Pipeline, StageFailed

pytestmark = pytest.mark.processes

TRAINS = """
import torch.nn.functional as F, torch
from torch import nn
from pipedream_rt import Pipeline, prepare

prepare()
print("imported", flush=True)
class Layer(nn.Linear): pass

def train():
    layers = [Layer(2, 2), Layer(2, 2)]
    with Pipeline(layers, stages=2, workers="local", loss_fn=F.mse_loss) as pipe:
        pipe.evaluate([(torch.ones(4, 2), torch.ones(4, 2))])
        print("trained", flush=True)
"""


@pytest.mark.usefixtures("environment")
def test_a_module_that_trains_when_it_is_imported_wants_a_guard(tmp_path, monkeypatch, capfd):
    (tmp_path / "mine.py").write_text(TRAINS + "\ntrain()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StageFailed) as found:
        importlib.import_module("mine")
    assert isinstance(found.value.__cause__, ConfigError)
    said, out = str(found.value), capfd.readouterr().out
    assert "ConfigError: worker 'worker-" in said
    words = "imports the module 'mine', because it needs a class or function of it, and 'mine'"
    assert words in said
    assert '`if __name__ == "__main__":`' in said
    assert "trained" not in out
    assert 2 <= out.count("imported") <= 3  # here and once in each of its workers


def test_with_a_guard_it_trains(tmp_path):
    (tmp_path / "mine.py").write_text(TRAINS + '\nif __name__ == "__main__":\n    train()\n')
    done = subprocess.run(
        [sys.executable, "-m", "mine"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}, timeout=LATEST_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout.count("trained")) == (0, 1), done.stderr


@pytest.mark.usefixtures("environment")
def test_a_layer_that_opens_a_pipeline_is_told_that_only_the_script_can():
    class Opens(nn.Linear):
        def forward(self, x):
            Pipeline([nn.Linear(2, 2)], workers="serial")

    layers = [nn.Linear(2, 2), Opens(2, 2)]
    words = (
        "in which a layer, the loss or another function that its stages compute opens a pipeline"
    )
    with (
        pytest.raises(StageFailed, match=words),
        Pipeline(layers, stages=2, workers="local", loss_fn=nn.functional.mse_loss) as pipe,
    ):
        pipe.evaluate([(torch.ones(4, 2), torch.ones(4, 2))])
