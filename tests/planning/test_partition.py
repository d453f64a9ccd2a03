"""What is predicted of a partition, beside the simulator and by hand."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.profiles import chain

from pipedream_rt.errors import ConfigError
from pipedream_rt.observe.summary import summarize
from pipedream_rt.planning.costing import Costing
from pipedream_rt.planning.cuts import cuts_of
from pipedream_rt.planning.explanation import choices_text, explained, partition_text
from pipedream_rt.planning.machines import Machines, Worker
from pipedream_rt.planning.partition import SLOWDOWNS, partition_of
from pipedream_rt.planning.planner import DATA_PARALLEL, partitions
from pipedream_rt.planning.search import Stage
from pipedream_rt.schedules import plan_for
from pipedream_rt.simulation import Costs, simulate


def machines(count, **more):
    return Machines(workers=(Worker(),) * count, **more)


def straight(count):
    """One layer for each stage, and one worker."""
    return [Stage(i - 1, i, (i,)) for i in range(count)]


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


@settings(max_examples=60, deadline=None)
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
    stages = [Stage(-1, 0, (0, 1))]
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
