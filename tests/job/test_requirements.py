"""Checks of options: what is refused, and the words that say what was meant."""

import pickle
from datetime import timedelta
from functools import partial

import pytest
from torch import nn

import pipedream_rt
from pipedream_rt import Checkpoints, ConfigError, Layout, Recovery, Training, UnknownOption
from pipedream_rt.job.requirements import (
    refuse_unknown,
    require_choice,
    require_count,
    require_decay,
    require_instance,
    require_range,
    require_seed,
    require_time,
)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Training(clipp=1), "Training has no option 'clipp'; did you mean clip?"),
        (lambda: Layout(clip=1), "Layout has no option 'clip'; clip is an option of Training"),
        (lambda: Recovery(restarts=1), "did you mean max_restarts?"),
        (lambda: Checkpoints("run", evry=3), "did you mean every?"),
        (
            lambda: pipedream_rt.Pipeline(nn.Linear(1, 1), slack=1),
            "slack belongs to Layout: give layout=Layout(slack=...)",
        ),
        (
            lambda: pipedream_rt.Pipeline(nn.Linear(1, 1), every=1),
            "give checkpoint=Checkpoints(every=...)",
        ),
        (lambda: pipedream_rt.Pipeline(nn.Linear(1, 1), zzz=1), "there are model, stages, example"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(make, words):
    with pytest.raises(UnknownOption) as e:
        make()
    assert words in str(e.value)
    assert isinstance(e.value, ConfigError)
    assert isinstance(e.value, TypeError)
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)


def test_the_first_name_that_is_not_known_is_refused():
    refuse_unknown("Layout", ["credits", "slack"])
    with pytest.raises(UnknownOption, match=r"no option 'zzz'; there are .*credits"):
        refuse_unknown("Layout", ["credits", "zzz", "yyy"])


def must_be(words, check, *values):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            check(value)
        assert words in str(caught.value)
        assert str(caught.value).endswith(f"not {value!r}")


def test_a_count_is_an_integer_that_is_large_enough():
    require_count("k", 1)
    require_count("k", 0, least=0)
    must_be("k must be an integer of at least 1", partial(require_count, "k"), 0, True, 1.0, "4")


def test_a_range_is_two_integers_that_do_not_fall():
    require_range("workers", (2, 2))
    wrong = ((3, 2), (0, 2), (1, True), (1.0, 2), (1, 2, 3), [1, 2], 2)
    must_be("two integers such as (2, 4)", partial(require_range, "workers"), *wrong)


def test_a_decay_is_a_number_below_one_or_nothing():
    for value in (None, 0, 0.999):
        require_decay(value)
    must_be("ema must be a number", require_decay, 1.0, -0.1, "0.9", True, float("nan"))


def test_a_seed_is_an_integer():
    require_seed(-1)
    must_be("seed must be an integer", require_seed, None, "7", 1.5, True)


def test_a_time_is_positive_and_has_its_unit():
    require_time("answer", timedelta(microseconds=1))
    must_be("must be a positive", partial(require_time, "answer"), timedelta(0), timedelta(-1), 30)


def test_a_choice_is_one_of_the_values_and_of_their_type():
    check = partial(require_choice, "resume", choices=(True, False, "auto"))
    check("auto")
    check(False)
    must_be("resume must be True, False or 'auto'", check, 1, 0, "Auto", None)


def test_an_instance_is_one_of_its_class():
    require_instance("recovery", Recovery(), Recovery)
    check = partial(require_instance, "recovery", kind=Recovery)
    must_be("recovery must be Recovery(...)", check, 3, Recovery)
