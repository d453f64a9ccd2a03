import os
from hashlib import blake2b

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pipedream_rt.checkpoint import layout
from pipedream_rt.checkpoint.layout import (
    checkpoints,
    digest_of,
    file_name,
    files_of,
    is_name,
    name_of,
    size_and_digest,
)


@pytest.mark.parametrize(
    "name",
    [".step-00000007.part", "abandoned-step-00000007", "other", "step-00000007-best", "step-7"],
)
def test_other_folders_are_no_checkpoints(name, tmp_path):
    assert not is_name(name)
    (tmp_path / name).mkdir()
    (tmp_path / "step-00000006").mkdir()
    assert checkpoints(tmp_path) == [tmp_path / "step-00000006"]


def test_checkpoints_are_listed_by_step_and_not_by_text(tmp_path):
    steps = [5, 99_999_999, 100_000_000, 123_456_789_012]
    for step in (steps[2], steps[0], steps[3], steps[1]):
        (tmp_path / name_of(step)).mkdir()
    assert [folder.name for folder in checkpoints(tmp_path)] == [name_of(s) for s in steps[::-1]]
    assert checkpoints(tmp_path / "nowhere") == []


def test_the_files_of_a_kind_are_in_the_order_of_the_stages(tmp_path):
    for stage in (2, 0, 1):
        for kind in ("model", "optimizer"):
            (tmp_path / file_name(kind, stage, 3)).touch()
    (tmp_path / "model.safetensors.index.json").touch()
    listed = {path.name for path in tmp_path.iterdir()}
    (tmp_path / "model-00004-of-00003.safetensors").touch()  # which nobody lists
    expected = [file_name("model", stage, 3) for stage in range(3)]
    assert [path.name for path in files_of(tmp_path, listed, "model")] == expected


def test_the_checksum_is_of_every_byte(tmp_path):
    data = bytes(range(256)) * 10_000  # several blocks
    (tmp_path / "file").write_bytes(data)
    assert digest_of(tmp_path / "file") == blake2b(data, digest_size=16).digest()
    assert size_and_digest(tmp_path / "file") == [len(data), digest_of(tmp_path / "file")]


def test_a_file_of_tensors_is_opened_once(tmp_path, monkeypatch):
    """Another file that gets the name between the check and the reading is not read."""
    path = tmp_path / "file"
    save_file({"a": torch.zeros(3)}, path)
    opened = layout.open_file

    def replaced(place, **options):
        file = opened(place, **options)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        monkeypatch.setattr(layout, "open_file", opened)
        return file

    monkeypatch.setattr(layout, "open_file", replaced)
    with layout.open_tensors(path) as tensors:
        assert tensors.get_tensor("a").tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(OSError, match="no ordinary file"), layout.open_tensors(path):
        pass


@pytest.mark.parametrize("name", [b"plain", "caf\u00e9".encode(), b"caf\xe9"])
def test_tensors_are_read_whatever_the_bytes_of_the_path(tmp_path, name):
    path = tmp_path / os.fsdecode(name)
    save_file({"w": torch.arange(3.0)}, path, metadata={"said": "x"})
    before = os.listdir("/proc/self/fd")
    with layout.open_tensors(path) as file:
        assert file.metadata()["said"] == "x"
        assert torch.equal(file.get_tensor("w"), torch.arange(3.0))
    path.write_bytes(b"junk")
    with pytest.raises(SafetensorError), layout.open_tensors(path):
        pass
    assert os.listdir("/proc/self/fd") == before
