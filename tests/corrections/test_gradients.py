"""Corrections of stale gradients and of their updates, on numbers that one can check by hand."""

import math

import pytest
import torch

from pipedream_rt import ConfigError
from pipedream_rt.corrections import DelayCompensation, ErrorFeedback
from pipedream_rt.stage.correction import Moment


def at(staleness, micro_batches=1):
    return Moment(stage=0, num_stages=4, micro_batches=micro_batches, update=staleness, read=0)


def compensated(correction, gradient, moved, micro_batches=1):
    """A gradient after the correction, where the weight has moved since the version read."""
    gradients = {"w": torch.tensor([gradient])}
    read, newest = {"w": torch.tensor([1.0])}, {"w": torch.tensor([1.0 + moved])}
    correction.after_backward(at(1, micro_batches), gradients, read, newest)
    assert (read["w"].item(), newest["w"].item()) == (1.0, 1.0 + moved)
    return gradients["w"].item()


def begun(correction):
    correction.state = {}
    return correction


def test_a_gradient_is_compensated_by_its_square_times_the_way_of_the_weight():
    correction = begun(DelayCompensation(strength=0.5))
    assert compensated(correction, 4.0, moved=0.25) == 4.0 + 0.5 * 16.0 * 0.25
    assert compensated(correction, -4.0, moved=-0.25) == -4.0 - 0.5 * 16.0 * 0.25
    assert compensated(correction, 4.0, moved=0.0) == 4.0
    assert correction.state == {}


def test_parts_of_a_gradient_are_compensated_as_the_whole():
    """With k micro-batches each has a k-th of the gradient, whose square is too small by k."""
    correction = begun(DelayCompensation(strength=0.5))
    assert 4 * compensated(correction, 1.0, 0.25, micro_batches=4) == compensated(
        correction, 4.0, 0.25
    )


def test_an_adaptive_strength_is_divided_by_the_root_of_the_average_square():
    correction = begun(DelayCompensation(strength=0.5, adaptive=True, decay=0.75))
    average = 0.0
    for gradient in (4.0, 2.0, 8.0):
        average = 0.75 * average + 0.25 * gradient**2
        expected = gradient + 0.5 * gradient**2 * 0.25 / math.sqrt(average + 1e-7)
        assert compensated(correction, gradient, 0.25) == pytest.approx(expected)


def test_a_sparse_gradient_cannot_adapt_and_is_named():
    gradients = {"table.weight": torch.ones(2, 2).to_sparse()}
    weights = {"table.weight": torch.ones(2, 2)}
    with pytest.raises(
        ConfigError, match=r"dense gradients, and that of 'table\.weight' is sparse"
    ):
        begun(DelayCompensation(adaptive=True)).after_backward(at(1), gradients, weights, weights)


def updated(correction, update, staleness):
    """What a step of some size adds to a weight in the end."""
    weights = {"w": torch.tensor([10.0 + update])}
    correction.after_step(at(staleness), weights, {"w": torch.tensor([10.0])})
    return weights["w"].item() - 10.0


def test_an_update_takes_back_the_error_of_the_one_before():
    """The first is left as it is; each next one is compared with what the optimizer added."""
    correction = begun(ErrorFeedback())
    assert [updated(correction, u, 1) for u in (1.0, 3.0, 2.0)] == [1.0, 3.0 + 2.0, 2.0 - 1.0]


@pytest.mark.parametrize(
    ("limit", "staleness", "factor"),
    [(1.0, 3, 1.0), (2.0, 3, 2.0), (2.0, 0.5, 0.5), (math.inf, 3, 3.0), (0.0, 3, 0.0)],
)
def test_the_error_counts_as_often_as_the_step_is_stale_up_to_a_limit(limit, staleness, factor):
    correction = begun(ErrorFeedback(limit=limit))
    updated(correction, 1.0, staleness)
    assert updated(correction, 3.0, staleness) == 3.0 + factor * 2.0


def test_a_fresh_step_is_left_alone_and_remembered():
    correction = begun(ErrorFeedback())
    assert [updated(correction, u, 0) for u in (1.0, 4.0)] == [1.0, 4.0]
    assert updated(correction, 5.0, 1) == 5.0 + 1.0
