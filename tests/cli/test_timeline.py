"""The command ``timeline``, as a user types it. It starts no process."""

import json
import re
from xml.etree import ElementTree

import pytest
from support.events import check_trace_events


def test_timeline_sums_up_draws_and_predicts(call, trace, golden):
    output = call(
        "timeline", trace, "--width", 100, "--end", "100ms", "--predict", "--what-if", "stages=8",
        "--what-if", "bandwidth=100Mbit,schedule=zero-bubble",
    )  # fmt: skip
    golden("timeline", output, sign=re.compile(r"[+-](?=0\.0%)"))  # that of an error of rounding


def test_timeline_into_files(call, tmp_path, trace):
    svg, events = tmp_path / "run.svg", tmp_path / "run.json"
    output = call("timeline", trace, "--svg", svg, "--perfetto", events, "--begin", "10ms")
    assert "10 ms to" in output
    ElementTree.parse(svg)
    check_trace_events(json.loads(events.read_text()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--begin", "99s"), "nothing happened"),
        (("--begin", "soon"), "is no time"),
        (("--what-if", "stages"), "'stages' has no ="),
        (("--what-if", "schedule=zigzag"), "unknown schedule"),
        (("--svg", "none/run.svg"), "cannot write"),
    ],
)
def test_wrong_words_about_a_trace(call, trace, words, message):
    assert message in call("timeline", trace, *words, code=1)


def test_what_is_no_trace(call):
    assert "is no trace" in call("timeline", __file__, code=1)
    assert "No such file" in call("timeline", "none.trace", code=1)
