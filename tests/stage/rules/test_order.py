"""Which rules a stage has, and in which order they act."""

import dataclasses

from support.rules import context
from support.stages import TWO, a_stage
from torch import nn

from pipedream_rt import Clip, LossScale
from pipedream_rt.corrections import DelayCompensation
from pipedream_rt.schedules import plan_for
from pipedream_rt.schedules.placement import Tie
from pipedream_rt.stage.rules.corrections import Correcting
from pipedream_rt.stage.rules.ema import Averaging
from pipedream_rt.stage.rules.order import rules_of


def names(plan, *options, stage=0):
    module = nn.ParameterDict({"w": nn.Parameter(nn.Linear(1, 1).weight.data)})
    return [type(rule).__name__ for rule in rules_of(options, context(module, plan, stage))]


EVERYTHING = (Averaging(0.9), Clip(norm=1.0), Correcting((DelayCompensation(),)), LossScale())


def test_a_plain_stage_has_none():
    assert names(TWO) == []
    stage = a_stage([nn.Linear(1, 1)], TWO)
    phases = ("_losses", "_roots", "_adjusts", "_ends", "_collects", "_changes", "_afters")
    assert not any(getattr(stage, phase) for phase in phases)


def test_they_act_in_this_order():
    plan = plan_for("1f1b", num_stages=2, replicas=[2, 1], per_update=2, shard_optimizer=True)
    assert names(plan, *EVERYTHING) == [
        "Replicas", "Totals", "Scaling", "Clipping", "Corrections", "Ema", "Shards"
    ]  # fmt: skip
    tied = plan_for("1f1b", num_stages=2)
    tied = dataclasses.replace(tied, ties=(Tie("w", (0, 1)),))
    for stage in range(2):
        assert names(tied, Averaging(0.9), stage=stage) == ["Ties", "Ema"]


def test_totals_are_there_for_those_who_need_them():
    one, two = (plan_for("1f1b", num_stages=n) for n in (1, 2))
    assert names(one, Clip(norm=1.0)) == ["Clipping"]
    assert names(one, LossScale()) == ["Totals", "Scaling"]
    assert names(two, Clip(norm=1.0)) == ["Totals", "Clipping"]
    assert names(two, Clip(norm=1.0, over="stage")) == ["Clipping"]
    assert names(two, Clip(value=1.0)) == ["Clipping"]
