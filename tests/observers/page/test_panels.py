"""The panels of the page: what a record and a trace tell of a run."""

import dataclasses

import pytest
from support.recorded import begun, record_of, stepped, traced, whole_run

from pipedream_rt.observers import Ended, Warned
from pipedream_rt.observers.page import panels as page_panels
from pipedream_rt.observers.page.panels import panels, where_time_goes, workers_panel


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


def test_the_head_has_the_command_the_commit_and_the_cores():
    known = {"command": "train.py --lr 3e-4", "commit": "0c76307+", "cores": "8"}
    first = dataclasses.replace(begun(), software=known)
    head, *_ = panels(record_of([first, stepped(0)]))
    assert "train.py --lr 3e-4, commit 0c76307+, process 1 on elsewhere with 8 cores" in head.body
    head, *_ = panels(record_of([begun(), stepped(0)]))
    assert "<p>process 1 on elsewhere, begun" in head.body


def test_the_speed_over_one_process_is_told_and_that_a_run_is_too_small_where_it_was_warned_of():
    events = [begun(), *(stepped(i) for i in range(60))]  # of 0.1 s each stage computes 0.05
    head, *rest = panels(record_of(events))
    assert "1.50 times one process, at most" in str(head.body)
    assert "too small" not in str(rest[0].body)
    small = [begun(), *(stepped(i, busy=(0.02 * i,) * 3) for i in range(60))]
    ended = Ended(time=1007.0, step=60, stages=(), trace=traced())
    # How long it took says nothing of a model where other programs use the cores too.
    head, advice, *_ = panels(record_of([*small, ended]))
    assert "0.60 times one process" in str(head.body)
    assert "too small" not in str(advice.body)
    warned = Warned(time=1001.0, text="too small for 3 workers: all stages together...")
    head, advice, *_ = panels(record_of([*small, warned, ended]))
    assert "too small for 3 workers" in str(advice.body)
    assert "num_workers" not in str(advice.body)
