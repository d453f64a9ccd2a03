"""The published planners against all plans, and against what the released code finds."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import chains, compositions, passing, profiles, total

from benchmarks.studies.published.graph_text import parse
from benchmarks.studies.published.planners import Piece, Published, solve
from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.cuts import cuts_of
from pipedream_rt.planning.profile import LayerCosts, Profile

COMPUTE = ("forward", "backward_input", "backward_weight")


def passing_as_published(profile, before):
    """What the released code takes to pass behind a set of layers."""
    needs = {i: set() for i in range(len(profile.layers))}
    users = {i: set() for i in needs}
    for a, b in profile.edges:
        needs[b] |= {a} | needs[a]
        users[a].add(b)
    last = {i for i in before if not users[i] & before}
    shared = {p for x in last for p in needs[x] if users[p] - needs[x] - {x}}
    return sum(profile.layers[i].output_bytes for i in last | shared)


def times_of(profile, asked, level, layers, first, machines, used, before):
    """The time of a stage, or of a stage whose groups have a best plan each."""
    compute = total(profile, layers, *COMPUTE)
    if level:
        compute = best(profile, asked, level - 1, layers, before)
    weights = total(profile, layers, "parameter_bytes")
    wide, all_machines = asked.bandwidths[level], asked.machines[level]
    if asked.model == "paper":
        return max(compute, 2 * (machines - 1) * weights / wide) / machines
    within = asked.machines[level - 1] if level and first else 1
    outputs = total(profile, layers, "output_bytes")
    if math.ceil((all_machines - used) / machines) * (weights + outputs) > asked.memory:
        return math.inf
    return (compute + 4 * (machines - 1) * weights / (wide * machines * within)) / machines


def best(profile, asked, level, layers, before):
    """The best time of some layers on all groups of a level, from all plans."""
    least, machines = math.inf, asked.machines[level]
    for stages in chains(profile, before, before | layers):
        for used in range(len(stages) if asked.fewer else machines, machines + 1):
            for sizes in compositions(used, len(stages)) if used >= len(stages) else ():
                if asked.straight and max(sizes) > 1:
                    continue
                least = min(least, worst(profile, asked, level, stages, sizes, before))
    return least


def worst(profile, asked, level, stages, sizes, before):
    """The time of the slowest stage or transfer of one plan."""
    found, done, used = 0.0, before, 0
    for number, (layers, size) in enumerate(zip(stages, sizes, strict=True)):
        used += size
        if number:
            found = max(found, transfer(profile, asked, level, done, size))
            if done | layers != frozenset(range(len(profile.layers))):
                after = done | layers
                if asked.compression is not None:
                    found = max(found, transfer(profile, asked, level, after, size))
        time = times_of(profile, asked, level, layers, number == 0, size, used, done)
        found = max(found, time)
        done = done | layers
    return found


def transfer(profile, asked, level, before, size):
    """The time of what passes behind some layers to a stage of so many machines."""
    if asked.model == "paper":
        return 2 * passing(profile, before) / asked.bandwidths[level]
    if asked.compression is None:
        return 0.0
    shared = asked.bandwidths[level] * size * asked.compression
    return 2 * passing_as_published(profile, before) / shared


@st.composite
def questions(draw, levels):
    model = draw(st.sampled_from(["pipedream", "pipedream", "paper"]))
    rates = st.sampled_from([1e2, 1e3, 1e4])
    released = model == "pipedream"
    # Beside a memory, idle workers count in the released code, in ways that plans do not have.
    fewer = levels == 1 and draw(st.booleans())
    memory = draw(st.sampled_from([1e3, 3e3, math.inf])) if released and not fewer else math.inf
    return Published(
        model=model,
        machines=tuple(draw(st.integers(1, 3)) for _ in range(levels)),
        bandwidths=tuple(draw(rates) for _ in range(levels)),
        memory=memory,
        straight=draw(st.booleans()),
        fewer=fewer,
        compression=draw(st.sampled_from([None, 1.0, 2.0])) if released else None,
    )


def agrees(profile, asked):
    whole = frozenset(range(len(profile.layers)))
    least = best(profile, asked, len(asked.machines) - 1, whole, frozenset())
    if math.isinf(least):
        with pytest.raises(ConfigError, match="no plan"):
            solve(cuts_of(profile), asked)
        return
    answer = solve(cuts_of(profile), asked)
    assert answer.time == pytest.approx(least, rel=1e-9, abs=1e-12)
    layers = [cuts_of(profile).layers_between(a, b) for a, b, _ in answer.stages()]
    assert sorted(i for stage in layers for i in stage) == sorted(whole)
    machines = sum(replicas for *_, replicas in answer.stages())
    assert machines <= math.prod(asked.machines)


@settings(max_examples=250)
@given(profile=profiles(most=5, branches=True), asked=questions(levels=1))
def test_on_one_level_no_plan_is_faster(profile, asked):
    agrees(profile, asked)


@settings(max_examples=250)
@given(profile=profiles(most=4), asked=questions(levels=2))
def test_on_two_levels_no_plan_of_a_chain_is_faster(profile, asked):
    agrees(profile, asked)


GRAPHS = Path(__file__).parent / "graphs"

RELEASED = [
    ("branches", (4,), (1e9,), {}, 0.020199792),
    ("branches", (16,), (1.25e9,), {}, 0.006),
    ("branches", (8,), (1e9,), {"compression": 1.0}, 0.043260205551020406),
    ("branches", (8,), (1e9,), {"straight": True}, 0.01875),
    ("branches", (8,), (1e7,), {"fewer": True}, 0.01875),
    ("branches", (8,), (1e9,), {"memory": 3e8}, 0.009712427555555554),
    ("branches", (4, 4), (4e9, 1.25e9), {}, 0.006),
    ("branches", (8, 2), (1e10, 3e9), {}, 0.006),
    ("branches", (2, 2, 2), (1e10, 1e9, 1e8), {"compression": 2.0}, 0.0296594264),
    ("branches", (4, 2), (1e9, 1e8), {"straight": True, "compression": 1.0}, 1.6),
    ("classifier", (4,), (1e9,), {}, 0.03725),
    ("classifier", (16,), (1.25e9,), {}, 0.010062912671604939),
    ("classifier", (8,), (1e9,), {"compression": 1.0}, 0.026927882122448978),
    ("classifier", (8,), (1e9,), {"straight": True}, 0.02675),
    ("classifier", (8,), (1e7,), {"fewer": True}, 0.025517111111111112),
    ("classifier", (8,), (1e9,), {"memory": 3e8}, 0.049),
    ("classifier", (4, 4), (4e9, 1.25e9), {}, 0.009476244),
    ("classifier", (8, 2), (1e10, 3e9), {}, 0.0091080168),
    ("classifier", (2, 2, 2), (1e10, 1e9, 1e8), {"compression": 2.0}, 0.0423470544),
    ("classifier", (4, 2), (1e9, 1e8), {"straight": True, "compression": 1.0}, 0.4),
]
"""What ``optimizer_graph_hierarchical.py`` at 7db6a1c prints for these files and settings."""


@pytest.mark.parametrize(("graph", "machines", "bandwidths", "more", "time"), RELEASED)
def test_the_released_code_finds_the_same(graph, machines, bandwidths, more, time):
    asked = Published(machines=machines, bandwidths=bandwidths, **more)
    answer = solve(cuts_of(parse((GRAPHS / f"{graph}.txt").read_text())), asked)
    assert answer.time == pytest.approx(time, rel=1e-9)


def test_groups_of_machines_have_pieces_of_their_own():
    layers = tuple(LayerCosts(name=str(i), forward=1.0) for i in range(4))
    asked = Published(machines=(2, 2), bandwidths=(1e9, 1e9), straight=True)
    answer = solve(cuts_of(Profile(layers=layers)), asked)
    assert answer.pieces == (
        Piece(-1, 1, 1, (Piece(-1, 0, 1), Piece(0, 1, 1))),
        Piece(1, 3, 1, (Piece(1, 2, 1), Piece(2, 3, 1))),
    )
    assert answer.stages() == [(-1, 0, 1), (0, 1, 1), (1, 2, 1), (2, 3, 1)]


def test_a_time_that_no_plan_has_is_found_as_the_released_code_finds_it():
    """A layer takes 10 ms, yet with two levels the released code prints 6 ms, without replicas.

    It gives one machine what is before the cut behind that layer, less what is before another cut
    that lies on the other branch.
    """
    nodes = [
        f"node{i} -- L -- forward_compute_time={milliseconds}, backward_compute_time=0.0, "
        "activation_size=0.0, parameter_size=0.0"
        for i, milliseconds in ((1, 2.0), (2, 10.0), (3, 4.0), (4, 1.0))
    ]
    edges = ["\tnode1 -- node2", "\tnode1 -- node3", "\tnode2 -- node4", "\tnode3 -- node4"]
    cuts = cuts_of(parse("\n".join(nodes + edges)))
    one_level = Published(machines=(4,), bandwidths=(1e9,), straight=True)
    assert solve(cuts, one_level).time == pytest.approx(0.010)
    two_levels = Published(machines=(2, 2), bandwidths=(1e9, 1e9), straight=True)
    assert solve(cuts, two_levels).time == pytest.approx(0.006)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "best"}, "the cost models are pipedream and paper, not 'best'"),
        ({"machines": (2, 2)}, "2 levels of machines need as many bandwidths, not 1"),
        ({"machines": ()}, "0 levels"),
        ({"machines": (0,)}, "at least 1 at each level"),
        ({"bandwidths": (0.0,)}, "bandwidth must be above 0"),
        ({"memory": 0.0}, "memory must be above 0"),
        ({"compression": 0.0}, "compression must be above 0"),
        ({"model": "paper", "memory": 1.0}, "know no memory and no compression"),
    ],
)
def test_numbers_out_of_range_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Published(**wrong)
