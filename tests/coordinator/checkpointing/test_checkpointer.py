"""Checkpoints while training goes on, and two runs with one folder: neither harms the other."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgpack
import pytest
import torch
from click.testing import CliRunner
from support import forked
from support.deadlines import LATEST_S
from support.inside import cluster
from support.models import regression
from support.oracle import assert_same
from support.small import losses, small

from pipedream_rt import CheckpointError, Checkpoints, ConfigError
from pipedream_rt.checkpoint import Manifest, checkpoints, manifest, read_manifest
from pipedream_rt.cli import main
from pipedream_rt.coordinator.checkpointing.checkpointer import result_of
from pipedream_rt.coordinator.results import StepResult
from pipedream_rt.stage import saving

DATA = regression(20)


def open_pipe(**options):
    return small(**{"stages": 2, "optimizer": (torch.optim.AdamW, {}), **options})


@pytest.mark.threads
def test_a_second_run_is_refused_and_the_first_goes_on(tmp_path):
    with open_pipe() as pipe:
        list(pipe.train_epoch(DATA))
        expected = pipe.state_dict()
    with open_pipe(checkpoint=Checkpoints(tmp_path, every=3)) as first:
        for result in first.train_epoch(DATA):
            if result.step == 8:
                for options in ({"every": 3}, {"every": 3, "resume": True}, {"resume": True}):
                    with pytest.raises(CheckpointError, match=rf"{tmp_path} is in use by process"):
                        open_pipe(checkpoint=Checkpoints(tmp_path, **options))
                first.save(tmp_path)  # the one of step 6 may still be on its way to the disk
                with open_pipe() as other:
                    list(other.train_epoch(DATA[:2]))
                    other.load(tmp_path)  # to read is allowed
                    with pytest.raises(CheckpointError, match="is in use by"):
                        other.save(tmp_path)
        assert_same(first.state_dict(), expected)
        run = first._run.checkpointer._run
    assert {read_manifest(folder).run for folder in checkpoints(tmp_path)} == {run}
    with open_pipe(checkpoint=Checkpoints(tmp_path, every=3, resume=True)) as again:
        assert again.step >= 12
        assert again._run.checkpointer._run_in(tmp_path) == run
        assert again._run.checkpointer._run_in(tmp_path / "elsewhere") != run


@pytest.mark.threads
def test_a_run_that_begins_anew_puts_those_of_another_aside(tmp_path, caplog):
    """As when the script was started again without resume: nothing of the first is lost."""
    with open_pipe() as first:
        list(first.train_epoch(DATA[:6]))
        first.save(tmp_path)
        saved = first.state_dict()
        run = first._run.checkpointer._run
    with open_pipe(checkpoint=Checkpoints(tmp_path, every=2, keep=1)) as second:
        list(second.train_epoch(DATA))
    assert "is of another run: it is put aside as abandoned-" in caplog.text
    aside = tmp_path / f"abandoned-{run[:8]}-step-00000006"
    with open_pipe() as again:
        assert again.load(aside).run == run
        assert_same(again.state_dict(), saved)
    assert run not in [read_manifest(folder).run for folder in checkpoints(tmp_path)]


@pytest.mark.threads
def test_a_recovery_does_not_take_the_checkpoint_of_another_run(tmp_path, caplog):
    """One that has taken its place, as by a copy; the run goes back further, to its own."""
    with open_pipe() as pipe:
        expected = losses(pipe, DATA)
    with open_pipe() as other:
        list(other.train_epoch(DATA[:3]))
        list(other.train_epoch(DATA[:3]))
        foreign = other.save(tmp_path / "other")
    with open_pipe(max_restarts=1) as pipe:
        found = []
        for result in pipe.train_epoch(DATA):
            found.append(result.loss)
            if result.step == 5:
                mine = pipe.save(tmp_path / "mine")
            if result.step == 10:
                shutil.rmtree(mine)
                shutil.copytree(foreign, mine)
                cluster(pipe)._workers[0].lose(ConnectionError("as if it had died"))
        assert len(pipe.restarts) == 1
    assert found == expected
    assert "was made by another run meanwhile; the run goes back to the" in caplog.text


@pytest.mark.threads
def test_a_run_whose_folder_was_taken_over_harms_nobody(tmp_path):
    """The folder was removed, and another run has come and gone meanwhile."""
    root = tmp_path / "run"
    with open_pipe() as first:
        list(first.train_epoch(DATA[:3]))
        first.save(root)
        shutil.rmtree(root)
        with open_pipe() as other:
            for _ in range(4):
                list(other.train_epoch(DATA[:1]))
                saved = other.save(root, extra=other.step)
        with open_pipe() as third:
            third._run.checkpointer.hold(root)
            with pytest.raises(CheckpointError, match="is in use by"):
                first.save(root)
        list(first.train_epoch(DATA[:1]))
        first.save(root)
    aside = [f for f in root.iterdir() if f.name.startswith("abandoned-")]
    assert len(aside) == 4
    assert read_manifest(next(f for f in aside if f.name.endswith(saved.name))).extra == 4


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """A folder with two checkpoints, and the weights in the older one."""
    folder = tmp_path_factory.mktemp("two")
    with open_pipe() as pipe:
        list(pipe.train_epoch(DATA[:2]))
        pipe.save(folder)
        expected = pipe.state_dict()
        list(pipe.train_epoch(DATA[:2]))
        pipe.save(folder)
    return folder, expected


@pytest.mark.threads
@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("groups", [{"lr": ["T", "zz", [1], b"x"]}]),
        ("groups", [{"lr": ["N", "zz", b"x"]}]),
        ("groups", [{"lr": ["d"]}, 3]),
        ("groups", [{"params": 3}]),
        ("identity", {"groups": None}),
        ("identity", {"hyper_parameters": [{"lr": torch.ones(3)}]}),
        ("identity", {"hyper_parameters": [{3: 4, "x": 1}]}),
        ("place", {"epoch": 1, "loader": None, "warm": False}),
        ("place", {"epoch": 1, "drawn": None, "loader": None, "warm": False, "now": {}}),
        ("run", "../../x"),
        ("run", None),
        ("step", 1 << 60),
        ("attached", None),
        ("results", [{"step": 3}]),
        ("fingerprints", [{}]),
        ("plain", {"optimizer/0.weight/step": 1, "group/0/#0": 3}),
        ("values", [["layer 0", 0, "rate", ["T", "zz", [1], b"x"], []]]),
        ("values", [["layer 0", 0, "rate", 0.5]]),
        ("modes", {"0": 3}),
    ],
    ids=range(19),
)
def test_a_checkpoint_that_makes_no_sense_is_passed_over_by_a_resume(
    tmp_path, two_checkpoints, field, wrong
):
    """Its checksums are right, as somebody has made them; the one before it is taken."""
    folder, expected = two_checkpoints
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "step-00000004"
    fields = {f.name: getattr(read_manifest(newest), f.name) for f in dataclasses.fields(Manifest)}
    packed = manifest._pack({**fields, field: wrong})
    whole = [manifest._MAGIC, manifest._FORMAT, packed, manifest._checksum(packed)]
    (newest / "manifest.msgpack").write_bytes(msgpack.packb(whole))
    with open_pipe(checkpoint=Checkpoints(tmp_path, resume=True)) as again:
        assert again.step == 2
        assert_same(again.state_dict(), expected)
    done = CliRunner().invoke(main, ["checkpoint", "inspect", str(newest)])
    assert done.exit_code == 1 or field in ("identity", "values")  # it shows none of these
    assert done.exception is None or isinstance(done.exception, SystemExit)


SCRIPT = """
import sys
import torch
from support.models import regression
from support.small import small
from pipedream_rt import Checkpoints
if __name__ == "__main__":
    kept = Checkpoints(sys.argv[1], every=2, resume=True)
    options = {"stages": 2, "optimizer": (torch.optim.AdamW, {}), "workers": sys.argv[2]}
    with small(checkpoint=kept, **options) as pipe:
        for result in pipe.train_epoch(regression(20)):
            if result.step > 3 and pipe._run.checkpointer.is_begun and sys.argv[3] == "stop":
                print("begun", flush=True)
                sys.stdin.readline()
                sys.argv[3] = "go"
            if sys.argv[3] == "raise" and pipe._run.checkpointer.is_begun:
                1 / 0
            if sys.argv[3] == "exit" and pipe._run.checkpointer.is_begun:
                sys.exit(7)
        print("done", pipe.step, flush=True)
"""


def start(folder, workers, what):
    path = str(Path(__file__).parents[2])
    return forked.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), workers, what],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def parts(folder):
    return sorted(folder.glob(".step-*"))


def gone(folder, seconds=30):
    """Wait until nothing unfinished is left."""
    end = time.monotonic() + seconds
    while parts(folder) and time.monotonic() < end:
        threading.Event().wait(0.05)
    return not parts(folder)


@pytest.mark.thinned(3)
@pytest.mark.processes
@pytest.mark.parametrize(
    "end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, "raise", "exit"], ids=str
)
def test_nothing_unfinished_is_left_by_whatever_end(tmp_path, end):
    """What stays where a whole machine dies is removed by the next run."""
    by_signal = isinstance(end, signal.Signals)
    with start(tmp_path, "local", "stop" if by_signal else end) as run:
        if by_signal:
            assert run.stdout.readline() == "begun\n"
            assert parts(tmp_path)
            run.send_signal(end)
        run.communicate(timeout=LATEST_S)
    assert gone(tmp_path)
    if end is not signal.SIGKILL:
        return
    with start(tmp_path, "local", "go") as run:
        out, err = run.communicate(timeout=LATEST_S)
    assert out == "done 20\n", err
    assert parts(tmp_path) == []


@pytest.mark.processes
def test_a_second_script(tmp_path):
    """It ends with the reason, before it has harmed anything."""
    with open_pipe(checkpoint=Checkpoints(tmp_path, every=2)) as first:
        results = first.train_epoch(DATA)
        next(results)
        with start(tmp_path, "serial", "go") as second:
            _, err = second.communicate(timeout=LATEST_S)
        assert second.returncode == 1
        assert f"{tmp_path} is in use by process {os.getpid()}, which writes" in err
        assert len(list(results)) == 19


@pytest.mark.threads
def test_a_run_that_can_write_no_checkpoint_ends_after_some(tmp_path):
    """A week without a checkpoint is worse than an error. The pipeline can still be used."""
    with open_pipe(checkpoint=Checkpoints(tmp_path / "run", every=2, attempts=4)) as pipe:
        (tmp_path / "run").rmdir()
        (tmp_path / "run").write_text("in the way")
        with pytest.raises(CheckpointError, match="4 checkpoints in a row could not be written; t"):
            list(pipe.train_epoch(DATA))
        assert pipe.step == 8
        pipe.save(tmp_path / "elsewhere")


@pytest.mark.threads
def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"no checkpoint can be written to .*file: File exists"):
        open_pipe(checkpoint=Checkpoints(tmp_path / "file", every=2))


@pytest.mark.parametrize("every", [None, 3])
def test_ctrl_c_is_told_what_the_run_can_go_on_from(tmp_path, every, caplog):
    with open_pipe(checkpoint=Checkpoints(tmp_path, every=every)) as pipe:
        checkpointer = pipe._run.checkpointer
        checkpointer.interrupted(2)
        assert ("before the first checkpoint" in caplog.text) is (every is not None)
        assert [checkpointer.due(step) for step in (1, 3, 6)] == [False, every == 3, every == 3]
        folder = pipe.save(tmp_path)
        checkpointer.interrupted(7)
        told = f"interrupted after 7 mini-batches; the last checkpoint is {folder}"
        assert (told in caplog.text) is (every is not None)


def test_a_checkpoint_that_is_left_leaves_nothing(tmp_path):
    with open_pipe() as pipe:
        checkpointer, state = pipe._run.checkpointer, pipe._run.run_state
        checkpointer.begin(tmp_path, None, state._manifest(None), [])
        assert checkpointer.is_begun
        assert parts(tmp_path)
        checkpointer.abandon()
        checkpointer.abandon()
        assert not checkpointer.is_begun
        assert checkpointer.finish() is None
        assert parts(tmp_path) == checkpoints(tmp_path) == []
        assert pipe.save(tmp_path) == tmp_path / "step-00000000"


def test_a_checkpoint_that_a_stage_could_not_write_says_why_and_leaves_nothing(
    tmp_path, monkeypatch
):
    def full(*_):
        raise OSError("No space left on device")

    with open_pipe() as pipe:
        list(pipe.train_epoch(DATA[:2]))
        with monkeypatch.context() as patch:
            patch.setattr(saving, "write_stage", full)
            with pytest.raises(CheckpointError, match="No space left on device"):
                pipe.save(tmp_path)
        assert parts(tmp_path) == checkpoints(tmp_path) == []
        assert pipe.save(tmp_path) == tmp_path / "step-00000002"


def test_results_come_back_from_a_manifest():
    """Which has lists for tuples."""
    result = StepResult(
        step=3, loss=0.5, losses=(0.25, 0.75), versions=(2, 3), staleness=1, busy_s=(0.5, 1.0),
        metrics={"mean": 2.0},
    )  # fmt: skip
    saved = msgpack.unpackb(msgpack.packb(dataclasses.asdict(result)))
    assert isinstance(saved["losses"], list)
    assert result_of(saved) == result
