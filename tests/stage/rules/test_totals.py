"""Norms go down the pipe, totals come back, and a checkpoint has those that are still needed."""

import math

import torch
from support.rules import context
from torch import nn

from pipedream_rt.schedules import EdgeKind, plan_named
from pipedream_rt.stage.rules.base import Update
from pipedream_rt.stage.rules.totals import NOT_FINITE, Totals

PLAN = plan_named("async-1f1b", num_stages=2).with_norms()


def totals(stage=0, norms=()):
    made = Totals(context(nn.Linear(1, 1), PLAN, stage))
    made.measured_by(lambda update: {n: torch.tensor(v) for n, v in norms}, 2.0)
    return made


def update(number):
    return Update(number, [], [], [])


def test_stage_0_makes_the_total_others_pass_norms_on():
    first, last = totals(0, [(0, 3.0)]), totals(1, [(1, 4.0)])
    gifts = last.collect(update(7))
    assert gifts.keys() == {EdgeKind.NORM}
    first.receive(EdgeKind.NORM, 1, gifts[EdgeKind.NORM])
    assert first.collect(update(7))[EdgeKind.TOTAL] == (7, 5.0)
    assert (first.of(7), last.of(7)) == (5.0, None)
    last.receive(EdgeKind.TOTAL, 0, (7, 5.0))
    assert last.of(7) == 5.0


def test_a_gradient_that_is_not_finite_on_any_stage_makes_it_infinite():
    first = totals(0, [(0, 3.0), (NOT_FINITE, 0.0)])
    first.receive(EdgeKind.NORM, 1, {NOT_FINITE: torch.tensor(1.0)})
    assert first.collect(update(0))[EdgeKind.TOTAL] == (0, math.inf)


def test_no_gradient_has_the_norm_0():
    assert totals().collect(update(0))[EdgeKind.TOTAL] == (0, 0.0)


def test_those_that_no_update_needs_are_forgotten_and_the_rest_is_kept():
    made = totals()
    for number in range(20):
        made.receive(EdgeKind.TOTAL, 0, (number, float(number)))
    made.receive(EdgeKind.TOTAL, 0, (3, 99.0))  # known long ago
    assert made.of(3) is None
    assert made.of(19) == 19.0
    again = totals()
    again.load_state(made.state(), 18)
    assert (again.of(17), again.of(18)) == (17.0, None)
    again.receive(EdgeKind.TOTAL, 0, (18, 1.0))
    assert again.of(18) == 1.0
    assert totals(1).state() == {}
