"""The optional rooms are loaded for who asks for them, and for nobody else."""

import ast
import inspect
import subprocess
import sys

import pytest
from support.deadlines import LATEST_S
from support.rooms import is_optional

from pipedream_rt import extras

PROGRAM = """
import sys

def told():
    packages = ("pipedream_rt", "prometheus_client")
    print(*(name for name in sys.modules if name.split(".")[0] in packages))

from pipedream_rt import Pipeline, Training
told()
import torch
from torch.nn import Linear, functional

def trains(workers, **training):
    with Pipeline(
        [Linear(3, 3), Linear(3, 1)], stages=2, loss_fn=functional.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 0.1}), workers=workers, training=Training(**training),
    ) as pipe:
        for result in pipe.train_epoch([(torch.ones(4, 3), torch.ones(4, 1))] * 2):
            assert result.step in (0, 1)
        pipe.evaluate([(torch.ones(4, 3), torch.ones(4, 1))])
        pipe.state_dict()
    told()

if __name__ == "__main__":
    trains("serial", verify=False)
    trains("local", verify=False)
    trains("serial")
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What is loaded after the import, a serial run, one on workers and one that verifies."""
    # Where the kernel allows a fence, each group of processes has torch RPC without being asked.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEDREAM_RT_RPC", "off")
        script = tmp_path_factory.mktemp("extras") / "script.py"
        script.write_text(PROGRAM)
        command = [sys.executable, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LATEST_S)
    return [line.split() for line in done.stdout.splitlines()]


def optional(modules):
    """Those that a run has to ask for; what exports metrics is somebody else's."""
    return sorted(name for name in modules if name == "prometheus_client" or is_optional(name))


def test_the_face_loads_at_most_205_modules_and_none_that_is_optional(loaded):
    found = loaded[0]
    assert "pipedream_rt.pipeline" in found
    assert len(found) <= 205
    assert optional(found) == []


@pytest.mark.parametrize("place", [1, 2], ids=["serial", "local"])
def test_a_run_that_names_no_optional_feature_loads_none(place, loaded):
    assert "pipedream_rt.serial" in loaded[place]
    assert optional(loaded[place]) == []


def test_a_run_loads_verify_for_its_first_mini_batch(loaded):
    assert {name.split(".")[1] for name in optional(loaded[3])} == {"verify"}


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
