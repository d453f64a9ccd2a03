"""What training gives back beside a loss: metrics, parts of a loss, the best weights."""

import logging
import math

import pytest
import torch
from safetensors.torch import load_file
from support.inside import kill
from support.models import mlp, regression
from support.oracle import assert_same
from support.pinned import Flat as Pipeline
from torch import nn
from torch.nn import functional as F

from pipedream_rt import CheckpointError, Checkpoints, ConfigError, Recovery

SCHEDULES = ("1f1b", "async-1f1b", "gpipe", "2bw")


def mean_of(output, y):
    return output.mean()


def in_parts(output, y):
    loss = F.mse_loss(output, y)
    return {"loss": loss, "twice": 2 * loss, "plain": 3}


def open_pipe(model=None, loss_fn=F.mse_loss, **options):
    options = {
        "stages": 3, "micro_batches": 3, "workers": "serial", "corrections": (),
        "schedule": "async-1f1b", "optimizer": (torch.optim.SGD, {"lr": 0.05}), **options,
    }  # fmt: skip
    return Pipeline(model or mlp(), loss_fn=loss_fn, **options)


def seen(result):
    return (result.step, result.loss, dict(result.metrics))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("workers", ["serial", "local"])
def test_metrics_are_those_of_their_mini_batch_and_change_nothing(schedule, workers):
    data = regression(6, samples=6)
    with open_pipe(schedule=schedule) as pipe:
        losses = [result.loss for result in pipe.train_epoch(data)]
        expected = pipe.state_dict()
    metrics = {"again": F.mse_loss, "mean": mean_of, "draws": lambda o, y: torch.rand(()) * 0}
    with open_pipe(schedule=schedule, workers=workers) as pipe:
        results = list(pipe.train_epoch(data, metrics=metrics))
        assert_same(pipe.state_dict(), expected)
    assert [result.loss for result in results] == losses
    # The loss, as a metric, is the loss: as of the version that the mini-batch has read.
    assert [result.metrics["again"] for result in results] == losses
    assert all(math.isfinite(result.metrics["mean"]) for result in results)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_may_be_a_dict_with_parts_beside_the_total(schedule):
    data = regression(5, samples=6)
    with open_pipe(schedule=schedule) as pipe:
        losses = [result.loss for result in pipe.train_epoch(data)]
        assert all(result.metrics == {} for result in pipe.train_epoch(data))
        loss, expected = pipe.evaluate(data), pipe.state_dict()
    with open_pipe(loss_fn=in_parts, schedule=schedule) as pipe:
        results = list(pipe.train_epoch(data))
        list(pipe.train_epoch(data))
        assert pipe.evaluate(data) == loss
        found = pipe.evaluate(data, metrics={"mean": mean_of})
        assert_same(pipe.state_dict(), expected)
    assert [result.loss for result in results] == losses
    assert [result.metrics for result in results] == [
        {"twice": 2 * loss, "plain": 3.0} for loss in losses
    ]
    assert found.keys() == {"loss", "twice", "plain", "mean"}
    assert found["twice"] == 2 * loss


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda o, y: {"loss": F.mse_loss(o, y), "rows": o}, "must be numbers"),
        (
            lambda o, y: {"total": F.mse_loss(o, y)},
            'one element under "loss", it returned NoneType',
        ),
        (lambda o, y: {"loss": o, "a": 1}, 'under "loss", it returned'),
    ],
)
def test_a_dict_that_is_no_loss_is_refused(loss_fn, words):
    with open_pipe(loss_fn=loss_fn) as pipe, pytest.raises(Exception, match=words):
        list(pipe.train_epoch(regression(1)))


def test_a_metric_that_says_no_number_is_told_of_once_and_ends_nothing(caplog):
    with caplog.at_level(logging.WARNING), open_pipe() as pipe:
        results = list(pipe.train_epoch(regression(4), metrics={"rows": lambda o, y: o}))
        list(pipe.train_epoch(regression(1)))
        pipe.state_dict()
    assert all(math.isnan(result.metrics["rows"]) for result in results)
    assert caplog.text.count('the metric "rows" must return a number') == 1
    with open_pipe() as pipe, pytest.raises(ConfigError, match="metrics must be functions"):
        list(pipe.train_epoch(regression(1), metrics={"loss": mean_of}))


def test_after_a_kill_and_after_a_resume_they_are_the_same(tmp_path):
    data = regression(12, samples=6)
    options = {"workers": "local", "loss_fn": in_parts, "recovery": Recovery(max_restarts=2)}
    with open_pipe(**options) as pipe:
        expected = [seen(r) for r in pipe.train_epoch(data, metrics={"mean": mean_of})]
    found = []
    with open_pipe(**options, checkpoint=Checkpoints(tmp_path, every=2)) as pipe:
        for result in pipe.train_epoch(data, metrics={"mean": mean_of}):
            found.append(seen(result))
            if result.step == 4:
                kill(pipe, "worker-2")
        assert len(pipe.restarts) == 1
    assert found == expected
    # In a checkpoint within an epoch are results that the script had not seen.
    with open_pipe(**options) as pipe:
        epoch = pipe.train_epoch(data, metrics={"mean": mean_of})
        before = [seen(next(epoch)) for _ in range(3)]
        pipe.save(tmp_path / "other")
        epoch.close()
    with open_pipe(**options) as pipe:
        pipe.load(tmp_path / "other")
        after = [seen(r) for r in pipe.train_epoch(data, metrics={"mean": mean_of})]
    assert before + after == expected


def test_an_epoch_is_as_long_as_its_loader():
    data = regression(3)
    with open_pipe() as pipe:
        epoch = pipe.train_epoch(data)
        assert len(epoch) == len(data)
        assert len(list(epoch)) == 3
        assert pipe.train_epoch([])  # as any generator
        endless = pipe.train_epoch(iter(data))
        with pytest.raises(TypeError, match="no len"):
            len(endless)
        assert len(list(endless)) == 3


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)])
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_best_weights_are_in_one_file(tmp_path):
    path, data = tmp_path / "best.safetensors", regression(3)
    with open_pipe(Tied(), stages=2, example=data[0]) as pipe:
        assert pipe.keep_best(path, 2.0)
        first = pipe.state_dict()
        list(pipe.train_epoch(data))
        assert not pipe.keep_best(path, 2.0)
        assert not pipe.keep_best(path, math.nan)
        assert_same(load_file(path), first)
        assert pipe.keep_best(path, torch.tensor(1.0))
        assert_same(load_file(path), pipe.state_dict())
        assert pipe.keep_best(tmp_path / "other", 0.5, highest=True)
        assert not pipe.keep_best(tmp_path / "other", 0.4, highest=True)
        with pytest.raises(ConfigError, match="value must be a number"):
            pipe.keep_best(path, {"loss": 1.0})
        with pytest.raises(CheckpointError, match="cannot be written"):
            pipe.keep_best(tmp_path / "nowhere" / "file", 1.0)
        pipe.save(tmp_path / "run")
    with open_pipe(Tied(), stages=2, example=data[0]) as pipe:
        pipe.load(tmp_path / "run")
        assert not pipe.keep_best(path, 1.5)  # it goes on from 1.0
        assert pipe.keep_best(path, 0.5)
    with open_pipe(Tied(), stages=2, example=data[0]) as pipe:
        assert pipe.keep_best(path, 9.0)  # a run of its own


def test_a_part_that_some_micro_batches_lack_is_a_mean_over_the_others():
    def loss_fn(output, y):
        loss = F.mse_loss(output, y)
        return {"loss": loss, "rare": 10} if y[0, 0] > 0 else {"loss": loss}

    x, y = torch.randn(6, 8), -torch.ones(6, 8)
    y[0, 0] = 1.0  # of the first of three micro-batches
    with open_pipe(loss_fn=loss_fn) as pipe:
        (result,) = pipe.train_epoch([(x, y)])
        assert result.metrics["rare"] == pytest.approx(10.0)
        assert pipe.evaluate([(x, y)], metrics={})["rare"] == 10.0
