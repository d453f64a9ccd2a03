"""Norms go down the pipe, totals come back, and a checkpoint has those that are still needed."""

import math

import pytest
import torch
from support.rules import context
from torch import nn

from pipedream_rt.schedules import EdgeKind, plan_for
from pipedream_rt.stage.rules.rule import Update
from pipedream_rt.stage.rules.totals import NOT_FINITE, Totals

PLAN = plan_for("async-1f1b", num_stages=2).with_norms()


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
    assert (first.of(7), last.of(7)) == (5.0, 4.0)


def test_where_updates_wait_the_total_of_stage_0_is_that_of_all():
    plan = plan_for("async-1f1b+vertical-sync", num_stages=2).with_norms()
    last = Totals(context(nn.Linear(1, 1), plan, 1))
    last.measured_by(lambda update: {1: torch.tensor(4.0)}, 2.0)
    last.collect(update(7))
    assert last.of(7) is None
    last.receive(EdgeKind.TOTAL, 0, (7, 5.0))
    assert last.of(7) == 5.0
    assert last.state() == {}


def clipped_by(norms):
    """The norms by which the two stages clip, of the norm of each in every update."""
    made = [Totals(context(nn.Linear(1, 1), PLAN, stage)) for stage in (0, 1)]
    first, last = made
    for stage, each in enumerate(made):
        each.measured_by(lambda u, s=stage: {s: torch.tensor(float(norms[u.number][s]))}, 2.0)
    found, came = ([], []), []
    for number in range(len(norms)):
        first.receive(EdgeKind.NORM, 1, last.collect(update(number))[EdgeKind.NORM])
        if number >= PLAN.delay:  # what an order lets come by then
            last.receive(EdgeKind.TOTAL, 0, came[number - PLAN.delay])
        found[1].append(float(last.of(number)))
        came.append(first.collect(update(number))[EdgeKind.TOTAL])
        found[0].append(float(first.of(number)))
    return found


def test_what_a_stage_cannot_know_yet_has_grown_as_the_rest_has():
    assert PLAN.delay == 2
    first, last = clipped_by([(3, 4)] * 4)
    assert first == [5.0] * 4
    assert last == [4.0, 4.0, 5.0, 5.0]


def test_a_sudden_gradient_is_known_to_every_stage_at_once():
    first, last = clipped_by([(3, 4), (3, 4), (3, 4), (300, 400), (3, 4), (3, 4), (3, 4)])
    assert first == [5.0, 5.0, 5.0, 500.0, 5.0, 5.0, 5.0]
    assert last == [4.0, 4.0, 5.0, 500.0, 5.0, 5.0, 5.0]
    assert clipped_by([(3, 4), (300, 400), (3, 4)])[1][1] == 400.0  # the first, after small ones


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_a_total_that_is_not_finite_says_nothing_of_later_ones(odd):
    first, last = clipped_by([(3, 4), (3, 4), (odd, 4), (3, 4), (3, 4), (3, 4)])
    assert math.isfinite(sum(first)) is False
    assert last == [4.0, 4.0, 5.0, 5.0, 5.0, 5.0]
    last = clipped_by([(3, 4), (3, 4), (3, odd), (3, 4), (3, 4), (3, 4)])[1]
    assert not math.isfinite(last[2])
    assert last[:2] + last[3:] == [4.0, 4.0, 5.0, 5.0, 5.0]


def test_gradients_that_were_zero_say_nothing_of_later_ones():
    assert clipped_by([(3, 0), (0, 0), (3, 4), (3, 4)])[1] == [0.0, 0.0, 4.0, 4.0]
    assert clipped_by([(3, 4), (3, 4), (0, 0), (3, 4), (3, 4)])[1] == [4.0, 4.0, 0.0, 5.0, 5.0]


def test_a_stage_goes_on_with_the_norms_that_it_knew():
    steady, changed = [(3, 4)] * 6, totals(1, [(1, 4.0)])
    for number in range(4):
        changed.collect(update(number))
    for number in range(2):
        changed.receive(EdgeKind.TOTAL, 0, (number, 5.0))
    again = totals(1, [(1, 4.0)])
    first = totals(0)
    for number in range(4):
        first.receive(EdgeKind.TOTAL, 0, (number, 5.0))
    again.load_state(first.state() | changed.state(), 4)
    again.collect(update(4))
    assert again.of(4) == clipped_by(steady)[1][4] == 5.0


def test_a_gradient_that_is_not_finite_on_any_stage_makes_it_infinite():
    first = totals(0, [(0, 3.0), (NOT_FINITE, 0.0)])
    first.receive(EdgeKind.NORM, 1, {NOT_FINITE: torch.tensor(1.0)})
    assert first.collect(update(0))[EdgeKind.TOTAL] == (0, math.inf)


def test_no_gradient_has_the_norm_0():
    assert totals().collect(update(0))[EdgeKind.TOTAL] == (0, 0.0)


def test_those_that_no_update_needs_are_forgotten_and_the_rest_is_kept():
    made, told = totals(), []
    made.tell(lambda *each: told.append(each))
    for number in range(20):
        made.receive(EdgeKind.TOTAL, 0, (number, float(number)))
    for number in (3, 19):  # known, long ago or just now
        made.receive(EdgeKind.TOTAL, 0, (number, 99.0))
    assert told == [(number, float(number)) for number in range(20)]
    assert made.of(3) is None
    assert made.of(19) == 19.0
    again = totals()
    again.load_state(made.state(), 18)
    assert (again.of(17), again.of(18)) == (17.0, None)
    again.receive(EdgeKind.TOTAL, 0, (18, 1.0))
    assert again.of(18) == 1.0
    assert totals(1).state() == {}
