"""The optional rooms are loaded for who asks for them, and for nobody else."""

import ast
import inspect
import subprocess
import sys

import pytest
from support.rooms import is_optional

from pipedream_rt import extras

LOADED = """
import sys
print(*(name for name in sys.modules if name.split(".")[0] == "pipedream_rt"))
"""

TRAINS = """
import torch
from torch.nn import Linear, functional

from pipedream_rt import Pipeline, Training

if __name__ == "__main__":
    with Pipeline(
        [Linear(3, 3), Linear(3, 1)], stages=2, loss_fn=functional.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 0.1}), workers="WORKERS", training=Training(MORE),
    ) as pipe:
        for result in pipe.train_epoch([(torch.ones(4, 3), torch.ones(4, 1))] * 2):
            assert result.step in (0, 1)
        pipe.evaluate([(torch.ones(4, 3), torch.ones(4, 1))])
        pipe.state_dict()
"""


def loaded_by(program, tmp_path, monkeypatch):
    """The modules of ours that a program loads in the process of the script."""
    # Where the kernel allows a fence, each group of processes has torch RPC without being asked.
    monkeypatch.setenv("PIPEDREAM_RT_RPC", "off")
    script = tmp_path / "script.py"
    script.write_text(program + LOADED)
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def optional(modules):
    return sorted(filter(is_optional, modules))


def test_the_face_loads_at_most_205_modules_and_none_that_is_optional(tmp_path, monkeypatch):
    found = loaded_by("from pipedream_rt import Pipeline", tmp_path, monkeypatch)
    assert "pipedream_rt.pipeline" in found
    assert len(found) <= 205
    assert optional(found) == []


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["serial", "local"])
def test_a_run_that_names_no_optional_feature_loads_none(workers, tmp_path, monkeypatch):
    program = TRAINS.replace("WORKERS", workers).replace("MORE", "verify=False")
    assert optional(loaded_by(program, tmp_path, monkeypatch)) == []


def test_a_run_loads_verify_for_its_first_mini_batch(tmp_path, monkeypatch):
    program = TRAINS.replace("WORKERS", "serial").replace("MORE", "")
    found = optional(loaded_by(program, tmp_path, monkeypatch))
    assert {name.split(".")[1] for name in found} == {"verify"}


def test_every_name_leads_to_an_optional_room():
    for name, module in extras._HOMES.items():
        assert is_optional(module)
        assert getattr(extras, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = extras.nothing


def test_type_checkers_know_every_name():
    """The names are written twice: for type checkers, and for who asks."""
    known = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(inspect.getsource(extras)))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert known == extras._HOMES
