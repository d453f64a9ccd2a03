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
    write_stage,
)
from pipedream_rt.checkpoint.layout import file_name
from pipedream_rt.checkpoint.writing import write_tensors
from pipedream_rt.messages.snapshot import Snapshot, Wanted
from pipedream_rt.messages.state_keys import StateKey, key_of


def test_what_is_written_is_read(tmp_path):
    folder = write(tmp_path, groups=[{"lr": 0.1}], extra={"epoch": 3, "names": ["a"]})
    assert os.listdir(tmp_path) == ["step-00000007"]
    manifest = verify(folder)
    assert (manifest.step, manifest.groups) == (7, [{"lr": 0.1}])
    assert manifest.extra == {"epoch": 3, "names": ["a"]}
    names = ["1.weight", "1.bias"]
    wanted = Wanted(weights=names, parameters=names, versions=names, buffers=["1.n"])
    found = read_stage(folder, manifest.files, manifest.plain, wanted)
    expected = state(1, 7)
    assert (set(found.weights), set(found.buffers)) == ({*names}, {"1.n"})
    for key, tensor in expected.weights.items():
        assert torch.equal((found.weights | found.buffers)[key], tensor)
    assert found.steps[key_of("optimizer/1.weight/on")] is True
    assert found.steps[key_of("optimizer/1.weight/none")] is None
    assert torch.equal(found.steps[key_of("optimizer/1.weight/m")], SHARED * 2)
    assert found.versions.keys() == {6}


def test_what_a_rule_keeps_of_a_parameter_is_read_whatever_its_path(tmp_path):
    kept = {StateKey("ema", "0.weight", path): torch.ones(1) for path in [(), ("a", 3)]}
    others = {StateKey("ema", "1.weight"): torch.ones(1)}
    files, plain, _ = write_stage(tmp_path, 0, 1, Snapshot(steps=kept | others))
    found = read_stage(tmp_path, files, plain, Wanted([], ["0.weight"], [], []))
    assert found.steps.keys() == kept.keys()


@pytest.mark.parametrize("key", ["w", "6/x/w", "six/w", "#-1/w"])
def test_an_older_version_under_an_odd_key_is_refused(tmp_path, key):
    path = tmp_path / file_name("versions", 0, 1)
    write_tensors(path, {"#6/w": torch.ones(1), key: torch.ones(1)})
    with pytest.raises(CheckpointError, match="a file of versions has the key"):
        read_stage(tmp_path, [path.name], {}, Wanted([], [], ["w"], []))


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


@pytest.mark.parametrize("link", [False, True])
def test_what_only_has_the_name_of_a_checkpoint_is_not_taken(tmp_path, link):
    """A folder of another step that was given the name, or one that lies elsewhere."""
    write(tmp_path, step=6)
    other = write(tmp_path / "elsewhere", step=7)
    if link:
        (tmp_path / "step-00000007").symlink_to(other)
    else:
        other.rename(tmp_path / "step-00000008")
    assert newest_good(tmp_path)[1].step == 6


def test_the_one_before_is_of_the_same_run_or_is_not_taken(tmp_path):
    write(tmp_path, step=6, run="1" * 32)
    folder = write(tmp_path, step=7, run="2" * 32)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="of another run than the newest one"):
        newest_good(tmp_path)
