"""The costs of a stage, by the formulas."""

import math

import pytest
from support.profiles import chain, machines, two_servers

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.costing import Costing
from pipedream_rt.planning.cuts import cuts_of
from pipedream_rt.planning.machines import LinkCodec, Machines, Worker
from pipedream_rt.planning.profile import LayerCosts, Profile


def test_a_codec_is_weighed_for_replicas_as_it_counts():
    """Two links share the micro-batches, and the time at their ends too."""
    cuts = cuts_of(chain(*[0.01] * 4, output_bytes=1e6))
    codec = LinkCodec(ratio=0.25, seconds_per_byte=2e-8)
    plain, coded = (Costing(cuts, two_servers(each)) for each in (None, codec))
    both = (0, 1), (2, 3)
    assert coded.is_coded(*both, 1)
    assert coded.transfers(*both)[1] == pytest.approx(1e6 * (0.25 / 25e6 + 2e-8) / 2)
    assert coded.transfers(*both)[1] < plain.transfers(*both)[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "gpipe"}, "plans are made for async-1f1b, 2bw, 1f1b, not for 'gpipe'"),
        ({"per_update": 0}, "micro-batches per update must be at least 1, not 0"),
        ({"copies": -1.0}, "copies must be a number of at least 0, not -1.0"),
        ({"copies": math.inf}, "copies must be a number of at least 0, not inf"),
        ({"copies": math.nan}, "copies must be a number of at least 0, not nan"),
    ],
    ids=["schedule", "micro-batches", "copies", "infinite", "nan"],
)
def test_what_cannot_be_costed_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Costing(cuts_of(chain(1)), machines(1), **options)


@pytest.mark.parametrize(
    ("schedule", "k", "replicas", "after", "in_flight", "versions", "staleness"),
    [
        ("async-1f1b", 1, 1, 3, 4, 4, 3),
        ("async-1f1b", 2, 1, 3, 4, 3, 2),
        ("async-1f1b", 4, 1, 3, 4, 2, 1),
        ("async-1f1b", 4, 2, 3, 3, 3, 2),  # a lag of 2 (2 + 1)
        ("2bw", 4, 1, 3, 4, 2, 1),
        ("1f1b", 4, 1, 3, 4, 1, 0),
        ("1f1b", 2, 1, 3, 2, 1, 0),  # no more than an update has
        ("1f1b", 3, 2, 9, 2, 1, 0),
        ("async-1f1b", 4, 1, 0, 1, 1, 0),
    ],
)
def test_what_is_in_flight_and_kept(schedule, k, replicas, after, in_flight, versions, staleness):
    costing = Costing(cuts_of(chain(1)), machines(1), schedule, k)
    assert costing.in_flight(replicas, after) == in_flight
    assert costing.versions(replicas, after) == versions
    assert costing.staleness(replicas, after) == staleness


def test_two_versions_need_a_lag_below_the_micro_batches_of_an_update():
    costing = Costing(cuts_of(chain(1)), machines(1), "2bw", 4)
    assert [costing.is_possible(1, after) for after in (3, 4)] == [True, False]
    assert [costing.is_possible(2, after) for after in (0, 1)] == [True, False]
    assert Costing(cuts_of(chain(1)), machines(1), "async-1f1b", 4).is_possible(1, 4)


LAYERS = Profile(
    layers=(
        LayerCosts(name="a", forward=1.0, backward_weight=1.0, output_bytes=10.0),
        LayerCosts(
            name="b", forward=2.0, backward_input=3.0, backward_weight=1.0, step=4.0,
            output_bytes=20.0, parameter_bytes=100.0, frozen_bytes=7.0, saved_bytes=30.0,
            optimizer_bytes=200.0,
        ),
        LayerCosts(name="c", forward=1.0),
    ),
    process_bytes=1000.0,
)  # fmt: skip
SPAN = (1, 1)
"""Layer b alone: between the cuts behind a and behind b."""


def test_the_period_of_a_stage_by_hand():
    own = Machines(workers=(Worker(), Worker(speed=0.5)), bandwidth_within=25.0, latency_within=1.0)
    one, both = [0], [0, 1]
    asynchronous = Costing(cuts_of(LAYERS), own, per_update=2)
    assert asynchronous.period(one, SPAN) == 6 / 1 + 4 / 2
    # The slower replica counts; the exchange of 100 bytes takes 4 + 1 s in 2 micro-batches.
    assert asynchronous.period(both, SPAN) == 6 / (2 * 0.5) + 4 / (2 * 0.5)
    assert asynchronous.exchange(both, 0, 1) == 100 / 25 + 1
    assert asynchronous.exchange(both, -1, 0) == 0.0  # there are no weights
    flushed = Costing(cuts_of(LAYERS), own, "1f1b", per_update=2)
    assert flushed.period(both, SPAN) == 10 + 5 / 2
    assert flushed.alone(both, 0, 1) == (4.0, 8.0)
    assert flushed.update(both, 0, 1) == 8.0


def test_a_slow_exchange_sets_the_pace_where_the_pipe_does_not_flush():
    slow = Costing(cuts_of(LAYERS), machines(2, bandwidth_within=1.0), per_update=8)
    assert slow.period([0, 1], SPAN) == 100 / 2


def test_the_memory_of_a_stage_by_hand():
    costing = Costing(cuts_of(LAYERS), machines(2), per_update=1, copies=2.0)
    fixed = 7 + 200 + 2 * (10 + 20) + 1000
    # Two versions, a gradient and two copies for the correction; two micro-batches in flight.
    assert costing.memory(1, 1, SPAN) == (2 + 1 + 2) * 100 + 2 * 30 + fixed
    assert costing.memory(1, 0, SPAN) == (1 + 1) * 100 + 30 + fixed  # nothing to correct
    # A lag of two: three versions, and r + 2 gradients.
    assert costing.memory(2, 0, SPAN) == (3 + 4) * 100 + 30 + fixed


def test_links_between_replicas_share_what_passes():
    costing = Costing(cuts_of(LAYERS), machines(6, bandwidth_within=5.0, latency_within=0.5))
    assert costing.transfers([0, 1, 2], [3, 4]).tolist() == [1.0, 2.0, 0.0]
    assert costing.latency([0, 1, 2], [3, 4], 0) == 0.5 + 2.0  # of one message
    assert not costing.is_coded([0], [1], 0)
