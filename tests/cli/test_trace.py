"""The commands around traces, as a user types them. They start no process."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from support.events import check_trace_events

from pipedream_rt import Trace
from pipedream_rt.cli import main
from pipedream_rt.schedules import RECIPES

ROOT = Path(__file__).resolve().parent.parent.parent


def call(*words, code=0):
    done = CliRunner().invoke(main, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "run.trace"
    call("simulate", "--schedule", "1f1b", "--stages", 4, "--micro-batches", 8, "--latency", "1ms",
         "--updates", 10, "--output", path)  # fmt: skip
    return path


def test_simulate_tells_and_draws():
    output = call("simulate", "--stages", 2, "--updates", 3, "--forward", "10ms,20ms")
    assert output.startswith("simulated: async-1f1b, 2 stages on 2 workers")
    assert "stage 1  .." in output
    assert "steady state" in output


@pytest.mark.parametrize("words", [("schedule", "help"), ("simulate", "--schedule", "help")])
def test_help_lists_the_schedules(words):
    output = call(*words)
    for name in RECIPES:
        assert f"  {name} " in output


def test_an_unknown_schedule_lists_the_known_ones():
    for words in (("schedule", "zigzag"), ("simulate", "--schedule", "zigzag")):
        output = call(*words, code=1)
        assert "unknown schedule 'zigzag'" in output
        assert "zero-bubble" in output


def test_compare_puts_all_on_the_same_workers():
    names = "async-1f1b,1f1b,gpipe,zero-bubble,interleaved-1f1b,2bw,async-1f1b+vertical-sync"
    output = call("simulate", "--stages", 4, "--micro-batches", 8, "--compare", names)
    rows = {line.split()[0]: line.split() for line in output.splitlines()}
    bubbles = {name: rows[name][4] for name in ("1f1b", "gpipe", "zero-bubble", "interleaved-1f1b")}
    assert bubbles == {
        "1f1b": "27.3%", "gpipe": "27.3%", "zero-bubble": "11.1%", "interleaved-1f1b": "15.8%"
    }  # fmt: skip
    assert "each stage is cut into 2" in output
    # What does not fit is said beside the others.
    output = call("simulate", "--stages", 4, "--micro-batches", 2, "--compare", "1f1b,2bw")
    assert "2bw: 2bw needs at least as many micro-batches" in output
    assert "unknown schedule" in call("simulate", "--compare", "1f1b,zigzag", code=1)


def test_costs_from_a_file_and_from_a_trace(tmp_path, trace):
    costs = tmp_path / "costs.json"
    call("timeline", trace, "--save-costs", costs)
    assert json.loads(costs.read_text())["latency"] == pytest.approx(0.001)
    options = ("--schedule", "1f1b", "--stages", 4, "--micro-batches", 8)
    found = call("simulate", "--profile", costs, *options)
    assert found.splitlines()[0] == call("simulate", *options, "--latency", "1ms").splitlines()[0]
    assert call("simulate", "--from-trace", trace, "--schedule", "1f1b") == found
    slower = call("simulate", "--profile", costs, *options, "--latency", "9ms")
    assert slower != found
    replayed = call("simulate", "--from-trace", trace, "--replay")
    assert replayed.startswith("simulated: replay of 1f1b, 4 stages")


def test_timeline_sums_up_and_draws(trace):
    output = call("timeline", trace, "--width", 100, "--end", "100ms")
    assert "hop latency: p50 1 ms" in output
    assert "staleness, share of micro-batches x stages: 0: 100.0%" in output
    lines = output.splitlines()
    assert sum(line.startswith("stage ") and "F" in line for line in lines) == 4
    assert all(len(line) <= 100 for line in lines[-5:])


def test_timeline_into_files(tmp_path, trace):
    svg, events = tmp_path / "run.svg", tmp_path / "run.json"
    output = call("timeline", trace, "--svg", svg, "--perfetto", events, "--begin", "10ms")
    assert "10 ms to" in output
    ElementTree.parse(svg)
    check_trace_events(json.loads(events.read_text()))


def test_predictions(trace):
    output = call(
        "timeline", trace, "--predict", "--what-if", "stages=8", "--what-if",
        "bandwidth=100Mbit,schedule=zero-bubble",
    )  # fmt: skip
    for row in ("measured", "predicted", "if stages=8", "if bandwidth=100Mbit,schedule=zero"):
        assert row in output
    assert "+0.0%" in output or "-0.0%" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("simulate", "--forward", "-1ms"), "forward must be a number of at least 0"),
        (("simulate", "--forward", "fast"), "'fast' is no time"),
        (("simulate", "--bandwidth", "0"), "bandwidth must be above 0"),
        (("simulate", "--forward", "1ms,2ms,3ms"), "forward has 3 entries, there are 4 stages"),
        (("simulate", "--latency", "1ms,2ms"), "latency is one value"),
        (("simulate", "--schedule", "2bw", "--micro-batches", 2), "2bw needs"),
        (("simulate", "--schedule", "interleaved-1f1b", "--stages", 5), "cannot be dealt"),
        (("simulate", "--replay"), "--replay needs --from-trace"),
        (("simulate", "--profile", "none.json"), "cannot be read"),
        (("simulate", "--from-trace", "none.trace"), "No such file"),
        (("simulate", "--output", "none/run.trace"), "cannot be written"),
        (("timeline", "none.trace"), "No such file"),
    ],
)
def test_wrong_words(words, message):
    assert message in call(*words, code=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--begin", "99s"), "nothing happened"),
        (("--begin", "soon"), "is no time"),
        (("--what-if", "stages"), "is no change"),
        (("--what-if", "schedule=zigzag"), "unknown schedule"),
        (("--svg", "none/run.svg"), "cannot write"),
    ],
)
def test_wrong_words_about_a_trace(trace, words, message):
    assert message in call("timeline", trace, *words, code=1)


def test_costs_come_from_one_place(tmp_path, trace):
    output = call("simulate", "--profile", trace, "--from-trace", trace, code=1)
    assert "not from both" in output
    assert "costs cannot be read" in call("simulate", "--profile", trace, code=1)


def test_what_is_no_trace(tmp_path, trace):
    cut = tmp_path / "cut"
    cut.write_bytes(trace.read_bytes()[:-1])
    assert "cut or changed" in call("timeline", cut, code=1)
    assert "is no trace" in call("timeline", __file__, code=1)
    assert Trace.load(trace).simulated


def test_the_picture_in_the_readme_is_made_by_the_command_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    readme = (ROOT / "README.md").read_text()
    lines = [line for line in readme.splitlines() if "zb.trace" in line]
    assert [line.split()[:2] for line in lines] == [
        ["pipedream-rt", "simulate"],
        ["pipedream-rt", "timeline"],
    ]
    for line in lines:
        call(*line.split()[1:])
    made = (tmp_path / "examples" / "zero_bubble.svg").read_text()
    assert made == (ROOT / "examples" / "zero_bubble.svg").read_text()


def test_what_the_readme_shows_is_what_the_commands_print():
    """Every block that begins with a command of ours and shows its output."""
    blocks = (ROOT / "README.md").read_text().split("```")[1::2]
    shown = [part for block in blocks for part in block.split("$ pipedream-rt ")[1:]]
    assert len(shown) == 3
    for part in shown:
        words, _, output = part.partition("\n")
        found = call(*words.split()).strip().splitlines()
        assert found[-len(output.strip().splitlines()) :] == output.strip().splitlines()
