"""The search against all plans, one after another, with the costs told a second time."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import chain, chains, compositions, passing, profiles, total

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.costing import Costing
from pipedream_rt.planning.cuts import cuts_of
from pipedream_rt.planning.machines import Machines, Worker
from pipedream_rt.planning.profile import LayerCosts, Profile
from pipedream_rt.planning.search import Limits, best_stages


def placements(workers, stages, replicas):
    """All ways to give stages contiguous workers, with others left idle between them."""

    def place(first, sizes):
        if not sizes:
            yield []
            return
        for start in range(first, workers - sum(sizes) + 1):
            mine = tuple(range(start, start + sizes[0]))
            for rest in place(start + sizes[0], sizes[1:]):
                yield [mine, *rest]

    for used in range(stages, workers + 1):
        for sizes in compositions(used, stages):
            if max(sizes) <= replicas:
                yield from place(0, sizes)


def period_of(profile, machines, schedule, k, copies, stages, placed):
    """The period of a plan; infinite if a worker has too little memory."""
    found, done = 0.0, frozenset()
    after = sum(map(len, placed))
    for number, (layers, mine) in enumerate(zip(stages, placed, strict=True)):
        r = len(mine)
        after -= r
        workers = [machines.workers[w] for w in mine]
        weights = total(profile, layers, "parameter_bytes")
        compute = total(profile, layers, "forward", "backward_input", "backward_weight")
        step = total(profile, layers, "step")
        busy = max(compute / (r * w.speed) + step / (k * w.speed) for w in workers)
        exchange = (r - 1) * weights / bandwidth(machines, mine)
        if r > 1 and weights:
            exchange += machines.latency_within  # the same between servers
        both = busy + exchange / k if schedule == "1f1b" else max(busy, exchange / min(k, r))
        found = max(found, both)
        enters, done = passing(profile, done), done | layers
        leaves = passing(profile, done)
        if number + 1 < len(placed):
            both = mine + placed[number + 1]
            pairs = min(r, len(placed[number + 1]))
            found = max(found, leaves / (pairs * bandwidth(machines, both)))
        w = math.ceil(after / r)
        in_flight = w + 1
        lag = w if r == 1 else r * (w + 1)
        if schedule == "2bw" and lag >= k:
            return math.inf
        versions = {"async-1f1b": math.ceil(lag / k) + 1, "2bw": 2, "1f1b": 1}[schedule]
        if schedule == "1f1b":
            in_flight = min(in_flight, math.ceil(k / r))
        gradients = 1 if r == 1 else r + 2
        memory = (versions + gradients + (copies if after else 0)) * weights
        memory += in_flight * total(profile, layers, "saved_bytes")
        memory += total(profile, layers, "frozen_bytes", "optimizer_bytes")
        memory += 2 * (enters + leaves) + profile.process_bytes
        if any(memory > worker.memory for worker in workers):
            return math.inf
    return found


def bandwidth(machines, workers):
    servers = {machines.workers[w].server for w in workers}
    if len(servers) == 1:
        return machines.bandwidth_within
    return min(machines.bandwidth, machines.bandwidth_within)


@st.composite
def machines(draw):
    count = draw(st.integers(1, 4))
    alike = draw(st.booleans())
    speeds = st.just(1.0) if alike else st.sampled_from([0.5, 1.0, 2.0])
    memories = st.just(math.inf) if alike else st.sampled_from([3e3, 1e4, math.inf])
    servers = sorted(draw(st.integers(0, 1)) for _ in range(count))
    room = draw(st.sampled_from([4e3, 1e4, math.inf, math.inf]))
    return Machines(
        workers=tuple(
            Worker(
                speed=draw(speeds), memory=min(room, draw(memories)), server=0 if alike else server
            )
            for server in servers
        ),
        bandwidth=draw(st.sampled_from([1e2, 1e3, math.inf])),
        bandwidth_within=draw(st.sampled_from([1e3, 1e4, math.inf])),
        **dict.fromkeys(("latency", "latency_within"), draw(st.sampled_from([0.0, 0.5]))),
    )


@settings(max_examples=300)
@given(
    data=st.data(),
    machines=machines(),
    branches=st.booleans(),
    schedule=st.sampled_from(["async-1f1b", "2bw", "1f1b"]),
    k=st.integers(1, 5),
    copies=st.sampled_from([0.0, 2.0]),
    replicas=st.sampled_from([None, 1, 2]),
)
def test_no_plan_is_faster(data, machines, branches, schedule, k, copies, replicas):
    profile = data.draw(profiles(most=4 if branches else 5, branches=branches))
    costing = Costing(cuts_of(profile), machines, schedule, k, copies)

    def periods():
        for stages in chains(profile):
            for placed in placements(len(machines), len(stages), replicas or len(machines)):
                yield period_of(profile, machines, schedule, k, copies, stages, placed)

    least = min(periods(), default=math.inf)
    if math.isinf(least):
        with pytest.raises(ConfigError, match="no plan f"):
            best_stages(costing, Limits(replicas))
        return
    period, stages = best_stages(costing, Limits(replicas))
    assert period == pytest.approx(least, rel=1e-9, abs=1e-12)
    layers = [frozenset(costing.cuts.layers_between(s.start, s.end)) for s in stages]
    placed = [s.workers for s in stages]
    found = period_of(profile, machines, schedule, k, copies, layers, placed)
    assert found == pytest.approx(least, rel=1e-9, abs=1e-12)
    assert best_stages(costing, Limits(replicas)) == (period, stages)


def alike(count, **more):
    return Machines(workers=(Worker(**more),) * count)


def replicas(stages):
    return [len(stage.workers) for stage in stages]


def test_a_slow_layer_is_replicated():
    costing = Costing(cuts_of(chain(1, 3, 1)), alike(5))
    assert best_stages(costing) == (pytest.approx(1.0), [(-1, 2, (0, 1, 2, 3, 4))])
    period, stages = best_stages(costing, Limits(replicas=3))
    assert (period, replicas(stages)) == (pytest.approx(1.0), [1, 3, 1])


def test_of_equal_plans_it_is_the_one_with_the_fewest_workers_and_then_the_most_even_one():
    period, stages = best_stages(Costing(cuts_of(chain(6, 1, 1, 1, 1)), alike(4)), Limits(1))
    assert (period, [s.end for s in stages]) == (pytest.approx(6.0), [0, 4])
    period, stages = best_stages(Costing(cuts_of(chain(6, 1, 1, 1, 1)), alike(4)), Limits(1, 3))
    assert (period, [s.end for s in stages]) == (pytest.approx(6.0), [0, 2, 4])


def test_weights_that_are_slow_to_exchange_are_not_replicated():
    layers = (
        LayerCosts(name="convolution", forward=3.0),
        LayerCosts(name="linear", forward=1.0, parameter_bytes=1e9),
    )
    costing = Costing(
        cuts_of(Profile(layers=layers)),
        Machines(workers=(Worker(),) * 4, bandwidth_within=1e8),
    )
    assert replicas(best_stages(costing)[1]) == [3, 1]


def test_an_error_says_the_smallest_memory_that_would_do():
    profile = chain(1, 1, parameter_bytes=1024.0)
    with pytest.raises(ConfigError, match=r"needs 3 KiB \(3,072 bytes\) on a worker, .* has 2 KiB"):
        best_stages(Costing(cuts_of(profile), alike(2, memory=2048.0)))
    fits = Costing(cuts_of(profile), alike(2, memory=3072.0))
    assert math.isfinite(best_stages(fits)[0])


def test_a_number_of_workers_that_layers_cannot_use_is_refused():
    with pytest.raises(
        ConfigError, match="no plan for 3 workers and a model that can be cut at 2 places"
    ):
        best_stages(Costing(cuts_of(chain(1, 1)), alike(3)), Limits(replicas=1, workers=3))
    costing = Costing(cuts_of(chain(1, 1)), alike(3), "2bw", 1)
    with pytest.raises(ConfigError, match="or more micro-batches per update than 1"):
        best_stages(costing, Limits(replicas=1, workers=2))
    with pytest.raises(ConfigError, match="more than the 3 workers"):
        best_stages(Costing(cuts_of(chain(1, 1)), alike(3)), Limits(workers=4))


def test_where_workers_differ_any_of_them_may_be_left_idle():
    workers = tuple(Worker(speed=speed) for speed in (1.0, 0.1, 1.0))
    period, stages = best_stages(Costing(cuts_of(chain(1, 1)), Machines(workers=workers)))
    assert (period, [s.workers for s in stages]) == (pytest.approx(1.0), [(0,), (2,)])


def test_servers_need_not_be_used_as_a_whole():
    """15-1 on two servers of eight, which the released planner cannot say."""
    layers = (
        LayerCosts(name="features", forward=15.0),
        LayerCosts(name="classifier", forward=1.0, parameter_bytes=1e9),
    )
    workers = tuple(Worker(server=w // 8) for w in range(16))
    machines = Machines(workers=workers, bandwidth=1e8, bandwidth_within=1e9)
    period, stages = best_stages(Costing(cuts_of(Profile(layers=layers)), machines))
    assert (period, replicas(stages)) == (pytest.approx(1.0), [15, 1])


def test_the_test_sees_all_placements():
    """What the search is compared with is not itself empty."""
    assert len(list(placements(3, 2, 3))) == len(set(map(str, placements(3, 2, 3)))) == 5
    assert len(list(itertools.chain(compositions(4, 2)))) == 3
