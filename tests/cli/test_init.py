"""The command ``init``, as a user types it."""

import ast
import re
import sys
from pathlib import Path

import pytest
from support import forked
from support.deadlines import LATEST_S

from pipedream_rt import Observe
from pipedream_rt.job.options import Options


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's, in the folder where the command is typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, width, classes=3, *, depth):\n"
        "        super().__init__()\n"
        "        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))\n"
        "        self.head = nn.Linear(width, classes)\n"
        "    def forward(self, x):\n"
        "        return self.head(self.layers(x))\n"
        "number = 3\n"
    )
    yield tmp_path
    sys.modules.pop("my_net", None)


def test_a_script_of_a_class_says_what_to_fill_in(call, module):
    output = call("init", "my_net:Net", "--stages", 3)
    assert "train.py trains the class Net: fill in" in output
    text = (module / "train.py").read_text()
    ast.parse(text)
    assert "Net(width=..., depth=...)" in text
    assert "the arguments of Net (width, depth) and loader()" in text
    assert "STAGES, EPOCHS = 3, 1" in text
    assert "whose forward takes x." in text


@pytest.mark.processes
def test_a_script_that_is_filled_in_trains_and_reports(call, module):
    call("init", "my_net:Net")
    path = module / "train.py"
    text = path.read_text().replace("Net(width=..., depth=...)", "Net(width=4, depth=4)")
    text = re.sub(
        r"    raise SystemExit\(.*\)\n",
        "    torch.manual_seed(1)\n"
        "    for _ in range(5):\n"
        "        yield torch.randn(8, 4), torch.randint(3, (8,))\n",
        text,
    )
    path.write_text(text)
    done = forked.run(
        [sys.executable, "train.py"], capture_output=True, text=True, timeout=LATEST_S
    )
    assert done.returncode == 0, done.stderr
    assert "on the mini-batches of loader()" in done.stdout
    assert {"report.html", "run", "weights.pt"} <= {each.name for each in module.iterdir()}


def test_a_script_that_is_not_filled_in_says_so(call, module):
    call("init", "my_net:Net")
    done = forked.run(
        [sys.executable, "train.py"], capture_output=True, text=True, timeout=LATEST_S
    )
    assert done.returncode == 1
    assert "width" in done.stderr or "say in loader()" in done.stderr


def test_a_script_of_a_name(call, module):
    call("init", "org/name-1.5", "-o", "tune.py")
    text = (module / "tune.py").read_text()
    (given,) = (
        each.value
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.keyword) and each.arg == "pipeline"
    )
    options = eval(ast.unparse(given), {"Observe": Observe, "STAGES": 2})
    assert Options(**options).is_told
    assert 'NAME, STAGES = "org/name-1.5", 2' in text
    assert "PipelineTrainer" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("my_net:Nothing",), "there is no class 'Nothing'"),
        (("nowhere:Net",), "there is no class 'Net' in 'nowhere'"),
        (("my_net:number",), "is no class with a forward"),
        ((":",), "there is no class"),
        (("a'b",), "neither module:Class nor a name"),
        (("my_net.Net",), "for a class of yours, give my_net:Net"),
        (("my_net.py",), "give my_net:Class"),
        (("my_net:Net", "-o", "missing/train.py"), "cannot write to"),
    ],
)
def test_wrong_words(call, module, words, message):
    assert message in call("init", *words, code=1)


def test_a_script_that_is_there_is_not_replaced(call, module):
    Path("train.py").write_text("mine")
    assert "is there already" in call("init", "my_net:Net", code=1)
    assert Path("train.py").read_text() == "mine"
    call("init", "my_net:Net", "--force")
    assert Path("train.py").read_text() != "mine"
