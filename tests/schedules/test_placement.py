"""Where stages are: their workers, replicas, links and ties."""

import dataclasses

import msgpack
import pytest

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules import EdgeKind, Plan, plan_for
from pipedream_rt.schedules.edges import Edge
from pipedream_rt.schedules.placement import Tie

CHAIN = plan_for("1f1b", num_stages=3, per_update=2)


INTERLEAVED = plan_for("interleaved-1f1b", num_stages=4, per_update=2)


def test_stages_are_dealt_to_the_workers_in_turn():
    assert [INTERLEAVED.stages_of(w) for w in range(2)] == [(0, 2), (1, 3)]
    assert [INTERLEAVED.name_of(w) for w in range(2)] == ["worker 0", "worker 1"]
    assert [CHAIN.name_of(w) for w in range(3)] == ["stage 0", "stage 1", "stage 2"]


def test_a_plan_may_place_a_stage_elsewhere():
    moved = dataclasses.replace(CHAIN, hosts=(2, 0, 2))
    assert [moved.stages_of(w) for w in range(3)] == [(1,), (), (0, 2)]
    assert [moved.worker_of(s) for s in range(3)] == [2, 0, 2]
    assert [moved.name_of(w) for w in range(3)] == ["stage 1", "worker 1", "worker 2"]
    assert moved != CHAIN


def test_a_replica_knows_what_it_is_called():
    plan = plan_for("async-1f1b", num_stages=2, replicas=[2, 1])
    assert [plan.title_of(address) for address in plan.addresses] == [
        "stage 0, replica 0", "stage 0, replica 1", "stage 1"
    ]  # fmt: skip
    assert [plan.label_of(address) for address in plan.addresses] == ["0.0", "0.1", "1"]
    assert [plan.stages_of(worker) for worker in range(3)] == [(0,), (1,), (2,)]
    again = Plan.unpacked(plan.packed())
    assert again == plan


def test_each_stage_gets_the_entries_of_its_own_layers():
    """By whole names: layer 1 is not layer 10."""
    plan = dataclasses.replace(CHAIN, layers=(("1",), ("10", "block"), ()))
    named = {"1.weight": 1, "10.weight": 2, "block.0.bias": 3, "other.weight": 4}
    assert plan.part(named) == [{"1.weight": 1}, {"10.weight": 2, "block.0.bias": 3}, {}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hosts": (0, 1)}, "hosts .*2 .*3 stages"),
        ({"hosts": (0, 1, 3)}, r"hosts .*0 to 2.*\(0, 1, 3\)"),
        ({"hosts": (-1, 0, 1)}, r"hosts .*\(-1, 0, 1\)"),
        ({"layers": (("0",),)}, "layers .*1 .*3 stages"),
        ({"links": ((0, 1), (2, 1))}, r"\(2, 1\)"),
        ({"links": ((0, 1), (1, 1))}, r"\(1, 1\)"),
        ({"links": ((0, 1), (1, 3))}, r"\(1, 3\)"),
        ({"links": ((-1, 1), (1, 2))}, r"\(-1, 1\)"),
        ({"links": ((0, 1), (1, 2), (0, 1))}, "twice"),
        ({"links": ((0, 1), (0, 2))}, r"one stage .*loss.*\[1, 2\]"),
        ({"links": ()}, r"one stage .*loss.*\[0, 1, 2\]"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(CHAIN, **changes)


def test_tied_weights_go_from_their_owner_and_shares_of_gradients_back_from_stage_to_stage():
    plan = dataclasses.replace(CHAIN, ties=(Tie("w", (0, 1, 2)), Tie("v", (0, 2))))
    weight, share = EdgeKind.WEIGHT, EdgeKind.SHARE
    w, v = plan.ties
    assert plan.lends(0) == {Edge(weight, 0, 1): (w,), Edge(weight, 0, 2): (w, v)}
    assert plan.borrows(2) == {Edge(weight, 0, 2): (w, v)}
    assert plan.shares_of(2) == {Edge(share, 2, 1): (w,), Edge(share, 2, 0): (v,)}
    assert plan.shares_for(0) == {Edge(share, 1, 0): (w,), Edge(share, 2, 0): (v,)}
    assert Plan.unpacked(msgpack.unpackb(msgpack.packb(plan.packed()))) == plan
    for stages in ((1,), (1, 1), (2, 1), (1, 3)):
        with pytest.raises(ConfigError, match="a tie joins two or more rising stages"):
            dataclasses.replace(CHAIN, ties=(Tie("w", stages),))


def test_so_many_mini_batches_are_ahead_that_the_first_stage_never_waits():
    """One where the pipe is flushed anyway."""
    assert CHAIN.credits() == 1
    assert plan_for("async-1f1b", num_stages=4).credits() == 4 + 1
    assert plan_for("async-1f1b", num_stages=4, per_update=3).credits() == 2 + 1
    assert plan_for("async-1f1b", num_stages=4, slack=1).credits() == 7 + 1


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("async-1f1b", {}, [3, 2, 1, 0]),
        ("async-1f1b", {"per_update": 2}, [2, 1, 1, 0]),
        ("async-1f1b", {"per_update": 8}, [1, 1, 1, 0]),
        ("async-1f1b", {"slack": 1}, [6, 4, 2, 0]),
        ("async-1f1b+vertical-sync", {}, [3, 3, 3, 3]),
        ("async-1f1b", {"synchronous": 50}, [3, 2, 1, 0]),
        ("2bw", {"per_update": 4}, [1, 1, 1, 1]),
        ("1f1b", {"per_update": 4}, [0, 0, 0, 0]),
    ],
)
def test_the_staleness_of_a_stage(name, options, expected):
    plan = plan_for(name, num_stages=4, **options)
    assert [plan.staleness(stage) for stage in range(4)] == expected
