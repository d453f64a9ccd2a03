"""The view of a running run in the terminal."""

import dataclasses
import io
import math

import pytest
from rich.console import Console
from support.recorded import begun, record_of, stepped, whole_run

from pipedream_rt.observers import Warned
from pipedream_rt.observers.run_record import RunRecord
from pipedream_rt.observers.terminal import sparkline, view_of


def shown(record, workers=None, width=100):
    out = io.StringIO()
    Console(file=out, width=width).print(view_of(record, workers, width))
    return out.getvalue()


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 10, ""),
        ([1.0], 10, ""),
        ([math.nan, 1.0, math.inf], 10, ""),
        ([1.0, 1.0], 10, "▁▁ 1"),
        ([0.0, 7.0], 10, "▁█ 7"),
        ([7.0, math.nan, 0.0], 10, "█▁ 0"),
        ([0.0, 0.0, 7.0, 7.0, 3.0], 3, "▁█▄ 3"),  # means of two, and of what is left
        ([-1e308, 0.0, 1.0], 10, "▁█ 1"),
    ],
    ids=["none", "one", "one number", "alike", "up", "down", "narrow", "too far"],
)
def test_losses_are_blocks_from_the_least_to_the_largest(values, width, line):
    assert sparkline(values, width) == line


@pytest.mark.parametrize("count", [99, 100, 101, 250])
def test_a_line_is_no_longer_than_the_terminal(count):
    blocks, _, last = sparkline([float(i) for i in range(count)], 100).partition(" ")
    assert count / 3 <= len(blocks) <= 100
    assert float(last) <= count - 1


def test_a_run_that_has_not_begun_says_so():
    assert shown(RunRecord()) == "the run has not begun\n"


def stages_of(text):
    """The rows of the table of stages."""
    rows = [line.strip("│ ").split() for line in text.splitlines()]
    return rows[rows.index(["stage", "worker", "version", "computes"]) + 1 :][:3]


def test_each_stage_has_its_version_and_how_much_it_computes():
    steps = [stepped(i, busy=(0.1 * i, 0.05 * i, 0.0)) for i in range(10)]
    assert stages_of(shown(record_of([begun(), *steps]))) == [
        ["0", "0", "7", "100%"],
        ["1", "1", "8", "50%"],
        ["2", "2", "9", "0%"],
    ]
    assert stages_of(shown(record_of([begun()])))[0] == ["0", "0", "-", "-"]


def test_what_workers_computed_before_a_recovery_is_not_taken_from_what_came_after():
    seconds = (5.0, 5.05, 0.05, 0.1)
    steps = [stepped(i, busy=(busy,) * 3) for i, busy in enumerate(seconds)]
    assert stages_of(shown(record_of([begun(), *steps])))[0] == ["0", "0", "1", "50%"]


def test_the_last_warnings_are_told_once_each():
    warned = [Warned(time=1001.0, text=f"warning\n{i}") for i in (1, 2, 3, 4, 4, 2)]
    text = shown(record_of([begun(), stepped(0), *warned]))
    assert [text.count(f"warning {i}") for i in range(1, 5)] == [0, 1, 1, 1]


def test_workers_stand_below_with_what_they_do():
    one = {
        "name": "w\x1b[2J", "stages": "0", "process": "pid 5", "silent_s": 1.0, "rss": 1 << 20,
        "doing": "waits for F3",
    }  # fmt: skip
    text = shown(record_of(whole_run()), [one])
    assert "waits for F3" in text
    assert "1 MiB" in text
    assert "\x1b" not in text
    assert "heard" not in shown(record_of(whole_run()), [])


def test_markup_of_the_terminal_in_a_name_stays_text():
    first = begun()
    first = dataclasses.replace(first, plan={**first.plan, "name": "[red]mine[/red]"})
    assert "[red]mine[/red]" in shown(record_of([first, stepped(0)]))
