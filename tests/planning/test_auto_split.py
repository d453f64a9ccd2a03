"""``Pipeline(stages="auto")``, with layers that move a clock of the tests."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from support import forked
from support.deadlines import LATEST_S
from support.pinned import Pipeline
from support.ports import free_port
from support.ticking import BATCH, Clock, Layer, ticking
from torch import nn

from pipedream_rt import Checkpoints, Clip, ConfigError
from pipedream_rt.corrections import DelayCompensation
from pipedream_rt.planning import auto_split
from pipedream_rt.planning.auto_split import PLAN_FILE

pytestmark = pytest.mark.usefixtures("clock", "three_cores")


def pipeline(*seconds, **options):
    given = {
        "stages": "auto",
        "example": BATCH,
        "loss_fn": F.mse_loss,
        "optimizer": (torch.optim.SGD, {"lr": 0.1}),
        "micro_batches": 3,
        "workers": "serial",
        **options,
    }
    return Pipeline(given.pop("model", None) or ticking(*seconds), **given)


def test_the_slowest_stage_is_made_as_fast_as_layers_allow():
    with pipeline(6, 1, 1, 1, 1, 2) as pipe:
        assert [len(names) for names in pipe.plan.layers] == [1, 3, 2]
        text = pipe.explain()
        assert "async-1f1b, 3 micro-batches per update" in text
        assert "period" in text
        assert [result.step for result in pipe.train_epoch([BATCH] * 2)] == [0, 1]


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "gpipe", "zero-bubble"])
def test_it_goes_with_other_schedules(schedule):
    with pipeline(1, 1, 1, schedule=schedule) as pipe:
        assert [len(names) for names in pipe.plan.layers] == [1, 1, 1]
        list(pipe.train_epoch([BATCH]))


@pytest.mark.parametrize(("schedule", "parts"), [("1f1b", 1), ("async-1f1b", 3)])
def test_without_a_number_of_micro_batches_the_smallest_part_is_measured(
    monkeypatch, schedule, parts
):
    """Of a mini-batch that a plan for three workers could come to feed."""
    taken, found = [], auto_split.first_micro_batch
    monkeypatch.setattr(
        auto_split, "first_micro_batch", lambda batch, k: taken.append(k) or found(batch, k)
    )
    with pipeline(1, 1, 1, schedule=schedule, micro_batches=None):
        assert taken == [parts]


def test_a_run_that_resumes_does_not_plan_anew(tmp_path):
    options = {"checkpoint": Checkpoints(tmp_path / "run", every=1, resume=True)}
    with pipeline(6, 1, 1, 1, 1, 2, **options) as pipe:
        first = pipe.plan.layers
        list(pipe.train_epoch([BATCH] * 2))
        pipe.save()
    before = Clock.now
    slower = ticking(6, 1, 1, 1, 1, 2)
    slower[5].times = 60, 60, 60  # measured now, it would be cut otherwise
    with pipeline(model=slower, **options) as pipe:
        assert pipe.plan.layers == first
        assert pipe.step == 2
        assert Clock.now == before
    # Another number of workers, or another model, is planned again.
    with pipeline(6, 1, 1, 1, **{**options, "checkpoint": tmp_path / "run"}) as pipe:
        assert [len(names) for names in pipe.plan.layers] == [1, 3]  # no third could help


def test_a_kept_plan_that_cannot_be_read_is_made_again(tmp_path, caplog):
    (tmp_path / PLAN_FILE).write_text(json.dumps({"key": 3}))
    with pipeline(1, 1, 1, checkpoint=tmp_path) as pipe:
        assert pipe.plan.num_stages == 3
    assert "holds no plan" in caplog.text
    assert json.loads((tmp_path / PLAN_FILE).read_text())["stages"] == ["1", "2"]


def test_fewer_layers_than_workers_make_fewer_stages():
    with pipeline(1, 1) as pipe:
        assert pipe.plan.num_stages == 2
    with pipeline(1) as pipe:
        assert pipe.plan.num_stages == 1


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Layer(4, 4, 4), Layer(1, 1, 1), Layer(1, 1, 1)

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def test_a_model_that_is_no_sequence_is_cut_too():
    with pipeline(model=Whole()) as pipe:
        assert pipe.plan.layers[0] == ("first",)
        list(pipe.train_epoch([BATCH]))


def test_the_number_of_threads_is_that_of_a_worker_for_a_while(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "pipedream_rt.planning.auto_split.profile",
        lambda *a, **k: seen.append(torch.get_num_threads()),
    )
    before = torch.get_num_threads()
    with pytest.raises(AttributeError):  # the profile is None here
        pipeline(1, 1, threads=before + 1)
    assert (seen, torch.get_num_threads()) == ([before + 1], before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"example": None}, "give example="),
        (
            {"schedule": "interleaved-1f1b"},
            r"is for the schedules async-1f1b, async-1f1b\+vertical-sync, 2bw",
        ),
        ({"workers": "127.0.0.1:1"}, "number and their links are not known"),
        ({"workers": lambda plan, **options: None}, "number and their links are not known"),
        ({"stages": "automatic"}, "stages must be a number or a list"),
        ({"replicas": 2}, "not known yet"),
        ({"replicas": [2, 1]}, "not known yet"),
        ({"stages": 2, "replicas": "auto"}, 'goes with stages="auto"'),
    ],
)
def test_what_is_missing_to_choose_is_said(options, message):
    with pytest.raises(ConfigError, match=message):
        pipeline(1, 1, **options)


def test_more_ranks_than_stages_are_refused(monkeypatch):
    for name, value in (("RANK", 0), ("WORLD_SIZE", 9), ("LOCAL_WORLD_SIZE", 9)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ConfigError, match="no plan uses 8 or 9 workers; there are plans for 1, 2"):
        pipeline(1, 1, workers=None)


SCRIPT = """
import torch, os
from torch import nn
from pipedream_rt import Pipeline
from pipedream_rt.planning import profiling

profiling._process_bytes = lambda: 1e8  # which starts an interpreter
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
batch = torch.ones(4, 8), torch.ones(4, 8)
with Pipeline(model, stages="auto", example=batch, loss_fn=nn.functional.mse_loss,
              optimizer=(torch.optim.SGD, {"lr": 0.1})) as pipe:
    print("rank", os.environ["RANK"], "workers", pipe.plan.workers)
    print("losses", [round(r.loss, 3) for r in pipe.train_epoch([batch] * 3)])
"""


@pytest.mark.processes
def test_under_torchrun_rank_0_chooses(tmp_path):
    """The processes are forked, with the environment that torchrun gives to its own."""
    (tmp_path / "script.py").write_text(SCRIPT)
    port = str(free_port())
    given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        forked.Popen(
            [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **given, "MASTER_PORT": port, "RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=LATEST_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    first, other = said
    assert first.count("rank 0 workers") == first.count("rank") == 1
    assert first.split()[3] in "12"
    assert other == ""


def test_the_planner_may_choose_replicas(tmp_path):
    """A layer that no cut divides is replicated; a run that resumes has the same plan."""
    options = {"replicas": "auto", "checkpoint": Checkpoints(tmp_path, resume=True)}
    with pipeline(6, 3, **options) as pipe:
        chosen = pipe.plan.replicas
        assert sum(chosen) == 3
        list(pipe.train_epoch([BATCH] * 2))
        pipe.save()
        assert "replicas" in pipe.explain()
    with pipeline(6, 3, **options) as pipe:
        assert pipe.plan.replicas == chosen
        assert pipe.step == 2
    with pipeline(6, 3) as pipe:
        assert pipe.plan.replicas == (1, 1)
    with pipeline(6, 3, replicas="auto", schedule="zero-bubble") as pipe:
        assert pipe.plan.replicas == (1, 1)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "gpipe", "async-1f1b+vertical-sync"])
def test_so_may_it_in_every_schedule_that_has_replicas(schedule):
    with pipeline(6, 3, replicas="auto", schedule=schedule, micro_batches=6) as pipe:
        assert sum(pipe.plan.replicas) == 3


def test_layers_that_share_a_weight_are_not_replicated():
    layers = ticking(6, 3)
    layers[1].w = layers[0].w
    with pipeline(model=layers, replicas="auto") as pipe:
        assert set(pipe.plan.replicas) == {1}


@pytest.mark.parametrize(
    "options", [{"clip": Clip(norm=1.0)}, {"corrections": [DelayCompensation()]}]
)
def test_no_replicas_are_chosen_that_would_be_refused(options):
    with pipeline(6, 3, replicas="auto", **options) as pipe:
        assert set(pipe.plan.replicas) == {1}
        list(pipe.train_epoch([BATCH]))


def test_vertical_sync_is_planned_as_the_schedule_without_it():
    with pipeline(6, 3, schedule="async-1f1b+vertical-sync") as pipe:
        assert pipe.plan.name == "async-1f1b+vertical-sync"
        assert pipe.plan.num_stages > 1
