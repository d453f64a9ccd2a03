"""A job is prepared before anything runs: nothing starts, nothing is written, and all is proved."""

import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipedream_rt
from pipedream_rt import Checkpoints, Clip, ConfigError, Layout, Training
from pipedream_rt.job.job import prepare
from pipedream_rt.job.options import Options
from pipedream_rt.job.unsplit_model import UnsplitModel

ADAM = (torch.optim.Adam, {"lr": 0.1})


def model(tie=False):
    layers = [nn.Linear(4, 4) for _ in range(4)]
    if tie:
        layers[3].weight = layers[0].weight
    return nn.Sequential(*layers)


def job(net=None, **options):
    options = {"stages": 4, "loss_fn": F.mse_loss, "optimizer": ADAM, "seed": 7, **options}
    return prepare(UnsplitModel(net or model(), options["loss_fn"]), Options(**options))


def test_nothing_starts_and_nothing_is_written(tmp_path):
    threads = set(threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))
    made = job(checkpoint=Checkpoints(tmp_path / "run", every=1))
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not list(tmp_path.iterdir())
    assert made.plan.num_stages == len(made.specs) == 4
    assert made.options.makes_checkpoints


def test_a_plan_has_its_ties_and_norms():
    made = job(model(tie=True), schedule="async-1f1b", training=Training(clip=Clip(norm=1.0)))
    assert [tie.stages for tie in made.plan.ties] == [(0, 3)]
    assert made.plan.norms == "estimated"
    late = job(schedule="1f1b", micro_batches=4, training=Training(clip=Clip(norm=1.0)))
    assert late.plan.norms == "exact"


class Table(nn.Module):
    def __init__(self, trains=True, **options):
        super().__init__()
        self.table = nn.Embedding(9, 4, **options)
        self.table.weight.requires_grad_(trains)

    def forward(self, x):
        return self.table(x)


@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 1.0}])
def test_a_table_is_refused_only_where_replicas_train_it(options):
    given = {"stages": 2, "schedule": "1f1b", "micro_batches": 2}
    apart, both = Layout(replicas=[1, 2]), Layout(replicas=2)

    def tables(**more):
        return nn.Sequential(Table(**options, **more), nn.Linear(4, 4))

    assert job(tables(), layout=apart, **given)
    assert job(tables(trains=False), layout=both, **given)
    assert job(tables(), layout=both, **{**given, "optimizer": None, "loss_fn": None})
    with pytest.raises(ConfigError, match=r"0\.table"):
        job(tables(), layout=both, **given)


def test_a_refused_pipeline_leaves_nothing_and_counts_no_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEDREAM_RT_TRACE", str(tmp_path / "t.trace"))
    for wrong in ({"stages": 99}, {"corrections": "x"}, {"training": Training(weigh=3)}):
        with pytest.raises(ConfigError):
            pipedream_rt.Pipeline(
                model(), loss_fn=F.mse_loss, optimizer=ADAM, workers="serial",
                checkpoint=Checkpoints(tmp_path / "run", every=1), **wrong,
            )  # fmt: skip
    assert not list(tmp_path.iterdir())
    with pipedream_rt.Pipeline(
        model(), loss_fn=F.mse_loss, optimizer=ADAM, workers="serial",
        checkpoint=Checkpoints(tmp_path / "run", every=1),
    ):  # fmt: skip
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "t.trace"]
