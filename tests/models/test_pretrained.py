"""Weights that workers read from a folder of safetensors."""

import json
import os
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.both import opened
from support.oracle import assert_same
from torch import nn

from pipedream_rt import StageFailed, without_values
from pipedream_rt.errors import ConfigError, PipelineError
from pipedream_rt.models.pretrained import find_pretrained


class Scaled(nn.Module):
    """A layer with a buffer that is in no state dict, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.gain = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("halved", torch.full((4,), 0.5), persistent=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return torch.tanh(x @ self.weight * self.gain * self.halved)


def model(values=True):
    torch.manual_seed(0)
    if values:
        return nn.Sequential(nn.Linear(4, 4), Scaled(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with without_values():
        return model()


def data(count=3):
    torch.manual_seed(1)
    return [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(count)]


def saved(folder, state, shards=1):
    """Write a state dict as a folder of one file, or of several with an index."""
    folder.mkdir(exist_ok=True)
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    index = {}
    for i in range(shards):
        name = f"model-{i}.safetensors"
        part = dict(list(state.items())[i::shards])
        save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.threads
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("values", [False, True])
def test_the_weights_are_those_of_the_folder(tmp_path, shards, values):
    plain = model()
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.25)
    folder = saved(tmp_path / "weights", plain.state_dict(), shards)
    with opened(plain) as pipe:
        losses = [r.loss for r in pipe.train_epoch(data())]
        expected = pipe.state_dict()
    with opened(model(values), weights=folder) as pipe:
        assert [r.loss for r in pipe.train_epoch(data())] == losses
        assert_same(pipe.state_dict(), expected)
        copy = pipe.module()
        assert not any(p.is_meta for p in copy.parameters())
        assert not copy[1].gain.requires_grad
        assert_same(copy.state_dict(), expected)


@pytest.mark.threads
def test_a_checkpoint_of_ours_is_such_a_folder_and_another_dtype_is_cast(tmp_path):
    with opened(model()) as pipe:
        list(pipe.train_epoch(data()))
        folder = pipe.save(tmp_path)
        expected = pipe.state_dict()
    with opened(model(values=False), weights=folder, stages=3) as pipe:
        assert_same(pipe.state_dict(), expected)
    state = {k: v.double() if v.is_floating_point() else v for k, v in expected.items()}
    with opened(model(values=False), weights=saved(tmp_path / "double", state)) as pipe:
        assert_same(pipe.state_dict(), expected)


def test_a_prefix_of_the_base_model_may_be_there_or_not(tmp_path):
    whole = nn.Module()
    whole.base = nn.Linear(2, 2)
    whole.base_model_prefix = "base"
    folder = saved(tmp_path / "a", whole.base.state_dict())
    assert find_pretrained(folder, whole).places["base.weight"][1] == "weight"
    whole.base.base_model_prefix = "base"
    folder = saved(tmp_path / "b", whole.state_dict())
    assert find_pretrained(folder, whole.base).places["weight"][1] == "base.weight"


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("there is no 3.bias", {"3.bias": None}),
        (r"3.bias has the shape \(3,\), the model \(2,\)", {"3.bias": torch.ones(3)}),
        (r"3.bias has the dtype I8, the model F32", {"3.bias": torch.ones(2).char()}),
        (
            r"3.bias has the dtype F8_E4M3, the model F32",
            {"3.bias": torch.ones(2).to(torch.float8_e4m3fn)},
        ),
        (r"there is no 1.gain", {"1.gain": None}),
        (r"there is no 2.running_mean", {"2.running_mean": None}),
    ],
)
def test_a_folder_of_another_model_is_refused(tmp_path, words, change):
    state = {k: v for k, v in {**model().state_dict(), **change}.items() if v is not None}
    with pytest.raises(ConfigError, match=words):
        opened(model(values=False), weights=saved(tmp_path, state))


def test_where_nothing_has_the_weights_it_is_said_what_to_give(tmp_path):
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        opened(model(), weights=tmp_path)
    with pytest.raises(ConfigError, match=r"give Layout\(weights=...\), the folder"):
        opened(model(values=False))
    with torch.device("meta"):
        bare = model()
    words = r"no 1.halved.*build the model in pipedream_rt.without_v"
    with pytest.raises(ConfigError, match=words):
        opened(bare, weights=saved(tmp_path, model().state_dict()))
    for wrong in (5, ""):
        with pytest.raises(ConfigError, match="weights must be a folder"):
            opened(model(), weights=wrong)


HEADER = b'{"0.weight": {"dtype": "F32", "shape": [1e999, 4], "data_offsets": [0, 4]}}'
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        *(
            ("model.safetensors", len(header).to_bytes(8, "little") + header, "cannot be read")
            for header in (b"[" * 100_000, HEADER)
        ),
        ("model.safetensors", b"nothing of this kind", "cannot be read"),
        (INDEX, b"{", "cannot be used"),
        (INDEX, b"[]", "cannot be used"),
        (INDEX, b'{"weight_map": {"a": "../a.safetensors"}}', "names the file"),
        (INDEX, b'{"weight_map": {"a": 1}}', "names the file"),
    ],
    ids=["deep", "infinite", "no header", "no end", "a list", "outside", "a number"],
)
def test_a_file_with_anything_in_it_is_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        opened(model(), weights=tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "a.shard"])
@pytest.mark.parametrize("kind", ["pipe", "zeros", "socket", "folder", "large"])
def test_what_is_no_ordinary_file_is_not_read(tmp_path, monkeypatch, name, kind):
    """A pipe would wait for ever, and a device has no end."""
    if name == "a.shard":
        name = "a.safetensors"
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"0.weight": name}}))
    place = tmp_path / name
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as unix:
        match kind:
            case "pipe":
                os.mkfifo(place)
            case "zeros":
                place.symlink_to("/dev/zero")
            case "socket":
                unix.bind(name)
            case "folder":
                place.mkdir()
            case "large":
                with place.open("wb") as file:
                    file.truncate(1 << 40)
        with pytest.raises(ConfigError, match=r"cannot be (used|read)"):
            find_pretrained(tmp_path, model())


def test_a_folder_of_links_as_in_the_cache_of_hugging_face(tmp_path):
    """Its snapshots are links to blobs outside of the folder."""
    state = model().state_dict()
    blobs, snapshot = saved(tmp_path / "blobs", state, shards=2), tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(os.path.relpath(blob, snapshot))
    with opened(model(values=False), weights=snapshot) as pipe:
        found = pipe.state_dict()
    assert all(torch.equal(found[key], state[key]) for key in state)


@pytest.mark.threads
def test_a_file_that_was_changed_since_the_start_is_refused(tmp_path, monkeypatch):
    folder = saved(tmp_path / "weights", model().state_dict())
    find = find_pretrained

    def found(*args):
        there = find(*args)
        state = load_file(folder / "model.safetensors")
        saved(folder, {**state, "more": torch.ones(1)})
        return there

    monkeypatch.setattr("pipedream_rt.job.unsplit_model.find_pretrained", found)
    with pytest.raises((StageFailed, PipelineError), match="is not the file that the script has"):
        opened(model(values=False), weights=folder)
