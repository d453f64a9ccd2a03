"""The plan: what flows between which stages, and where they run."""

import dataclasses
import itertools
import json
import math

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import diamond
from support.plans import in_script
from support.shapes import replicated, schedules
from support.written import LaterBackward

from pipedream_rt.errors import ConfigError, ScheduleError
from pipedream_rt.schedules import COORDINATOR, RECIPES, Action, EdgeKind, Kind, Plan, plan_for
from pipedream_rt.schedules.actions import OF_STAGES, OF_UPDATES
from pipedream_rt.schedules.edges import Edge

CHAIN = plan_for("1f1b", num_stages=3, per_update=2)
INTERLEAVED = plan_for("interleaved-1f1b", num_stages=4, per_update=2)
DIAMOND = diamond.plan()


def arrows(messages):
    """Their edges as ``activation *>0``, the coordinator being a star; a dash for none."""
    edges = (message.edge for message in messages)
    texts = (f"{e.kind.value} {e.source}>{e.target}".replace("-1", "*") for e in edges)
    return ", ".join(texts) or "-"


def table(plan, kind):
    """What each stage needs for an action of a kind, and what it gives."""
    lines = []
    for stage in range(plan.num_stages):
        named, unnamed = Action(kind, 5, stage), Action(kind, 5)
        assert plan.needs(named) == plan.needs(unnamed, stage)
        assert plan.gives(named) == plan.gives(unnamed, stage)
        lines.append(f"{stage}: {arrows(plan.needs(named))} => {arrows(plan.gives(named))}")
    return lines


# -- edges ------------------------------------------------------------------------------------


def test_what_a_forward_of_a_chain_needs_and_gives():
    assert table(CHAIN, Kind.FORWARD) == [
        "0: activation *>0 => activation 0>1",
        "1: activation 0>1 => activation 1>2",
        "2: activation 1>2, target *>2 => loss 2>*",
    ]


@pytest.mark.parametrize("kind", [Kind.BACKWARD, Kind.INPUT])
def test_what_a_backward_of_a_chain_needs_and_gives_is_the_same_the_other_way(kind):
    """The half that finds the gradient of the input, too."""
    assert table(CHAIN, kind) == [
        "0: gradient 1>0 => -",
        "1: gradient 2>1 => gradient 1>0",
        "2: - => gradient 2>1",
    ]


@pytest.mark.parametrize("kind", [Kind.WEIGHT, Kind.STEP])
@pytest.mark.parametrize("plan", [CHAIN, INTERLEAVED, DIAMOND])
def test_nobody_waits_for_the_weights(plan, kind):
    assert table(plan, kind) == [f"{stage}: - => -" for stage in range(plan.num_stages)]


def test_edges_lie_between_stages_whichever_worker_hosts_them():
    """Worker 0 hosts stages 0 and 2: four stages are a chain all the same."""
    assert [INTERLEAVED.worker_of(s) for s in range(4)] == [0, 1, 0, 1]
    assert table(INTERLEAVED, Kind.FORWARD) == [
        "0: activation *>0 => activation 0>1",
        "1: activation 0>1 => activation 1>2",
        "2: activation 1>2 => activation 2>3",
        "3: activation 2>3, target *>3 => loss 3>*",
    ]
    assert table(INTERLEAVED, Kind.BACKWARD) == [
        "0: gradient 1>0 => -",
        "1: gradient 2>1 => gradient 1>0",
        "2: gradient 3>2 => gradient 2>1",
        "3: - => gradient 3>2",
    ]


def test_one_stage_has_the_coordinator_on_both_sides():
    plan = plan_for("1f1b", num_stages=1)
    assert table(plan, Kind.FORWARD) == ["0: activation *>0, target *>0 => loss 0>*"]
    assert table(plan, Kind.BACKWARD) == ["0: - => -"]


def test_a_diamond_forks_and_joins():
    """Rising numbers on both sides, which is the order in which gradients are added."""
    assert table(DIAMOND, Kind.FORWARD) == [
        "0: activation *>0 => activation 0>1, activation 0>2",
        "1: activation 0>1 => activation 1>3",
        "2: activation 0>2 => activation 2>3",
        "3: activation 1>3, activation 2>3, target *>3 => loss 3>*",
    ]
    assert table(DIAMOND, Kind.BACKWARD) == [
        "0: gradient 1>0, gradient 2>0 => -",
        "1: gradient 3>1 => gradient 1>0",
        "2: gradient 3>2 => gradient 2>0",
        "3: - => gradient 3>1, gradient 3>2",
    ]
    assert (DIAMOND.entries, DIAMOND.exits) == ((0,), (3,))
    assert (DIAMOND.producers(3), DIAMOND.consumers(0)) == ((1, 2), (1, 2))


def test_norms_come_from_the_next_stage_whose_replicas_take_turns_though_no_link_does():
    chain = plan_for("1f1b", num_stages=4, replicas=[1, 1, 3, 1], per_update=2)
    plan = dataclasses.replace(chain, links=diamond.LINKS, norms="exact")
    norms = [arrows(plan.needs(Action(Kind.STEP, update, 1))) for update in range(4)]
    assert norms == ["norm 2>1", "norm 4>1", "norm 3>1", "norm 2>1"]


def test_the_order_in_which_links_are_given_does_not_matter():
    backwards = dataclasses.replace(DIAMOND, links=DIAMOND.links[::-1])
    for kind in OF_STAGES:
        assert table(backwards, kind) == table(DIAMOND, kind)


def test_a_skip_goes_straight_from_producer_to_consumer():
    skip = dataclasses.replace(CHAIN, links=((0, 1), (1, 2), (0, 2)))
    assert table(skip, Kind.FORWARD) == [
        "0: activation *>0 => activation 0>1, activation 0>2",
        "1: activation 0>1 => activation 1>2",
        "2: activation 0>2, activation 1>2, target *>2 => loss 2>*",
    ]


def test_two_stages_may_take_the_models_input():
    fork = dataclasses.replace(CHAIN, links=((0, 2), (1, 2)))
    assert fork.entries == (0, 1)
    assert table(fork, Kind.FORWARD)[:2] == [
        "0: activation *>0 => activation 0>2",
        "1: activation *>1 => activation 1>2",
    ]


@pytest.mark.parametrize(
    ("plan", "activations", "gradients"),
    [
        (CHAIN, 3, 2),
        (INTERLEAVED, 4, 3),
        (DIAMOND, 5, 4),
        (plan_for("gpipe", num_stages=1), 1, 0),
    ],
)
def test_as_many_messages_are_expected_as_there_are_edges_of_a_kind(plan, activations, gradients):
    of_chain = {
        EdgeKind.ACTIVATION: activations, EdgeKind.GRADIENT: gradients,
        EdgeKind.TARGET: 1, EdgeKind.LOSS: 1,
        EdgeKind.WEIGHT: 0, EdgeKind.SHARE: 0, EdgeKind.NORM: 0, EdgeKind.TOTAL: 0,
        EdgeKind.PARTIAL: 0, EdgeKind.STEPPED: 0,
    }  # fmt: skip
    for kind in EdgeKind:
        edges = plan.edges(kind)
        assert len(edges) == len(set(edges)) == of_chain.get(kind, plan.num_stages)
        assert {edge.kind for edge in edges} <= {kind}
    for kind in (EdgeKind.NORM, EdgeKind.TOTAL):
        assert len(plan.with_norms().edges(kind)) == plan.num_stages - 1


def test_what_is_no_training_goes_between_the_coordinator_and_every_stage():
    for kind in (EdgeKind.START, EdgeKind.COMMAND):
        assert CHAIN.edges(kind) == tuple(Edge(kind, COORDINATOR, s) for s in range(3))
    for kind in (EdgeKind.READY, EdgeKind.REPLY, EdgeKind.SAVED, EdgeKind.FAILED):
        assert CHAIN.edges(kind) == tuple(Edge(kind, s, COORDINATOR) for s in range(3))


@given(schedules())
def test_what_one_needs_another_gives(plan):
    """Nobody waits where nothing is sent; the coordinator gives and takes the rest."""
    actions = [Action(kind, 0, stage) for kind in OF_STAGES for stage in range(plan.num_stages)]
    needed = {each.edge for action in actions for each in plan.needs(action)}
    sent = {each.edge for action in actions for each in plan.gives(action)}
    assert all(edge.source == COORDINATOR for edge in needed - sent)
    assert all(edge.target == COORDINATOR for edge in sent - needed)
    for edge in needed & sent:
        assert (edge.source < edge.target) is (edge.kind is EdgeKind.ACTIVATION)


# -- the schedule -----------------------------------------------------------------------------


def drawn(plan, worker, start, stop):
    return " ".join(map(str, plan.order(worker, start, stop)))


def test_an_order_ends_with_the_last_micro_batch():
    assert drawn(CHAIN, 0, 0, 2) == "F0 F1 B0 B1 S0 D1"
    assert drawn(CHAIN, 0, 2, 4) == "F2 F3 B2 B3 S1 D2"
    assert drawn(CHAIN, 0, 2, 2) == "D1"
    assert drawn(INTERLEAVED, 1, 0, 2) == (
        "1:F0 1:F1 3:F0 3:B0 3:F1 3:B1 1:B0 1:B1 3:S0 1:S0 1:D1 3:D1"
    )
    endless = plan_for("async-1f1b", num_stages=2).order(0)
    assert " ".join(str(next(endless)) for _ in range(6)) == "F0 F1 B0 S0 F2 B1"


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("1F1", {}, "'1F1'; there are 1f1b, .*async-1f1b.*zero-bubble"),
        ("Zero", {}, "'Zero'; there are zero-bubble, .*gpipe"),
        ("gpipe+vertical-sync", {}, "unknown schedule"),
        ("interleaved-1f1b", {"num_stages": 5}, "5 stages cannot be dealt .*2 each"),
        ("1f1b", {"stages_per_worker": 2, "num_stages": 4}, "one stage on each worker, not 2"),
        ("1f1b", {"num_stages": 0}, "stages .*at least 1.*0"),
        ("1f1b", {"num_stages": 2.0}, r"stages .*at least 1.*2\.0"),
        ("1f1b", {"stages_per_worker": "2"}, "stages_per_worker .*at least 1.*'2'"),
        ("1f1b", {"stages_per_worker": 0}, "stages_per_worker .*at least 1.*0"),
        ("1f1b", {"per_update": True}, "micro_batches .*at least 1.*True"),
        ("interleaved-1f1b", {"num_stages": 8, "per_update": 6}, "must be a multiple of 4, not 6"),
        ("2bw", {"per_update": 2}, "at least as many micro-batches per update.* is 2, .* need 3"),
        ("gpipe", {"slack": 1}, "gpipe.*slack"),
        ("interleaved-1f1b", {"num_stages": 4, "per_update": 2, "slack": 1}, "slack .*one stage"),
        (
            "interleaved-1f1b",
            {"stages_per_worker": 1, "per_update": 3, "slack": 1},
            "interleaved-1f1b has no warm-up that slack",
        ),
        ("zero-bubble", {"slack": 1}, "zero-bubble has no warm-up that slack"),
        ("1f1b", {"slack": (1,)}, "slack .*1 .*3 stages .*2 hops"),
        ("1f1b", {"synchronous": 1}, "1f1b flushes .* no use for synchronous_updates"),
    ],
)
def test_numbers_for_which_there_is_no_schedule_are_refused(name, numbers, words):
    with pytest.raises(ConfigError, match=words):
        plan_for(name, **{"num_stages": 3, **numbers})


@given(schedules(), st.lists(st.text(max_size=3), max_size=2))
def test_a_plan_is_the_same_after_a_trip_as_plain_data(plan, layers):
    plan = dataclasses.replace(plan, layers=(tuple(layers),) * plan.num_stages)
    for trip in (
        lambda data: msgpack.unpackb(msgpack.packb(data)),
        lambda data: json.loads(json.dumps(data)),
    ):
        again = Plan.unpacked(trip(plan.packed()))
        assert again == plan
        assert again.recipe is RECIPES[plan.name]
    for kind in OF_STAGES:
        assert table(again, kind) == table(plan, kind)


def test_a_plan_that_is_no_chain_comes_back_too():
    again = Plan.unpacked(msgpack.unpackb(msgpack.packb(DIAMOND.packed())))
    assert again.links == diamond.LINKS
    assert again == dataclasses.replace(DIAMOND, recipe=None)


def test_a_schedule_that_a_user_wrote_is_known_by_name_only_after_the_trip_and_says_so():
    """What flows where is known all the same."""
    plan = plan_for(LaterBackward(), proved=False, num_stages=2, per_update=2)
    again = Plan.unpacked(plan.packed())
    assert (again.name, again.shape) == ("LaterBackward", plan.shape)
    for kind in OF_STAGES:
        assert table(again, kind) == table(plan, kind)
    for ask in (
        lambda plan: plan.flushes, lambda plan: plan.order(0), lambda plan: plan.reads(0, 0),
        lambda plan: plan.kept(0), lambda plan: plan.in_flight(0), lambda plan: plan.credits(),
    ):  # fmt: skip
        ask(plan)
        with pytest.raises(ScheduleError, match="'LaterBackward'"):
            ask(again)


def test_data_that_are_no_plan_are_an_error():
    with pytest.raises(KeyError):
        Plan.unpacked({})
    with pytest.raises(ConfigError, match="hosts"):
        Plan.unpacked({**CHAIN.packed(), "hosts": [0]})


def test_the_warm_up_is_what_the_order_does_before_its_first_backward():
    plan = plan_for("async-1f1b", num_stages=3, slack=(2, 1))
    for stage, ahead in enumerate((5, 2, 0)):
        order = plan.order(stage)
        before = [next(order).kind for _ in range(ahead + 2)]
        assert before == [Kind.FORWARD] * (ahead + 1) + [Kind.BACKWARD]
        assert plan.in_flight(stage) == ahead + 1


@settings(max_examples=50)
@given(replicated(most=3))
def test_the_edges_of_a_kind_are_those_that_actions_need_or_give(plan):
    wanted = {kind: set() for kind in EdgeKind}
    for address in plan.addresses:
        for kind, number in itertools.product(OF_STAGES, range(math.lcm(*plan.replicas))):
            if kind in OF_UPDATES or plan.next_own(address, number) == number:
                action = Action(kind, number, address)
                for each in (*plan.needs(action), *plan.gives(action)):
                    wanted[each.edge.kind].add(each.edge)
    for number in range(math.lcm(*plan.replicas)):
        for each in plan.gives(Action(Kind.INJECT, number), COORDINATOR):
            wanted[each.edge.kind].add(each.edge)
    for kind in (EdgeKind.ACTIVATION, EdgeKind.TARGET, EdgeKind.GRADIENT, EdgeKind.LOSS,
                 EdgeKind.PARTIAL, EdgeKind.STEPPED):  # fmt: skip
        found = plan.edges(kind)
        assert set(found) == wanted[kind]
        assert len(found) == len(set(found))


def test_a_script_that_computes_the_loss_is_one_more_place_behind_the_exit():
    plan = in_script("gpipe", per_update=2)
    assert table(plan, Kind.FORWARD) == [
        "0: activation *>0 => activation 0>1",
        "1: activation 0>1 => activation 1>2",
        "2: activation 1>2 => loss 2>*",
    ]
    assert table(plan, Kind.BACKWARD) == [
        "0: gradient 1>0 => gradient 0>*",
        "1: gradient 2>1 => gradient 1>0",
        "2: gradient *>2 => gradient 2>1",
    ]
    give = Action(Kind.GRADIENT, 3)
    assert arrows(plan.needs(give, COORDINATOR)) == "loss 2>*"
    assert arrows(plan.gives(give, COORDINATOR)) == "gradient *>2"
    assert plan.edges(EdgeKind.TARGET) == ()


@pytest.mark.parametrize(
    ("name", "per_update", "ahead", "expected"),
    [
        ("async-1f1b", 1, 2, "N0 N1 G0 N2 G1 N3 G2 G3"),
        ("async-1f1b", 1, 1, "N0 G0 N1 G1 N2 G2 N3 G3"),
        ("gpipe", 2, 1, "N0 N1 G0 G1 N2 N3 G2 G3"),
    ],
)
def test_the_script_gives_gradients_when_it_has_no_credit_left(name, per_update, ahead, expected):
    plan = dataclasses.replace(in_script(name, per_update=per_update), ahead=ahead)
    assert " ".join(map(str, plan.order(COORDINATOR, 0, 4))) == expected


def test_where_the_loss_is_computed_survives_packing():
    for plan in (in_script("gpipe"), CHAIN):
        data = json.loads(json.dumps(plan.packed()))
        assert Plan.unpacked(data).loss_in_script is plan.loss_in_script
    del data["loss_in_script"]  # as of an older trace
    assert not Plan.unpacked(data).loss_in_script
