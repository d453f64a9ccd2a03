"""Plans, results and traces as HTML for the cells of a notebook."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
from support.recorded import plan_of, traced

from pipedream_rt.observers.page.cells import (
    explanation_html,
    plan_html,
    result_html,
    text_html,
    trace_html,
)


def rows(html):
    """The texts of the cells, row by row."""
    body = str(html).partition("<tbody>")[2].partition("</tbody>")[0]
    texts = body.replace("<th scope=row>", "<td>").replace("</th>", "</td>")
    return [
        [cell.partition("</td>")[0] for cell in row.split("<td>")[1:]]
        for row in texts.split("<tr>")[1:]
    ]


def test_a_plan_has_a_row_for_each_replica_with_its_layers_and_bounds():
    plan = plan_of(2, replicas=[2, 1])
    plan = dataclasses.replace(plan, layers=(("a", "b", "c"), ("<d>",)))
    html = plan_html(plan)
    assert "async-1f1b, 2 stages with 2-1 replicas on 3 workers, 1 micro-batches" in html
    assert rows(html) == [
        ["0.0", "0", "a..c", "&lt;= 2", "&lt;= 4", "&lt;= 5"],
        ["0.1", "1", "a..c", "&lt;= 2", "&lt;= 4", "&lt;= 5"],
        ["1", "2", "&lt;d&gt;", "&lt;= 1", "&lt;= 0", "&lt;= 1"],
    ]


def test_a_plan_without_a_model_and_with_an_unknown_schedule_is_shown():
    plan = dataclasses.replace(plan_of(2), recipe=None, name="my own")
    assert rows(plan_html(plan))[1] == ["1", "1", "", *["&lt;= ?"] * 3]


def test_an_explanation_is_a_table_between_paragraphs():
    table = [("stage", "layers"), ("0", "<a>..b"), ("1", "c")]
    html = explanation_html(["1f1b & more", "cut"], table, ["verified"], "")
    assert rows(html) == [["0", "&lt;a&gt;..b"], ["1", "c"]]
    above, _, below = str(html).partition("<thead>")
    assert "<p>1f1b &amp; more<br>cut</p>" in above
    assert below.endswith("<p>verified</p>")
    assert str(explanation_html([], table, [], "x < y")).endswith("<pre>x &lt; y</pre>")


def test_a_result_has_its_numbers():
    result = SimpleNamespace(
        step=7, loss=0.123456, staleness=2, versions=(5, 6, 7), losses=(0.1, math.nan)
    )
    assert rows(result_html(result)) == [["7", "0.123", "2", "5, 6, 7", "0.1, nan"]]


def test_a_trace_is_drawn_and_an_empty_one_says_why_it_is_not():
    trace = traced()
    assert trace_html(trace).count("<svg") == 1
    empty = dataclasses.replace(trace, spans=trace.spans[:0])
    assert trace_html(empty).startswith("<pre>")
    assert "<svg" not in trace_html(empty)


@pytest.mark.parametrize("text", ["<b>a</b>  b", "a & b"], ids=["tags", "signs"])
def test_a_text_stays_a_text(text):
    shown = text_html(text)
    assert shown.unescape() == f"<pre>{text}</pre>"
    assert text not in shown
