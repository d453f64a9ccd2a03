"""Line charts as SVG: what is drawn where, and what numbers are called."""

import math
import re

import pytest

from pipedream_rt.observers.page.charts import Line, Mark, line_chart, number_text, tick_texts


@pytest.mark.parametrize(
    "values",
    [[1.38, 1.385, 1.39, 1.395, 1.4], [0.0, 0.5], [1e-4, 1.5e-4], [1000.0, 1000.5], [], [3]],
)
def test_no_two_ticks_are_called_alike(values):
    assert len(set(tick_texts(values))) == len(values)


@pytest.mark.parametrize(
    "values",
    [[1.0], [0.0, 0.0], [-5.0, -5.0], [1e-30, 1e30], [0.0, 1e-300], [-1.0, 1e9], [5.0, math.nan],
     [-1e308, 1e308], [1e308]],
    ids=str,
)  # fmt: skip
def test_a_chart_lies_within_its_frame(values):
    points = [(float(i), value) for i, value in enumerate(values)]
    chart = str(line_chart("t", [Line("a", points)], "x"))
    for x, y in re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", chart):
        assert 0 <= float(x) <= 520
        assert 0 <= float(y) <= 250
    for drawing in chart.split("</svg>")[:2]:
        assert drawing.count("<text") <= 2 + 6 + 7


def test_a_gap_is_a_gap():
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 2.0), (4.0, 1.0)]
    chart = str(line_chart("t", [Line("a", points)], "x"))
    linear, logarithmic = re.findall(r'<path class="line l0" d="([^"]+)"', chart)
    assert linear.count("M") == logarithmic.count("M") == 2


def test_the_other_kind_of_axis_is_drawn_where_there_is_one():
    def drawn(values, **how):
        return str(line_chart("t", [Line("a", list(enumerate(map(float, values))))], "x", **how))

    for values, usual, other in (([1, 2, 4], False, True), ([1, 500, 1000], True, False)):
        first, second, *_ = drawn(values).split("</svg>")
        assert 'class="chart usual"' in first
        assert 'class="chart other"' in second
        assert ["is logarithmic" in each for each in (first, second)] == [usual, other]
    for values, how in (([1, 1.2], {}), ([0, 5], {}), ([-1, 5], {}), ([1, 9], {"from_zero": True})):
        assert "<button" not in drawn(values, **how)


def test_a_chart_without_points_says_so():
    assert "Nothing to draw" in line_chart("t", [Line("a", [(0.0, math.nan)])], "x")


def test_marks_beyond_the_axis_are_left_out():
    marks = [Mark(1.0, "saved", "in"), Mark(9.0, "recovered", "out")]
    chart = line_chart("t", [Line("a", [(0.0, 1.0), (2.0, 2.0)])], "x", marks)
    assert "in</title>" in chart
    assert "out</title>" not in chart


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.0, "1"), (0.25, "0.25"), (1234.0, "1.23k"), (2.5e6, "2.5M"), (3e-5, "3e-5"),
     (-0.5, "-0.5"), (999_999.6, "1M"), (999.6, "1k"), (999.4, "999"),
     (1e12, "1e+03G"), (math.nan, "nan")],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert number_text(value) == text


def test_marks_are_named():
    marks = [Mark(at, kind, kind) for at, kind in enumerate(["recovered", "saved", "evaluated"])]
    chart = str(line_chart("title", [Line("one", [(0.0, 1.0), (2.0, 2.0)])], "x", marks))
    assert all(f"</svg>{name}</li>" in chart for name in ("recovery", "checkpoint", "evaluation"))
    assert "legend" not in str(line_chart("title", [Line("one", [(0.0, 1.0), (2.0, 2.0)])], "x"))


def test_many_checkpoints_are_thinned_and_every_recovery_is_drawn():
    line = Line("loss", [(float(n), 1.0 + n) for n in range(1000)])
    marks = [Mark(float(n), kind, "") for n in range(1000) for kind in ("saved", "evaluated")]
    marks += [Mark(float(n), "recovered", "") for n in range(100)]
    _, other, legend = str(line_chart("loss", [line], "mini-batch", marks)).split("</svg>", 2)
    drawn = other + legend
    assert drawn.count('class="mark recovered"') == 101  # and one in the legend
    assert 30 < drawn.count('class="mark saved"') < 50
    assert 30 < drawn.count('class="mark evaluated"') < 50
    assert "loss 1000" not in drawn  # one line alone is named by the heading


def test_the_legend_has_the_last_values():
    lines = [Line(name, [(0.0, 1.0), (1.0, value), (2.0, math.nan)]) for name, value in
             (("training", 0.25), ("evaluation", 0.5))]  # fmt: skip
    drawn = str(line_chart("loss", lines, "mini-batch"))
    assert "training 0.25<" in drawn
    assert "evaluation 0.5<" in drawn
