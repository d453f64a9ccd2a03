import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.judge import legal
from support.plans import Listed, Unbounded, in_script, listed
from support.shapes import schedules

from pipedream_rt.errors import ScheduleError
from pipedream_rt.schedules import Action, Kind, check, plan_for
from pipedream_rt.schedules.checker import prove

ORDERS = [
    "F0 F1 F2 B0 S0 F3 B1 S1 B2 S2 B3 S3",
    "F0 F1 B0 S0 F2 B1 S1 F3 B2 S2 B3 S3",
    "F0 B0 S0 F1 B1 S1 F2 B2 S2 F3 B3 S3",
]


def written(change=lambda orders: None):
    orders = [order.split() for order in ORDERS]
    change(orders)
    return listed(plan_for("async-1f1b", num_stages=3), *map(" ".join, orders))


def test_a_right_order_is_accepted_and_drawn():
    assert check(written(), 4).render() == (
        "stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3\n"
        "stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .\n"
        "stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  ."
    )


def swap(stage, first, second):
    def change(orders):
        row = orders[stage]
        i, j = row.index(first), row.index(second)
        row[i], row[j] = row[j], row[i]

    return change


def test_a_deadlock_shows_who_waits_for_what():
    """Stage 0 wants B0 before it sends F1; stage 1 wants F1 before it sends B0."""
    change = swap(0, "F1", "B0")
    rule = "deadlock: stage 0 waits in B0 for gradient 0 from stage 1, stage 1 waits in F1 for act"
    with pytest.raises(ScheduleError, match=rule) as e:
        check(written(change), 4)
    assert str(e.value).splitlines()[1] == "stage 0  F0   >B0< .    ."


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda o: o[1].remove("F3"), "F3"),
        (lambda o: o[1].remove("B3"), "before its backward B3"),
        (lambda o: o[2].remove("S3"), "never does S3"),
        (lambda o: o[0].insert(3, "F2"), "goes forward twice"),
        (lambda o: o[2].insert(2, "B0"), "goes backward twice"),
        (lambda o: o[2].insert(3, "S0"), "the next update should be S1"),
        (swap(2, "B0", "S0"), "update before its backward B0"),
        (swap(1, "F2", "F3"), "the next forward should be F2"),
        (
            lambda o: o[0].insert(3, o[0].pop(o[0].index("F3"))),
            r"4 micro-batches in flight, but in_flight\(0\) of the plan says 3",
        ),
        (lambda o: [row.clear() for row in o], "stage 0 never does F0"),
        (lambda o: o[0].__setitem__(slice(4, 6), ["F3", "S0"]), "version 1, but the versions kept"),
        (lambda o: o[2].insert(1, "G1"), "G1 is an action of the coordinator"),
        (swap(2, "F0", "B0"), "stage 2, B0: backward before its forward F0[^!]*>B0<"),
    ],
)
def test_a_broken_order_is_refused(change, rule):
    with pytest.raises(ScheduleError, match=rule):
        check(written(change), 4)


def plain(orders, workers):
    """For the judge."""
    return [
        [
            (a.kind.value, a.index, w if a.stage is None else a.stage)
            for a in orders[w]
            if a.kind is not Kind.DRAIN
        ]
        for w in range(workers)
    ]


@settings(max_examples=300)
@given(schedules(most=4), st.sampled_from(["drop", "double", "swap", "swap alike"]), st.data())
def test_a_mutated_schedule_is_refused(schedule, how, data):
    """A dropped or doubled action, and two of a kind in turn, always; others as the judge says."""
    shape, micro_batches = schedule.shape, 2 * schedule.per_update
    orders = [
        [a for a in schedule.order(w, 0, micro_batches) if a.kind is not Kind.DRAIN]
        for w in range(shape.workers)
    ]
    row = data.draw(st.sampled_from(orders))
    i = data.draw(st.integers(0, len(row) - 1))
    match how:
        case "drop":
            del row[i]
        case "double":
            row.insert(data.draw(st.integers(i, len(row))), row[i])
        case "swap":
            j = data.draw(st.integers(0, len(row) - 1))
            row[i], row[j] = row[j], row[i]
        case "swap alike":
            alike = [
                j
                for j, a in enumerate(row)
                if (a.kind, a.stage) == (row[i].kind, row[i].stage) and j != i
            ]
            assume(alike)
            j = data.draw(st.sampled_from(alike))
            row[i], row[j] = row[j], row[i]
    mutated = listed(schedule, *orders, kind=Unbounded)
    judged = legal(
        plain(orders, shape.workers), shape.workers, shape.num_stages, shape.per_update,
        micro_batches,
    )  # fmt: skip
    assert not judged or how == "swap"
    if judged:
        check(mutated, micro_batches)
    else:
        with pytest.raises(ScheduleError):
            check(mutated, micro_batches)


@given(schedules())
def test_the_judge_accepts_what_is_built_in(schedule):
    shape, micro_batches = schedule.shape, 2 * schedule.per_update
    orders = [list(schedule.order(w, 0, micro_batches)) for w in range(shape.workers)]
    assert legal(
        plain(orders, shape.workers), shape.workers, shape.num_stages, shape.per_update,
        micro_batches,
    )  # fmt: skip


REPLICAS = plan_for("1f1b", num_stages=1, replicas=[2], per_update=2)
OTHER = "F1 B1 R0 S0 F3 B3 R1 S1"
"""What the second replica does when the first one breaks a rule."""

HALVES = plan_for("zero-bubble", num_stages=2, per_update=2)
FIRST = "F0 F1 I0 W0 I1 W1 S0"
"""What stage 0 does when stage 1 breaks a rule."""

ALTERNATING = plan_for("1f1b", num_stages=1, replicas=[2])
ONE = plan_for("gpipe", num_stages=1, per_update=2)


@pytest.mark.parametrize(
    ("plan", "orders", "rule"),
    [
        (REPLICAS, ("F0 B0 S0 F2", OTHER), "update before R0"),
        (REPLICAS, ("F0 B0 R0 R0 S0", OTHER), "the gradients of update 0 are handed over twice"),
        (REPLICAS, ("F0 R0 B0 S0", OTHER), "before its backward B0"),
        (REPLICAS, ("F0 F1 B0", OTHER), "micro-batch 1 goes to another replica"),
        (REPLICAS, ("F0 F4", OTHER), "the next forward should be F2"),
        (REPLICAS, ("F0 B0 R0", "F1 B1 F3 B3 R0"), "0 must come before B3, which .* update 1"),
        (ALTERNATING, ("F0 B0 R0 S0 R1", "S0"), "this replica has no micro-batch of update 1"),
        (ONE, ("F0 F1 B0 B1 F2 F3 B2 S0 B3 S1",), "0 must come before B2, which .* update 1"),
        (HALVES, (FIRST, "F0 I0 F1 W1 I1 W0 S0"), "weight half before its input half I1"),
        (HALVES, (FIRST, "F0 I0 F1 I1 W1 W0 S0"), "the next weight half should be W0"),
        (HALVES, (FIRST, "F0 I0 F1 B1 W0 W1 S0"), "a backward is split always or never"),
        (HALVES, (FIRST, "F0 I0 F1 I1 W0 S0 W1"), "update before its backward W1"),
        (HALVES, (FIRST, "F0 I0 F1 I1 W0 S0"), "update before its backward W1"),
    ],
)
def test_what_replicas_halves_and_updates_must_not_do(plan, orders, rule):
    with pytest.raises(ScheduleError, match=rule):
        check(listed(plan, *orders, kind=Unbounded), 2 if plan is HALVES else 4)


def test_halves_that_are_in_order_are_accepted():
    check(listed(HALVES, FIRST, "F0 I0 F1 I1 W0 W1 S0", kind=Unbounded), 2)


def test_too_many_versions_are_refused():
    class Greedy(Listed):
        def kept(self, stage):
            return 1

    plan = listed(plan_for("async-1f1b", num_stages=3), *ORDERS, kind=Greedy)
    with pytest.raises(ScheduleError, match=r"2 versions kept, but kept\(\) of the .* says 1"):
        check(plan, 4)


def test_a_version_is_read_only_once_its_weights_were_taken():
    """A replica steps its own part of the weights; the others' parts come after the step."""
    sharded = plan_for("1f1b", num_stages=1, replicas=[2], per_update=2, shard_optimizer=True)
    plan = listed(sharded, "F0 B0 R0 S0 F2", "F1 B1 R0 S0 T0 F3 B3 R1 S1 T1")
    with pytest.raises(ScheduleError, match="replica 0, F2: reads version 1 before T0"):
        check(plan, 4)


def test_a_written_schedule_that_deadlocks_shows_where():
    class Waits:
        def order(self, worker, shape, start):
            for m in itertools.count(start, 2):
                if worker:
                    for kind in (Kind.FORWARD, Kind.BACKWARD):
                        yield from (Action(kind, m), Action(kind, m + 1))
                else:
                    for kind in (Kind.FORWARD, Kind.BACKWARD):
                        yield Action(kind, m)
                    for kind in (Kind.FORWARD, Kind.BACKWARD):
                        yield Action(kind, m + 1)
                yield Action(Kind.STEP, m // 2)

    rule = "stage 0 waits in B0 for gradient 0 from stage 1, stage 1 waits in F1 for activation 1"
    with pytest.raises(ScheduleError, match=rule) as e:
        plan_for(Waits(), num_stages=2, per_update=2)
    assert ">B0<" in str(e.value)


def test_a_long_grid_is_cut_to_its_end():
    grid = check(plan_for("async-1f1b", num_stages=2), 50)
    assert grid.render(last=4).splitlines()[0].startswith("stage 0  ... ")


@pytest.mark.parametrize("name", ["1f1b", "async-1f1b", "zero-bubble"])
def test_a_loss_of_the_whole_mini_batch_needs_all_its_forwards_first(name):
    with pytest.raises(ScheduleError, match=r'"gpipe"[^!]*gradient 0 from the coordinator'):
        prove(in_script(name, 2, per_update=4), name)
    prove(in_script(name, 2), name)
