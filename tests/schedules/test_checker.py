import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream_rt.errors import ScheduleError
from pipedream_rt.schedules import Action, check, schedule_named

ORDERS = [
    "F0 F1 F2 B0 S0 F3 B1 S1 B2 S2 B3 S3",
    "F0 F1 B0 S0 F2 B1 S1 F3 B2 S2 B3 S3",
    "F0 B0 S0 F1 B1 S1 F2 B2 S2 F3 B3 S3",
]


@dataclasses.dataclass
class Written:
    """A schedule written by hand, over the bounds of async-1f1b."""

    orders: list[list[str]]
    num_stages: int = 3
    per_update: int = 1

    def order(self, stage, start=0, stop=None):
        return iter([Action.parse(text) for text in self.orders[stage]])

    def __getattr__(self, name):
        return getattr(schedule_named("async-1f1b", num_stages=3), name)


def written(change=lambda orders: None):
    orders = [order.split() for order in ORDERS]
    change(orders)
    return Written(orders)


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
    with pytest.raises(
        ScheduleError, match="deadlock: stage 0 waits for B0, stage 1 waits for F1"
    ) as e:
        check(written(change), 4)
    assert str(e.value).splitlines()[1] == "stage 0  F0   >B0< .    ."


def test_the_culprit_is_marked_in_the_grid():
    with pytest.raises(ScheduleError, match="stage 2, B0: backward before its forward F0") as e:
        check(written(swap(2, "F0", "B0")), 4)
    assert ">B0<" in str(e.value)


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
            "4 in flight, the schedule states 3",
        ),
        (lambda o: [row.clear() for row in o], "stage 0 never does F0"),
        (lambda o: o[0].__setitem__(slice(4, 6), ["F3", "S0"]), "version 1, but the versions kept"),
    ],
)
def test_a_broken_order_is_refused(change, rule):
    with pytest.raises(ScheduleError, match=rule):
        check(written(change), 4)


@given(st.data())
def test_every_mutation_is_refused(data):
    """Dropping, doubling or swapping actions of one kind breaks some rule."""
    orders = [order.split() for order in ORDERS]
    row = data.draw(st.sampled_from(orders))
    i = data.draw(st.integers(0, len(row) - 1))
    match data.draw(st.sampled_from(["drop", "double", "swap"])):
        case "drop":
            del row[i]
        case "double":
            row.insert(i, row[i])
        case "swap":
            others = [j for j, text in enumerate(row) if text[0] == row[i][0] and j != i]
            j = data.draw(st.sampled_from(others))
            row[i], row[j] = row[j], row[i]
    with pytest.raises(ScheduleError):
        check(Written(orders), 4)


def test_too_many_versions_are_refused():
    class Greedy(Written):
        def kept(self, stage):
            return 1

    with pytest.raises(ScheduleError, match="2 versions kept, the schedule states 1"):
        check(Greedy([order.split() for order in ORDERS]), 4)


def test_a_long_grid_is_cut_to_its_end():
    grid = check(schedule_named("async-1f1b", num_stages=2), 50)
    assert grid.render(last=4).splitlines()[0].startswith("stage 0  ... ")
