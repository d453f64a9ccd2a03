"""The code of layers, compared between a script and its workers."""

import functools
import importlib
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from pipedream_rt import ConfigError, Pipeline, StageFailed
from pipedream_rt.planning.code import Code, changed, code_of, refuse_other_code, replaced

SOURCE = """
    import math
    import torch
    from torch import nn
    from torch.nn.functional import relu

    SCALE = 2.0

    def scaled(x):
        return inner(x) * SCALE

    def inner(x):
        return relu(x)

    class Base(nn.Module):
        width = 4

        def finish(self, x):
            return x + 1

        @staticmethod
        def start(x):
            return x - 1

        @property
        def half(self):
            return self.width // 2

    class Layer(Base):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.finish(scaled(self.linear(self.start(x))))

    def loss(y, target):
        return (y - target).square().mean() * math.pi
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that workers can import too, whose names tests may replace."""
    name = f"code_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield importlib.import_module(name)
    del sys.modules[name]


def other(self_or_x, x=None):
    return x


def test_equal_code_is_equal_in_another_process(module):
    """Whatever the order of sets there."""
    code = (
        f"import sys, pickle, {module.__name__} as m\n"
        "from pipedream_rt.planning.code import code_of\n"
        "sys.stdout.buffer.write(pickle.dumps(code_of([m.Layer(), m.loss])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    there = pickle.loads(done.stdout)
    here = code_of([module.Layer(), module.loss])
    assert here == there
    names = {name.removeprefix(f"{module.__name__}.") for name in here.pieces}
    assert {
        "Layer.forward", "Layer.__init__", "Base.finish", "Base.start", "Base.half", "scaled()",
        "inner()", "relu()", "loss()", "torch.nn.modules.linear.Linear.forward",
    } <= names  # fmt: skip
    constants = {name.removeprefix(f"{module.__name__}.") for name in here.constants}
    assert constants == {"SCALE", "Base.width"}
    refuse_other_code(here, there)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("Layer", "forward", other),
        ("Layer", "train", other),
        ("Base", "finish", other),
        ("Base", "start", staticmethod(other)),
        ("Base", "half", property(other)),
        ("", "scaled", other),
        ("", "inner", other),
        ("", "relu", other),
        ("", "loss", other),
    ],
)
def test_what_is_replaced_is_named(module, monkeypatch, owner, name, value):
    before = code_of([module.Layer(), module.loss])
    layer, loss = module.Layer(), module.loss
    monkeypatch.setattr(getattr(module, owner) if owner else module, name, value, raising=False)
    after = code_of([layer, module.loss if name == "loss" else loss])
    names = replaced(before, after)
    full = ".".join(filter(None, (module.__name__, owner, name)))
    if name == "loss":
        assert any("loss" in each for each in before.pieces.keys() - after.pieces.keys())
    else:
        assert names == [full]
        with pytest.raises(ConfigError, match=f"other code than the script of {full}: the script"):
            refuse_other_code(before, after)


def test_a_method_of_torch_that_computes(monkeypatch):
    before = code_of([nn.Linear(1, 1), torch.optim.SGD])
    monkeypatch.setattr(nn.Linear, "forward", other)
    monkeypatch.setattr(torch.optim.SGD, "step", other)
    names = replaced(before, code_of([nn.Linear(1, 1), torch.optim.SGD]))
    assert names == ["torch.nn.modules.linear.Linear.forward", "torch.optim.sgd.SGD.step"]


def test_a_tool_that_wraps_what_is_imported_changes_nothing(module, monkeypatch):
    """As a checker of types does, and an optimizer of torch with its own step."""
    before = code_of([module.Layer(), torch.optim.SGD])

    def wrap(function):
        @functools.wraps(function)
        def checked(*args):
            return function(*args)

        return checked

    monkeypatch.setattr(module.Layer, "forward", wrap(module.Layer.forward))
    monkeypatch.setattr(module, "scaled", wrap(module.scaled))
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    after = code_of([module.Layer(), torch.optim.SGD])
    assert before != after
    assert replaced(before, after) == []


def test_another_file_of_the_same_name(module, tmp_path):
    """As on a machine that nobody has updated."""
    before = code_of([module.Layer()])
    path = tmp_path / f"{module.__name__}.py"
    path.write_text(path.read_text().replace("x + 1", "x + 2"))
    importlib.invalidate_caches()
    del sys.modules[module.__name__]
    newer = importlib.import_module(module.__name__)
    assert replaced(before, code_of([newer.Layer()])) == [f"{module.__name__}.Base.finish"]


def test_a_file_that_was_edited_since_it_was_imported_is_not_other_code(module, tmp_path):
    before = code_of([module.Layer()])
    (tmp_path / f"{module.__name__}.py").write_text("")
    assert replaced(before, code_of([module.Layer()])) == []


def test_variables(module, monkeypatch):
    before = code_of([module.Layer()])
    monkeypatch.setattr(module, "SCALE", 3.0)
    monkeypatch.setattr(module.Base, "width", 5)
    name = module.__name__
    assert changed(before, code_of([module.Layer()])) == [
        f"{name}.Base.width is 4 here and 5 there", f"{name}.SCALE is 2.0 here and 3.0 there"
    ]  # fmt: skip
    assert changed(before, Code()) == []


def test_partials_methods_and_objects(module):
    layer = module.Layer()
    for thing in (functools.partial(module.loss, target=1), layer.forward, module.Layer):
        assert code_of([thing]).pieces
    assert code_of(["a name", torch.relu, len, None]).pieces == {}


@pytest.mark.processes
def test_workers_refuse_to_compute_with_another_method(module, monkeypatch, shared_fork_server):
    def opened():
        return Pipeline(
            [module.Layer(), module.Layer()], stages=2, loss_fn=nn.functional.mse_loss,
            optimizer=(torch.optim.SGD, {"lr": 0.1}),
        )  # fmt: skip

    with opened() as pipe:
        assert pipe.submit(torch.ones(1, 4), torch.ones(1, 4)).step == 0
        pipe.flush()
    with monkeypatch.context() as context:
        context.setattr(module.Layer, "forward", lambda self, x: self.linear(x))
        with pytest.raises(
            StageFailed, match=r"other code than the script of code_\w*\.Layer\.for"
        ):
            opened()
    with opened():
        pass


@pytest.mark.processes
def test_workers_refuse_to_step_with_another_method(module, monkeypatch, shared_fork_server):
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: None)
    with pytest.raises(StageFailed, match=r"other code than the script of torch\.optim\.sgd\.SGD"):
        Pipeline(
            [nn.Linear(1, 1), nn.Linear(1, 1)], stages=2, loss_fn=nn.functional.mse_loss,
            optimizer=(torch.optim.SGD, {"lr": 0.1}),
        )  # fmt: skip
