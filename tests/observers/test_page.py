"""The page of a run as HTML: what stands in it, and that nothing in a run can write markup."""

import dataclasses
import math
import re
from html.parser import HTMLParser

import pytest
from support.recorded import begun, stepped, traced, whole_run

from pipedream_rt import ConfigError
from pipedream_rt.observers import Ended, Warned
from pipedream_rt.observers.page import panels as page_panels
from pipedream_rt.observers.page.charts import Line, Mark, line_chart, number_text, tick_texts
from pipedream_rt.observers.page.panels import panels, where_time_goes, workers_panel
from pipedream_rt.observers.page.render import page_of, report_of, write_report
from pipedream_rt.observers.run_record import RunRecord

_VOID = {"meta", "link", "br", "line", "path", "polygon", "rect"}


class Parsed(HTMLParser):
    """Checks that tags are closed in their order; collects texts and tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)


def record_of(events):
    record = RunRecord()
    for event in events:
        record(event)
    return record


def test_a_whole_run_has_all_panels():
    names = [panel.name for panel in panels(record_of(whole_run()))]
    assert names == [
        "head", "warnings", "loss", "evaluated-0", "loss-time", "rate", "throughput", "staleness",
        "busy", "stages", "time", "bubble", "hops", "timeline", "plan", "recoveries", "checkpoints",
        "evaluations", "settings", "software",
    ]  # fmt: skip


def test_a_live_page_leaves_out_what_is_simulated(monkeypatch):
    def simulate(*arguments):
        raise AssertionError("something was simulated")

    monkeypatch.setattr(page_panels, "predict", simulate)
    monkeypatch.setattr(page_panels, "what_if", simulate)
    names = {panel.name for panel in panels(record_of(whole_run()), live=True)}
    assert names > {"time", "bubble", "timeline"}


def test_of_a_trace_that_has_lost_its_beginning_the_end_is_drawn():
    record = record_of(whole_run())
    (drawn,) = [str(p.body) for p in panels(record) if p.name == "timeline"]
    assert "All of it" in drawn
    lost = [dataclasses.replace(worker, dropped=1) for worker in record.trace.workers]
    record.trace = dataclasses.replace(record.trace, workers=tuple(lost))
    found = {panel.name: panel for panel in panels(record)}
    assert "The last moments" in str(found["timeline"].body)
    assert found["time"].note.startswith("Of the last ")


@pytest.mark.parametrize(
    "values",
    [[1.38, 1.385, 1.39, 1.395, 1.4], [0.0, 0.5], [1e-4, 1.5e-4], [1000.0, 1000.5], [], [3]],
)
def test_no_two_ticks_are_called_alike(values):
    assert len(set(tick_texts(values))) == len(values)


@pytest.mark.parametrize(
    "events",
    [
        [],
        [begun()],
        [begun(), stepped(0)],
        [begun(), stepped(0, loss=math.nan), stepped(1, loss=math.inf), stepped(2)],
        [begun(), *(stepped(i, loss=1.0, at=1000.0) for i in range(5))],
        [begun(), *(stepped(i, samples=0) for i in range(5))],
        [begun(stages=1), *(stepped(i, stages=1) for i in range(3000))],
        [begun(replicas=2), stepped(0)],
        [begun(), *(stepped(i, busy=(0.1 * i,) * (i % 7)) for i in range(7))],
        whole_run(),
        whole_run()[:-1],
    ],
    ids=lambda events: f"{len(events)} events",
)
def test_any_run_is_shown(events):
    page = Parsed(report_of(record_of(events)))
    assert any(tag == "main" for tag, _ in page.tags)
    assert "nan" not in [a.get("d", "") for _, a in page.tags]


def test_a_page_asks_the_network_for_nothing():
    text = report_of(record_of(whole_run()))
    page = Parsed(text)
    for tag, attributes in page.tags:
        assert tag not in {"img", "iframe", "object", "base", "form"}
        for name in ("src", "href", "action"):
            assert attributes.get(name, "data:,") == "data:,"
    assert "default-src 'none'" in text
    assert not re.search(r"https?://", text)
    assert len(text) < 2 << 20


def test_texts_of_a_run_are_no_markup():
    page = Parsed(report_of(record_of(whole_run())))
    assert not any(tag == "b" and not a for tag, a in page.tags if tag == "b" and a)
    assert any("a <b>bold</b> warning" in text for text in page.texts)


def test_markup_in_names_stays_text():
    evil = "</script><script>alert(1)</script>"
    event = begun()
    event.plan["layers"] = [[evil], [evil], [evil]]
    text = report_of(record_of([event, stepped(0)]))
    assert evil not in text
    Parsed(text)


def test_the_parts_of_the_time_make_up_the_whole():
    trace = traced()
    for address in trace.plan.addresses:
        parts = where_time_goes(trace, address)
        assert sum(part.share for part in parts) == pytest.approx(1.0, abs=0.01)
        shares = {part.kind: part.share for part in parts}
        assert shares["backward"] == pytest.approx(2 * shares["forward"], rel=0.01)


def test_workers_are_shown_as_they_are():
    panel = workers_panel(
        [{"name": "<w>", "stages": "1", "process": "pid 5", "silent_s": 0.25, "rss": 1 << 20,
          "doing": "waits for <F3>; since ever"}]
    )  # fmt: skip
    assert "&lt;w&gt;" in panel.body
    assert "waits for &lt;F3&gt;<" in panel.body


def test_a_report_is_written_or_refused(tmp_path):
    path = write_report(tmp_path / "report.html", record_of(whole_run()))
    assert path.read_text().startswith("<!doctype html>")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(tmp_path / "missing" / "report.html", record_of(whole_run()))


def test_a_live_page_may_ask_its_server_alone():
    assert "connect-src 'self'" in page_of("x", [], live=True)
    assert "connect-src 'none'" in page_of("x", [])


# -- charts -------------------------------------------------------------------------------------


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


def test_stages_that_never_compute_at_once_are_not_compared():
    steps = [stepped(i, busy=(0.1 * i, 1.0 * i, 0.1 * i)) for i in range(20)]
    first = begun()
    assert "if all workers" in "".join(str(p.body) for p in panels(record_of([first, *steps])))
    first.settings["workers"] = "serial"
    assert "if all workers" not in "".join(str(p.body) for p in panels(record_of([first, *steps])))


def test_what_was_chosen_stands_apart_from_what_went_wrong():
    early, late = Warned(time=999.0, text="chosen"), Warned(time=1001.0, text="went wrong")
    found = {p.name: str(p.body) for p in panels(record_of([begun(), early, stepped(0), late]))}
    assert "went wrong" in found["warnings"]
    assert "chosen" in found["chosen"]
    assert "chosen" not in found["warnings"]


def test_marks_are_named():
    marks = [Mark(at, kind, kind) for at, kind in enumerate(["recovered", "saved", "evaluated"])]
    chart = str(line_chart("title", [Line("one", [(0.0, 1.0), (2.0, 2.0)])], "x", marks))
    assert all(f"</svg>{name}</li>" in chart for name in ("recovery", "checkpoint", "evaluation"))
    assert "legend" not in str(line_chart("title", [Line("one", [(0.0, 1.0), (2.0, 2.0)])], "x"))


def test_the_head_has_the_command_the_commit_and_the_cores():
    known = {"command": "train.py --lr 3e-4", "commit": "0c76307+", "cores": "8"}
    first = dataclasses.replace(begun(), software=known)
    head, *_ = panels(record_of([first, stepped(0)]))
    assert "train.py --lr 3e-4, commit 0c76307+, process 1 on elsewhere with 8 cores" in head.body
    head, *_ = panels(record_of([begun(), stepped(0)]))
    assert "<p>process 1 on elsewhere, begun" in head.body


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


def test_the_speed_over_one_process_is_told_and_that_a_run_is_too_small():
    events = [begun(), *(stepped(i) for i in range(60))]  # of 0.1 s each stage computes 0.05
    head, *rest = panels(record_of(events))
    assert "1.50 times one process, at most" in str(head.body)
    assert "too small" not in str(rest[0].body)
    small = [begun(), *(stepped(i, busy=(0.02 * i,) * 3) for i in range(60))]
    ended = Ended(time=1007.0, step=60, stages=(), trace=traced())
    head, advice, *_ = panels(record_of([*small, ended]))
    assert "0.60 times one process" in str(head.body)
    assert "too small for 3 workers" in str(advice.body)
    assert "num_workers" not in str(advice.body)
