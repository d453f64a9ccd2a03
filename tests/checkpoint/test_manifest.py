from dataclasses import asdict
from hashlib import blake2b

import msgpack
import pytest
import torch

from pipedream_rt import CheckpointError, ConfigError
from pipedream_rt.checkpoint.manifest import (
    Manifest,
    is_plain,
    read_manifest,
    refuse_unsaveable,
    seal,
)
from pipedream_rt.coordinator.feed.loading import _saveable, generators
from pipedream_rt.coordinator.results import StepResult


def manifest(**changes):
    about = {"schedule": "async-1f1b", "workers": 2, "stages_per_worker": 1, "per_update": 1}
    return Manifest(step=3, **about, **changes)


def written(folder, data):
    (folder / "manifest.msgpack").write_bytes(data)
    return folder


def test_a_manifest_comes_back_as_it_was(tmp_path):
    state = [b"bytes", None, 2.5, {7: "a number as a key"}]
    now = _saveable(generators())
    place = {"epoch": 1, "drawn": None, "now": now, "loader": state, "warm": False}
    result = StepResult(
        step=2, loss=1.5, losses=(1.5,), versions=(0, 1), staleness=1, busy_s=(0.1, 0.2)
    )
    results = [msgpack.unpackb(msgpack.packb(asdict(result)))]
    before = manifest(groups=[{"lr": 0.1}], place=place, results=results, run="a" * 32)
    after = read_manifest(written(tmp_path, seal(before)))
    assert after.place.pop("now").keys() == before.place.pop("now").keys()
    after.results[0]["losses"] = result.losses
    assert (after.place, after.groups, after.run) == (before.place, before.groups, before.run)
    assert after.results[0]["busy_s"] == [0.1, 0.2]


def test_a_manifest_holds_tensors(tmp_path):
    before = torch.arange(6.0).view(2, 3).t()
    after = read_manifest(written(tmp_path, seal(manifest(extra={"t": before})))).extra["t"]
    assert torch.equal(after, before)
    assert after.dtype == before.dtype


def test_what_a_manifest_cannot_hold_is_refused_by_name_or_when_it_is_sealed():
    refuse_unsaveable("the scheduler", {"numbers": [1, 2.5, None, True], "tensor": torch.ones(2)})
    with pytest.raises(ConfigError, match="the state of the scheduler cannot go into a checkpoint"):
        refuse_unsaveable("the scheduler", {"function": print})
    with pytest.raises(CheckpointError, match="extra, attached objects and loaders can hold"):
        seal(manifest(extra=object()))
    with pytest.raises(CheckpointError, match="extra, attached objects and loaders can hold"):
        seal(manifest(extra=1 << 70))
    with pytest.raises(CheckpointError, match=r"was not written, .* unreadable: its 'slack' is"):
        seal(manifest(slack=[-1]))


@pytest.mark.parametrize("group", [{"lr": 0.1, "params": [1]}, {None: 1}, [1]], ids=repr)
def test_hyper_parameters_go_by_name_and_without_parameters(group):
    with pytest.raises(CheckpointError, match=r"was not written, .* unreadable: its 'groups' is"):
        seal(manifest(groups=[group]))


def test_the_state_of_an_accelerator_may_have_so_many_bytes_and_no_more(tmp_path):
    def sized(size):
        now = _saveable(generators()) | {"devices": [torch.zeros(size, dtype=torch.uint8)]}
        place = {"epoch": 1, "drawn": None, "now": now, "loader": None, "warm": False}
        return seal(manifest(place=place))

    found = read_manifest(written(tmp_path, sized(1 << 16))).place["now"]["devices"]
    assert [state.numel() for state in found] == [1 << 16]
    with pytest.raises(CheckpointError, match="its 'place' is"):
        sized((1 << 16) + 1)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (1, True), (2.5, True), ("text", True), (None, True), ([1, ["a", None]], True),
        ((1, 2), False),  # it would come back as a list
        ({"a": [1, b"bytes"]}, True), ({"a": (1, 2)}, False), (print, False),
    ],
)  # fmt: skip
def test_plain_values_are_numbers_texts_and_lists_of_them(value, plain):
    assert is_plain(value) is plain


def whole(magic="pipedream-rt checkpoint", version=5, packed=b"", checksum=b"", fields=None):
    """The bytes of a manifest of such parts; some fields have their right checksum."""
    if fields is not None:
        packed = msgpack.packb(fields)
        checksum = blake2b(packed, digest_size=16).digest()
    return msgpack.packb([magic, version, packed, checksum])


def changed():
    magic, version, packed, checksum = msgpack.unpackb(seal(manifest()))
    return whole(magic, version, bytes([packed[0] ^ 1]) + packed[1:], checksum)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the manifest of .* cannot be used"),
        (b"junk", "the manifest of .* cannot be used"),
        (whole("another program", 2), "it is no manifest of pipedream-rt"),
        (whole(version=9), "of format 9, this version reads 5"),
        (whole(), "its checksum differs"),
        (changed(), r"was changed after .*: its checksum differs"),
        (whole(fields=[1]), "it holds a list in place of a dict of fields"),
        (whole(fields={"step": 3, "height": 1, 7: 2}), "fields that no manifest has: 'height', 7"),
    ],
    ids=["nothing", "junk", "foreign", "format", "unsigned", "changed", "list", "fields"],
)
def test_what_is_no_manifest_is_refused(tmp_path, data, reason):
    with pytest.raises(CheckpointError, match=reason):
        read_manifest(written(tmp_path, data))
