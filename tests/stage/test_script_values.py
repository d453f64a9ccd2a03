"""A stage's copies of the script's values: what each micro-batch sees, and what may not change."""

import pytest
import torch

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.holders import Holder
from pipedream_rt.stage.hyper import pack_hyper
from pipedream_rt.stage.script_values import GivenValues


class Options:
    """What the script holds, and a layer reads."""

    def __init__(self):
        self.rate, self.mode = 0.5, "warm"


def here(stage=0, shared=()):
    """Options, and what a stage makes of them as holder 3."""
    options = Options()
    return options, GivenValues(stage, {3: Holder(options, "object", "here")}, shared)


def fed(**values):
    """What a micro-batch is fed with, for holder 3."""
    return [[3, key, pack_hyper(value, key)] for key, value in values.items()]


def test_each_micro_batch_sees_what_it_was_fed_with():
    options, given = here()
    for rate in (0.1, 0.2, 0.1):  # a backward comes after forwards with later values
        given.apply(fed(rate=rate))
        assert (options.rate, options.mode) == (rate, "warm")


def test_what_the_stage_has_removed_itself_stays_so():
    options, given = here()
    given.apply(fed(new=1))
    del options.new
    given.apply(fed())
    assert not hasattr(options, "new")


def test_what_a_later_micro_batch_was_not_fed_with_is_as_at_the_start():
    options, given = here()
    given.apply(fed(rate=0.1))
    given.apply(fed(rate=0.2, mode="hot", new=(1, 2)))
    assert (options.rate, options.mode, options.new) == (0.2, "hot", (1, 2))
    given.apply(fed(rate=0.1))
    assert vars(options) == {"rate": 0.1, "mode": "warm"}
    given.apply([])
    assert vars(options) == {"rate": 0.5, "mode": "warm"}


def test_an_entry_that_came_later_goes_for_an_earlier_micro_batch():
    table = {"old": 1.0}
    given = GivenValues(0, {3: Holder(table, "dict", "here")}, ())
    given.apply(fed(new=0.5))
    assert table == {"old": 1.0, "new": 0.5}
    given.apply([])
    assert table == {"old": 1.0}


def test_values_of_holders_that_this_stage_has_not_are_ignored():
    options, given = here()
    given.apply([[7, "rate", 0.1]])
    assert options.rate == 0.5


def test_a_value_that_travels_is_no_change_by_the_stage():
    _, given = here(2, [3])
    given.apply(fed(rate=0.1))
    given.refuse_parted()
    given.apply([])
    given.refuse_parted()


def test_a_change_by_the_stage_is_refused_with_both_values():
    options, given = here(2, [3])
    options.rate = 0.7
    words = r"stage 2 has changed 'rate' of here \(0.5 became 0.7\), of which other stages"
    with pytest.raises(ConfigError, match=words):
        given.refuse_parted()


def test_the_state_of_an_object_is_refused_without_values():
    shared = torch.zeros(2)
    given = GivenValues(0, {3: Holder(shared, "state", "a tensor")}, [3])
    shared.add_(1)
    with pytest.raises(ConfigError, match="stage 0 has changed a tensor, of which other stages"):
        given.refuse_parted()


def test_what_no_other_stage_has_may_change():
    options, given = here(2)
    options.rate = 0.7
    given.refuse_parted()


def test_a_cache_may_be_filled_once_and_a_dict_again():
    options, cache = Options(), {}
    options.mask = None
    holders = {3: Holder(options, "object", "here"), 4: Holder(cache, "dict", "a cache")}
    given = GivenValues(0, holders, [3, 4])
    options.mask = torch.ones(2)
    for size in (1, 2):
        cache[size] = torch.ones(size)
        given.refuse_parted()
    options.more = torch.ones(2)
    with pytest.raises(ConfigError, match="has changed 'more' of here"):
        given.refuse_parted()


@pytest.mark.parametrize(
    ("cache", "other"),
    [
        ({}, torch.ones(2, requires_grad=True)),
        ({}, 3),
        ({"x": torch.ones(2)}, torch.zeros(2)),
    ],
    ids=["with a gradient", "a number", "not empty"],
)
def test_a_cache_is_filled_with_tensors_without_gradient_and_none_is_replaced(cache, other):
    cache = dict(cache)
    given = GivenValues(0, {4: Holder(cache, "dict", "a cache")}, [4])
    cache["x"] = other
    with pytest.raises(ConfigError, match="has changed 'x' of a cache"):
        given.refuse_parted()


@pytest.mark.parametrize("value", [[1], {"a": 1}], ids=str)
def test_of_a_class_only_plain_values_count(value):
    class Shared:
        table, count = None, 0

    given = GivenValues(0, {4: Holder(Shared, "class", "Shared", travels=False)}, [4])
    Shared.table = value
    given.refuse_parted()
    Shared.count = 1
    with pytest.raises(ConfigError, match=r"has changed 'count' of Shared \(0 became 1\)"):
        given.refuse_parted()
