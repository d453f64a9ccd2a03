"""The schedule and the micro-batches that are chosen where they are left out."""

import pytest
import torch
import torch.nn.functional as F
from support.models import Counts, mlp, regression
from support.pinned import Flat as Pipeline
from torch import nn

from pipedream_rt import Clip, LossScale
from pipedream_rt.cluster import generations
from pipedream_rt.corrections import ErrorFeedback
from pipedream_rt.job import samples
from pipedream_rt.job.defaults import time_of_flush, with_schedule
from pipedream_rt.job.options import Layout, Options

FEW, MANY, UNKNOWN = torch.optim.NAdam, torch.optim.AdamW, torch.optim.Adagrad


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    rows = {
        "NAdam": {1: 1.08, 4: 0.99}, "AdamW": {1: 1.3, 4: 1.12}, "Adam": {1: 1.05, 4: 1.04},
        "SGD": {1: 1.2, 2: 1.0},
    }  # fmt: skip
    monkeypatch.setattr(samples, "SAMPLES", {"async-1f1b": rows, "2bw": {"AdamW": {1: 1.4}}})


def chosen(optimizer, stages=4, modules=(), groups=({"momentum": 0.9},), **options):
    made = with_schedule(Options(**options), optimizer, stages, modules, groups=groups)
    return made.schedule, made.micro_batches


def test_one_that_bears_as_much_of_it_as_there_can_be_has_no_more_micro_batches_than_stages():
    assert chosen(torch.optim.Adam) == ("async-1f1b", 4)
    assert chosen(torch.optim.Adam, stages=2) == ("async-1f1b", 2)
    assert chosen(torch.optim.Adam, micro_batches=16) == ("async-1f1b", 16)
    assert chosen(torch.optim.SGD) == ("async-1f1b", 8)  # the fewest with which it bears it


@pytest.mark.parametrize("optimizer", [FEW, MANY, UNKNOWN, torch.optim.Adam])
def test_a_schedule_that_is_tried_has_the_micro_batches_that_it_would_be_chosen_with(optimizer):
    """Whatever speaks for another one."""
    few = 4 if optimizer is torch.optim.Adam else 16
    for schedule, count in (("1f1b", 16), ("async-1f1b", few)):
        given = {"schedule": schedule, "is_tried": True}
        assert chosen(optimizer, **given) == (schedule, count)
        assert chosen(optimizer, **given, micro_batches=2) == (schedule, 2)
        assert chosen(optimizer, **given, corrections=[ErrorFeedback()]) == (schedule, count)


def test_an_optimizer_that_bears_staleness_has_a_schedule_that_waits_for_nothing():
    assert chosen(FEW) == ("async-1f1b", 16)
    assert chosen(FEW, stages=1) == ("1f1b", None)


@pytest.mark.parametrize("optimizer", [MANY, UNKNOWN])
def test_others_learn_as_plain_pytorch(optimizer):
    assert chosen(optimizer) == ("1f1b", 16)
    assert chosen(optimizer, stages=8) == ("1f1b", 32)
    assert chosen(optimizer, stages=1) == ("1f1b", None)  # whole mini-batches


def test_a_loss_in_the_script_has_all_outputs_before_the_first_backward():
    def found(**options):
        made = with_schedule(Options(**options), FEW, 4, (), of_all=True)
        return made.schedule, made.micro_batches

    assert found() == ("gpipe", 16)
    assert found(micro_batches=2) == ("gpipe", 2)
    assert found(schedule="async-1f1b") == ("async-1f1b", 1)
    assert found(schedule="1f1b", micro_batches=4) == ("1f1b", 4)  # refused by the plan
    assert found(corrections=[ErrorFeedback()]) == ("async-1f1b", 1)
    assert found(schedule="async-1f1b", is_tried=True) == ("async-1f1b", 1)
    assert found(schedule="1f1b", is_tried=True) == ("gpipe", 16)


def test_batch_norm_sees_as_many_samples_as_can_be():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    assert chosen(MANY, modules=[model]) == ("async-1f1b", 4)
    assert chosen(UNKNOWN, modules=[model]) == ("1f1b", 4)


def test_layers_that_count_for_themselves_see_as_few_micro_batches():
    assert chosen(UNKNOWN, modules=[nn.Sequential(nn.Sequential(Counts(2, 2)))]) == ("1f1b", 4)


def test_what_is_named_stays():
    assert chosen(MANY, schedule="async-1f1b") == ("async-1f1b", None)
    assert chosen(FEW, schedule="1f1b", micro_batches=3) == ("1f1b", 3)


def test_few_micro_batches_make_waiting_dearer_than_staleness():
    found = [chosen(MANY, micro_batches=k)[0] for k in (4, 8, 16, 64)]
    assert found == ["async-1f1b", "1f1b", "1f1b", "1f1b"]
    assert [chosen(FEW, micro_batches=k)[0] for k in (16, 64)] == ["async-1f1b", "1f1b"]
    assert chosen(UNKNOWN, micro_batches=4)[0] == "1f1b"


def test_options_about_staleness_are_for_a_schedule_that_has_some():
    assert chosen(MANY, micro_batches=1) == ("async-1f1b", 1)
    assert chosen(MANY, corrections="auto") == ("async-1f1b", None)
    assert chosen(MANY, corrections=[ErrorFeedback()]) == ("async-1f1b", None)
    assert chosen(MANY, layout=Layout(synchronous_updates=3)) == ("async-1f1b", None)
    assert chosen(MANY, corrections=()) == ("1f1b", 16)


def test_figures_with_corrections_are_not_for_runs_without():
    bears = torch.optim.Adam
    assert chosen(bears, corrections=()) == ("1f1b", 16)
    assert chosen(bears, layout=Layout(replicas=2, shard_optimizer=True)) == ("1f1b", 32)
    assert chosen(bears, layout=Layout(replicas=2)) == ("async-1f1b", 8)
    assert chosen(FEW, corrections=()) == ("async-1f1b", 16)  # it gets none by default either
    for groups in ([{}], [{"momentum": 0.9}, {"momentum": 0.0}]):  # nothing to be corrected by
        assert chosen(torch.optim.SGD, groups=groups) == ("1f1b", 16)
    assert chosen(bears, groups=[{"betas": (0.0, 0.9)}]) == ("1f1b", 16)
    assert chosen(bears, groups=[{"betas": (0.9, 0.9)}]) == ("async-1f1b", 4)


def test_where_nothing_is_trained_nothing_waits():
    assert chosen(None) == ("async-1f1b", None)


def test_the_time_of_a_flush():
    assert time_of_flush(4, 4) == 1.75
    assert time_of_flush(1, 3) == 1.0


def opened(optimizer, caplog, **options):
    given = {"stages": 3, "schedule": None, "loss_fn": F.mse_loss, "workers": "serial", **options}
    caplog.set_level("INFO", "pipedream_rt.pipeline")
    with Pipeline(mlp(), optimizer=(optimizer, {"lr": 0.01}), **given) as pipe:
        assert len(list(pipe.train_epoch(regression(3)))) == 3  # of 4 samples
        said = [r.message for r in caplog.records if r.levelname == "INFO"]
        return pipe.plan.name, pipe.plan.per_update, *said


def test_a_pipeline_says_what_was_chosen(caplog):
    assert opened(MANY, caplog) == (
        "1f1b",
        12,
        'chosen: schedule="1f1b", micro_batches=12: it learns as plain PyTorch does',
    )
    caplog.clear()
    assert opened(FEW, caplog) == (
        "async-1f1b",
        12,
        'chosen: schedule="async-1f1b", micro_batches=12: no worker waits, for as many samples',
    )
    caplog.clear()
    assert "up to 1.40 times the samples" in opened(MANY, caplog, schedule="2bw")[2]
    caplog.clear()
    assert (
        "nobody has measured how many"
        in opened(FEW, caplog, schedule="async-1f1b+vertical-sync")[2]
    )
    caplog.clear()
    assert opened(MANY, caplog, schedule="1f1b", micro_batches=3) == ("1f1b", 3)


def test_where_another_option_needs_a_flush_it_has_the_micro_batches_of_one():
    """Weights that a forward changes go with no version; Adam bears staleness with one for each."""
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Flatten(), *mlp(4, 4))
    options = {"stages": 2, "schedule": None, "loss_fn": F.mse_loss, "workers": "serial"}
    with Pipeline(model, optimizer=(torch.optim.Adam, {"lr": 0.01}), **options) as pipe:
        assert (pipe.plan.name, pipe.plan.per_update) == ("1f1b", 8)


def test_what_was_not_chosen_is_told_to_who_asks():
    given = {"stages": 3, "schedule": None, "loss_fn": F.mse_loss, "workers": "serial"}
    with Pipeline(mlp(), optimizer=(MANY, {"lr": 0.01}), **given) as pipe:
        said = " ".join(pipe.explain().split())
        assert 'chosen: schedule="1f1b", micro_batches=12: it learns as plain PyTorch does' in said
        assert (
            'with schedule="async-1f1b" no worker waits for another, which saves 14% of the time, '
            "for up to 1.12 times the samples (AdamW)" in said
        )
    with Pipeline(mlp(), optimizer=(FEW, {"lr": 0.01}), **given) as pipe:
        assert "waits for another" not in pipe.explain()


def test_stages_are_measured_for_the_schedule_that_is_chosen(monkeypatch, caplog):
    # On more cores, and so stages, a flush of 4 samples may cost more than staleness does.
    monkeypatch.setattr(generations.os, "sched_getaffinity", lambda pid: {0, 1})
    name, count, *_ = opened(MANY, caplog, stages="auto", workers="local", example=regression(1)[0])
    assert name == "1f1b"
    assert count % 4 == 0 or count == 1


def test_replicas_share_the_micro_batches():
    assert chosen(MANY, layout=Layout(replicas=2)) == ("1f1b", 32)
    assert chosen(MANY, stages=1, layout=Layout(replicas=3)) == ("1f1b", 3)
    assert chosen(MANY, layout=Layout(replicas=4), micro_batches=16)[0] == "async-1f1b"  # 4 each


@pytest.mark.parametrize(
    "options",
    [
        {"loss_scale": LossScale()},
        {"autocast": torch.float16},
        {"replicas": 2, "clip": Clip(norm=1.0)},
        {"stages": 1, "replicas": 2, "shard_optimizer": True},
    ],
)
def test_what_goes_with_a_flush_alone_gets_one(options, caplog):
    for optimizer in (FEW, MANY):
        name, *_ = opened(optimizer, caplog, **options)
        assert name == "1f1b"


def test_sharded_optimizers_have_as_many_micro_batches_as_they_need(caplog):
    for optimizer in (FEW, MANY):
        _, count, *_ = opened(optimizer, caplog, replicas=(13, 1, 1), shard_optimizer=True)
        assert count >= 13
