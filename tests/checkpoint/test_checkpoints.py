"""Checkpoints from the first byte to the last: written, found, verified, read, removed."""

import contextlib
import json
import os
import resource

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import SHARED, committing, state, write

from pipedream_rt import CheckpointError
from pipedream_rt.checkpoint import (
    Manifest,
    RunLock,
    checkpoints,
    newest_good,
    prune,
    put_aside_later,
    read_stage,
    shapes,
    verify,
    weights_of,
    write_manifest,
    write_stage,
)
from pipedream_rt.messages.snapshot import Snapshot, Wanted
from pipedream_rt.messages.state_keys import key_of, optimizer_state


def test_what_is_written_is_read(tmp_path):
    folder = write(tmp_path, groups=[{"lr": 0.1}], extra={"epoch": 3, "names": ["a"]})
    assert os.listdir(tmp_path) == ["step-00000007"]
    manifest = verify(folder)
    assert (manifest.step, manifest.groups) == (7, [{"lr": 0.1}])
    assert manifest.extra == {"epoch": 3, "names": ["a"]}
    names = ["1.weight", "1.bias"]
    wanted = Wanted(weights=[*names, "1.n"], parameters=names, versions=names, buffers=[])
    found = read_stage(folder, manifest.files, manifest.plain, wanted)
    expected = state(1, 7)
    for key, tensor in expected.weights.items():
        assert torch.equal(found.weights[key], tensor)
    assert found.steps[key_of("optimizer/1.weight/on")] is True
    assert found.steps[key_of("optimizer/1.weight/none")] is None
    assert torch.equal(found.steps[key_of("optimizer/1.weight/m")], SHARED * 2)
    assert found.versions.keys() == {6}


def test_other_tools_find_the_weights(tmp_path):
    folder = write(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    whole = {}
    for name in set(index["weight_map"].values()):
        whole.update(load_file(folder / name))
    assert whole.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    assert shapes(folder, verify(folder).files)["0.weight"] == (3, 2)


@pytest.mark.parametrize("how", ["cut", "flipped", "emptied", "removed"])
def test_a_damaged_file_is_never_loaded(tmp_path, how):
    """At every 64 bytes of every file; the checkpoint before is found instead."""
    before = write(tmp_path, step=6)
    folder = write(tmp_path, step=7)
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for place in range(0, len(data), 64):
            if how == "cut":
                path.write_bytes(data[:place])
            elif how == "flipped":
                path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            elif how == "emptied":
                path.write_bytes(b"")
            else:
                path.unlink()
            with pytest.raises(CheckpointError):
                verify(folder)
            found, manifest = newest_good(tmp_path)
            assert (found, manifest.step) == (before, 6)
            if how in ("emptied", "removed"):
                break
        path.write_bytes(data)
    assert newest_good(tmp_path)[0] == folder


@pytest.mark.parametrize("free", [0, 1])
def test_too_few_descriptors_are_an_error_of_the_system(tmp_path, free):
    """Safetensors would say that the file is not there, or raise what a damaged one does."""
    folder = write(tmp_path)
    files, limits = verify(folder).files, resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="Too many open files") as e:
            weights_of(folder, files)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(e.value.__cause__, OSError)


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


def test_the_same_step_is_replaced(tmp_path):
    write(tmp_path, extra=1)
    assert verify(write(tmp_path, extra=2)).extra == 2
    assert os.listdir(tmp_path) == ["step-00000007"]


def test_a_checkpoint_that_was_being_replaced_comes_back(tmp_path):
    """The process died between the two renames."""
    write(tmp_path, step=6)
    write(tmp_path, step=7).rename(tmp_path / ".step-00000007.old.part")
    assert newest_good(tmp_path)[1].step == 7
    (tmp_path / "step-00000007").rename(tmp_path / ".step-00000007.old.part")
    RunLock(tmp_path).release()
    write(tmp_path, step=8)
    assert [f.name for f in checkpoints(tmp_path)] == [f"step-0000000{n}" for n in (8, 7, 6)]


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


def test_there_is_none(tmp_path):
    for path in (tmp_path, tmp_path / "none", tmp_path / "step-00000001"):
        with pytest.raises(CheckpointError, match=r"no whole checkpoint|cannot be used"):
            newest_good(path)


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
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_stage(tmp_path / "none", 0, 1, state(0, 1))
