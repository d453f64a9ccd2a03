"""The scales of losses, as torch.amp.GradScaler has them."""

import dataclasses
import math

import pytest
import torch
from support.rules import context
from torch import nn

from pipedream_rt.messages.state_keys import StateKey
from pipedream_rt.schedules import EdgeKind, plan_for
from pipedream_rt.stage.rules.rule import Update
from pipedream_rt.stage.rules.scaling import LossScale
from pipedream_rt.stage.rules.totals import Totals

FOUND = [False, False, True, False, False, False, True, True, False, False, False, False]
PLAN = plan_for("1f1b", num_stages=2)


class Scaler:
    """A rule of scaling that is told what has become of updates."""

    def __init__(self, given):
        at = context(nn.Linear(1, 1), PLAN)
        self.totals = Totals(at)
        self.rule = given.rule(dataclasses.replace(at, totals=self.totals))

    def learn(self, number, skipped):
        self.totals.receive(EdgeKind.TOTAL, 1, (number, math.inf if skipped else 0.0))
        update = Update(number, [], [], [])
        self.rule.change(update)
        return update.skipped


@pytest.mark.parametrize(
    "given",
    [
        {"init_scale": 65536.0, "growth_interval": 2},
        {"init_scale": 3.3, "growth_interval": 3, "growth_factor": 1.7, "backoff_factor": 0.3},
        {"init_scale": 1e38, "growth_interval": 1, "growth_factor": 10.0},  # would be infinite
    ],
)
def test_a_scale_moves_as_torchs_does(given):
    scaler = Scaler(LossScale(**given))
    scale, tracker = torch.tensor(given["init_scale"]), torch.tensor(0, dtype=torch.int32)
    options = LossScale(**given)
    for update, skipped in enumerate(FOUND):
        assert scaler.rule.of_update(update) == scale.item()
        torch._amp_update_scale_(
            scale, tracker, torch.tensor(float(skipped)), options.growth_factor,
            options.backoff_factor, options.growth_interval,
        )  # fmt: skip
        assert scaler.learn(update, skipped) == skipped
    assert scaler.rule.statistics() == {"updates_skipped": sum(FOUND)}


def test_a_scaler_goes_on_from_a_checkpoint():
    whole, again = (Scaler(LossScale(growth_interval=2)) for _ in range(2))
    for update, skipped in enumerate(FOUND[:6]):
        whole.learn(update, skipped)
    again.rule.load_state(whole.rule.state(), 5)
    for update, skipped in enumerate(FOUND[5:], 5):
        if update > 5:
            whole.learn(update, skipped)
        again.learn(update, skipped)
    assert again.rule.state() == whole.rule.state()


@pytest.mark.parametrize("with_totals", [False, True])
def test_scaling_may_begin_at_a_checkpoint_of_a_run_that_scaled_nothing(with_totals):
    begun = Scaler(LossScale(init_scale=8.0))
    state = {StateKey("totals", path=("totals",)): [[4, 1.0]]} if with_totals else {}
    begun.totals.load_state(state, 5)
    begun.rule.load_state(state, 5)
    assert begun.rule.of_update(5) == 8.0
    assert begun.learn(5, True)
    assert begun.rule.of_update(6) == 4.0


def test_a_checkpoint_of_the_first_update_has_no_scales():
    assert Scaler(LossScale()).rule.state() == {}
