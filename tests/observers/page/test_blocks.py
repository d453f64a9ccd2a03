"""What panels are made of: tables, bars and lists, in which no text is markup."""

import pytest
from markupsafe import Markup

from pipedream_rt.observers.page.blocks import (
    BarSegment,
    PlanBox,
    bars,
    drawn_plan,
    facts,
    known,
    sentences,
    table,
)
from pipedream_rt.schedules import Plan, plan_for

EVIL = "<script>&"


@pytest.mark.parametrize(
    ("made", "times"),
    [
        (table([EVIL], [[EVIL, EVIL]]), 3),
        (bars([(EVIL, [BarSegment("rest", EVIL, 0.5)])]), 3),  # a row, a tooltip and the legend
        (facts({EVIL: EVIL}), 2),
        (sentences([EVIL], "said"), 1),
        (drawn_plan([(EVIL, [PlanBox(EVIL, [EVIL])])]), 3),
    ],
    ids=["table", "bars", "facts", "sentences", "plan"],
)
def test_a_name_from_a_run_cannot_be_markup(made, times):
    assert EVIL not in made
    assert made.count("&lt;script&gt;&amp;") == times


def test_the_first_cell_of_a_row_is_its_head_and_markup_stays_markup():
    made = table(["of", "value"], [["a", Markup("<b>1</b>")], ["b", ""]])
    assert "<tr><th scope=row>a</th><td><b>1</b></td></tr>" in made
    assert "<tr><th scope=row>b</th><td></td></tr>" in made
    assert "<tbody></tbody>" in table(["of"], [])


def test_a_part_of_a_bar_has_a_number_where_there_is_room():
    made = bars(
        [("stage 0", [BarSegment("forward", "forward", 0.09), BarSegment("rest", "", 0.08)])]
    )
    assert 'style="width:9.00%" title="forward 9%"><b>9%</b>' in made
    assert 'style="width:8.00%" title=" 8%"></span>' in made


def test_each_kind_of_part_stands_in_the_legend_once_and_up_to_a_colon():
    parts = [BarSegment("wait", "waits: stage 1", 0.1), BarSegment("held", "held up", 0.2)]
    legend = bars([("a", parts), ("b", [BarSegment("wait", "waits: stage 2", 0.3)])])
    legend = legend.partition('<ul class="legend">')[2]
    assert legend.count("<li>") == 2
    assert legend.index("waits<") < legend.index("held up<")
    assert "stage" not in legend


def test_of_a_schedule_that_a_user_wrote_nothing_is_known():
    plan = plan_for("async-1f1b", num_stages=3)
    assert known(plan.kept, 0) == "3"
    read = Plan.unpacked({**plan.packed(), "name": "my own"})
    assert known(read.kept, 0) == "?"
