"""The timeline of the page: which part of a trace is drawn, and where its actions lie."""

import dataclasses
import re

import pytest
from support.recorded import traced

from pipedream_rt.errors import TraceError
from pipedream_rt.observers.page.timeline_panel import ACTIONS, timelines
from pipedream_rt.tracing.trace import WorkerFacts

LONG = traced(micro_batches=2 * ACTIONS)


def heads(html):
    return re.findall(r'<div class="tools"><span>([^(]+) \(', html)


def labels(html):
    return re.findall(r"<b>([FBS]\d+)</b>", html)


def test_a_short_run_is_drawn_whole():
    html = timelines(traced(micro_batches=5))
    assert heads(html) == ["All of it"]
    assert sorted(labels(html)) == sorted(3 * [f"{kind}{m}" for kind in "FBS" for m in range(5)])


def test_of_a_long_run_the_beginning_and_the_middle_are_drawn():
    html = timelines(LONG)
    assert heads(html) == ["The beginning", "The middle"]
    first, middle = html.split('<div class="timeline">')[1:]
    assert labels(first)[0] == "F0"
    numbers = [int(label[1:]) for label in labels(middle)]
    assert min(numbers) <= ACTIONS <= max(numbers)  # half of the micro-batches
    for part in (first, middle):
        assert 0.9 * ACTIONS < len(labels(part)) < 1.6 * ACTIONS


def test_of_a_run_whose_beginning_is_lost_the_end_is_drawn():
    lost = tuple(WorkerFacts(name=str(i), dropped=1) for i in range(3))
    html = timelines(dataclasses.replace(LONG, workers=lost))
    assert heads(html) == ["The last moments"]
    assert f"B{2 * ACTIONS - 1}" in labels(html)
    assert "F0" not in labels(html)


def test_actions_lie_within_their_lane_and_can_be_seen():
    for left, width in re.findall(r"left:([\d.]+)%;width:([\d.]+)%", timelines(LONG)):
        assert 0 <= float(left) <= 100
        assert float(width) >= 0.03
        assert float(left) + float(width) <= 100.04


def test_each_worker_has_a_lane_with_its_name():
    html = timelines(traced())
    lanes = [f'<div class="lane" aria-label="stage {i}">' for i in range(3)]
    assert [html.count(lane) for lane in lanes] == [1, 1, 1]
    assert "<span>stage 0</span><span>stage 1</span><span>stage 2</span>" in html


def test_a_trace_without_an_action_is_refused():
    with pytest.raises(TraceError, match="no action"):
        timelines(dataclasses.replace(LONG, spans=LONG.spans[:0]))
