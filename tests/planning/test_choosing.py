"""The stages that ``stages="auto"`` stands for, chosen before there is a job."""

import pytest
import torch
import torch.nn.functional as F
from support.pinned import Pipeline
from support.ticking import BATCH, ticking

import pipedream_rt.cluster.generations
from pipedream_rt import Checkpoints, ConfigError, choose

pytestmark = pytest.mark.usefixtures("clock", "three_cores")

OPTIONS = {
    "loss_fn": F.mse_loss,
    "optimizer": (torch.optim.SGD, {"lr": 0.1}),
    "workers": "serial",
    "micro_batches": 3,
    "schedule": "async-1f1b",
}


def automatic(*seconds, **options):
    return Pipeline(ticking(*seconds), stages="auto", example=BATCH, **{**OPTIONS, **options})


def test_whoever_chooses_first_has_the_stages_of_auto():
    layers = ticking(6, 1, 1, 1, 1, 2)
    choice = choose(layers, example=BATCH, **OPTIONS)
    assert choice.stages == ["1", "4"]
    assert "period" in choice.why
    with (
        automatic(6, 1, 1, 1, 1, 2) as auto,
        pipedream_rt.Pipeline(layers, **{**OPTIONS, **choice.options}) as given,
    ):
        assert given.plan == auto.plan
    with pytest.raises(ConfigError, match="give example="):
        choose(layers, **OPTIONS)
    with pytest.raises(ConfigError, match="did you mean"):
        choose(layers, exampel=BATCH, **OPTIONS)
    with pytest.raises(ConfigError, match="leave stages= to Pipeline"):
        choose(layers, example=BATCH, stages=2, **OPTIONS)


def test_slack_of_the_user_stays():
    with automatic(1, 1, 1, slack=2) as pipe:
        assert pipe.plan.shape.slack == (2, 2)


def test_what_the_job_would_refuse_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(ConfigError, match="weigh must be"):
        automatic(6, 3, weigh=3, checkpoint=Checkpoints(tmp_path / "run", every=1))
    assert not list(tmp_path.iterdir())


def test_one_stage_is_chosen_without_a_schedule_for_several():
    """`Pipeline` chooses the schedule and the micro-batches then, as for any single stage."""
    given = {**OPTIONS, "schedule": None, "micro_batches": None}
    several = choose(ticking(6, 6, 6), example=BATCH, **given)
    assert (len(several.stages), several.schedule is None) == (2, False)
    one = choose(ticking(6), example=BATCH, **given)
    assert (one.stages, one.schedule, one.micro_batches) == ([], None, None)
    assert set(one.options) == {"stages", "schedule", "micro_batches", "layout"}
