"""Gradients are clipped as torch clips them, by the norm of the stage or of all stages."""

import dataclasses

import pytest
import torch
from support.rules import context
from torch import nn

from pipedream_rt import Clip
from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules import EdgeKind, plan_for
from pipedream_rt.stage.rules.rule import Update
from pipedream_rt.stage.rules.totals import Totals

SYNC = plan_for("async-1f1b+vertical-sync", num_stages=2).with_norms()
LATE = plan_for("async-1f1b", num_stages=2).with_norms()


def stages(clip, plan):
    """Two stages with their gradients, and the whole model."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for parameter in whole.parameters():
        parameter.grad = torch.randn_like(parameter)
    made = []
    for index in range(2):
        module = whole[index]
        at = context(module, plan, index)
        numbers = {name: 2 * index + i for i, name in enumerate(at.named)}
        totals = Totals(at)
        rule = clip.rule(dataclasses.replace(at, numbers=numbers, totals=totals))
        made.append((module, totals, rule, [p.grad.clone() for p in module.parameters()]))
    return whole, made


def measured(made, number=0):
    """Let the norms go down and the total come back; the updates."""
    (_, first, _, mine), (_, last, _, theirs) = made
    behind = last.collect(Update(number, theirs, [], []))
    first.receive(EdgeKind.NORM, 1, behind[EdgeKind.NORM])
    total = first.collect(Update(number, mine, [], []))[EdgeKind.TOTAL]
    last.receive(EdgeKind.TOTAL, 0, total)
    return total


@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf")])
def test_the_norm_of_all_stages_is_that_of_torch(kind):
    whole, made = stages(Clip(norm=0.1, norm_type=kind), SYNC)
    number, total = measured(made)
    gradients = [p.grad.clone() for p in whole.parameters()]
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1, kind).item()
    assert (number, total) == (0, expected)
    right = [p.grad.clone() for p in whole.parameters()]
    for parameter, gradient in zip(whole.parameters(), gradients, strict=True):
        parameter.grad = gradient
    for _, _, rule, _ in made:
        rule.change(Update(0, [], [], []))
    assert all(torch.equal(p.grad, r) for p, r in zip(whole.parameters(), right, strict=True))


def test_a_late_norm_is_estimated_and_at_first_that_of_the_stages_behind():
    _, made = stages(Clip(norm=0.1), LATE)
    assert LATE.delay == 2
    _, total = measured(made, 0)
    module, totals, rule, gradients = made[1]
    own = torch.stack([g.norm() for g in gradients]).norm()
    for number, by in ((1, own), (2, total)):
        totals.collect(Update(number, gradients, [], []))
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        rule.change(Update(number, [], [], []))
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient * 0.1 / (by + 1e-6))


def test_an_update_that_is_skipped_is_not_clipped():
    _, made = stages(Clip(value=1e-9), SYNC)
    module, _, rule, gradients = made[0]
    rule.change(Update(0, [], [], [], skipped=True))
    assert torch.equal(module.weight.grad, gradients[0])
    rule.change(Update(0, [], [], []))
    assert module.weight.grad.abs().max() == torch.tensor(1e-9)


@pytest.mark.parametrize("options", [{}, {"norm": 1.0, "value": 1.0}, {"norm": -1}, {"norm": True}])
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(ConfigError):
        Clip(**options)
