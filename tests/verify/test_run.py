"""A pipeline can be asked whether it computes what plain PyTorch does; asking changes nothing."""

import logging
import os
import random
import signal
import sys

import numpy as np
import pytest
import torch
from support import both, forked
from support.deadlines import LATEST_S
from support.late import Late, too_late
from support.verified import LooksAround
from torch import nn

from pipedream_rt import Clip, ConfigError, LayerSpec, StageFailed, Training

SGD = (torch.optim.SGD, {"lr": 0.1})
ASK_ALONE = Training(verify=False)


def batches(count=3):
    return both.batches(count)


def linear():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8))


def opened(model, data, workers="serial", **options):
    options = {"micro_batches": 2, "training": ASK_ALONE, "workers": workers, **options}
    return both.opened(model, example=data[0], **options)


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "schedule"), [("serial", "1f1b"), ("local", "async-1f1b")])
def test_asking_changes_nothing(workers, schedule):
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) / (1 + self.calls % 3)

    class Augmented(torch.utils.data.Dataset):
        def __len__(self):
            return 48

        def __getitem__(self, i):
            return torch.full((8,), i + random.random()), torch.full((8,), np.random.rand())

    def run(asks):
        torch.manual_seed(0)
        model = nn.Sequential(Counting(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 8))
        loader = torch.utils.data.DataLoader(Augmented(), batch_size=8, shuffle=True)
        random.seed(1)
        np.random.seed(1)
        with opened(model, batches(), workers, schedule=schedule) as pipe:
            losses = []
            for _ in range(2):
                if asks:
                    pipe.verify(loader, steps=2)
                losses += [result.loss for result in pipe.train_epoch(loader)]
            drawn = torch.rand(1).item(), random.random(), np.random.rand()
            return losses, pipe.fingerprint().digest, drawn, model[0].calls

    assert run(asks=True) == run(asks=False)


class Draws(nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.uniform(0.5, 1.5)


def test_in_eval_mode_it_is_the_same_and_values_are_counted():
    with opened(linear(), batches()) as pipe:
        assert pipe.verify(batches()).values > 40
        pipe.train(False)
        assert pipe.verify(batches())


def test_what_cannot_be_asked_is_refused():
    data = batches()
    with opened(linear(), data) as pipe:
        with pytest.raises(ConfigError, match="gives each item once"):
            pipe.verify(iter(data))
        with pytest.raises(ConfigError, match="yielded nothing"):
            pipe.verify([])
        with pytest.raises(ConfigError, match="steps"):
            pipe.verify(data, steps=0)
        with pytest.raises(ConfigError, match="takes a loader"):
            pipe.verify(3)
        assert len(list(pipe.train_epoch(data))) == 3
    needs = pytest.raises(ConfigError, match="needs loss_fn and optimizer")
    with opened(linear(), data, optimizer=None) as pipe, needs:
        pipe.verify(data)
    specs = [LayerSpec(nn.Linear, 8, 8) for _ in range(2)]
    with opened(specs, data, training=Training()) as pipe:
        with pytest.raises(ConfigError, match="no values of this model"):
            pipe.verify(data)
        assert "no values of its weights" in " ".join(pipe.explain().split())


# -- the first mini-batch -----------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["serial", "local"])
def test_the_first_mini_batch_is_compared_and_it_is_said(workers, caplog):
    """Its bits are those without: see `test_innocent.py`."""

    def run(training):
        with opened(linear(), batches(), workers, training=training) as pipe:
            assert len(list(pipe.train_epoch(batches()))) == 3
            return " ".join(pipe.explain().split())

    with caplog.at_level(logging.INFO):
        assert "the first mini-batch is computed in plain PyTorch too" in run(Training())
        assert "the first mini-batch is what plain PyTorch computes" in caplog.text
        caplog.clear()
        assert "as Training(verify=False) says" in run(ASK_ALONE)
    assert "plain PyTorch computes" not in caplog.text


@pytest.mark.parametrize("clip", [None, Clip(norm=0.1)])
def test_a_large_model_is_compared_in_part_and_it_is_said_what_it_takes(clip, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 8))
    with (
        caplog.at_level(logging.INFO),
        opened(model, batches(), training=Training(clip=clip)) as pipe,
    ):
        assert len(list(pipe.train_epoch(batches()))) == 3
        found = pipe.verify(batches())
    assert found, str(found)
    # Where gradients are clipped by the norm of all of them, by itself only losses are compared.
    losses, weights = 2, 5
    count = losses + (0 if clip else weights)
    assert f"is what plain PyTorch computes, in {count} values" in caplog.text
    assert "3 mini-batches, with up to " in caplog.text
    assert "verify: mini-batch 3 of 3, 0.0 s left" in caplog.text


@pytest.fixture
def said(caplog):
    """Trains a model whose first mini-batch is compared, and returns what was said."""

    def train(model, before=lambda pipe: None):
        with caplog.at_level(logging.INFO), opened(model, batches(), training=Training()) as pipe:
            before(pipe)
            assert len(list(pipe.train_epoch(batches()))) == 3
        return caplog.text

    return train


def looking_around():
    return nn.Sequential(LooksAround(8, 8), nn.Linear(8, 8))


def test_what_takes_too_long_is_left_out(said, monkeypatch):
    monkeypatch.setattr("pipedream_rt.verify.run._is_after", lambda until: True)
    text = said(looking_around())
    assert "is what plain PyTorch computes, in 1 values" in text
    assert "two micro-batches as one" not in text


def test_samples_that_depend_on_each_other_are_told_of(said):
    assert "the loss of two micro-batches as one" in said(looking_around())


def test_a_model_that_draws_by_itself_is_left_alone(said):
    text = said(nn.Sequential(Draws(8, 8), nn.Linear(8, 8)))
    assert "draws random numbers of Python or NumPy" in text


def test_a_run_that_was_touched_before_is_not_compared(said):
    def double(module):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter *= 2

    text = said(linear(), before=lambda pipe: pipe.on_stages(double))
    assert "do not have the weights that the script's model has" in text


MODULE = """
from torch import nn
SCALE = 1.0
class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * SCALE
"""

SCRIPT = """
import torch, scaled_by_a_global as module
from torch import nn
from pipedream_rt import Pipeline
if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    for module.SCALE in (1.0, 0.5):
        with Pipeline(
            nn.Sequential(module.Scaled(8, 8), nn.Linear(8, 8)), stages=2, loss_fn=nn.MSELoss(),
            optimizer=(torch.optim.SGD, {"lr": 0.1}), schedule="1f1b",
        ) as pipe:
            print(len(list(pipe.train_epoch([(x, x)] * 3))))
            print(pipe.verify([(x, x)]))
"""


@pytest.mark.processes
def test_workers_that_go_by_another_global_are_found(tmp_path):
    """First they go by the same one."""
    (tmp_path / "scaled_by_a_global.py").write_text(MODULE)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = forked.run(
        [sys.executable, script], capture_output=True, text=True, timeout=LATEST_S, check=False
    )
    three, same = done.stdout.splitlines()
    assert three == "3", done.stderr
    assert "the same as plain PyTorch" in same
    assert done.returncode == 1
    assert "the first mini-batch is not what plain PyTorch computes: the loss" in done.stderr
    assert "so it is the workers: a global" in done.stderr


@pytest.mark.parametrize("steps", [2, 5])
def test_run_with_verify(steps, monkeypatch, capfd):
    """As ``pipedream-rt run --verify`` asks a script for it; see `tests/cli/test_run.py`."""
    monkeypatch.setenv("PIPEDREAM_RT_VERIFY", "3")
    data = batches(steps)
    with opened(linear(), data) as pipe:
        assert len(list(pipe.train_epoch(data))) == steps
    told = capfd.readouterr().err
    assert f"{min(steps, 3)} mini-batches" in told
    assert "verified: the same as plain PyTorch" in told


def test_an_error_of_a_stage_stays_what_it_is():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 7))
    with opened(model, batches(), training=Training()) as pipe, pytest.raises(StageFailed):
        list(pipe.train_epoch(batches()))


class SignalsInScript(nn.Module):
    """Sends the script's process a signal in its first training forward there."""

    def __init__(self):
        super().__init__()
        self.pid = os.getpid()

    def forward(self, x):
        if self.training and os.getpid() == self.pid:
            signal.raise_signal(signal.SIGUSR1)
        return x


@pytest.mark.processes
def test_what_a_signal_handler_raises_in_the_comparison_reaches_the_script():
    """It is no error of the user's code, which would only be left out of the comparison."""
    data = batches()
    signal.signal(signal.SIGUSR1, too_late)
    model = nn.Sequential(nn.Linear(8, 8), SignalsInScript(), nn.Linear(8, 8))
    with opened(model, data, "local", training=Training()) as pipe:
        with pytest.raises(Late):
            list(pipe.train_epoch(data))
        assert len(list(pipe.train_epoch(data))) == len(data)
