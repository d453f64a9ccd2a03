"""Checkpoints are written whole or not at all, as private as their weights, and removed."""

import contextlib
import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import committing, state, write

from pipedream_rt import CheckpointError
from pipedream_rt.checkpoint import (
    Manifest,
    RunLock,
    UnfinishedCheckpoint,
    checkpoints,
    newest_good,
    prune,
    put_aside_later,
    put_aside_others,
    shapes,
    verify,
    weights_of,
    write_manifest,
    write_stage,
    writing,
)
from pipedream_rt.checkpoint.writing import write_tensors
from pipedream_rt.messages.snapshot import Snapshot
from pipedream_rt.messages.state_keys import optimizer_state


def test_other_tools_find_the_weights(tmp_path):
    folder = write(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    whole = {}
    for name in set(index["weight_map"].values()):
        whole.update(load_file(folder / name))
    assert whole.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    assert shapes(folder, verify(folder).files)["0.weight"] == (3, 2)


def test_what_was_not_finished_is_not_there(tmp_path):
    write(tmp_path, step=6)
    with contextlib.suppress(ZeroDivisionError), committing(tmp_path, 7) as part:
        write_stage(part, 0, 1, state(0, 7))
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["step-00000006"]
    # A process that was killed leaves a part, which the next run removes.
    (tmp_path / ".step-00000008.1.part").mkdir()
    assert newest_good(tmp_path)[1].step == 6
    RunLock(tmp_path).release()
    assert os.listdir(tmp_path) == ["step-00000006"]


def test_what_has_the_name_of_a_checkpoint_is_on_the_disk(tmp_path, monkeypatch):
    """All its files before it gets the name, and then the name itself."""
    synced = []

    def noted(path):
        synced.append((path.stat().st_ino, checkpoints(tmp_path)))

    monkeypatch.setattr(writing, "sync", noted)
    folder = write(tmp_path)
    *before, last = synced
    parts = (folder, *folder.iterdir())
    assert {number for number, named in before if not named} == {p.stat().st_ino for p in parts}
    assert last == (tmp_path.stat().st_ino, [folder])


def test_the_same_step_is_replaced(tmp_path):
    write(tmp_path, extra=1)
    assert verify(write(tmp_path, extra=2)).extra == 2
    assert os.listdir(tmp_path) == ["step-00000007"]


def test_pruning_keeps_the_newest(tmp_path):
    for step in (5, 100, 20, 3):
        write(tmp_path, step=step)
    prune(tmp_path, 2)
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-00000100", "step-00000020"]
    prune(tmp_path, 1, [tmp_path / "step-00000020"])
    assert len(checkpoints(tmp_path)) == 2


def test_a_run_that_went_back_puts_later_ones_aside(tmp_path):
    for step in (5, 100, 20):
        write(tmp_path, step=step)
    put_aside_later(tmp_path, tmp_path / "step-00000020")
    assert sorted(os.listdir(tmp_path)) == [
        "abandoned-step-00000100", "step-00000005", "step-00000020"
    ]  # fmt: skip


def test_what_cannot_be_saved_is_named(tmp_path):
    odd = Snapshot(weights={}, steps=optimizer_state({"w": {"fn": print}}), versions={})
    with pytest.raises(CheckpointError, match="optimizer state 'fn' of w is a builtin"):
        write_stage(tmp_path, 0, 1, odd)
    with pytest.raises(CheckpointError, match="can hold numbers"):
        write(tmp_path, extra=object())
    with pytest.raises(CheckpointError, match="that all workers and the coordinator share"):
        write_manifest(tmp_path, Manifest(step=1, schedule="", workers=1, stages_per_worker=1,
                                          per_update=1, files={"gone": [1, b""]}), {})  # fmt: skip


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="step-00000007 cannot be written"):
        UnfinishedCheckpoint(tmp_path / "file", 7)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_stage(tmp_path / "none", 0, 1, state(0, 1))


def test_a_checkpoint_is_as_private_as_its_weights(tmp_path):
    before = os.umask(0)
    try:
        folder = write(tmp_path / "run")
    finally:
        os.umask(before)
    for path in (folder.parent, folder, *folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_umask_takes_more_away(tmp_path):
    about = {"step": 1, "schedule": "", "workers": 1, "stages_per_worker": 1, "per_update": 1}
    before = os.umask(0o277)
    try:
        write_manifest(tmp_path, Manifest(**about, files={}), {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "manifest.msgpack").stat().st_mode) == 0o400


def test_a_file_is_written_over_and_nothing_else_is_left(tmp_path):
    """As a recovery does, while the coordinator may be reading the file."""
    path = tmp_path / "weights.safetensors"
    for value in (1.0, 2.0):
        write_tensors(path, {"w": torch.full((2,), value)}, {"about": "it"})
    assert os.listdir(tmp_path) == [path.name]
    assert load_file(path)["w"].tolist() == [2.0, 2.0]
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_tensors(tmp_path / "folder", {"w": torch.ones(2)})
    assert sorted(os.listdir(tmp_path)) == ["folder", path.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_file_whose_writing_is_interrupted_is_as_before_and_nothing_else_is_left(
    error, tmp_path, monkeypatch
):
    def interrupted(path):
        raise error

    path = tmp_path / "best.safetensors"
    write_tensors(path, {"w": torch.ones(2)})
    monkeypatch.setattr(writing, "sync", interrupted)
    with pytest.raises(error):
        write_tensors(path, {"w": torch.zeros(2)})
    assert os.listdir(tmp_path) == [path.name]
    assert load_file(path)["w"].tolist() == [1.0, 1.0]


def test_complex_numbers_are_written_as_pairs(tmp_path):
    """For which safetensors has no type; the shapes are those of the model all the same."""
    name = "model-00001-of-00001.safetensors"
    weights = {"z": torch.tensor([1 + 2j, 3j], dtype=torch.complex128), "w": torch.ones(2)}
    write_tensors(tmp_path / name, weights)
    assert load_file(tmp_path / name)["z"].tolist() == [[1.0, 2.0], [0.0, 3.0]]
    assert shapes(tmp_path, [name]) == {"z": (2,), "w": (2,)}
    found = weights_of(tmp_path, [name])
    assert all(torch.equal(found[key], tensor) for key, tensor in weights.items())


def test_checkpoints_of_another_run_are_put_aside_under_names_of_their_own(tmp_path, caplog):
    mine, other = "a" * 32, "b" * 32
    for _ in range(2):  # the second of step 6 finds the name of the first
        write(tmp_path, step=6, run=other)
        put_aside_others(tmp_path, mine)
    write(tmp_path, step=8, run=mine)
    (tmp_path / "step-00000009").mkdir()
    put_aside_others(tmp_path, mine)
    assert sorted(os.listdir(tmp_path)) == [
        "abandoned-bbbbbbbb-step-00000006", "abandoned-bbbbbbbb-step-00000006-2",
        "abandoned-unknown-step-00000009", "step-00000008",
    ]  # fmt: skip
    assert "is of another run: it is put aside as abandoned-unknown-step-00000009" in caplog.text
