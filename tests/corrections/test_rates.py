"""Corrections of the options of a step: rates, momentum and refreshes by the staleness."""

import pytest
import torch
from torch import nn

from pipedream_rt.corrections import (
    StalenessDamping,
    StalenessMomentum,
    StalenessRate,
    StalenessRefresh,
)
from pipedream_rt.stage.correction import Moment


def changed(correction, staleness, update=0, num_stages=4, **options):
    """The options of a group after the correction of a step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.8)
    optimizer.param_groups[0].update(options)
    moment = Moment(
        stage=0, num_stages=num_stages, micro_batches=1, update=update, read=update - staleness
    )
    correction.before_step(moment, optimizer)
    return optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("staleness", "update", "expected"),
    [(4, 0, 0.2), (4, 4, 0.4), (4, 8, 0.8), (4, 99, 0.8), (1, 0, 0.8), (0.5, 0, 0.8), (0, 0, 0.8)],
)
def test_the_division_by_the_staleness_fades_out(staleness, update, expected):
    """Halfway it is one by the root; fresh enough gradients are never stepped by more."""
    group = changed(StalenessRate(updates=8), staleness, update)
    assert group["lr"] == pytest.approx(expected)


@pytest.mark.parametrize(("power", "expected"), [(0.5, 0.4), (1.0, 0.2), (0.0, 0.8)])
def test_a_rate_is_damped_by_one_more_than_the_staleness(power, expected):
    assert changed(StalenessDamping(power), 3)["lr"] == pytest.approx(expected)
    assert changed(StalenessDamping(power), 0)["lr"] == 0.8


@pytest.mark.parametrize(("staleness", "expected"), [(0, 0.5), (2, 0.7), (4, 0.9), (9, 0.9)])
def test_a_momentum_rises_to_the_top_and_no_further(staleness, expected):
    group = changed(StalenessMomentum(top=0.9), staleness, momentum=0.5, betas=(0.5, 0.99))
    assert group["momentum"] == pytest.approx(expected)
    assert group["betas"] == (pytest.approx(expected), 0.99)


def test_no_momentum_stays_none():
    group = changed(StalenessMomentum(), 3)
    assert group["momentum"] == 0
    assert "betas" not in group


def test_refreshes_are_more_frequent_where_it_is_staler():
    """Never more than one for each step; a stage without staleness keeps its number."""
    found = [changed(StalenessRefresh(), tau, refresh=10)["refresh"] for tau in (0, 1, 3, 99)]
    assert found == [10, 15, 5, 1]
    assert "refresh" not in changed(StalenessRefresh(), 3)


@pytest.mark.parametrize("stages", [3, 4, 9])
def test_together_the_stale_stages_refresh_as_often_as_all_do_without(stages):
    """The staleness of an asynchronous pipeline falls by one from stage to stage."""
    found = [
        changed(StalenessRefresh(), tau, num_stages=stages, refresh=10_000)["refresh"]
        for tau in range(1, stages)
    ]
    assert sum(1 / each for each in found) == pytest.approx(stages / 10_000, rel=1e-3)
