"""What is predicted of a partition, beside the simulator and by hand."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.profiles import chain, machines

from pipedream_rt.planning.costing import Costing
from pipedream_rt.planning.cuts import cuts_of
from pipedream_rt.planning.machines import Machines, Worker
from pipedream_rt.planning.partition import SLOWDOWNS, partition_of
from pipedream_rt.planning.search import StageChoice
from pipedream_rt.schedules import plan_for
from pipedream_rt.simulation import Costs, simulate
from pipedream_rt.tracing.summary import summarize


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


@pytest.mark.parametrize(("replicas", "slack"), [(2, 1), (3, 2)])
def test_slack_keeps_replicas_between_other_stages_at_work(replicas, slack):
    """A micro-batch stays there for as many periods, so the stage before must be ahead by more."""
    stages = [StageChoice(-1, 0, (0,)), StageChoice(0, 1, tuple(range(1, replicas + 1)))]
    stages.append(StageChoice(1, 2, (replicas + 1,)))
    profile = chain(1, replicas, 1)
    costing = Costing(cuts_of(profile), machines(replicas + 2), "async-1f1b", 1)
    found = partition_of(costing, stages, SLOWDOWNS["none"])
    assert [stage.slack for stage in found.stages] == [slack, 0, 0]
    assert found.throughput == pytest.approx(1.0)


def test_slowdown_is_read_between_points_and_goes_on_behind_the_last():
    def slowdown(layers, k):
        costing = Costing(cuts_of(chain(*[1.0] * layers)), machines(layers), "async-1f1b", k)
        return partition_of(costing, straight(layers), ((0.0, 1.0), (1.0, 2.0))).slowdown

    assert slowdown(1, 1) == 1.0
    assert slowdown(2, 1) == 1.5  # stalenesses 1, 0
    assert slowdown(5, 1) == 3.0  # 4, 3, 2, 1, 0
