"""Folders of checkpoints that somebody else has prepared, or changed.

Whatever is wrong is a `CheckpointError` that can be printed, quickly, and the checkpoint before it
is taken instead; nothing that the manifest does not list is ever read.
"""

import os
import random

import msgpack
import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import write
from support.wrong import WRONG

from pipedream_rt import CheckpointError
from pipedream_rt.checkpoint import manifest as module
from pipedream_rt.checkpoint import newest_good, read_manifest, read_stage, verify, weights_of
from pipedream_rt.checkpoint.layout import size_and_digest
from pipedream_rt.messages.snapshot import Wanted

WANTED = Wanted(["0.weight"], ["0.weight"], ["0.weight"], [])

pytestmark = pytest.mark.timeout(60)  # some of these hung for ever
MANY = (pytest.mark.stress, pytest.mark.timeout(900))


def sealed(fields):
    """The bytes of a manifest with any fields, whose checksum is right."""
    packed = module._pack(fields)
    return msgpack.packb([module._MAGIC, module._FORMAT, packed, module._checksum(packed)])


def fields_of(folder):
    data = (folder / "manifest.msgpack").read_bytes()
    return module._unpack(msgpack.unpackb(data)[2])


def refused(root, folder):
    """It is refused with a text, and the one before it is taken."""
    with pytest.raises(CheckpointError) as e:
        verify(folder)
    assert str(e.value).isprintable()
    assert len(str(e.value)) < 1000
    assert newest_good(root)[1].step == 6
    with pytest.raises(CheckpointError):
        newest_good(folder)


@pytest.fixture
def run(tmp_path):
    """A run with two checkpoints."""
    root = tmp_path / "run"
    write(root, step=6)
    return root, write(root, step=7)


def test_a_file_that_the_manifest_does_not_list_is_not_read(run, caplog):
    _, folder = run
    before = weights_of(folder, verify(folder).files)
    for name in (
        "model-00003-of-00003",
        "model-00001-of-00002x",
        "model-0",
        "optimizer-00009-of-9",
    ):
        save_file({"0.weight": torch.full((3, 2), 9.0)}, folder / f"{name}.safetensors")
    manifest = verify(folder)
    assert "which are not read: model-0.safetensors, " in caplog.text
    after = weights_of(folder, manifest.files)
    assert all(torch.equal(before[key], after[key]) for key in before | after)
    found = read_stage(folder, manifest.files, manifest.plain, WANTED)
    assert torch.equal(found.weights["0.weight"], before["0.weight"])


@pytest.mark.parametrize("which", ["model-00001-of-00002.safetensors", "manifest.msgpack"])
@pytest.mark.parametrize("kind", ["link", "link to itself", "pipe", "device", "folder", "large"])
def test_what_is_no_ordinary_file(run, which, kind):
    root, folder = run
    place = folder / which
    copy = place.read_bytes()
    place.unlink()
    match kind:
        case "link":
            (root / "copy").write_bytes(copy)
            place.symlink_to(root / "copy")
        case "link to itself":
            place.symlink_to(place)
        case "pipe":
            os.mkfifo(place)
        case "device":
            place.symlink_to("/dev/zero")
        case "folder":
            place.mkdir()
        case "large":
            with place.open("wb") as file:
                file.truncate(1 << 40)
    refused(root, folder)


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../x", "../step-00000006/model-00001-of-00002.safetensors", "", ".", "a\0b",
     "model.safetensors", "manifest.msgpack", "model-00001-of-00002.safetensors\n", "\x1b[2J", 7],
)  # fmt: skip
def test_names_that_no_checkpoint_has(run, name):
    root, folder = run
    fields = fields_of(folder)
    fields["files"][name] = [1, b"x" * 16]
    (folder / "manifest.msgpack").write_bytes(sealed(fields))
    refused(root, folder)


@pytest.mark.parametrize("field", sorted(module._FIELDS))
def test_a_field_of_another_type(run, field):
    """Each is refused, or is of a type that fits."""
    root, folder = run
    right = fields_of(folder)
    for wrong in WRONG:
        (folder / "manifest.msgpack").write_bytes(sealed({**right, field: wrong}))
        if module._FIELDS[field](wrong):
            read_manifest(folder)
        else:
            refused(root, folder)
    without = {name: value for name, value in right.items() if name != field}
    (folder / "manifest.msgpack").write_bytes(sealed(without))
    if module._FIELDS[field](None):
        read_manifest(folder)
    else:
        refused(root, folder)


@pytest.mark.parametrize(
    "fields",
    [None, [], 3, "text", {}, {"unknown": 1}, {1: 2}, [["step", 1]]],
)
def test_a_manifest_that_holds_something_else(run, fields):
    root, folder = run
    (folder / "manifest.msgpack").write_bytes(sealed(fields))
    refused(root, folder)


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=MANY)])
def test_generated_manifests(run, count):
    """Bytes changed anywhere, with the checksum made right again: never another error."""
    root, folder = run
    draw = random.Random(3)
    packed = module._pack(fields_of(folder))
    refusals = 0
    for _ in range(count):
        data = bytearray(packed)
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(data))
            match draw.randrange(3):
                case 0:
                    data[place] = draw.randrange(256)
                case 1:
                    del data[place : place + draw.randrange(20)]
                case 2:
                    data[place:place] = draw.randbytes(draw.randrange(9))
            data = data or bytearray(1)
        outer = [module._MAGIC, module._FORMAT, bytes(data), module._checksum(bytes(data))]
        (folder / "manifest.msgpack").write_bytes(msgpack.packb(outer))
        try:
            verify(folder)
        except CheckpointError as error:
            refusals += str(error).isprintable()
            assert newest_good(root)[1].step == 6
    assert refusals > count // 2


@pytest.mark.parametrize("count", [100, pytest.param(5_000, marks=MANY)])
def test_generated_files_of_tensors(run, count):
    """Files that a manifest lists with their right checksums, but which are none."""
    _, folder = run
    draw = random.Random(4)
    place = folder / "model-00001-of-00002.safetensors"
    good, fields = place.read_bytes(), fields_of(folder)
    for number in range(count):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 5)):
            data[draw.randrange(min(len(data), 300))] = draw.randrange(256)
        if number % 3 == 0:
            del data[draw.randrange(len(data)) :]
        place.write_bytes(data)
        fields["files"][place.name] = size_and_digest(place)
        (folder / "manifest.msgpack").write_bytes(sealed(fields))
        manifest = verify(folder)
        try:
            weights_of(folder, manifest.files)
            read_stage(folder, manifest.files, manifest.plain, WANTED)
        except CheckpointError as error:
            assert str(error).isprintable()  # noqa: PT017 - some files are still whole
