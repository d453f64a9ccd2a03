"""Ten steps of a small model with a kill: on workers of this machine, and on those of several."""

import json
import os
import signal
import sys
from datetime import timedelta

import pytest
import torch

from pipedream_rt.doctor import training
from pipedream_rt.doctor.training import _of_kill, _one_of_here, _place, examined, main, train_on

PATIENCE = timedelta(seconds=60)


def grades(found):
    return [(each.check, each.grade) for each in found]


@pytest.mark.processes
def test_a_worker_is_killed_on_the_way_and_the_bits_are_those_of_one_process():
    found = examined(2, PATIENCE)
    assert grades(found) == [("training", "ok"), ("recovery", "ok"), ("bits", "ok")]
    assert found[1].where == "stage 1"
    assert "killed after 5 steps, and replaced in" in found[1].text
    assert found[2].text == "all of 4 weights are those of one process"


def test_other_bits_are_an_error_that_names_the_first_weight(monkeypatch):
    def trained(stages, workers, patience):
        return {"a": torch.zeros(1), "b": torch.ones(1) * (workers == "serial")}, []

    monkeypatch.setattr(training, "_trained", trained)
    (found,) = examined(2, PATIENCE)
    assert (found.check, found.grade) == ("bits", "fail")
    assert "1 of 2 weights differ from those of one process, first b" in found.text


def test_only_a_process_of_this_machine_is_killed():
    boot, names, pid = _place(None)
    assert pid == os.getpid()
    others = ("another boot", names, 7), (boot, names + 1, 8)
    assert _one_of_here([(boot, names, 5), *others]) == (0, 5)
    assert _one_of_here(others) is None
    assert _of_kill(None, None).grade == "note"


def test_a_kill_that_nobody_notices_is_an_error():
    class Pipe:
        restarts = ()

    assert _of_kill((1, 7), Pipe).grade == "fail"


@pytest.mark.parametrize("late", [False, True])
def test_what_keeps_it_from_training_is_written_and_in_time(monkeypatch, tmp_path, late):
    def fails(stages, patience):
        if late:
            os.kill(os.getpid(), signal.SIGALRM)
        raise OSError("no more sockets")

    monkeypatch.setattr(training, "examined", fails)
    monkeypatch.setattr(sys, "argv", ["", "2", "180", str(tmp_path / "found")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert signal.alarm(0) == 0
    (found,) = json.loads((tmp_path / "found").read_text())
    expected = "did not end within 180 s" if late else "OSError: no more sockets"
    assert found["grade"] == "fail"
    assert expected in found["text"]


def test_a_process_that_ends_without_an_answer_is_an_error():
    commands = []

    def run(command):
        commands.append(command)
        return 137

    (found,) = train_on(3, PATIENCE, run)
    assert found.grade == "fail"
    assert "ended with 137 before it had an answer" in found.text
    assert commands[0][3:5] == ["3", "180"]
