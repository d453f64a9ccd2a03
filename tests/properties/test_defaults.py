"""What a pipeline does when the number of micro-batches and the corrections are left out."""

import logging

import pytest
import torch
import torch.nn.functional as F
from support.both import assert_same, learned
from support.models import mlp, regression
from support.pinned import Flat as Pipeline

from pipedream_rt import Clip, ConfigError, LossScale
from pipedream_rt.corrections import StalenessNesterov


def open_pipe(optimizer=(torch.optim.AdamW, {"lr": 0.01}), layers=6, **options):
    defaults = {"stages": 3, "loss_fn": F.mse_loss, "workers": "serial"}
    return Pipeline(mlp(layers=layers), optimizer=optimizer, **{**defaults, **options})


def trained(**options):
    """The losses and the state after eight mini-batches."""
    with open_pipe(**options) as pipe:
        return learned(pipe, regression(8))


def test_no_gradient_is_more_than_one_update_stale():
    for schedule in ("async-1f1b", "2bw"):
        for stages in (2, 3):
            with open_pipe(stages=stages, schedule=schedule) as pipe:
                assert pipe.plan.per_update == stages
                assert max(pipe.plan.staleness(stage) for stage in range(stages)) == 1
    with open_pipe(stages=1) as pipe:
        assert pipe.plan.per_update == 1


def test_a_schedule_that_flushes_takes_whole_mini_batches():
    for schedule in ("gpipe", "1f1b"):
        with open_pipe(schedule=schedule) as pipe:
            assert pipe.plan.per_update == 1
            assert "corrections:" not in pipe.explain()


def test_the_defaults_are_what_one_would_write():
    corrections = [StalenessNesterov()]
    assert_same(trained(), trained(micro_batches=3, corrections=corrections))
    assert_same(trained(corrections=()), trained(micro_batches=3, corrections=()))


def test_what_there_was_is_one_micro_batch_without_corrections():
    """One update for each mini-batch, whose gradients are as stale as the stages are deep."""
    with open_pipe(micro_batches=1, corrections=()) as pipe:
        list(pipe.train_epoch(regression(8)))
        assert [pipe.plan.staleness(stage) for stage in range(3)] == [2, 1, 0]
        assert "corrections:" not in pipe.explain()


def test_corrections_that_sharded_optimizers_do_not_bear_are_left_out():
    with pytest.raises(ConfigError, match="corrections"):
        open_pipe(corrections="auto", shard_optimizer=True, replicas=2)
    with open_pipe(shard_optimizer=True, replicas=2) as pipe:
        assert "corrections:" not in pipe.explain()


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 2},
        {"clip": Clip(norm=1.0)},
        {"schedule": "2bw", "clip": Clip(norm=1.0)},
        {"schedule": "2bw", "loss_scale": LossScale()},
        {"ema": 0.9},
        {"synchronous_updates": 4},
        {"schedule": "async-1f1b+vertical-sync"},
        {"recompute": True},
    ],
)
def test_the_defaults_bear_every_other_option(options):
    with open_pipe(**options) as pipe:
        assert max(map(pipe.plan.staleness, range(3))) == 1
        assert "corrections: StalenessNesterov" in pipe.explain()
        list(pipe.train_epoch(regression(4)))


# -- what is said -------------------------------------------------------------------------------


def test_what_was_chosen_is_said_at_the_start(caplog):
    caplog.set_level(logging.INFO, "pipedream_rt.pipeline")
    with open_pipe():
        chosen = "chosen: micro_batches=3, corrections=StalenessNesterov: no worker waits"
        assert chosen in caplog.text
    assert len(caplog.records) == 1
    caplog.clear()
    caplog.set_level(logging.WARNING, "pipedream_rt.pipeline")
    for options in (
        {"micro_batches": 3, "corrections": "auto"},
        {"optimizer": None},
        {"stages": 1},
    ):
        with open_pipe(**options):
            assert caplog.text == ""


def test_a_flush_that_lets_one_stage_work_at_a_time_is_said_at_the_start(caplog):
    with open_pipe(schedule="1f1b"):
        assert "no two workers compute at once" in caplog.text
    caplog.clear()
    with open_pipe(schedule="1f1b", micro_batches=1):
        assert caplog.text == ""


def test_what_it_costs_is_explained():
    with open_pipe() as pipe:
        list(pipe.train_epoch(regression(8)))
        text = pipe.explain()
    assert "3 micro-batches per update" in text
    assert "weights MiB" in text
    assert "corrections MiB" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "the time of 36 passes over a stage's weights" in text
