"""The code of layers, compared between a script and its workers."""

import functools
import importlib
import pickle
import sys
import textwrap
import types

import pytest
import torch
from support import forked
from support.pinned import Pipeline
from torch import nn

from pipedream_rt import ConfigError, StageFailed
from pipedream_rt.models import code as code_module
from pipedream_rt.models.code import code_of, refuse_other_code

SOURCE = """
    import functools
    import math
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.nn.functional import relu

    SCALE = 2.0
    SIZES = (1, 2)

    def scaled(x):
        return inner(x) * SCALE + sum(SIZES)

    def inner(x):
        return F.gelu(relu(x))

    def squared(x):
        return x * x

    TABLE = {"squared": squared}

    @functools.lru_cache
    def cached(n):
        return n + 1

    def times(factor):
        def decorate(function):
            @functools.wraps(function)
            def multiplied(*args):
                return function(*args) * factor
            return multiplied
        return decorate

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x ** 3

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Helper:
        def __init__(self, n):
            self.n = n

        def add(self, x):
            return x + self.n

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

        @times(2.0)
        def doubled(self, x):
            return x

    class Layer(Base):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.act = squared

        def forward(self, x):
            '''The forward.'''
            x = self.finish(scaled(self.linear(self.start(x)))) * self.half
            x = 1e-3 * Cube.apply(Helper(cached(1)).add(TABLE["squared"](self.act(x))))
            return self.doubled(x)

        def unused(self):
            return 1

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


def replaced(before, after):
    return [name for name in before if name in after and before[name] != after[name]]


def other(self_or_x, x=None):
    return x


def test_equal_code_is_equal_in_another_process(module):
    """Whatever the order of sets there."""
    code = (
        f"import sys, pickle, {module.__name__} as m\n"
        "from pipedream_rt.models.code import code_of\n"
        "sys.stdout.buffer.write(pickle.dumps(code_of([m.Layer(), m.loss])))"
    )
    done = forked.run([sys.executable, "-c", code], capture_output=True, check=True)
    there = pickle.loads(done.stdout)
    here = code_of([module.Layer(), module.loss])
    assert here == there
    names = {name.removeprefix(f"{module.__name__}.") for name in here}
    assert {
        "Layer.forward", "Base.finish", "Base.start", "Base.half", "scaled", "inner", "relu",
        "loss", "squared", "cached", "Cube.forward", "Cube.backward", "Helper.add", "Base.doubled",
        "torch.nn.modules.linear.Linear.forward", "torch.nn.functional.gelu",
        f"the file of {module.__name__}",
    } <= names  # fmt: skip
    assert not names & {"Layer.__init__", "torch.nn.modules.linear.Linear.reset_parameters"}
    refuse_other_code(here, there)


def wrapped(function):
    @functools.wraps(function)
    def new(*args):
        return function(*args) * 2

    return new


class Other:
    def __init__(self, n):
        pass

    def add(self, x):
        return x


REPLACED = {
    "forward": lambda m, set_: set_(m.Layer, "forward", other),
    "a method of a base": lambda m, set_: set_(m.Base, "finish", other),
    "a static method": lambda m, set_: set_(m.Base, "start", staticmethod(other)),
    "a property": lambda m, set_: set_(m.Base, "half", property(other)),
    "a method, by a wrapper": lambda m, set_: set_(m.Layer, "forward", wrapped(m.Layer.forward)),
    "a method, by another one": lambda m, set_: set_(m.Base, "finish", m.Layer.unused),
    "a function": lambda m, set_: set_(m, "scaled", other),
    "a function of a function": lambda m, set_: set_(m, "inner", other),
    "an imported function": lambda m, set_: set_(m, "relu", other),
    "a cached function": lambda m, set_: set_(m, "cached", functools.lru_cache(lambda n: 7)),
    "a function of torch": lambda m, set_: set_(torch.nn.functional, "gelu", other),
    "a method of torch": lambda m, set_: set_(nn.Linear, "forward", other),
    "an autograd function": lambda m, set_: set_(m.Cube, "backward", staticmethod(other)),
    "a class that is used": lambda m, set_: set_(m, "Helper", Other),
    "a method of a class that is used": lambda m, set_: set_(m.Helper, "add", other),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_is_found(module, monkeypatch, name):
    layer = module.Layer()
    before = code_of([layer, module.loss])
    REPLACED[name](module, monkeypatch.setattr)
    found = replaced(before, code_of([layer, module.loss]))
    assert len(found) == 1, found
    with pytest.raises(ConfigError, match=r"other code than the script of .*: the script has re"):
        refuse_other_code(before, code_of([layer, module.loss]))


@pytest.mark.parametrize(
    "name", ["train", "__repr__", "reset_parameters", "__init__", "__sizeof__"]
)
def test_what_no_worker_calls_may_be_replaced(module, monkeypatch, name):
    layer = module.Layer()
    before = code_of([layer])
    monkeypatch.setattr(module.Layer, name, other, raising=False)
    assert replaced(before, code_of([layer])) == []


def test_layers_that_workers_build_are_built_by_the_same_code(module, monkeypatch):
    layer = module.Layer()
    before = code_of([layer], built=True)
    monkeypatch.setattr(module.Layer, "__init__", other)
    assert replaced(before, code_of([layer], built=True)) == [f"{module.__name__}.Layer.__init__"]


def test_the_step_of_an_optimizer(monkeypatch):
    """To which torch adds a hook when one is made."""
    before = code_of([torch.optim.AdamW])
    torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1)
    assert replaced(before, code_of([torch.optim.AdamW])) == []
    monkeypatch.setattr(torch.optim.AdamW, "step", other)
    assert replaced(before, code_of([torch.optim.AdamW])) == ["torch.optim.adamw.AdamW.step"]


def test_what_torch_wraps_anew_when_it_is_called(module, monkeypatch):
    """Its own functions are those of its version; one of the user's that it wraps is not."""
    before = code_of([torch.optim.AdamW])
    adam = sys.modules["torch.optim.adam"]
    monkeypatch.setattr(adam, "_fused_adam", torch.no_grad()(adam._fused_adam))
    assert replaced(before, code_of([torch.optim.AdamW])) == []
    monkeypatch.setattr(module.Layer, "forward", torch.no_grad()(module.Layer.forward))
    before = code_of([module.Layer])
    monkeypatch.setattr(module.Layer, "forward", torch.no_grad()(module.Base.finish))
    assert replaced(before, code_of([module.Layer])) == [f"{module.__name__}.Layer.forward"]


def test_a_tool_that_wraps_what_is_imported_changes_nothing(module, monkeypatch):
    """As a checker of types does."""
    before = code_of([module.Layer()])
    tool = {"__name__": "typeguard._decorators"}
    exec(
        "import functools\n"
        "def wrap(function):\n"
        "    @functools.wraps(function)\n"
        "    def checked(*args):\n"
        "        return function(*args)\n"
        "    return checked\n",
        tool,
    )
    monkeypatch.setattr(module.Layer, "forward", tool["wrap"](module.Layer.forward))
    monkeypatch.setattr(module, "scaled", tool["wrap"](module.scaled))
    assert code_of([module.Layer()]) == before


def test_what_a_layer_of_the_script_reads_is_compared_and_the_layer_is_not(module, monkeypatch):
    """The layer travels with its code."""
    variables = {"__name__": "__main__", "nn": nn, "scaled": module.scaled}
    source = "class Mine(nn.Module):\n    def forward(self, x):\n        return scaled(x)\n"
    exec(source, variables)
    before = code_of([variables["Mine"]()])
    assert "__main__.Mine.forward" not in before
    monkeypatch.setattr(module, "inner", other)
    assert replaced(before, code_of([variables["Mine"]()])) == [f"{module.__name__}.inner"]


class Bare:
    """A proxy without anything behind it."""

    @property
    def __class__(self):
        raise RuntimeError("nothing is bound")

    def __getattr__(self, name):
        raise RuntimeError("nothing is bound")


def test_odd_things_in_a_module(module, monkeypatch):
    for name, value in {"proxy": Bare(), "lazy": type("Lazy", (types.ModuleType,), {
        "__getattribute__": lambda self, name: 1 // 0
    })("lazy")}.items():  # fmt: skip
        monkeypatch.setattr(module, name, value, raising=False)
    assert f"{module.__name__}.Layer.forward" in code_of([module.Layer()])


@pytest.mark.parametrize(
    ("edit", "differs"),
    [
        (lambda text: text.replace("x + 1", "x + 2"), True),
        (lambda text: "# a comment\n\n" + text.replace("return 1", "return 1  # one"), False),
    ],
)
def test_another_file_of_the_same_name(module, tmp_path, edit, differs):
    """As on a machine that nobody has updated. Comments do not count."""
    before = code_of([module.Layer()])
    path = tmp_path / f"{module.__name__}.py"
    path.write_text(edit(path.read_text()))
    code_module._digest.cache_clear()  # as in another process
    found = replaced(before, code_of([module.Layer()]))
    assert found == [f"the file of {module.__name__}"] * differs
    if differs:
        with pytest.raises(ConfigError, match=r"in the file of code_\w*: a file was edited"):
            refuse_other_code(before, code_of([module.Layer()]))


def test_a_file_that_cannot_be_read_now_is_not_other_code(module, tmp_path):
    """Nor is it remembered as one that cannot be read."""
    before = code_of([module.Layer()])
    path, away = tmp_path / f"{module.__name__}.py", tmp_path / "away"
    path.rename(away)
    code_module._digest.cache_clear()  # as in another process
    refuse_other_code(code_of([module.Layer()]), before)
    away.rename(path)
    assert code_of([module.Layer()]) == before


@pytest.mark.parametrize(
    ("holds", "expected"),
    [("site-packages/", True), ("mine/pack-1.dist-info/", True), ("mine/", False)],
)
def test_what_lies_among_packages_is_not_the_users_own(tmp_path, monkeypatch, holds, expected):
    folder = tmp_path / holds.split("/")[0]
    (tmp_path / holds).mkdir(parents=True)
    name = f"lies_in_{tmp_path.name}"  # answers are kept
    module = types.ModuleType(name)
    module.__file__ = str(folder / f"{name}.py")
    monkeypatch.setitem(sys.modules, name, module)
    assert code_module.is_installed(name) is expected
    module.__file__ = str(folder / "gone" / f"{name}.py")
    monkeypatch.setitem(sys.modules, f"{name}_gone", module)
    assert not code_module.is_installed(f"{name}_gone")


def test_partials_methods_and_objects(module):
    layer = module.Layer()
    for thing in (functools.partial(module.loss, target=1), layer.forward, module.Layer):
        assert f"{module.__name__}.loss" in code_of([thing])
    assert not [n for n in code_of([torch.relu, len, None]) if not n.startswith("torch.nn.")]


@pytest.mark.processes
def test_workers_refuse_to_compute_with_another_method(module, monkeypatch):
    def opened():
        return Pipeline(
            [module.Layer(), module.Layer()], stages=2, loss_fn=nn.functional.mse_loss,
            optimizer=(torch.optim.SGD, {"lr": 1e-9}), on_nan="ignore",
        )  # fmt: skip

    with opened() as pipe:
        assert pipe.submit(torch.ones(1, 4), torch.ones(1, 4)).step == 0
        pipe.flush()
    with monkeypatch.context() as context:
        context.setattr(module.Layer, "forward", lambda self, x: self.linear(x))
        words = r"other code than the script of code_\w*\.Layer\.for"
        with pytest.raises(StageFailed, match=words):
            opened()
    with opened():
        pass


@pytest.mark.processes
def test_workers_refuse_to_step_with_another_method(module, monkeypatch):
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: None)
    with pytest.raises(StageFailed, match=r"other code than the script of torch\.optim\.sgd\.SGD"):
        Pipeline(
            [nn.Linear(1, 1), nn.Linear(1, 1)], stages=2, loss_fn=nn.functional.mse_loss,
            optimizer=(torch.optim.SGD, {"lr": 0.1}),
        )  # fmt: skip
