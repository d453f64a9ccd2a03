import dataclasses
import os
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from pipedream_rt.cluster.environment import MAX_RESTARTS, RESUME, TRACE
from pipedream_rt.coordinator import script_environment
from pipedream_rt.coordinator.script_environment import (
    restart_option,
    resume_option,
    take_place,
    trace_option,
    writable,
)
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.options import (
    Checkpoints,
    Layout,
    Observe,
    Options,
    Recovery,
    Training,
    checkpoint_option,
)

RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """No outer launcher leaves word, and no other test has traced a pipeline."""
    for name in (TRACE, RESUME, MAX_RESTARTS, RESTART_COUNT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(script_environment, "_taken", Counter())


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda: Checkpoints(None), "folder", "None"),
        (lambda: Checkpoints(b"x"), "folder", "b'x'"),
        (lambda: Checkpoints("x", every=0), "every", "0"),
        (lambda: Checkpoints("x", every=1.5), "every", "1.5"),
        (lambda: Checkpoints("x", keep=-1), "keep", "-1"),
        (lambda: Checkpoints("x", keep=True), "keep", "True"),
        (lambda: Recovery(heartbeat=timedelta(0)), "heartbeat", "timedelta(0)"),
        (lambda: Recovery(answer=3), "answer", "3"),
        (lambda: Recovery(start=timedelta(-1)), "start", "timedelta(days=-1)"),
        (lambda: Layout(credits=0), "credits", "0"),
        (lambda: checkpoint_option(3), "checkpoint", "3"),
        (lambda: Options(checkpoint=3), "checkpoint", "3"),
        (lambda: Observe(trace=3), "trace", "3"),
        (lambda: Recovery(max_restarts=-1), "max_restarts", "-1"),
        (lambda: Recovery(max_restarts=True), "max_restarts", "True"),
        (lambda: Training(ema=1.0), "ema", "1.0"),
        (lambda: Training(check_loss=-1), "check_loss must be an integer of at least 0", "-1"),
        (lambda: Training(check_loss=True), "check_loss must be an integer of at least 0", "True"),
        (lambda: Recovery(max_restarts="3"), "max_restarts", "'3'"),
        (lambda: Layout(shard_optimizer="no"), "shard_optimizer must be True", "'no'"),
        (lambda: Layout(shard_optimizer=None), "shard_optimizer must be True", "None"),
        (
            lambda: Checkpoints("run", resume="yes"),
            "of the checkpoints, must be True",
            "'yes'",
        ),
        (lambda: Checkpoints("run", resume=1), "of the checkpoints, must be True", "1"),
    ],
)
def test_what_cannot_be_is_refused_and_named_with_its_value(make, name, value):
    with pytest.raises(ConfigError) as e:
        make()
    assert name in str(e.value)
    assert value in str(e.value)


def test_what_can_be_is_taken_as_it_is():
    Checkpoints("x", every=1, keep=1)
    Checkpoints("x", every=None, keep=None)
    Recovery(heartbeat=timedelta(microseconds=1))
    Layout()
    Training()
    Observe()
    Layout(credits=1, stages_per_worker=0)  # which `Shape` refuses


@pytest.mark.parametrize("value", [Checkpoints("x"), Recovery(), Layout(), Training(), Observe()])
def test_options_are_values(value):
    """So one that was checked stays right, and can be given to several pipelines."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)
    assert value == dataclasses.replace(value)


def test_the_folder_of_checkpoints_outlives_a_change_of_the_working_directory(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert Checkpoints("run").path == tmp_path / "run"
    assert Checkpoints(Path("run")).path == tmp_path / "run"


def test_a_plain_path_is_a_folder_of_checkpoints():
    more = Checkpoints("run", every=3)
    assert checkpoint_option(None) is None
    assert checkpoint_option(more) is more
    assert checkpoint_option("run") == Checkpoints("run")
    assert checkpoint_option(Path("run")) == Checkpoints(Path("run"))


# -- the trace --------------------------------------------------------------------------------


def test_a_trace_is_recorded_as_the_caller_says(tmp_path):
    assert trace_option(None) == (False, None)
    assert trace_option(False) == (False, None)
    assert trace_option(True) == (True, None)
    assert trace_option(tmp_path / "t") == (True, tmp_path / "t")
    assert trace_option(str(tmp_path / "t")) == (True, tmp_path / "t")


def test_every_pipeline_of_a_script_leaves_the_trace_that_the_command_asks_for(
    tmp_path, monkeypatch
):
    """One that is told what to do itself is not counted."""
    monkeypatch.setenv(TRACE, str(tmp_path / "run.trace"))
    for name in ("run", "run-2", "run-3"):
        assert trace_option(None) == trace_option(None) == (True, tmp_path / f"{name}.trace")
        take_place(Options(observe=Observe(trace=False)))
        take_place(Options(observe=Observe(trace=tmp_path / "own")))
        take_place(Options())  # this one is started
    assert trace_option(False) == (False, None)
    assert trace_option(tmp_path / "own") == (True, tmp_path / "own")


def test_a_trace_that_could_not_be_written_at_the_end_is_refused_at_the_start(
    tmp_path, monkeypatch
):
    with pytest.raises(ConfigError, match=r"trace .* folder"):
        writable(tmp_path)
    with pytest.raises(ConfigError, match=r"trace .* there is no folder "):
        writable(tmp_path / "missing" / "t")
    # Not by its mode: root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=r"trace .* permission"):
        writable(tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_trace_goes_where_the_script_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert writable("t") == tmp_path / "t"


# -- going on ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "command", "restarts", "goes_on"),
    [
        (None, False, None, False),
        (None, False, "0", False),
        (None, False, "2", True),
        (None, True, None, True),
        (False, True, "2", False),
        (True, False, None, True),
    ],
)
def test_a_run_goes_on_if_its_script_or_its_launcher_says_so(
    monkeypatch, said, command, restarts, goes_on
):
    """What the script says counts more than the command, or torchrun that starts it again."""
    if command:
        monkeypatch.setenv(RESUME, "1")
    if restarts is not None:
        monkeypatch.setenv(RESTART_COUNT, restarts)
    assert resume_option(Checkpoints("run", resume=said)) is goes_on


def test_a_command_to_go_on_needs_checkpoints(monkeypatch):
    assert resume_option(None) is False
    monkeypatch.setenv(RESUME, "1")
    with pytest.raises(ConfigError, match=r"resume .* checkpoint="):
        resume_option(None)


def test_the_number_of_restarts_comes_from_the_script_or_the_command_or_the_default(monkeypatch):
    assert restart_option(None, 3) == 3
    monkeypatch.setenv(MAX_RESTARTS, "5")
    assert restart_option(None, 3) == 5
    assert restart_option(0, 3) == 0


@pytest.mark.parametrize("text", ["many", "-1", "1.5", ""])
def test_a_number_of_restarts_that_is_none_is_refused_by_name(monkeypatch, text):
    monkeypatch.setenv(MAX_RESTARTS, text)
    with pytest.raises(ConfigError, match=MAX_RESTARTS):
        restart_option(None, 0)


def test_the_name_of_a_schedule_may_be_in_any_case():
    assert Options(schedule="GPipe").schedule == "gpipe"
    with pytest.raises(ConfigError, match="unknown schedule 'gpip'; there are gpipe, "):
        Options(schedule="gpip")
