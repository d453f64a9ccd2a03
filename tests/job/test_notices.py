"""What is said at the start of a run."""

import itertools

import pytest
import torch
import torch.distributed as dist
from support.models import Counts
from torch import nn

from pipedream_rt.corrections import ErrorFeedback, Extrapolation
from pipedream_rt.job.notices import (
    DisabledFeatures,
    about_alternative,
    about_balance,
    about_choice,
    about_cores,
    about_micro_batches,
    about_plan,
    about_process_group,
    about_state,
    about_workers,
)
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.models import find_layers
from pipedream_rt.schedules import plan_for

NOTHING = DisabledFeatures(schedule=False, micro_batches=False, corrections=False)
BOTH = DisabledFeatures(schedule=False, micro_batches=True, corrections=True)
ALL = DisabledFeatures(schedule=True, micro_batches=True, corrections=True)
CORRECTED = (ErrorFeedback(), Extrapolation())


def plan(schedule="async-1f1b", per_update=None, stages=4, **options):
    return plan_for(schedule, num_stages=stages, per_update=per_update, **options)


# -- the stages ----------------------------------------------------------------------------------


EMPTY = {}


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(30, 30) for _ in range(4))


def heavy(model, stages, work=EMPTY, **options):
    unsplit = UnsplitModel(model, **options)
    bounds = [0, *range(1, stages), None]
    names = list(unsplit.sequence or find_layers(unsplit.whole))
    return about_balance(unsplit, [names[a:b] for a, b in itertools.pairwise(bounds)], work)


def test_a_layer_that_holds_most_of_a_model_is_named_with_what_would_cut_it():
    backbone = nn.Sequential(Backbone(), nn.Linear(30, 2))
    (said,) = heavy(backbone, 2)
    assert said.startswith("layer 0, a Backbone, holds 98% of the parameters")
    assert "With example=" in said
    assert heavy(backbone, 2, opens=True) == []
    (said,) = heavy(nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 8), nn.Linear(8, 8)), 3)
    assert "layer 0, a Embedding, holds 98%" in said
    assert "It cannot be cut." in said
    whole = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(8, 2))
    (said,) = heavy(whole, 2)
    assert "Give what is in it as layers" in said
    assert heavy(nn.Sequential(*backbone[0].blocks), 4) == []
    assert heavy(backbone, 1) == []


def test_a_layer_that_works_most_is_named_and_not_one_that_holds_most():
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert heavy(model, 2, {"0": 10, "1": 10, "2": 10}) == []
    (said,) = heavy(model, 2, {"0": 10, "1": 10, "2": 80})
    assert said == (
        "layer 2, a Linear, does 80% of the work. It cannot be cut, so fewer stages would be as "
        "fast"
    )


def test_workers_that_nobody_uses_are_told_of():
    assert about_workers(2, 2) == []
    (said,) = about_workers(2, 3)
    assert said.startswith("there may be 3 workers, and the stages use 2")


# -- the schedule -------------------------------------------------------------------------------


def test_of_a_run_without_corrections_no_figure_with_them_is_told():
    made = plan("1f1b", 16)
    assert "as many samples (Muon)" in about_alternative(made, ALL, torch.optim.Muon)
    said = about_alternative(made, ALL, torch.optim.AdamW, corrected=False)
    assert "more samples, of which nobody has measured how many" in said
    assert "nobody has measured" in about_choice(plan(), (), ALL, torch.optim.AdamW)


def test_what_was_chosen_is_said_in_a_line():
    for left_out in (
        ALL,
        BOTH,
        DisabledFeatures(schedule=False, micro_batches=False, corrections=True),
    ):
        for made in (plan(), plan(per_update=16), plan("1f1b", 16), plan("2bw")):
            said = about_choice(made, CORRECTED, left_out, torch.optim.AdamW)
            named = made.flushes and not left_out.schedule  # which says all by itself
            assert said.startswith("chosen: ") or (named and not said)
            assert len(said) < 140
            assert "\n" not in said
    assert about_choice(plan(stages=1), CORRECTED, ALL, torch.optim.AdamW).startswith("one stage,")
    assert about_choice(plan(), CORRECTED, NOTHING, torch.optim.AdamW) == ""


def test_nothing_is_said_of_what_the_user_has_written():
    assert about_plan(plan(per_update=4), NOTHING) == []
    assert about_plan(plan(per_update=1, stages=1), BOTH) == []
    assert about_plan(plan("1f1b", per_update=1), NOTHING) == []
    assert about_plan(plan("1f1b", per_update=4), BOTH) == []


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_a_flush_with_whole_mini_batches_lets_one_stage_work_at_a_time(schedule):
    (said,) = about_plan(plan(schedule), BOTH)
    assert "no two workers compute at once. With micro_batches=8 they do" in said


def test_a_staleness_above_one_is_told_in_a_line_about_this_run():
    (said,) = about_plan(plan(per_update=1), NOTHING)
    assert "up to 3 updates stale" in said
    assert "with micro_batches=4 they are one update stale at most" in said
    assert about_plan(plan(per_update=3), NOTHING) == []
    (said,) = about_plan(plan(per_update=1, slack=1), NOTHING)
    assert "up to 6 updates" in said
    assert "micro_batches=7" in said


# -- the machine --------------------------------------------------------------------------------


def test_more_workers_than_cores_are_told_of():
    (said,) = about_cores(workers=4, threads=1, cores=2)
    assert "4 workers share 2 cores of this machine, so no more than 2 of them compute" in said
    (said,) = about_cores(workers=4, threads=2, cores=4)
    assert "4 workers of 2 threads share 4 cores" in said
    assert about_cores(workers=4, threads=1, cores=4) == []
    assert about_cores(workers=1, threads=4, cores=2) == []


# -- the first mini-batch -----------------------------------------------------------------------


def test_batch_norm_sees_micro_batches():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2)))
    (said,) = about_micro_batches({"": model}, samples=30, per_update=4)
    assert "(1 and 1 more) sees micro-batches of 8 samples, not mini-batches of 30" in said
    assert about_micro_batches({"": model}, samples=30, per_update=1) == []
    assert about_micro_batches({"": model.eval()}, samples=30, per_update=4) == []
    assert about_micro_batches({"0": nn.GroupNorm(1, 2)}, samples=30, per_update=4) == []


def test_state_that_each_micro_batch_moves_is_told_of():
    (said,) = about_micro_batches({"1": Counts(2, 2)}, 32, 8)
    assert "the forward of layer 1 changes 'calls', 8 times per update" in said
    assert 'micro_batches=1, schedule="gpipe" gives it whole mini-batches' in said
    assert about_micro_batches({"1": Counts(2, 2)}, 32, 1) == []


def test_the_script_is_told_that_state_is_on_the_stages():
    (said,) = about_state(UnsplitModel(nn.Sequential(nn.ReLU(), Counts(2, 2), Counts(2, 2))))
    assert said.startswith("the forward of layer 1 changes 'calls' (and so do 1 more) on its stage")
    assert about_state(UnsplitModel(nn.Sequential(nn.BatchNorm1d(2)))) == []


def test_layers_that_take_time_in_dimension_0_are_named():
    model = nn.Sequential(nn.LSTM(2, 2), nn.LSTM(2, 2, batch_first=True))
    (said,) = about_micro_batches({"": model}, samples=30, per_update=4)
    assert "cut along dimension 0, which is 30 long, and 0 takes time there" in said
    assert about_micro_batches({"": model}, samples=30, per_update=4, is_marked=True) == []
    assert (
        about_micro_batches({"0": nn.LSTM(2, 2, batch_first=True)}, samples=30, per_update=4) == []
    )


def test_micro_batches_that_stay_empty_are_told_of():
    (said,) = about_micro_batches({"": nn.Linear(2, 2)}, samples=3, per_update=8)
    assert "3 samples leaves 5 of 8 micro-batches empty; micro_batches=3 does the same" in said
    assert about_micro_batches({"": nn.Linear(2, 2)}, samples=8, per_update=8) == []


# -- a process group in the script ---------------------------------------------------------------


class Ranked(nn.Linear):
    def forward(self, x):
        return super().forward(x) + dist.get_rank()


def ranked_loss(output, target):
    return (output - target).sum() * dist.get_world_size()


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def asked(loss_fn=None):
    model = UnsplitModel(nn.Sequential(nn.Linear(2, 2), nn.Sequential(Ranked(2, 2)), Ranked(2, 2)))
    return about_process_group(model, [["0", "1"], ["2"]], loss_fn)


def test_layers_that_ask_for_a_process_group_are_named_where_the_script_has_one(group):
    (said,) = asked(ranked_loss)
    assert said.startswith("layer 1.0, a Ranked and 2 more may ask torch.distributed, which says ")
    assert "rank 0 of 1 in this script" in said
    model = UnsplitModel(nn.Sequential(nn.Linear(2, 2)))
    (said,) = about_process_group(model, [["0"]], ranked_loss)
    assert said.startswith("the loss may ask torch.distributed")
    assert about_process_group(model, [["0"]], nn.MSELoss()) == []


def test_without_a_process_group_in_the_script_nothing_is_said():
    assert asked(ranked_loss) == []
