"""The engine of grids: what is kept is not done again, and how a command ended is told."""

import importlib
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

import pytest
from support.deadlines import LATEST_S

from benchmarks import grid

SCRIPT = """
import os, sys, threading
from dataclasses import dataclass
from pathlib import Path
from benchmarks import grid

@dataclass(frozen=True)
class Run:
    name: str

    @property
    def key(self):
        return grid.key_of(self)

def tell(text):
    os.write(1, f"{text}\\n".encode())  # a whole line, beside those of the other process

def done(run):
    if run.name == "wrong":
        raise ValueError("it cannot be done")
    if run.name == "endless":
        tell(f"endless {os.getpid()}")
        threading.Event().wait()
    return {"name": run.name, "key": run.key, "process": os.getpid()}

def wanted(kept):
    names = {line["name"] for line in kept.values()}
    return [Run(name) for name in (*sys.argv[2:], *(["after b"] if "b" in names else []))]

if __name__ == "__main__":
    grid.end_by_signals()
    folder = Path(sys.argv[1])
    kept = grid.by_key(*folder.glob("*.jsonl"))
    for line in grid.fill(kept, wanted, done, lambda line: folder / f"{line['name'][0]}.jsonl", 1):
        tell(line["name"])
    assert kept == grid.by_key(*folder.glob("*.jsonl"))
"""


@pytest.fixture
def begin(tmp_path):
    """Start a grid of runs with some names, whose lines are in files of their first letters."""
    script, started = tmp_path / "script.py", []
    script.write_text(SCRIPT)

    def begun(*names):
        started.append(
            subprocess.Popen(
                [sys.executable, script, tmp_path / "results", *names],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": str(grid.ROOT)}, start_new_session=True,
            )
        )  # fmt: skip
        return started[-1]

    yield begun
    for each in started:
        with suppress(ProcessLookupError):  # all of it have ended
            os.killpg(each.pid, signal.SIGKILL)
        each.communicate()


def names_in(path):
    return [line["name"] for line in grid.lines_of(path)]


@pytest.mark.processes
def test_what_is_kept_is_not_done_again_and_what_is_wanted_twice_is_done_once(begin, tmp_path):
    assert begin("a", "c", "a").communicate(timeout=LATEST_S) == ("a\nc\n", "")
    assert begin("c", "d", "a").communicate(timeout=LATEST_S) == ("d\n", "")
    results = tmp_path / "results"
    assert [names_in(results / f"{name}.jsonl") for name in "acd"] == [["a"], ["c"], ["d"]]


@pytest.mark.processes
def test_a_grid_goes_on_with_what_follows_from_results_until_no_more_is_wanted(begin, tmp_path):
    assert begin("b", "a").communicate(timeout=LATEST_S) == ("b\na\nafter b\n", "")
    assert names_in(tmp_path / "results" / "a.jsonl") == ["a", "after b"]


@pytest.mark.processes
def test_what_was_done_before_an_error_is_kept(begin, tmp_path):
    process = begin("a", "wrong", "d")
    assert "it cannot be done" in process.communicate(timeout=LATEST_S)[1]
    assert process.returncode == 1
    assert names_in(tmp_path / "results" / "a.jsonl") == ["a"]


@pytest.mark.processes
def test_what_was_done_before_a_signal_is_kept_and_what_runs_ends(begin, tmp_path):
    process = begin("a", "endless")
    # The second run may begin before the first is told.
    told, (_, pid) = sorted(process.stdout.readline().split() for _ in range(2))
    assert told == ["a"]
    left = os.pidfd_open(int(pid))
    process.terminate()
    assert process.wait(LATEST_S) == 128 + signal.SIGTERM
    ended, *_ = select.select([left], [], [], LATEST_S)
    os.close(left)
    assert ended
    assert names_in(tmp_path / "results" / "a.jsonl") == ["a"]


def test_of_two_lines_with_one_key_the_last_counts(tmp_path):
    path = tmp_path / "lines.jsonl"
    for number in (1, 2):
        grid.keep(path, {"key": "k", "number": number})
    assert grid.by_key(path, tmp_path / "none") == {"k": {"key": "k", "number": 2}}


def test_a_field_that_came_later_changes_the_key_only_where_it_says_something():
    @dataclass(frozen=True)
    class Old:
        name: str

    @dataclass(frozen=True)
    class New(Old):
        later: str = ""

    key = grid.key_of(Old("a"))
    assert grid.key_of(New("a"), later=("later",)) == key
    others = [(New("a", "x"), ("later",)), (Old("b"),), (Old("a"), (), "more")]
    assert len({key, *(grid.key_of(*each) for each in others)}) == 4


@pytest.mark.parametrize(
    ("script", "files"),
    [
        ("learning", ["learning", "learning_codecs"]),
        ("first_touch", ["first_touch", "newcomers"]),
    ],
)
def test_runs_that_were_done_long_ago_have_the_keys_of_their_lines(script, files, monkeypatch):
    monkeypatch.syspath_prepend(grid.ROOT / "benchmarks")
    module = importlib.import_module(script)
    names, checked = module.Run.__dataclass_fields__, 0
    for line in (line for name in files for line in grid.lines_of(grid.RESULTS / f"{name}.jsonl")):
        given = {name: value for name, value in line.items() if name in names}
        if "options" in given:
            given["options"] = tuple(map(tuple, given["options"]))
        if given.get("corrections") == "default":
            continue  # the key holds what the defaults were then
        assert module.Run(**given).key == line["key"]
        checked += 1
    assert checked > 150


def say(text, then=""):
    """A program that prints a text, and then does something."""
    return [sys.executable, "-c", f"import json, os, sys\nprint({text!r})\n{then}"]


def test_the_last_object_counts_and_other_words_and_half_a_line_do_not():
    text = '{"a": 1}\n{"a": 2}\n[3]\n4\nwords\n{"a": 5, "b'
    assert grid.said(say(text)) == ({"a": 2}, 0, "")
    assert grid.said(say("words")) == ({}, 0, "")


def test_of_a_program_that_fails_code_and_errors_are_told():
    ended = grid.said(say('{"a": 1}', then="sys.exit('it went wrong')"))
    assert ended == ({"a": 1}, 1, "it went wrong\n")


def test_a_program_runs_in_its_folder_with_variables_besides_those_of_this_process(tmp_path):
    then = "print(json.dumps({'is': [os.getcwd(), *map(os.environ.get, ('PATH', 'MORE'))]}))"
    ended = grid.said(say("", then), environment={"MORE": "more"}, folder=tmp_path)
    assert ended.found == {"is": [str(tmp_path), os.environ["PATH"], "more"]}


@pytest.mark.parametrize("apart", [True, False])
def test_a_program_whose_time_is_over_is_killed(apart):
    assert grid.said(["sleep", "600"], limit_s=0, apart=apart).code is None


@pytest.mark.parametrize("apart", [True, False])
def test_what_a_program_leaves_running_ends_with_a_session_of_its_own_alone(apart):
    pid = grid.said(["sh", "-c", """sleep 600 & echo "{\\"pid\\": $!}" """], apart=apart).found[
        "pid"
    ]
    try:
        left = os.pidfd_open(pid)
    except ProcessLookupError:  # ended, and reaped
        assert apart
        return
    ended, *_ = select.select([left], [], [], LATEST_S if apart else 0)
    os.close(left)
    assert bool(ended) == apart
    if not apart:
        os.kill(pid, signal.SIGKILL)
