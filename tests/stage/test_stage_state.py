"""The state of a stage goes through one set of functions, and comes back as it was."""

from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from support.messages import head
from support.oracle import assert_same
from support.rules import context
from support.stages import stages_of, value
from torch import nn

from pipedream_rt import Clip
from pipedream_rt.messages.head import LossTask
from pipedream_rt.messages.state_keys import by_text
from pipedream_rt.schedules import plan_for
from pipedream_rt.schedules.placement import Tie
from pipedream_rt.stage import stage_state

ADAM = (torch.optim.Adam, {"lr": 0.1})


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))


def one_stage(**options):
    (stage,) = stages_of(model(), loss_fn=F.mse_loss, optimizer=ADAM, **options)
    return stage


def train(stage, numbers):
    for m in numbers:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(m))
        stage.forward(head(m), [value(x)], value(x.flip(0)), LossTask(share=1.0))
        stage.backward(m, ())
        stage.end(m)
        stage.step(m)
    return stage


def test_a_stage_goes_on_from_what_was_read_of_another():
    options = {"clip": Clip(norm=0.1), "ema": 0.9}
    whole, begun = train(one_stage(**options), range(6)), train(one_stage(**options), range(3))
    again = one_stage(**options)
    assert stage_state.restore(again, stage_state.snapshot(begun), step=3, floor=0)
    train(again, range(3, 6))
    assert_same(stage_state.state_dict(again), stage_state.state_dict(whole))
    found, wanted = by_text(stage_state.step_state(again)), by_text(stage_state.step_state(whole))
    assert found.pop("split/0") == wanted.pop("split/0")
    assert_same(found, wanted)
    assert stage_state.fingerprints(again) == stage_state.fingerprints(whole)


def test_each_value_stands_under_the_part_that_keeps_it():
    stage = train(one_stage(ema=0.9), range(2))
    parts = {key.part for key in stage_state.step_state(stage)}
    assert parts == {"optimizer", "split", "ema"}
    assert {key.part for key in stage_state.optimizer_state(stage)} == {"optimizer", "split", "ema"}


def test_loaded_weights_are_those_of_the_newest_version():
    stage = train(one_stage(), range(2))
    zeros = {key: torch.zeros_like(t) for key, t in stage_state.state_dict(stage).items()}
    stage_state.load_state(stage, zeros)
    assert_same(stage_state.state_dict(stage), zeros)
    train(stage, [2])
    assert any(t.any() for t in stage_state.state_dict(stage).values())


def test_of_a_borrowed_weight_that_was_loaded_nothing_older_is_read():
    module = nn.ParameterDict({"tied": nn.Parameter(torch.ones(2))})
    plan = replace(plan_for("async-1f1b", num_stages=2), ties=(Tie("head", (0, 1)),))
    weights = context(module, plan, 1, names={"tied": "head"}).weights
    weights.receive(0, {"head": torch.full((2,), 3.0)})
    stage = SimpleNamespace(module=module, weights=weights, parameters=weights.own)
    stage_state.load_state(stage, {"tied": torch.full((2,), 5.0)})
    weights.begin(0)
    with weights.reading(0):
        assert module["tied"].tolist() == [5, 5]


def test_a_kept_version_stays_as_it_was():
    stage = train(one_stage(ema=0.5), range(2))
    before = {key: t.clone() for key, t in stage_state.state_dict(stage).items()}
    stage_state.keep(stage, 1, False, {})
    stage_state.keep(stage, 2, True, {})
    train(stage, [2])
    assert_same(stage_state.state_dict(stage, 1), before)
    average, newest = stage_state.state_dict(stage, 2), stage_state.state_dict(stage)
    assert not torch.equal(average["0.weight"], newest["0.weight"])


def test_fingerprints_differ_where_a_value_does():
    one, other = train(one_stage(), range(2)), train(one_stage(), range(2))
    assert stage_state.fingerprints(one) == stage_state.fingerprints(other)
    with torch.no_grad():
        other.module[1].running_mean[0] += 1
    before, now = stage_state.fingerprints(one), stage_state.fingerprints(other)
    assert [key for key in now if now[key] != before[key]] == ["buffers"]
