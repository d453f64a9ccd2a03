"""The table of channels: who needs what, who gives it, and that nobody waits for ever."""

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import in_script
from support.shapes import replicated, schedules
from support.written import Late

from pipedream_rt.errors import ScheduleError
from pipedream_rt.schedules import CHANNELS, COORDINATOR, Action, EdgeKind, Kind, check, plan_for
from pipedream_rt.schedules.actions import apply, drain, inject, step
from pipedream_rt.schedules.checker import prove
from pipedream_rt.schedules.edges import Edge, Need
from pipedream_rt.schedules.execution import Execution
from pipedream_rt.schedules.placement import Tie

THREE = plan_for("async-1f1b", num_stages=3)
SYNC = plan_for("async-1f1b+vertical-sync", num_stages=3).with_norms()


def texts(messages):
    """``total 3 from stage 0 to 2``, one for each."""
    return [f"{each.words()} to {each.edge.target}".replace("-1", "*") for each in messages]


def test_every_kind_of_edge_has_one_row():
    assert sorted(channel.kind.value for channel in CHANNELS) == sorted(k.value for k in EdgeKind)


def test_an_update_that_waits_for_its_norm_is_applied_before_the_first_forward_that_reads_it():
    orders = [" ".join(map(str, itertools.islice(SYNC.order(worker), 14))) for worker in range(3)]
    assert orders == [
        "F0 F1 F2 B0 S0 F3 B1 S1 F4 B2 S2 F5 B3 S3",
        "F0 F1 B0 S0 F2 B1 S1 A0 F3 B2 S2 A1 F4 B3",
        "F0 B0 S0 F1 B1 S1 F2 B2 S2 A0 F3 B3 S3 A1",
    ]
    assert " ".join(map(str, SYNC.order(2, 0, 4))) == (
        "F0 B0 S0 F1 B1 S1 F2 B2 S2 A0 F3 B3 S3 A1 A2 A3 D4"
    )


def test_norms_go_down_and_totals_come_back():
    # And the total of the newest update by which the last stage has scaled the losses of update 3.
    assert texts(SYNC.needs(step(3), 1)) == [
        "norm 3 from stage 2 to 1", "total 0 from stage 0 to 1"
    ]  # fmt: skip
    assert texts(SYNC.gives(step(3), 1)) == ["norm 3 from stage 1 to 0"]
    assert texts(SYNC.gives(step(3), 0)) == [
        "total 3 from stage 0 to 1", "total 3 from stage 0 to 2"
    ]  # fmt: skip
    assert texts(SYNC.needs(apply(3), 2)) == ["total 3 from stage 0 to 2"]
    assert SYNC.applied_by(0) is Kind.STEP
    assert SYNC.applied_by(1) is Kind.APPLY


def test_a_norm_that_comes_too_late_is_taken_some_updates_later():
    delayed = THREE.with_norms()
    assert (delayed.norms, delayed.delay) == ("estimated", 3)
    assert texts(delayed.needs(step(5), 1)) == [
        "norm 5 from stage 2 to 1",
        "total 2 from stage 0 to 1",
    ]
    assert texts(delayed.needs(drain(5), 1)) == ["total 4 from stage 0 to 1"]
    assert delayed.applied_by(2) is Kind.STEP


def test_one_stage_has_all_norms_itself():
    one = plan_for("async-1f1b", num_stages=1)
    assert one.with_norms() is one


def test_weights_of_a_tie_are_needed_up_to_a_version():
    tied = dataclasses.replace(THREE, ties=(Tie("w", (0, 2)),))
    assert texts(tied.needs(Action(Kind.FORWARD, 7), 2))[-1] == "weight 5 from stage 0 to 2"
    assert texts(tied.gives(step(4), 0)) == ["weight 5 from stage 0 to 2"]
    assert texts(tied.needs(drain(8), 2)) == ["weight 8 from stage 0 to 2"]
    assert texts(tied.gives(Action(Kind.BACKWARD, 7), 2)) == [
        "gradient 7 from stage 2 to 1", "share 7 from stage 2 to 0"
    ]  # fmt: skip
    k = dataclasses.replace(tied, shape=dataclasses.replace(tied.shape, per_update=3))
    shares = [k.gives(Action(Kind.BACKWARD, m), 2)[-1].number for m in range(7)]
    assert shares == [-1, -1, 0, 0, 0, 1, 1]  # those of which nothing is new are not sent


def test_the_owner_of_a_tie_sends_its_weights_when_it_applies():
    tied = dataclasses.replace(SYNC, ties=(Tie("w", (1, 2)),))
    assert texts(tied.gives(step(4), 1)) == ["norm 4 from stage 1 to 0"]
    assert texts(tied.gives(apply(4), 1)) == ["weight 5 from stage 1 to 2"]


def test_credits_are_a_need_of_the_coordinator():
    plan = plan_for("async-1f1b", num_stages=2, per_update=2)
    ahead = plan.credits()
    loss = Edge(EdgeKind.LOSS, 1, COORDINATOR)
    for m in range(4 * ahead):
        assert plan.needs(inject(m), COORDINATOR) == (Need(loss, (m // 2 - ahead + 1) * 2 - 1),)
    assert texts(plan.gives(inject(3), COORDINATOR)) == [
        "activation 3 from the coordinator to 0", "target 3 from the coordinator to 1"
    ]  # fmt: skip


def test_a_replica_without_a_micro_batch_of_an_update_waits_for_its_next_one():
    """Which it does not take: the first replica of three has the micro-batches 0, 3, 6."""
    plan = plan_for("async-1f1b", num_stages=1, replicas=[3])
    needs = plan.needs(step(1), 0)
    assert needs[0] == Need(Edge(EdgeKind.ACTIVATION, COORDINATOR, 0), 3, peek=True)
    assert [need.words(plan.title_of) for need in needs[1:]] == [
        "partial 1 from stage 0, replica 1"
    ]
    assert not any(need.peek for need in plan.needs(step(1), 1))


@st.composite
def anything(draw):
    """A plan with what goes together: replicas, or ties; norms; shards."""
    if draw(st.booleans()):
        plan = draw(replicated(most=3))
        may_have_norms = plan.flushes and not plan.shape.shard_optimizer
    else:
        plan = draw(schedules(most=4))
        may_have_norms = True
        stages = range(plan.num_stages)
        ties = [Tie(f"w{i}", pair) for i, pair in enumerate(itertools.combinations(stages, 2))]
        plan = dataclasses.replace(plan, ties=tuple(t for t in ties if draw(st.booleans())))
    return plan.with_norms() if may_have_norms and draw(st.booleans()) else plan


@settings(max_examples=300)
@given(anything(), st.integers(1, 6), st.data())
def test_what_is_given_is_needed_and_a_flush_leaves_nothing_on_the_way(plan, updates, data):
    k = plan.per_update
    cuts = data.draw(st.sets(st.integers(1, 5), max_size=2))
    flushes = sorted(k * cut for cut in cuts if cut < updates)
    prove(plan, plan.name)
    check(plan, updates * k)
    check(plan, updates * k, flushes=flushes, credits=plan.credits())
    check(plan, updates * k, credits=1)
    sent, taken = {}, {}
    for _, address, action in Execution(plan, updates * k, flushes=flushes, credits=plan.credits()):
        for edge, number, peek in plan.needs(action, address):
            assert peek or number <= sent.get(edge, 0 if edge.kind is EdgeKind.WEIGHT else -1)
            if not peek:
                taken[edge] = max(taken.get(edge, -1), number)
        for edge, number, _ in plan.gives(action, address):
            sent[edge] = max(sent.get(edge, -1), number)
    for edge, number in sent.items():
        if edge.target != COORDINATOR and number >= 0:
            assert taken[edge] == number, str(edge)


# -- schedules that somebody wrote ----------------------------------------------------------------


SECOND_STAGE_LATE = Late([0, 1], ahead=[0, 0], behind=[0, 1])
"""Two stages, split backwards; the second does each weight half one micro-batch late."""


class SecondStageInHalves:
    """Two stages, of which the second alone splits its backwards."""

    def order(self, worker, shape, start):
        halves = (Kind.INPUT, Kind.WEIGHT) if worker else (Kind.BACKWARD,)
        for m in itertools.count(start):
            yield from (Action(kind, m) for kind in (Kind.FORWARD, *halves, Kind.STEP))

    versions = Late([0, 0])


def test_a_plan_cuts_backwards_if_one_of_its_stages_does():
    assert plan_for(SecondStageInHalves(), num_stages=2).cuts_backward
    assert plan_for(SECOND_STAGE_LATE, num_stages=2).cuts_backward


def test_a_written_schedule_that_deadlocks_for_a_tie_alone_is_refused():
    plan = plan_for(SECOND_STAGE_LATE, num_stages=2)
    tied = dataclasses.replace(plan, ties=(Tie("a.weight", (0, 1)),))
    rule = r"stage 0 waits in W0 for share 0 from stage 1, stage 1 waits in F1 for activation 1"
    with pytest.raises(ScheduleError, match=rule):
        prove(tied, SECOND_STAGE_LATE)


def ends(plan, micro_batches, seed):
    """Whether an execution ends in which, one at a time, anybody goes on who can."""
    draw, k = random.Random(seed), plan.per_update
    orders = {w: list(plan.order(w, 0, micro_batches)) for w in range(plan.workers)}
    orders[COORDINATOR] = [inject(m) for m in range(micro_batches)]
    places, sent = dict.fromkeys(orders, 0), {}
    stages = range(plan.num_stages)
    owners = {(tie.stages[0], user) for tie in plan.ties for user in tie.stages[1:]}
    pairs = {pair for tie in plan.ties for pair in itertools.pairwise(tie.stages)}

    def can(worker):
        kind, i, _ = orders[worker][places[worker]]
        s = worker
        needed = []
        if kind is Kind.INJECT:
            needed += [("F", stages[-1], (i // k - plan.credits()) * k + j) for j in range(k)]
        if kind is Kind.FORWARD:
            needed.append(("F", s - 1, i) if s else ("N", COORDINATOR, i))
            needed += [
                (plan.applied_by(o).value, o, plan.reads(o, i) - 1) for o, u in owners if u == s
            ]
        if kind in (Kind.BACKWARD, Kind.INPUT) and s < stages[-1]:
            needed.append(("B", s + 1, i))
        if kind in (Kind.BACKWARD, Kind.WEIGHT) and i % k == k - 1:
            needed += [("E", user, i) for before, user in pairs if before == s]
        if kind is Kind.STEP and plan.norms != "none" and s < stages[-1]:
            needed.append(("S", s + 1, i))
        if kind is Kind.STEP and plan.norms == "estimated" and s:
            needed.append(("S", 0, i - plan.delay))
        if kind is Kind.APPLY:
            needed.append(("S", 0, i))
        return all(number < 0 or (letter, at, number) in sent for letter, at, number in needed)

    while left := [w for w in orders if places[w] < len(orders[w])]:
        able = [w for w in left if can(w)]
        if not able:
            return False
        worker = draw.choice(able)
        kind, i, _ = orders[worker][places[worker]]
        places[worker] += 1
        sent[kind.value, worker, i] = True
        if kind in (Kind.BACKWARD, Kind.INPUT):
            sent["B", worker, i] = True
        if kind in (Kind.BACKWARD, Kind.WEIGHT):
            sent["E", worker, i] = True
    return True


MANY = [pytest.param(seed, marks=pytest.mark.stress) for seed in range(20, 200)]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("seed", [*range(20), *MANY])
def test_what_is_proved_of_a_written_schedule_is_what_happens(seed):
    """Fifty random schedules each, against an execution that knows the rules by heart."""
    draw, accepted = random.Random(seed), 0
    for _ in range(50):
        written = Late.drawn(draw)
        try:
            plan = plan_for(
                written, num_stages=written.num_stages, per_update=written.k, proved=False
            )
        except ScheduleError:
            continue
        stages = range(plan.num_stages)
        pairs = itertools.combinations(stages, 2)
        ties = tuple(Tie(f"w{p}", p) for p in pairs if draw.random() < 0.4)
        plan = dataclasses.replace(plan, ties=ties)
        plan = plan.with_norms() if draw.random() < 0.5 else plan
        length = plan.per_update * (4 * plan.num_stages + 6)
        try:
            prove(plan, written)
        except ScheduleError as error:
            if "deadlock" in str(error):
                assert not all(ends(plan, length, draw.random()) for _ in range(2))
            continue
        accepted += 1
        assert ends(plan, length, draw.random())
    assert accepted > 5


def test_the_gradient_of_an_output_waits_for_all_outputs_of_its_mini_batch():
    plan = in_script("gpipe", per_update=4)
    needed = [plan.needs(Action(Kind.GRADIENT, m), COORDINATOR) for m in (0, 3, 4)]
    assert [texts(each) for each in needed] == [
        ["loss 3 from stage 2 to *"],
        ["loss 3 from stage 2 to *"],
        ["loss 7 from stage 2 to *"],
    ]


def test_each_replica_of_the_exit_gets_the_gradients_of_its_own_micro_batches():
    plan = in_script("gpipe", stages=2, per_update=4, replicas=(1, 2))
    given = [plan.gives(Action(Kind.GRADIENT, m), COORDINATOR) for m in range(4)]
    assert [need.edge.target for (need,) in given] == [1, 2, 1, 2]
    for m in range(4):
        (need,) = plan.needs(Action(Kind.BACKWARD, m), given[m][0].edge.target)
        assert need.edge == given[m][0].edge
