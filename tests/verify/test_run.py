"""A pipeline can be asked whether it computes what plain PyTorch does; asking changes nothing."""

import logging
import os
import random
import signal
import sys
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from support import forked
from support.deadlines import LATEST_S
from support.late import Late, too_late
from support.models import batches as token_batches
from support.models import kitchen_sink
from support.pinned import Flat as Pipeline
from torch import nn
from torch.nn import functional as F

from pipedream_rt import (
    Clip,
    ConfigError,
    LayerSpec,
    Layout,
    StageFailed,
    Training,
    Whole,
)
from pipedream_rt.codecs import BFloat16

SGD = (torch.optim.SGD, {"lr": 0.1})
ASK_ALONE = Training(verify=False)


def batches(count=3, samples=8):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, samples, 8, generator=generator).unbind() for _ in range(count)]


class Between(nn.Module):
    """No sequence, with dropout between its layers, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8)

    def forward(self, x):
        x = F.dropout(torch.tanh(self.drop(self.one(x))), 0.2, self.training)
        return self.two(self.drop(x))


class OwnLoss(Between):
    def forward(self, x, labels):
        made = super().forward(x)
        return {"loss": F.mse_loss(made, labels), "made": made}


class Margin(nn.Module):
    """A loss with a weight and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output, target):
        self.seen += 1
        return ((output - target) ** 2 * self.weight).mean()


def tied():
    one, two = nn.Linear(8, 8), nn.Linear(8, 8)
    return nn.Sequential(one, nn.Tanh(), two, nn.Tanh(), one)


def model_of(kind):
    torch.manual_seed(0)
    return kind()


def linear():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8))


def opened(model, data, workers="serial", **options):
    given = {
        "stages": 2, "example": data[0], "loss_fn": F.mse_loss, "optimizer": SGD,
        "schedule": "1f1b", "micro_batches": 2, "training": ASK_ALONE, **options,
    }  # fmt: skip
    return Pipeline(model, workers=workers, **given)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b", "2bw", "zero-bubble"])
@pytest.mark.parametrize("kind", [linear, Between, tied])
@pytest.mark.parametrize(
    "optimizer",
    [(torch.optim.AdamW, {"lr": 0.01}), (*SGD, [("*.bias", {"weight_decay": 0.1})])],
)
def test_what_is_right_is_the_same(schedule, kind, optimizer):
    with opened(model_of(kind), batches(), schedule=schedule, optimizer=optimizer) as pipe:
        found = pipe.verify(batches())
        assert found, str(found)
        assert found.values > 40
        list(pipe.train_epoch(batches()))
        found = pipe.verify(batches(), steps=1)  # from the weights of now
        assert found, str(found)
        assert ("rounding" in str(found)) == (kind is tied)


@pytest.mark.parametrize(
    "options",
    [
        {"training": Training(clip=Clip(norm=0.1), verify=False)},
        {"training": Training(clip=Clip(norm=0.1, over="stage"), verify=False)},
        {"training": Training(clip=Clip(value=0.01), verify=False)},
        {"training": Training(recompute=True, ema=0.9, verify=False)},
        {"training": Training(autocast=torch.bfloat16, verify=False)},
        {"training": Training(autocast=torch.float16, verify=False)},
        {"layout": Layout(codecs=BFloat16())},
        {"layout": Layout(replicas=2)},
        {"schedule": "interleaved-1f1b", "stages": 4},
        {"micro_batches": 1},
        {"loss_fn": Margin()},
    ],
    ids=str,
)
def test_with_all_options_it_is_the_same(options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with opened(model, batches(), **options) as pipe:
        found = pipe.verify(batches())
        assert found, str(found)


def test_models_that_are_called_otherwise():
    data = [{"x": x, "labels": y} for x, y in batches()]
    with opened(model_of(OwnLoss), data, loss_fn=None) as pipe:
        assert pipe.verify(data)
    data = token_batches(3)
    with opened(kitchen_sink(), data, loss_fn=F.cross_entropy, stages=4) as pipe:
        assert pipe.verify(data)
        pipe.train(False)
        assert pipe.verify(data)


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["serial", "local"])
@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b"])
def test_asking_changes_nothing(workers, schedule):
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) / (1 + self.calls % 3)

    def run(asks):
        torch.manual_seed(0)
        model = nn.Sequential(Counting(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 8))
        loader = torch.utils.data.DataLoader(
            [(x, y) for xs, ys in batches(6) for x, y in zip(xs, ys, strict=True)],
            batch_size=8, shuffle=True,
        )  # fmt: skip
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


class LooksAround(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class WithTable(nn.Linear):
    def forward(self, given):
        x, table = given
        return super().forward(x) + table.mean(0)


CALLS = ContextVar("calls", default=0)  # which nobody can see from outside


class ScaledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        CALLS.set(CALLS.get() + 1)
        return gradient * CALLS.get()


class Backward(nn.Linear):
    def forward(self, x):
        return ScaledBackward.apply(super().forward(x))


class Clamped(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))


class CountsSteps(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        CountsSteps.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / CountsSteps.steps
        return super().step(closure)


def drawing_loss(output, target):
    return F.mse_loss(output, target) * random.uniform(0.5, 1.5)


@pytest.mark.parametrize(
    ("options", "place", "cause"),
    [
        ({"kind": Draws}, "the output of layer 0, micro-batch 0 of mini-batch 0", "Its input is"),
        ({"loss_fn": drawing_loss}, "the loss, micro-batch 0", "it is the loss"),
        ({"kind": Backward}, "the gradient of 0.", "it is in the backward"),
        ({"optimizer": (CountsSteps, {"lr": 0.1})}, "after the update", "step of the optimizer"),
        ({"kind": LooksAround}, "the loss of two micro-batches as one", "depend on each other"),
        ({"kind": Clamped}, "the gradient of 0.", "a hook that clamps or norms"),
    ],
)
def test_it_says_where_they_part_and_why(options, place, cause):
    options = dict(options)
    torch.manual_seed(0)
    model = nn.Sequential(options.pop("kind", nn.Linear)(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with opened(model, batches(), **options) as pipe:
        found = pipe.verify(batches())
    assert not found
    assert place in found.parted
    assert cause in found.cause
    assert found.difference > 1e-4
    assert found.parted in str(found)


def test_a_table_with_as_many_rows_is_found_and_a_mark_mends_it():
    torch.manual_seed(0)
    table = torch.randn(8, 8)
    for mark, same in ((lambda value: value, False), (Whole, True)):
        data = [((x, mark(table)), y) for x, y in batches()]
        model = [WithTable(8, 8), nn.Linear(8, 8)]
        with opened(model, data) as pipe:
            assert bool(pipe.verify(data)) is same


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
    with (
        Pipeline(linear(), stages=2, loss_fn=F.mse_loss, workers="serial") as pipe,
        pytest.raises(ConfigError, match="needs loss_fn and optimizer"),
    ):
        pipe.verify(data)
    specs = [LayerSpec(nn.Linear, 8, 8) for _ in range(2)]
    with opened(specs, data, training=Training()) as pipe:
        with pytest.raises(ConfigError, match="no values of this model"):
            pipe.verify(data)
        assert "no values of its weights" in " ".join(pipe.explain().split())


# -- the first mini-batch -----------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "schedule", "workers"),
    [
        (linear, "1f1b", "serial"), (Between, "async-1f1b", "serial"), (linear, "2bw", "serial"),
        (Between, "1f1b", "local"), (linear, "async-1f1b", "local"), (Between, "2bw", "local"),
    ],
)  # fmt: skip
def test_the_first_mini_batch_is_compared_and_the_bits_are_those_without(
    workers, schedule, kind, caplog
):
    def run(training):
        data = batches(6)
        with opened(model_of(kind), data, workers, schedule=schedule, training=training) as pipe:
            told = " ".join(pipe.explain().split())
            return [r.loss for r in pipe.train_epoch(data)], pipe.fingerprint().digest, told

    with caplog.at_level(logging.INFO):
        *with_it, told = run(Training())
        assert "the first mini-batch is computed in plain PyTorch too" in told
        assert "the first mini-batch is what plain PyTorch computes" in caplog.text
        caplog.clear()
        *without, told = run(ASK_ALONE)
    assert "as Training(verify=False) says" in told
    assert "plain PyTorch computes" not in caplog.text
    assert with_it == without


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


def test_what_takes_too_long_is_left_out(caplog, monkeypatch):
    monkeypatch.setattr("pipedream_rt.verify.run._is_after", lambda until: True)
    model = nn.Sequential(LooksAround(8, 8), nn.Linear(8, 8))
    with caplog.at_level(logging.INFO), opened(model, batches(), training=Training()) as pipe:
        assert len(list(pipe.train_epoch(batches()))) == 3
    assert "is what plain PyTorch computes, in 1 values" in caplog.text
    assert "two micro-batches as one" not in caplog.text


def test_a_model_that_draws_by_itself_is_left_alone(caplog):
    model = nn.Sequential(Draws(8, 8), nn.Linear(8, 8))
    with caplog.at_level(logging.INFO), opened(model, batches(), training=Training()) as pipe:
        assert len(list(pipe.train_epoch(batches()))) == 3
    assert "draws random numbers of Python or NumPy" in caplog.text


def test_samples_that_depend_on_each_other_are_told_of(caplog):
    model = nn.Sequential(LooksAround(8, 8), nn.Linear(8, 8))
    with opened(model, batches(), training=Training()) as pipe:
        assert len(list(pipe.train_epoch(batches()))) == 3
    assert "the loss of two micro-batches as one" in caplog.text


def test_what_the_processs_classes_count_is_put_back():
    """Serial stages have the script's own classes."""

    def run(training):
        CountsSteps.steps = 0
        optimizer = (CountsSteps, {"lr": 0.1})
        with opened(linear(), batches(), optimizer=optimizer, training=training) as pipe:
            list(pipe.train_epoch(batches()))
        return CountsSteps.steps

    with pytest.raises(ConfigError, match="the first mini-batch is not what plain PyTorch"):
        run(Training())
    assert run(ASK_ALONE) == 6


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
    with (
        opened(model, batches(), training=Training()) as pipe,
        pytest.raises(StageFailed),
    ):
        list(pipe.train_epoch(batches()))


SEEN, COUNTS = [], {"calls": 0, "mean": torch.zeros(())}


def collects(output, target):
    """A loss that can be imported, so that copies of it share its globals with the script."""
    SEEN.append(len(output))
    COUNTS["calls"] += 1
    COUNTS["mean"] += output.detach().mean() / len(SEEN)
    return F.mse_loss(output, target)


def test_what_globals_hold_is_put_back():
    def run(training):
        SEEN.clear()
        COUNTS.update(calls=0, mean=torch.zeros(()))
        torch.manual_seed(0)
        with opened(linear(), batches(), loss_fn=collects, training=training) as pipe:
            list(pipe.train_epoch(batches()))
        return list(SEEN), COUNTS["calls"], COUNTS["mean"].item()

    expected = run(ASK_ALONE)
    assert expected[1] == len(expected[0]) > 0
    assert run(Training()) == expected


def test_a_run_that_was_touched_before_is_not_compared(caplog):
    def double(module):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter *= 2

    with caplog.at_level(logging.INFO), opened(linear(), batches(), training=Training()) as pipe:
        pipe.on_stages(double)
        assert len(list(pipe.train_epoch(batches()))) == 3
    assert "do not have the weights that the script's model has" in caplog.text


def test_a_loader_that_draws_by_python_is_left_as_it_is():
    class Augmented(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return torch.full((8,), random.random()), torch.full((8,), np.random.rand())

    loader = torch.utils.data.DataLoader(Augmented(), batch_size=4)
    with opened(linear(), batches(), training=ASK_ALONE) as pipe:
        before = random.getstate(), str(np.random.get_state())
        assert pipe.verify(loader, steps=2)
        assert (random.getstate(), str(np.random.get_state())) == before


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
    data, before = batches(), signal.signal(signal.SIGUSR1, too_late)
    try:
        model = nn.Sequential(nn.Linear(8, 8), SignalsInScript(), nn.Linear(8, 8))
        with Pipeline(
            model, stages=2, loss_fn=F.mse_loss, optimizer=SGD, workers="local",
            training=Training(),
        ) as pipe:  # fmt: skip
            with pytest.raises(Late):
                list(pipe.train_epoch(data))
            assert len(list(pipe.train_epoch(data))) == len(data)
    finally:
        signal.signal(signal.SIGUSR1, before)
