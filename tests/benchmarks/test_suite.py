"""The suite of benchmarks: cases run in turn, what is kept is not measured again, medians hold.

And what it compares computes the same thing: our pipeline and a plain loop end with the same loss.
"""

import importlib
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.table import Table
from support import forked
from support.deadlines import LATEST_S

from benchmarks.__main__ import BENCHMARKS
from benchmarks.suite import parts, runs
from benchmarks.workload import Workload

HERE = Path(__file__).resolve().parents[2] / "benchmarks"

COUNTING = """
import json, pathlib, sys, threading
log = pathlib.Path(sys.argv[2])
log.write_text(log.read_text() + sys.argv[1] if log.exists() else sys.argv[1])
print("something else first")
if sys.argv[1] == "gone":
    print(json.dumps({"unavailable": "no such thing"}))
    sys.exit(3)
if sys.argv[1] == "mute":
    sys.exit()
if sys.argv[1] == "bad":
    sys.exit("it went wrong")
print(json.dumps({"seconds": float(len(log.read_text()))}), flush=True)
print('{"cut": 1, "o', flush=True)
if sys.argv[1] == "late":
    import subprocess
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)  # it holds its output open
    log.with_name("other").write_text(str(other.pid))
    threading.Event().wait()
"""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Results of these tests alone."""
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    monkeypatch.setattr(runs, "machine", lambda: {"commit": "abc"})
    (tmp_path / "count.py").write_text(COUNTING)
    return tmp_path


def counting(kept, *words, once=False, file=None, **more):
    """A benchmark of a case for each word, whose script notes the word."""
    cases = [
        runs.Case({"word": word}, (str(kept / "count.py"), word, str(kept / "log")), **more)
        for word in words
    ]
    return runs.Benchmark("title", cases, lambda lines: Table(), once=once, file=file)


def test_repeats_are_taken_in_turn_and_what_is_kept_is_not_measured_again(kept):
    benchmark = counting(kept, "a", "b")
    told = runs.run("x", benchmark, 3, Path("none"))
    for _ in range(3):
        next(told)  # stopped before the third is done
    told.close()
    assert (kept / "log").read_text() == "ab"
    list(runs.run("x", benchmark, 3, Path("none")))
    assert (kept / "log").read_text() == "ababab"
    assert list(runs.run("x", benchmark, 3, Path("none"))) == []
    lines = [json.loads(text) for text in (kept / "x.jsonl").read_text().splitlines()]
    assert [line["seconds"] for line in lines] == [1, 2, 3, 4, 5, 6]
    mine, others = map(runs.summed_up, runs.newest(benchmark, "x"))
    assert (mine["seconds"], mine["seconds spread"], mine["repeats"]) == (3, 4, 3)
    assert (others["seconds"], others["word"]) == (4, "b")
    assert repr(runs.summed_up([{"workers": 8}, {"workers": 8}])["workers"]) == "8"


def test_another_commit_is_measured_anew_and_shown_alone(kept, monkeypatch):
    benchmark = counting(kept, "a")
    list(runs.run("x", benchmark, 1, Path("none")))
    monkeypatch.setattr(runs, "machine", lambda: {"commit": "def"})
    list(runs.run("x", benchmark, 1, Path("none")))
    assert [line["commit"] for line in runs.newest(benchmark, "x")[0]] == ["def"]
    assert len(runs.lines_of(runs.results_of("x"))) == 2


def test_what_cannot_run_here_says_why_and_what_fails_ends_the_suite(kept):
    list(runs.run("x", counting(kept, "gone"), 1, Path("none")))
    assert runs.lines_of(runs.results_of("x"))[0]["unavailable"] == "no such thing"
    with pytest.raises(SystemExit, match="it went wrong"):
        list(runs.run("y", counting(kept, "bad"), 1, Path("none")))
    with pytest.raises(SystemExit, match="it printed no result"):
        list(runs.run("y", counting(kept, "mute"), 1, Path("none")))
    told = list(runs.run("z", counting(kept, "a", foreign=True), 1, Path("no/python")))
    assert "left out, as no/python does not exist" in told[0]
    assert not runs.lines_of(runs.results_of("z"))


def test_what_fails_or_is_late_is_a_result_where_each_case_is_measured_once(kept, monkeypatch):
    monkeypatch.setenv("OUT", str(kept / "there"))
    benchmark = counting(kept, "a", "bad", "late", once=True, file="y", limit_s=8)
    try:
        list(runs.run("x", benchmark, 5, Path("none")))
    finally:
        os.kill(int((kept / "other").read_text()), signal.SIGKILL)
    (good,), (bad,), (late,) = runs.newest(benchmark, "x")
    assert good["seconds"] == 1
    assert bad["error"] == "exit code 1: it went wrong\n"
    assert (late["seconds"], late["unfinished"]) == (8, "killed after 8 s")
    assert [path.name for path in (kept / "there").iterdir()] == ["y.jsonl"]
    assert list(runs.run("x", benchmark, 5, Path("none"))) == []


def test_cases_have_no_more_than_is_left_of_the_time_for_all(kept):
    benchmark = counting(kept, "late", "late", once=True, limit_s=60)
    list(runs.run("x", replace(benchmark, limit_s=0), 1, Path("none")))
    for line in runs.lines_of(runs.results_of("x")):
        assert line["unfinished"] == "killed after 0 s"


@pytest.mark.parametrize("commit", ["unknown", "abc-dirty"])
def test_what_was_measured_of_no_commit_is_measured_again(kept, monkeypatch, commit):
    monkeypatch.setattr(runs, "machine", lambda: {"commit": commit})
    benchmark = counting(kept, "a", once=True)
    for _ in range(2):
        list(runs.run("x", benchmark, 1, Path("none")))
    assert (kept / "log").read_text() == "aa"
    assert [line["seconds"] for line in runs.newest(benchmark, "x")[0]] == [2]


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_every_case_is_told_from_all_others_and_its_script_is_there(name):
    cases = BENCHMARKS[name].cases
    assert len({json.dumps(case.facts) for case in cases}) == len(cases)
    for case in cases:
        assert (HERE / case.command[0]).is_file()


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_a_table_can_be_made_of_what_is_kept_and_of_nothing(name):
    benchmark = BENCHMARKS[name]
    kept = runs.newest(benchmark, name)
    benchmark.table(
        [runs.summed_up(of_case) or c.facts for of_case, c in zip(kept, benchmark.cases)]
    )
    benchmark.table([case.facts for case in benchmark.cases])


def loss_of(script, w, *words):
    command = [sys.executable, "-W", "ignore", HERE / script, w.to_json(), *words]
    done = forked.run(command, check=True, capture_output=True, text=True, timeout=LATEST_S)
    return json.loads(done.stdout.splitlines()[-1])["loss"]


@pytest.mark.processes
def test_what_is_compared_computes_the_same(monkeypatch):
    w = Workload("transformer", 2, 2, updates=2, samples=2, width=32, context=16, layers=2)
    plain = loss_of("peers/one_process.py", w)
    monkeypatch.syspath_prepend(HERE)
    ours = importlib.import_module("ours")
    for schedule, place in (("1f1b", ""), ("gpipe", "script")):
        assert ours.run(w, schedule, place)["loss"] == pytest.approx(plain, rel=1e-6)
    assert loss_of("peers/torch_pipelining.py", w, "1f1b") == pytest.approx(plain, rel=1e-6)


def test_a_workload_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="3 layers do not divide into 2 equal stages"):
        Workload("transformer", 2, 2, updates=2, samples=2, width=32, layers=3)
    with pytest.raises(ValueError, match="model is 'rnn'"):
        Workload("rnn", 2, 2, updates=2, samples=2, width=32)


@pytest.mark.processes
def test_a_wire_that_is_emulated_at_the_receiver():
    """Without root, and with a codec: an update takes no less than its bytes do on the wire."""
    words = ("emulated", "ours", "async-1f1b", "--codec", "int8 with feedback", "--updates", "1")
    done = forked.run(
        [sys.executable, HERE / "wire.py", *words], capture_output=True, text=True,
        timeout=LATEST_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    share = line["bytes"] / line["dense_bytes"]
    assert share == pytest.approx(0.266, abs=0.001)
    assert line["update_s"] > 0.8 * 64 * line["transfer_s"] * share


def test_codecs_of_the_wire_are_those_that_were_trained():
    text = (HERE / "learning.py").read_text()
    for _, _, codec in (row for rows in parts.WIRES.values() for row in rows):
        assert f'"{codec}":' in text
