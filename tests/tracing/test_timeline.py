import json
from xml.etree import ElementTree

import pytest
from support.costs import simulated as run
from support.events import check_trace_events

from pipedream_rt.errors import TraceError
from pipedream_rt.simulation.costs import Costs
from pipedream_rt.tracing import timeline


def test_text_with_a_letter_for_each_column():
    trace = run(updates=1)
    assert timeline.text(trace, timeline.window(trace), width=9 + 12).splitlines() == [
        "stage 0  FFF..BFB.B.B",
        "stage 1  .FF.BFBFB.B.",
        "stage 2  ..FBFBFBFB..",
        "         0 s    12 ms",
    ]


def test_text_with_room_for_labels():
    trace = run("interleaved-1f1b", 4, 2, 1)
    drawn = timeline.text(trace, timeline.window(trace), width=10 + 60)
    assert drawn.splitlines()[0] == (
        "worker 0  0:F0--0:F1--2:F0--2:F1--......2:B0--......2:B1--0:B0--0:B1--"
    )


def test_a_window():
    trace = run()
    view = timeline.window(trace, 0.002, 0.004)
    assert {box.label for box in view.boxes} == {"F0", "F1", "F2", "B0"}
    assert str(view) == "2 ms to 4 ms of 24 ms"
    with pytest.raises(TraceError, match="nothing happened between 9 s and the end"):
        timeline.window(trace, 9.0)
    long = run("async-1f1b", 3, 1, 1000)
    assert len(timeline.window(long).boxes) == timeline.MOST_DRAWN


def test_svg():
    trace = run(costs=Costs(forward=((0.001,),), backward=((0.002,),), step=((0.0005,),)))
    document = timeline.svg(trace, timeline.window(trace))
    root = ElementTree.fromstring(document)
    space = "{http://www.w3.org/2000/svg}"
    tips = [t.text for t in root.iter(f"{space}title")][1:]
    assert len(tips) == 3 * (8 + 8 + 2 + 1)
    assert "stage 1 B3, version 0, 2 ms" in tips
    width = float(root.get("width"))
    for box in root.iter(f"{space}rect"):
        assert (
            0 <= float(box.get("x", 0)) <= float(box.get("x", 0)) + float(box.get("width")) <= width
        )
    words = [t.text for t in root.iter(f"{space}text")]
    assert {"stage 0", "F0", "B7", "F forward", "0 s", "20 ms"} <= set(words)
    assert "<script" not in timeline.svg(_named(trace, "<script>"), timeline.window(trace))
    ElementTree.fromstring(timeline.svg(_named(trace, "a\x07b"), timeline.window(trace)))


def _named(trace, name):
    import dataclasses

    return dataclasses.replace(trace, plan=dataclasses.replace(trace.plan, name=name))


@pytest.mark.parametrize("name", ["async-1f1b", "interleaved-1f1b", "zero-bubble"])
def test_perfetto(name):
    trace = run(name, 4, 4, 3)
    found = json.loads(timeline.perfetto(trace))
    check_trace_events(found)
    events = found["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"stage 0", "stage 3", "coordinator"} <= names
    for m in range(12):
        flow = sorted(
            (e for e in events if e.get("cat") == "flow" and e["id"] == m), key=lambda e: e["ts"]
        )
        assert [e["ph"] for e in flow] == ["s", *"t" * 6, "f"]
        assert [e["tid"] for e in flow] == [0, 1, 2, 3, 3, 2, 1, 0]
    counters = [e for e in events if e["ph"] == "C"]
    assert max(e["args"]["versions"] for e in counters) == max(trace.spans["kept"])
    complete = [e for e in events if e["ph"] == "X" and e["cat"] != "coordinator"]
    assert len(complete) == (trace.spans["stage"] >= 0).sum()
