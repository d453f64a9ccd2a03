"""Costs for tests, in whole milliseconds."""

from hypothesis import strategies as st

from pipedream_rt.schedules import plan_for
from pipedream_rt.simulation.costs import Costs
from pipedream_rt.simulation.simulator import simulate


def unit(**changes):
    """Return costs in which forward, backward and its halves take 1 ms each, and the rest 0."""
    halves = {"input_gradient": ((0.001,),), "weight_gradient": ((0.001,),)}
    return Costs(**{"forward": ((0.001,),), "backward": ((0.001,),), **halves, **changes})


def simulated(name="1f1b", n=3, k=4, updates=2, costs=None):
    """The trace of some updates, of k micro-batches each, on n stages."""
    schedule = plan_for(name, num_stages=n, per_update=k)
    return simulate(schedule, costs or unit(), updates * k)


def asynchronous(name="async-1f1b", n=3, k=1, updates=6):
    """The same, with an update after each micro-batch."""
    return simulated(name, n, k, updates)


def milliseconds(low=0):
    return st.integers(low, 9).map(lambda n: n / 1000)


def samples():
    return st.lists(milliseconds(), min_size=1, max_size=3).map(tuple)


def random_costs():
    """Return a strategy for costs that are the same for all stages."""
    one = st.tuples(samples())
    return st.builds(
        Costs,
        forward=one,
        backward=one,
        step=one,
        activation_bytes=st.tuples(st.integers(0, 5).map(float)),
        weight_bytes=st.tuples(st.integers(0, 5).map(float)),
        latency=milliseconds(),
        bandwidth=st.sampled_from([float("inf"), 100.0, 1000.0, 5000.0]),
        overhead=milliseconds(),
        injection=milliseconds(),
        turnaround=milliseconds(),
        speed=st.tuples(st.sampled_from([0.5, 1.0, 2.0])),
    )
