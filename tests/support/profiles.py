"""Random profiles, and all ways to cut a profile, told without the library's own search."""

import itertools

from hypothesis import strategies as st

from pipedream_rt.planning.machines import Machines, Worker
from pipedream_rt.planning.profile import LayerCosts, Profile

TIMES = st.integers(0, 1000).map(lambda x: x / 1000)
SIZES = st.integers(0, 1000).map(float)


@st.composite
def profiles(draw, most=6, branches=False):
    """A profile of a few layers: a chain, or a graph in which everything depends on the first."""
    count = draw(st.integers(1, most))
    layers = tuple(
        LayerCosts(
            name=f"layer{i}",
            forward=draw(TIMES),
            backward_input=draw(TIMES),
            backward_weight=draw(TIMES),
            step=draw(TIMES),
            output_bytes=draw(SIZES),
            parameter_bytes=draw(SIZES),
            frozen_bytes=draw(SIZES),
            saved_bytes=draw(SIZES),
            optimizer_bytes=draw(SIZES),
        )
        for i in range(count)
    )
    if not branches:
        return Profile(layers=layers)
    edges = {(draw(st.integers(0, i - 1)), i) for i in range(1, count)}
    edges |= {(draw(st.integers(0, i - 1)), i) for i in range(1, count) if draw(st.booleans())}
    return Profile(layers=layers, edges=tuple(edges))


def ideals_of(profile):
    """All sets of layers that contain what their layers need, but for the empty one."""
    count = len(profile.layers)
    needs = {i: {a for a, b in profile.edges if b == i} for i in range(count)}
    sets = [
        frozenset(s)
        for size in range(1, count + 1)
        for s in itertools.combinations(range(count), size)
    ]
    return [s for s in sets if all(needs[i] <= s for i in s)]


def chains(profile, before=frozenset(), until=None):
    """All ways to cut a profile into stages, each a list of sets of layers.

    Given layers before the first stage, and all layers until the end of the last, it is a part of
    the profile that is cut.
    """
    end = frozenset(range(len(profile.layers))) if until is None else until
    ideals = [ideal for ideal in ideals_of(profile) if ideal <= end]

    def grow(done):
        if done == end:
            yield []
        for ideal in ideals:
            if done < ideal:
                for rest in grow(ideal):
                    yield [ideal - done, *rest]

    return list(grow(before))


def total(profile, stage, *names):
    """The sum of some costs of a stage's layers."""
    return sum(getattr(profile.layers[i], name) for i in stage for name in names)


def passing(profile, before):
    """The bytes of outputs of a set of layers that others need."""
    passed = {a for a, b in profile.edges if a in before and b not in before}
    return sum(profile.layers[i].output_bytes for i in passed)


def compositions(number, parts):
    """All ways to write a number as a sum of so many positive ones, in order."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number - parts + 2):
        for rest in compositions(number - first, parts - 1):
            yield (first, *rest)


def chain(*seconds, **more):
    """A profile of layers that take so long in all, a third of it forward."""
    return Profile(
        layers=tuple(
            LayerCosts(
                name=str(i), forward=s / 3, backward_input=s / 3, backward_weight=s / 3, **more
            )
            for i, s in enumerate(seconds)
        )
    )


def machines(count, **more):
    """Workers that are all alike."""
    return Machines(workers=(Worker(),) * count, **more)


def two_servers(codec):
    """Four workers on two servers, with a slow link between these."""
    workers = tuple(Worker(server=number // 2) for number in range(4))
    return Machines(workers=workers, bandwidth=25e6, bandwidth_within=1e10, codec=codec)
