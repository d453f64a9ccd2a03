"""The loop over a loader that keeps the pipe full."""

import logging

import pytest
from support.models import regression
from support.oracle import assert_same
from support.small import losses, small

from pipedream_rt import ConfigError


def test_two_epochs_at_a_time_are_refused():
    with small() as pipe:
        data = regression(6)
        with pytest.raises(ConfigError, match=r"epoch 0 is under way.*close it"):
            list(zip(pipe.train_epoch(data), pipe.train_epoch(data)))
    with small() as pipe:
        first = pipe.train_epoch(data)
        next(first)
        with pytest.raises(ConfigError, match="epoch 0 is under way"):
            next(pipe.train_epoch(data))
        first.close()
        assert len(losses(pipe, data)) == 6


def test_an_empty_epoch_says_so(caplog):
    with small() as pipe:
        once = iter(regression(3))
        assert [len(losses(pipe, once)) for _ in range(2)] == [3, 0]
    assert "the loader of epoch 1 yielded nothing. A generator" in caplog.text


def test_what_a_break_leaves_behind_can_be_seen(caplog):
    with caplog.at_level(logging.INFO), small() as pipe:
        for result in pipe.train_epoch(regression(12)):
            if result.step == 4:
                break
        assert (pipe.seen, pipe.step) == (5, 8)
        weights = pipe.state_dict()
        assert [result.step for result in pipe.train_epoch(regression(3))] == [8, 9, 10]
    assert "left after result 4: the mini-batches up to 7 are trained on" in caplog.text
    with small() as pipe:
        losses(pipe, regression(12)[:8])
        assert_same(weights, pipe.state_dict())


def test_an_epoch_is_as_long_as_its_loader():
    data = regression(3)
    with small() as pipe:
        epoch = pipe.train_epoch(data)
        assert len(epoch) == len(data)
        assert len(list(epoch)) == 3
        assert pipe.train_epoch([])  # as any generator
        endless = pipe.train_epoch(iter(data))
        with pytest.raises(TypeError, match="no len"):
            len(endless)
        assert len(list(endless)) == 3


def test_the_loader_is_always_one_item_ahead():
    """Neither more nor less, so what it draws does not depend on timing."""
    drawn = []

    def loader():
        for i, pair in enumerate(regression(9)):
            drawn.append(i)
            yield pair

    with small() as pipe:
        ahead = [len(drawn) - r.step for r in pipe.train_epoch(loader())]
        c = pipe.plan.credits()
    assert ahead == [c + 1] * (9 - c) + list(range(c, 0, -1))


def test_an_epoch_that_nobody_iterates_over_is_told_of(caplog):
    with small() as pipe:
        pipe.train_epoch(regression(4))
        pipe.evaluate(regression(4))
        assert caplog.text.count("nothing was trained") == 1
        for _ in pipe.train_epoch(regression(4)):
            pass
    assert caplog.text.count("nothing was trained") == 1
