"""The curves of a run: what is drawn of losses, rates and the work of its stages."""

import dataclasses
import math

import pytest
from support.recorded import begun, record_of, stepped, whole_run

from pipedream_rt.observers import Evaluated
from pipedream_rt.observers.page.charts import Line
from pipedream_rt.observers.page.curves import curve_panels, says_something, table_of_curves


def curves_of(events, stages=3):
    return {curve.name: curve for curve in table_of_curves(record_of(events), stages)}


def values(line):
    return [value for _, value in line.points]


def test_each_mini_batch_is_a_point_and_loss_over_time_begins_with_the_run():
    found = curves_of([begun(at=1000.0), *(stepped(i, loss=float(i)) for i in range(3))])
    training, evaluation = found["loss"].lines
    assert training.points == [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0)]
    assert (training.band, evaluation.points) == ([], [])
    assert [at for at, _ in found["loss-time"].lines[0].points] == pytest.approx([0.1, 0.2, 0.3])
    assert values(found["staleness"].lines[0]) == [0.0, 1.0, 2.0]


def test_the_throughput_is_that_between_two_mini_batches():
    """Of samples, or else of mini-batches; none where no time has passed."""
    events = [begun(), stepped(0, at=1001.0), stepped(1, at=1003.0), stepped(2, at=1003.0)]
    assert curves_of(events)["throughput"].lines[0].points == [(3.0, 8 / 2.0)]
    events = [begun(), stepped(0, at=1001.0, samples=0), stepped(1, at=1001.5, samples=0)]
    assert curves_of(events)["throughput"].lines[0].points == [(1.5, 2.0)]
    assert curves_of([begun()])["throughput"].lines[0].points == []


def test_the_share_of_work_has_a_gap_where_new_workers_count_from_0():
    seconds = [(1.0, 1.5), (2.0, 1.5), (0.5, 2.5), (9.0, 2.6)]
    steps = [stepped(i, at=1000.0 + 2 * i, busy=busy) for i, busy in enumerate(seconds)]
    first, second = curves_of([begun(stages=2), *steps], 2)["busy"].lines
    assert values(first) == pytest.approx([0.5, math.nan, 1.0], nan_ok=True)  # never above 1
    assert values(second) == pytest.approx([0.0, 0.5, 0.05])


def test_many_points_are_smoothed_and_a_loss_that_is_no_number_does_not_spoil_the_rest():
    losses = [1.0, math.nan, *[2.0] * 38]
    steps = [stepped(i, loss=loss) for i, loss in enumerate(losses)]
    *_, smoothed = curves_of([begun(), *steps])["loss"].lines
    assert smoothed.name == "training, smoothed"
    # A mean of the two, in which the later one counts more, and not nine parts of the first.
    assert values(smoothed)[:3] == pytest.approx([1.0, 1.0, 1 + 0.1 / 0.19])
    assert 1.9 < values(smoothed)[-1] < 2.0
    assert len(curves_of([begun(), *steps[:39]])["loss"].lines) == 2


def test_each_group_of_parameters_has_a_rate():
    steps = [dataclasses.replace(stepped(i), rates=(0.1, 0.2)) for i in range(2)]
    names = [line.name for line in curves_of([begun(), *steps])["rate"].lines]
    assert names == ["group 0", "group 1"]
    assert [line.name for line in curves_of([begun(), stepped(0)])["rate"].lines] == ["rate"]


def test_metrics_have_a_curve_each_but_not_too_many():
    many = {"loss": 1.0, **{f"metric {i}": float(i) for i in range(20)}}
    events = [begun(), stepped(0), Evaluated(time=1000.1, step=1, values=many)]
    found = curves_of([*events, Evaluated(time=1000.2, step=2, values={"metric 0": 5.0})])
    evaluated = [curve for name, curve in found.items() if name.startswith("evaluated-")]
    assert [curve.title for curve in evaluated] == [f"Evaluation: metric {i}" for i in range(8)]
    assert evaluated[0].lines[0].points == [(1.0, 0.0), (2.0, 5.0)]
    assert values(found["loss"].lines[1]) == pytest.approx([1.0, math.nan], nan_ok=True)


@pytest.mark.parametrize(
    ("points", "from_zero", "says"),
    [
        ([], False, False),
        ([math.nan, math.inf], False, False),
        ([0.0, math.nan], False, True),
        ([0.0, math.nan], True, False),
        ([0.0, -1.0], True, True),
    ],
)
def test_what_says_nothing_is_not_drawn(points, from_zero, says):
    assert says_something(Line("a", list(enumerate(points))), from_zero) is says


def test_empty_curves_stand_on_a_live_page_alone():
    record = record_of([begun()])
    assert list(curve_panels(record, record.begun, live=False)) == []
    names = [panel.name for panel in curve_panels(record, record.begun, live=True)]
    assert names == ["loss", "loss-time", "rate", "throughput", "staleness", "busy"]


def test_what_happened_is_marked_where_it_happened():
    record = record_of(whole_run())
    panels = {panel.name: panel.body for panel in curve_panels(record, record.begun, live=False)}
    for name in ("loss", "throughput"):
        assert "worker-1 was killed by SIGKILL</title>" in panels[name]
        assert "<title>checkpoint 8</title>" in panels[name]
