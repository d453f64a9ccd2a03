"""A run: the workers of a job, and what is said when it begins."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.models import mlp, regression
from support.small import SGD, small
from torch import nn

from pipedream_rt import DistributedOptimizer, Recovery
from pipedream_rt.checkpoint import read_manifest
from pipedream_rt.coordinator.run import notices_of, start
from pipedream_rt.job.job import prepare
from pipedream_rt.job.options import Options
from pipedream_rt.job.unsplit_model import UnsplitModel

RECOVERY = Recovery(max_restarts=0)
OPTIONS = {"loss_fn": F.mse_loss, "optimizer": SGD, "stages": 2}


def job_of(model=None, **options):
    return prepare(UnsplitModel(model or mlp(), F.mse_loss), Options(**OPTIONS, **options))


class Publisher:
    def __init__(self):
        self.ended = 0

    def end(self):
        self.ended += 1


def test_workers_that_cannot_start_leave_nothing():
    """What was begun before them is ended, once, and the error is the one that there was."""

    def fail(spec):
        raise ZeroDivisionError("no worker")

    publisher = Publisher()
    with pytest.raises(ZeroDivisionError, match="no worker"):
        start(job_of(recovery=RECOVERY, workers=fail), publisher)
    assert publisher.ended == 1


def test_what_was_begun_ends_with_the_workers():
    publisher = Publisher()
    group = start(job_of(recovery=RECOVERY, workers="serial"), publisher)
    assert publisher.ended == 0
    group.life.close()
    group.life.close()
    assert publisher.ended == 1


def test_nothing_is_said_of_a_run_that_only_measures(monkeypatch):
    job = job_of(workers="serial", schedule="1f1b")
    assert any("no two workers compute at once" in text for text in notices_of(job))
    monkeypatch.setattr("pipedream_rt.coordinator.run.profile_option", lambda: "profile.json")
    assert notices_of(job) == []


class Ranked(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + dist.get_rank())


@pytest.mark.parametrize(("workers", "told"), [("local", 1), ("serial", 0)])
def test_a_process_group_that_only_the_script_has_is_told_of(workers, told):
    """Serial stages see that of the script."""
    model = nn.Sequential(Ranked(8, 8), nn.Linear(8, 8))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        said = notices_of(job_of(model, workers=workers))
    finally:
        dist.destroy_process_group()
    assert len([text for text in said if "layer 0, a Ranked may ask" in text]) == told


def test_a_checkpoint_knows_the_optimizer_that_was_assigned_later(tmp_path):
    """Its class, its parameters and its hyper-parameters, and what else decides the results."""
    with small(optimizer=None, seed=5) as pipe:
        before = read_manifest(pipe.save(tmp_path / "before")).identity
        pipe.optimizer = DistributedOptimizer(torch.optim.Adam, pipe.parameter_rrefs(), lr=0.5)
        later = read_manifest(pipe.save(tmp_path / "later")).identity
    assert (before["seed"], later["seed"], before["optimizer"]) == (5, 5, "")
    assert later["optimizer"].endswith("Adam")
    assert [name for group in later["groups"] for name in group][:2] == ["0.weight", "0.bias"]
    assert "mse_loss" in later["loss"]


def test_the_first_mini_batch_shows_what_batch_norm_sees(caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    with small(model, stages=2, micro_batches=2) as pipe:
        assert caplog.text == ""
        list(pipe.train_epoch(regression(3)))
        list(pipe.train_epoch(regression(3)))
    assert caplog.text.count("BatchNorm (1) sees micro-batches of 2 samples") == 1


class Slow(nn.Linear):
    """A layer that computes longer than others."""

    def forward(self, x):
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            pass
        return super().forward(x)


@pytest.mark.parametrize(("workers", "count"), [("local", 1), ("serial", 0)])
@pytest.mark.processes
def test_stages_that_take_unequal_times_are_told_of(caplog, workers, count):
    """Not where no two of them ever compute at once."""
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), Slow(8, 8)]
    with small(layers, workers=workers, micro_batches=4) as pipe:
        list(pipe.train_epoch(regression(20)))
    assert caplog.text.count("its one layer, 2, takes several workers") == count


@pytest.mark.processes
def test_more_workers_than_cores_are_told_of(caplog):
    cores = len(os.sched_getaffinity(0))
    options = {"stages": cores + 1, "micro_batches": cores + 1, "workers": "local"}
    with small(mlp(layers=cores + 1), **options):
        assert f"{cores + 1} workers share {cores} core" in caplog.text
