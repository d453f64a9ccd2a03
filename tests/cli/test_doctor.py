"""The command ``doctor``: what it prints of what was found, and its exit code."""

import json
import sys

import pytest

from pipedream_rt.doctor import rounds, training
from pipedream_rt.doctor.judgement import Finding, MeasuredLink
from pipedream_rt.doctor.rounds import Found

pytestmark = pytest.mark.usefixtures("environment")

FINE = {
    "software": "torch 2", "processor": "a kind", "source": "", "memory": 8 << 30,
    "shm": 1 << 30, "shares": True, "files": 4096, "files_at_most": 4096, "accelerator": "",
    "folder": "ok",
}  # fmt: skip


@pytest.fixture
def found(monkeypatch):
    """What the command finds on this machine."""
    made = Found({"here": FINE})
    monkeypatch.setattr(rounds, "examine_self", lambda folder, source: made)
    return made


def test_a_machine_that_fits_is_no_error_and_its_links_are_given_to_the_planner(
    call, found, golden
):
    found.links["a", "b"] = found.links["b", "a"] = MeasuredLink(1e-4, 1e9)
    golden("doctor-fits", call("doctor"))


def test_what_is_missing_is_marked_and_what_to_do_stands_below(call, found, golden):
    found.machines["here"] = {**FINE, "folder": "No such file: /run", "files": 256}
    golden("doctor-misses", call("doctor", code=1))


def test_a_warning_alone_is_no_error(call, found):
    found.machines["here"] = {**FINE, "files": 256}
    assert "!!  open files" in call("doctor")


def test_who_was_sent_away_is_an_error(call, found):
    found.refused["node-1"] = "it has another secret"
    assert "XX  node-1 was sent away: it has another secret" in call("doctor", code=1)


def test_a_program_reads_everything(call, found):
    found.links["a", "b"] = MeasuredLink(None, 0.0, "no")
    found.clocks["b"] = 0.5
    said = json.loads(call("doctor", "--json", code=1))
    assert said["machines"] == {"here": FINE}
    assert said["links"] == [
        {"from": "a", "to": "b", "latency_s": None, "bandwidth": 0.0, "problem": "no"}
    ]
    assert (said["clocks"], said["refused"]) == ({"b": 0.5}, {})
    assert "fail" in {each["grade"] for each in said["findings"]}


def test_a_training_is_a_line_for_each_step_of_it_and_counts(call, found, monkeypatch):
    counts, said = [], [Finding("training", "", "ok", "10 steps"), Finding("bits", "", "ok", "all")]

    def train_on(stages, patience, run):
        counts.append((stages, patience.total_seconds()))
        assert run([sys.executable, "-c", "raise SystemExit(4)"]) == 4
        return list(said)

    monkeypatch.setattr(training, "train_on", train_on)
    lines = call("doctor", "--train", "--patience", 7).splitlines()
    assert [line.split()[1] for line in lines[-2:]] == ["training", "bits"]
    assert counts == [(2, 7.0)]
    said.append(Finding("bits", "", "fail", "1 of 4 weights differ", "are they of one kind?"))
    output = call("doctor", "--train", code=1)
    assert output.endswith("bits: are they of one kind?\n")
    found.machines["here"] = {**FINE, "folder": "No such file: /run"}
    assert "left out, as a job would not run" in call("doctor", "--train", code=1)
    assert len(counts) == 2


def test_a_folder_that_is_not_there_is_told(call, tmp_path):
    output = call("doctor", "--folder", tmp_path / "none", code=1)
    assert "the shared folder cannot be written to" in output
