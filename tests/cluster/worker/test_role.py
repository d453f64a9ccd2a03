"""A worker opens no pipelines of its own: else each of its workers would open the next one."""

import os
import subprocess
import sys

import pytest
from support.deadlines import LATEST_S

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

GUARDED = TRAINS + '\nif __name__ == "__main__":\n    train()\n'


def run(folder, *words):
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=LATEST_S,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("place", ["mine.py", "mine/__init__.py"])
def test_a_module_that_trains_when_it_is_imported_wants_a_guard(tmp_path, place):
    (tmp_path / "mine").mkdir()
    (tmp_path / place).write_text(TRAINS + "\ntrain()\n")
    name = place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    code, out, err = run(tmp_path, "-c", f"import {name}")
    assert code == 1
    assert "trained" not in out
    assert out.count("imported") <= 3  # in the script and once in each of its workers
    words = f"imports the module {name!r}, because it needs a class or function of it, and {name!r}"
    assert "pipedream_rt.errors.ConfigError: worker 'worker-" in err
    assert words in err
    assert '`if __name__ == "__main__":`' in err


@pytest.mark.processes
@pytest.mark.parametrize("words", [["-m", "mine"], ["-c", "import mine; mine.train()"]])
def test_with_a_guard_it_trains_however_it_is_started(tmp_path, words):
    (tmp_path / "mine.py").write_text(GUARDED)
    code, out, err = run(tmp_path, *words)
    assert (code, out.count("trained")) == (0, 1), err


@pytest.mark.processes
def test_a_layer_that_opens_a_pipeline_is_told_that_only_the_script_can(tmp_path):
    opens = TRAINS.replace("Layer(nn.Linear): pass", "Layer(nn.Linear):\n    def forward(self, x):"
                           "\n        Pipeline([nn.Linear(2, 2)], workers='serial')")  # fmt: skip
    (tmp_path / "script.py").write_text(opens + "\ntrain()\n")
    code, _, err = run(tmp_path, "script.py")
    assert code == 1
    assert "in which a layer, the loss or another function that its stages compute opens" in err
