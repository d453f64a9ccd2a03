"""Checkpoints are found, verified and read."""

import os
import resource

import pytest
import torch
from support.checkpoints import SHARED, state, write

from pipedream_rt import CheckpointError
from pipedream_rt.checkpoint import (
    RunLock,
    checkpoints,
    newest_good,
    read_stage,
    verify,
    weights_of,
)
from pipedream_rt.messages.snapshot import Wanted
from pipedream_rt.messages.state_keys import key_of


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


def test_a_checkpoint_that_was_being_replaced_comes_back(tmp_path):
    """The process died between the two renames."""
    write(tmp_path, step=6)
    write(tmp_path, step=7).rename(tmp_path / ".step-00000007.old.part")
    assert newest_good(tmp_path)[1].step == 7
    (tmp_path / "step-00000007").rename(tmp_path / ".step-00000007.old.part")
    RunLock(tmp_path).release()
    write(tmp_path, step=8)
    assert [f.name for f in checkpoints(tmp_path)] == [f"step-0000000{n}" for n in (8, 7, 6)]


def test_there_is_none(tmp_path):
    for path in (tmp_path, tmp_path / "none", tmp_path / "step-00000001"):
        with pytest.raises(CheckpointError, match=r"no whole checkpoint|cannot be used"):
            newest_good(path)


def test_the_one_before_is_of_the_same_run_or_is_not_taken(tmp_path):
    write(tmp_path, step=6, run="1" * 32)
    folder = write(tmp_path, step=7, run="2" * 32)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="of another run than the newest one"):
        newest_good(tmp_path)
