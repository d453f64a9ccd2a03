"""Pipelines in a notebook: cells that are run again, Ctrl-C, and what is shown."""

import logging
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch.nn.functional as F
from support import forked
from support.deadlines import LATEST_S
from support.models import mlp, regression
from support.pinned import Flat as Pipeline
from torch.optim import SGD

import pipedream_rt
from pipedream_rt import Observe, notebook, plan_for

DATA = regression(12)


class Formatter:
    """The formatter of IPython, as far as it is used."""

    def __init__(self):
        self.by_name = {}

    def for_type_by_name(self, module, name, function):
        self.by_name[module, name] = function


class Shell:
    """A shell of IPython in a notebook, as far as it is used."""

    def __init__(self):
        self.kernel = object()
        self.displayhook = SimpleNamespace(prompt_count=1)
        formatter = Formatter()
        self.display_formatter = type("", (), {"formatters": {"text/html": formatter}})()
        self.shown = formatter.by_name


@pytest.fixture
def shell(monkeypatch):
    found = Shell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: found))
    return found


def opened(**options):
    given = {"stages": 2, "loss_fn": F.mse_loss, "optimizer": (SGD, {"lr": 0.01})}
    return Pipeline(mlp(), **{**given, "workers": "serial", **options})


def test_a_cell_that_is_run_again_closes_the_pipeline_of_before(shell, caplog):
    pipe = opened()
    shell.displayhook.prompt_count = 2
    again = opened()
    assert pipe.state.value == "closed"
    assert "of cell 1 is closed, as this cell opens another one" in caplog.text
    again.close()


@pytest.mark.processes
def test_it_does_with_worker_processes_too(shell):
    pipe = opened(workers="local")
    shell.displayhook.prompt_count = 2
    with opened(workers="local") as again:
        assert pipe.state.value == "closed"
        assert len(list(again.train_epoch(DATA))) == 12


@pytest.mark.parametrize("workers", ["serial", pytest.param("local", marks=pytest.mark.processes)])
def test_two_pipelines_of_one_cell_stay(shell, workers):
    with opened(workers=workers) as one, opened(workers=workers) as other:
        assert one.state.value == other.state.value == "open"


def test_outside_of_a_notebook_nothing_is_closed():
    with opened() as one, opened() as other:
        assert one.state.value == other.state.value == "open"
    notebook.close_earlier()
    assert notebook.calm_call(list, range(3)) == [0, 1, 2]


def test_what_was_chosen_and_compared_is_told_in_the_cell(shell, capsys, monkeypatch):
    for name in (None, "pipedream_rt"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    given = {"stages": 2, "loss_fn": F.mse_loss, "optimizer": (SGD, {"lr": 0.01})}
    with pipedream_rt.Pipeline(mlp(), workers="serial", **given) as pipe:
        list(pipe.train_epoch(DATA[:2]))
        pipe.state_dict()
    told, red = capsys.readouterr()
    chosen, *_, compared = told.splitlines()
    assert chosen == 'chosen: schedule="1f1b", micro_batches=8: it learns as plain PyTorch does'
    assert compared.startswith("the first mini-batch is what plain PyTorch computes, in ")
    assert red == ""


def press():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("workers", ["serial", pytest.param("local", marks=pytest.mark.processes)])
def test_ctrl_c_leaves_a_pipeline_that_can_be_used(shell, workers):
    def loader():
        for i, item in enumerate(DATA):
            if i == 5:
                press()  # while the pipeline is at work
            yield item

    before = signal.getsignal(signal.SIGINT)
    with opened(workers=workers) as pipe:
        seen = []

        def train():
            seen.extend(result.step for result in pipe.train_epoch(loader()))

        with pytest.raises(KeyboardInterrupt):
            train()
        assert 0 < len(seen) < 12
        assert pipe.state.value == "open"
        assert signal.getsignal(signal.SIGINT) is before
        assert len(list(pipe.train_epoch(DATA))) == 12
        assert pipe.evaluate(DATA) > 0


def test_ctrl_c_in_an_evaluation(shell):
    def loader():
        yield from DATA[:3]
        press()
        yield from DATA[3:]

    with opened() as pipe:
        with pytest.raises(KeyboardInterrupt):
            pipe.evaluate(loader())
        assert pipe.evaluate(DATA) > 0
        assert len(list(pipe.train_epoch(DATA))) == 12


def test_a_second_ctrl_c_is_raised_at_once(shell):
    interrupts = notebook.Interrupts()
    with interrupts.held():
        press()
        assert interrupts.came
        with pytest.raises(KeyboardInterrupt):
            press()


def test_a_break_leaves_no_handler(shell):
    before = signal.getsignal(signal.SIGINT)
    with opened() as pipe:
        for _ in pipe.train_epoch(DATA):
            break
        assert signal.getsignal(signal.SIGINT) is before
        assert len(list(pipe.train_epoch(DATA))) == 12


def test_plans_results_and_traces_are_shown(shell):
    with opened(observe=Observe(trace=True)) as pipe:
        (result,) = pipe.train_epoch(DATA[:1])
        shown = {name: function for (_, name), function in shell.shown.items()}
        assert "<td>0</td>" in shown["Plan"](pipe.plan)
        assert "&lt;= 1" in shown["Plan"](pipe.plan)
        assert f"<td>{result.step}</td>" in shown["StepResult"](result)
        assert "<svg" in shown["Trace"](pipe.trace())
        html = pipe.explain()._repr_html_()
        assert "<p>schedule async-1f1b, 2 micro-batches per update<br>" in html
        assert html.count("<tr>") == 3
        assert "peak MiB</th>" in pipe._repr_html_()
    assert "closed" in pipe._repr_html_()
    assert shown["Plan"](plan_for("gpipe", num_stages=3, per_update=3)).count("<tr>") == 4


def test_what_is_registered_is_there():
    """The formatters go by the names of modules and classes."""
    from importlib import import_module

    for (module, name), (home, function) in notebook._SHOWN.items():
        assert hasattr(import_module(module), name)
        assert hasattr(import_module(home), function)


def test_in_a_real_shell(tmp_path):
    """A cell is run, run again, and shown, by IPython itself."""
    pytest.importorskip("IPython", reason="IPython is not installed")
    import sys

    script = tmp_path / "cells.py"
    script.write_text(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "cell = '''\n"
        "import torch\n"
        "from torch import nn\n"
        "from pipedream_rt import Pipeline\n"
        "pipe = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], stages=2, workers='serial',\n"
        "                loss_fn=nn.functional.mse_loss, optimizer=(torch.optim.SGD, {}))\n"
        "plan = pipe.plan\n"
        "'''\n"
        "shell.run_cell(cell, store_history=True).raise_error()\n"
        "first = shell.user_ns['pipe']\n"
        "shell.run_cell(cell, store_history=True).raise_error()\n"
        "print(first.state.value, shell.user_ns['pipe'].state.value)\n"
        "data, _ = shell.display_formatter.format(shell.user_ns['plan'])\n"
        "print('<table>' in data['text/html'])\n"
        "data, _ = shell.display_formatter.format(shell.user_ns['pipe'])\n"
        "print('<pre>' in data['text/html'])\n"
        "shell.user_ns['pipe'].close()\n"
    )
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    done = forked.run(
        [sys.executable, "-W", "ignore", script], env=environment, capture_output=True, text=True,
        timeout=LATEST_S,
    )  # fmt: skip
    assert done.stdout.split() == ["closed", "open", "True", "True"], done.stdout + done.stderr
