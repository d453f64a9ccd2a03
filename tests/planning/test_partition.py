"""What is predicted of a partition, beside the simulator and by hand."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.profiles import chain

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.alternatives import choices_text, explained, partition_text
from pipedream_rt.planning.costing import Costing
from pipedream_rt.planning.cuts import cuts_of
from pipedream_rt.planning.machines import LinkCodec, Machines, Worker
from pipedream_rt.planning.partition import SLOWDOWNS, partition_of
from pipedream_rt.planning.planner import DATA_PARALLEL, partitions
from pipedream_rt.planning.search import StageChoice
from pipedream_rt.schedules import plan_for
from pipedream_rt.simulation import Costs, simulate
from pipedream_rt.tracing.summary import summarize


def machines(count, **more):
    return Machines(workers=(Worker(),) * count, **more)


def straight(count):
    """One layer for each stage, and one worker."""
    return [StageChoice(i - 1, i, (i,)) for i in range(count)]


def simulated(profile, schedule, k, slacks, latency):
    """Micro-batches per second by the simulator."""
    layers = profile.layers
    plan = plan_for(schedule, num_stages=len(layers), per_update=k, slack=slacks)
    costs = Costs(
        forward=tuple((layer.forward,) for layer in layers),
        backward=tuple((layer.backward_input + layer.backward_weight,) for layer in layers),
        latency=0.0,
        hop_latency=(latency,),
    )
    updates = 40 if plan.flushes else max(2, 400 // k)
    trace = simulate(plan, costs, updates * k, credits=10_000)
    if plan.flushes:
        return updates * k / summarize(trace).makespan
    return summarize(trace).throughput


@settings(max_examples=60)
@given(
    seconds=st.lists(st.integers(5, 30).map(lambda x: x / 10), min_size=1, max_size=6),
    schedule=st.sampled_from(["async-1f1b", "2bw", "1f1b"]),
    k=st.integers(6, 12),
    latency=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_the_simulator_says_the_same_throughput(seconds, schedule, k, latency):
    profile = chain(*seconds)
    costing = Costing(cuts_of(profile), machines(len(seconds), latency_within=latency), schedule, k)
    found = partition_of(costing, straight(len(seconds)), SLOWDOWNS["none"])
    slacks = tuple(stage.slack for stage in found.stages[:-1])
    assume(schedule != "2bw" or len(seconds) + sum(slacks) <= k)
    rate = simulated(profile, schedule, k, slacks, latency)
    assert found.throughput == pytest.approx(rate, rel=0.02)
    rough = partition_of(costing, straight(len(seconds)), SLOWDOWNS["none"], rough=True)
    if schedule == "1f1b":
        assert 0.7 * found.throughput <= rough.throughput <= 1.1 * found.throughput
    elif latency <= 0.1:
        assert rough.throughput == pytest.approx(found.throughput, rel=0.1)


def test_slack_hides_a_latency_of_a_flush_too_and_costs_activations():
    costing = Costing(cuts_of(chain(1, 1)), machines(2, latency_within=0.3), "1f1b", 8)
    first, _ = partition_of(costing, straight(2), SLOWDOWNS["none"]).stages
    assert (first.slack, first.in_flight, first.versions, first.staleness) == (1, 3, 1, 0)


def test_slack_hides_a_latency_and_costs_staleness():
    costing = Costing(cuts_of(chain(1, 1)), machines(2, latency_within=0.3))
    first, last = partition_of(costing, straight(2), SLOWDOWNS["none"]).stages
    assert (first.slack, first.in_flight, first.versions, first.staleness) == (1, 3, 3, 2)
    assert (last.slack, last.in_flight, last.versions, last.staleness) == (0, 1, 1, 0)


def test_slack_that_does_not_fit_the_memory_is_left_out():
    profile = chain(1, 1, parameter_bytes=100.0)
    workers = (Worker(memory=350.0),) * 2
    costing = Costing(cuts_of(profile), Machines(workers=workers, latency_within=0.3))
    partition = partition_of(costing, straight(2), SLOWDOWNS["none"])
    assert [stage.slack for stage in partition.stages] == [0, 0]
    assert partition.throughput == pytest.approx(1 / 1.3, rel=0.02)
    assert partition.memory == 300.0


def test_the_bottleneck_may_be_a_link():
    costing = Costing(cuts_of(chain(1, 1, output_bytes=100.0)), machines(2, bandwidth_within=50.0))
    partition = partition_of(costing, straight(2), SLOWDOWNS["none"])
    assert partition.bottleneck == "the link from stage 0 to stage 1"
    assert partition.throughput == pytest.approx(0.5)


def test_replicas_exchange_gradients_while_they_compute_unless_the_pipe_flushes():
    profile = chain(1, parameter_bytes=100.0)
    stages = [StageChoice(-1, 0, (0, 1))]
    rates = {}
    for schedule in ("async-1f1b", "1f1b"):
        costing = Costing(cuts_of(profile), machines(2, bandwidth_within=500.0), schedule, 2)
        rates[schedule] = partition_of(costing, stages, SLOWDOWNS["none"]).throughput
    assert rates["async-1f1b"] == pytest.approx(2.0)  # 0.2 s of exchange in 1 s
    assert rates["1f1b"] == pytest.approx(2 / (1 + 0.2))


def test_slowdown_is_read_between_points_and_goes_on_behind_the_last():
    def slowdown(layers, k):
        costing = Costing(cuts_of(chain(*[1.0] * layers)), machines(layers), "async-1f1b", k)
        return partition_of(costing, straight(layers), ((0.0, 1.0), (1.0, 2.0))).slowdown

    assert slowdown(1, 1) == 1.0
    assert slowdown(2, 1) == 1.5  # stalenesses 1, 0
    assert slowdown(5, 1) == 3.0  # 4, 3, 2, 1, 0


def test_choices_are_compared_by_what_they_are_worth():
    cuts = cuts_of(chain(1, 1, 1, 1))
    found = partitions(cuts, machines(4), replicas=1)
    assert [each.schedule for each in found[:2]] == ["async-1f1b", "2bw"]
    assert found[0].shape == "1-1-1-1"
    assert {each.schedule for each in found} == {"async-1f1b", "2bw", "1f1b", DATA_PARALLEL}
    stale = partitions(cuts, machines(4), replicas=1, slowdown=((0.0, 1.0), (1.0, 9.0)))
    assert stale[0].staleness == 0
    assert stale == sorted(stale, key=lambda each: -each.worth)
    text = choices_text(found) + partition_text(found[0])
    assert all(each.schedule in text for each in found)


def test_data_parallelism_uses_the_workers_that_hold_the_model_and_are_fast_enough():
    profile = chain(2, 2, parameter_bytes=100.0)
    workers = (Worker(speed=0.1), Worker(memory=300.0), Worker(), Worker())
    found = partitions(
        cuts_of(profile), Machines(workers=workers), choices=[DATA_PARALLEL], per_update=2
    )
    assert found[0].stages[0].workers == (2, 3)
    assert found[0].throughput == pytest.approx(0.5)


def test_what_no_choice_can_do_says_why_for_each():
    cuts = cuts_of(chain(1, parameter_bytes=100.0))
    tiny = Machines(workers=(Worker(memory=10.0),))
    with pytest.raises(
        ConfigError, match=r"async-1f1b: no plan fits[\s\S]*data-parallel: the whole"
    ):
        partitions(cuts, tiny)
    with pytest.raises(ConfigError, match="not for 'gpipe'"):
        partitions(cuts, tiny, choices=["gpipe"])
    with pytest.raises(ConfigError, match="plans are made for async-1f1b, 2bw, 1f1b, not for"):
        Costing(cuts, tiny, "gpipe")
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        Costing(cuts, tiny, per_update=0)


def test_it_is_explained_what_would_change_the_answer():
    cuts = cuts_of(chain(3, 1, parameter_bytes=8.0, output_bytes=1.0))
    own = Machines(workers=(Worker(memory=100.0),) * 2, bandwidth_within=8.0)

    def plan(other, per_update):
        return partitions(cuts, other, per_update=per_update, replicas=1)

    text = explained(plan(own, None), own, plan)
    for expected in (
        "the bottleneck is stage 0",
        "the next best choice is",
        "twice the bandwidth",
        "half the memory",
        "a worker less",
        "a worker more",
        "one micro-batch per update",
    ):
        assert expected in text


# -- codecs ---------------------------------------------------------------------------------------


def two_servers(codec):
    """Four workers on two servers, with a slow link between these."""
    workers = tuple(Worker(server=number // 2) for number in range(4))
    return Machines(workers=workers, bandwidth=25e6, bandwidth_within=1e10, codec=codec)


def test_a_codec_is_chosen_for_the_link_on_which_it_pays():
    profile = chain(*[0.01] * 4, output_bytes=1e6)
    options = {"choices": ["async-1f1b"], "per_update": 8, "replicas": 1, "workers": [4]}
    plain = partitions(cuts_of(profile), two_servers(None), **options)[0]
    codec = LinkCodec(ratio=0.25, seconds_per_byte=1e-9)
    coded = partitions(cuts_of(profile), two_servers(codec), **options)[0]
    assert [stage.coded for stage in coded.stages] == [False, True, False, False]
    assert coded.codecs("int8") == {(1, 2): "int8"}
    assert plain.codecs("int8") == {}
    assert coded.stages[1].transfer == pytest.approx(1e6 * (0.25 / 25e6 + 1e-9))
    assert coded.throughput > 2 * plain.throughput
    assert "the codec pays, as Layout(codecs={(1, 2): codec})" in partition_text(coded)
    assert "codec" not in partition_text(plain)


def test_a_codec_that_takes_longer_than_the_link_is_not_chosen():
    profile = chain(*[0.01] * 4, output_bytes=1e6)
    slow = LinkCodec(ratio=0.25, seconds_per_byte=1e-6)
    found = partitions(cuts_of(profile), two_servers(slow), choices=["async-1f1b"], workers=[4])[0]
    assert found.codecs("int8") == {}


@pytest.mark.parametrize(
    "options", [{"ratio": 0}, {"ratio": 1.1}, {"ratio": 1, "seconds_per_byte": -1}]
)
def test_a_codec_that_makes_no_sense_is_refused(options):
    with pytest.raises(ConfigError, match="codec"):
        LinkCodec(**options)


def test_a_codec_is_weighed_for_replicas_as_it_counts():
    """Two links share the micro-batches, and the time at their ends too."""
    cuts = cuts_of(chain(*[0.01] * 4, output_bytes=1e6))
    codec = LinkCodec(ratio=0.25, seconds_per_byte=2e-8)
    plain, coded = (Costing(cuts, two_servers(each)) for each in (None, codec))
    both = (0, 1), (2, 3)
    assert coded.is_coded(*both, 1)
    assert coded.transfers(*both)[1] == pytest.approx(1e6 * (0.25 / 25e6 + 2e-8) / 2)
    assert coded.transfers(*both)[1] < plain.transfers(*both)[1]
