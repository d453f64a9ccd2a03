"""The command ``checkpoint``, as a user types it, on the checkpoints of a small run."""

import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.models import mlp, regression
from support.oracle import assert_same
from support.pinned import Pipeline

FIRST, NEWEST = "step-00000001", "step-00000002"


def trained(folder, rates=(0.1, 0.1)):
    """Save after each mini-batch; return the weights after the last."""
    with Pipeline(
        mlp(), stages=2, loss_fn=F.mse_loss, optimizer=(torch.optim.SGD, {"lr": 1.0}),
        workers="serial",
    ) as pipe:  # fmt: skip
        for rate, item in zip(rates, regression(len(rates)), strict=True):
            pipe.optimizer.param_groups[0]["lr"] = rate
            list(pipe.train_epoch([item]))
            pipe.save(folder, extra={"epoch": "\x1b[2J"})
        return pipe.state_dict()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, trained(folder)


@pytest.fixture
def run(made, tmp_path):
    """A run of two checkpoints, of which a test may do what it likes."""
    return shutil.copytree(made[0], tmp_path / "run")


def test_the_newest_whole_checkpoint_is_shown(call, run, golden):
    """Its digests, the other options of the optimizer and the sizes are torch's."""
    digest, others = re.compile(r"(?<= )[0-9a-f]{8,}"), re.compile(r"(?<=lr 0\.1, )momentum .*")
    shown = call("checkpoint", "inspect", run)
    size = re.compile(r"(?<= )[0-9.]+ (Ki)?B$", re.MULTILINE)
    golden("checkpoint", shown, run=run, digest=digest, others=others, size=size)
    (run / NEWEST / "manifest.msgpack").write_bytes(b"")
    assert f"{FIRST}: step 1, async" in call("checkpoint", "inspect", run)
    assert "cannot be used" in call("checkpoint", "inspect", run / NEWEST, code=1)


def test_every_byte_is_verified(call, run):
    assert call("checkpoint", "verify", run).count(": whole, step ") == 2
    (part,) = (run / FIRST).glob("model-00001-*")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    output = call("checkpoint", "verify", run, code=1)
    assert f"{run / FIRST}: damaged: " in output
    assert f"{run / NEWEST}: whole, step 2" in output
    assert "1 damaged" in output
    assert "step 2" in call("checkpoint", "verify", run / NEWEST)


def test_weights_are_exported_as_the_model_names_them(call, run, made, tmp_path):
    out = tmp_path / "out.safetensors"
    assert f"{out}: {len(made[1])} tensors of step 2" in call("checkpoint", "export", run, out)
    assert_same(load_file(out), dict(sorted(made[1].items())))
    assert out.stat().st_mode & 0o077 == 0


def test_an_export_replaces_nothing_unless_it_is_told_to(call, run, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"mine")
    refused = call("checkpoint", "export", run, out, code=1)
    assert "is there already; --force replaces it" in refused
    assert out.read_bytes() == b"mine"
    assert "of step 2" in call("checkpoint", "export", run, out, "--force")
    assert "cannot be written" in call("checkpoint", "export", run, tmp_path / "no" / "x", code=1)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert "is there already" in call("checkpoint", "export", run, tmp_path / "broken", code=1)


def test_an_export_changes_no_checkpoint(call, run, tmp_path):
    (tmp_path / "link").symlink_to(run / NEWEST)
    whole = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for inside in (
        run / NEWEST / "model-00001-of-00002.safetensors", run / NEWEST / "new",
        tmp_path / "link" / "new", run / FIRST / "manifest.msgpack", run / NEWEST / "no" / "new",
    ):  # fmt: skip
        refused = call("checkpoint", "export", run, inside, "--force", code=1)
        assert "is inside a checkpoint" in refused
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == whole


def test_two_runs_are_compared_at_the_steps_that_both_have(call, run, tmp_path):
    assert call("checkpoint", "compare", run, run) == "equal at the steps 1, 2\n"
    trained(tmp_path / "late", (0.1, 0.2))
    trained(tmp_path / "early", (0.2, 0.1))
    late = call("checkpoint", "compare", run, tmp_path / "late", code=1)
    assert "equal up to step 1, different at step 2: stage 0: weights" in late
    early = call("checkpoint", "compare", run, tmp_path / "early", code=1)
    assert "Error: different at step 1: stage 0: weights" in early
    shutil.rmtree(tmp_path / "late" / NEWEST)
    assert call("checkpoint", "compare", run, tmp_path / "late") == "equal at the steps 1\n"
    nothing = call("checkpoint", "compare", run / NEWEST, tmp_path / "late", code=1)
    assert "no step has a checkpoint in both: 2; 1" in nothing
