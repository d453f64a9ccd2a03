"""The summary of a trace: times, bubble, staleness and memory, in numbers and as text."""

import dataclasses

import numpy as np
import pytest
from support.costs import simulated as run
from support.costs import unit

from pipedream_rt.errors import TraceError
from pipedream_rt.schedules import Kind, plan_for
from pipedream_rt.simulation.simulator import simulate
from pipedream_rt.tracing.summary import (
    Lines,
    bytes_text,
    describe,
    longest_stretch,
    seconds_text,
    summarize,
    table,
    worker_rows,
)
from pipedream_rt.tracing.trace import CODES


def test_the_summary_of_async_1f1b():
    trace = run("async-1f1b", 3, 1, 30)
    summary = summarize(trace)
    assert summary.throughput == pytest.approx(500)
    assert [s.versions for s in summary.stages] == [3, 2, 1]
    assert [s.in_flight for s in summary.stages] == [3, 2, 1]
    assert summary.stages[0].staleness == {0: 1, 1: 1, 2: 28}
    assert summary.staleness == {0: 30 + 1 + 1, 1: 1 + 29, 2: 28}
    assert summary.hops == (0, 0, 0, 0)
    # Stage 0 waits for the first gradient, then for one more at each drain.
    assert summary.stages[0].waits[1] == pytest.approx(0.004)
    assert summary.makespan == pytest.approx(0.064)
    assert summary.bubble[0] == pytest.approx(4 / 64)


def test_the_summary_as_text(golden):
    costs = unit(latency=0.003, weight_bytes=(2.0**20,), stash_bytes=(1024.0,))
    golden("summary", describe(run("async-1f1b", 2, 1, 50, costs)))


def test_numbers_for_people():
    assert [seconds_text(s) for s in (0, 3e-9, 2.5e-5, 0.0123, 61.5)] == [
        "0 s", "3 ns", "25 us", "12.3 ms", "61.5 s"
    ]  # fmt: skip
    sizes = (0, 1023, 2**20, 1010 * 2**20, 3 * 2**30, 5000 * 2**30)
    assert [bytes_text(size) for size in sizes] == [
        "0 B", "1023 B", "1 MiB", "1010 MiB", "3 GiB", "5000 GiB"
    ]  # fmt: skip


def test_a_trace_without_an_action_has_no_summary():
    empty = run(updates=1)
    empty = dataclasses.replace(empty, spans=empty.spans[:0])
    with pytest.raises(TraceError, match="there is no action in the trace"):
        summarize(empty)


@pytest.mark.parametrize("updates", [0, 1])
def test_fewer_than_two_updates_without_a_flush_between_have_no_throughput(updates):
    """Filling and draining the pipe are no steady phase."""
    trace = run("async-1f1b", 2, 1, 2)
    steps = np.flatnonzero(trace.spans["kind"] == CODES[Kind.STEP])
    fewer = np.delete(trace.spans, steps[updates * 2 :])
    assert summarize(trace).throughput == pytest.approx(500)
    assert summarize(dataclasses.replace(trace, spans=fewer)).throughput == 0.0


def test_the_longest_stretch_is_the_one_with_the_most_updates():
    runs = [run("async-1f1b", 2, 1, updates).by_stage()[0] for updates in (2, 5, 3)]
    stretch = longest_stretch(np.concatenate(runs))
    steps = stretch[stretch["kind"] == CODES[Kind.STEP]]
    assert steps["index"].tolist() == [0, 1, 2, 3, 4]


def test_replicas_are_counted_one_by_one_and_their_micro_batches_together():
    plan = plan_for("async-1f1b", num_stages=2, replicas=[2, 1])
    summary = summarize(simulate(plan, unit(), 10))
    assert [(s.stage, s.worker) for s in summary.stages] == [(0, 0), (1, 1), (2, 2)]
    assert summary.micro_batches == 10
    assert sum(summary.stages[2].staleness.values()) == 10
    assert sum(summary.stages[0].staleness.values()) == 5


def test_a_wide_table_goes_on_below_with_its_first_column():
    rows = [("name", "one", "two", "three"), ("a", "1" * 9, "2" * 9, "3" * 9)]
    assert table(rows, 30).splitlines() == [
        "name  one        two",
        "a     111111111  222222222",
        "name  three",
        "a     333333333",
    ]
    assert table(rows).splitlines()[1] == "a     111111111  222222222  333333333"
    assert table([("a", "b" * 99)], 30) == "a  " + "b" * 99  # two columns are never parted


def test_what_a_worker_does_cannot_write_to_the_terminal():
    one = {
        "name": "w", "stages": "0", "process": "pid 1", "silent_s": 0.04, "rss": 0,
        "doing": "waits\x1b[2J; since",
    }  # fmt: skip
    ((*_, heard, memory, doing),) = worker_rows([one])
    assert (heard, memory) == ("0.0 s ago", "-")
    assert doing.isprintable()
    assert doing.startswith("waits")
    assert "since" not in doing


def test_a_text_in_a_notebook_is_no_markup():
    assert Lines("<b>")._repr_html_() == "<pre>&lt;b&gt;</pre>"
