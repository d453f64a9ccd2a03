"""Saving and going on: the same bits as a run that never stopped."""

import collections
import functools
import math
import os
import types

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.inside import kill
from support.models import OPTIMIZERS, POINTS, Of, batches, kitchen_sink, mlp, regression, tied
from support.oracle import assert_same
from support.pinned import Pipeline
from support.small import small

from pipedream_rt import CheckpointError, ConfigError, WorkerLost
from pipedream_rt.serial.cluster import SerialCluster

pytestmark = pytest.mark.threads


def open_pipe(n=4, optimizer="adamw", **kwargs):
    defaults = {
        "stages": POINTS[n][1:] or 1, "loss_fn": F.cross_entropy,
        "optimizer": OPTIMIZERS[optimizer],
        "workers": functools.partial(SerialCluster, shuffle_seed=n),
    }  # fmt: skip
    return Pipeline(kitchen_sink(), **{**defaults, **kwargs})


DATA = batches(12, samples=8)


def losses(pipe, data):
    return [loss for r in pipe.train_epoch(data) for loss in r.losses]


@functools.cache
def undisturbed(n, optimizer, options):
    with open_pipe(n, optimizer, **dict(options)) as pipe:
        return losses(pipe, DATA), pipe.state_dict()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("after", [1, 5, 11])
@pytest.mark.parametrize(
    ("n", "optimizer", "options"),
    [
        (1, "sgd", {}),
        (4, "adamw", {}),
        (5, "sgd", {}),
        (4, "adamw-foreach", {"micro_batches": 2}),
        (4, "adamw", {"schedule": "async-1f1b+vertical-sync"}),
        (4, "adamw", {"schedule": "2bw", "micro_batches": 4}),
        (3, "adam", {"schedule": "1f1b", "micro_batches": 3}),
        (4, "adamw", {"schedule": "zero-bubble", "micro_batches": 4}),
        (4, "adamw-fused", {"schedule": "interleaved-1f1b", "micro_batches": 4}),
        (4, "adamw", {"slack": (1, 0, 2)}),
    ],
)
def test_a_resumed_run_is_the_run(tmp_path, caplog, n, optimizer, options, after):
    """Saving changes nothing, and what goes on from it gives the same losses and weights."""
    expected, weights = undisturbed(n, optimizer, tuple(options.items()))
    with open_pipe(n, optimizer, **options) as pipe:
        begun = losses(pipe, DATA[:after])
        pipe.save(tmp_path)
        assert begun + losses(pipe, DATA[after:]) == expected
        assert_same(pipe.state_dict(), weights)
    with open_pipe(n, optimizer, **options) as pipe:
        assert pipe.load(tmp_path).step == after
        results = list(pipe.train_epoch(DATA[after:]))
        assert [loss for r in results for loss in r.losses] == expected[len(begun) :]
        assert [r.step for r in results] == list(range(after, 12))
        assert_same(pipe.state_dict(), weights)
    usual = ("updates stale", "BatchNorm")
    assert not [said for said in caplog.messages if not any(each in said for each in usual)]


@pytest.mark.parametrize(("before", "later"), [(4, 2), (2, 5), (1, 3)])
def test_another_number_of_stages_is_exact_in_schedules_that_flush(tmp_path, before, later):
    options = {"schedule": "1f1b", "micro_batches": 2}
    expected, weights = undisturbed(before, "adamw", tuple(options.items()))
    with open_pipe(before, **options) as pipe:
        begun = losses(pipe, DATA[:5])
        pipe.save(tmp_path)
    with open_pipe(later, **{**options, "schedule": "gpipe"}) as pipe:
        pipe.load(tmp_path)
        assert begun + losses(pipe, DATA[5:]) == expected
        assert_same(pipe.state_dict(), weights)


def test_another_number_of_stages_in_an_asynchronous_schedule_is_said(tmp_path, caplog):
    with open_pipe(2) as pipe:
        losses(pipe, DATA[:5])
        pipe.save(tmp_path)
    with open_pipe(5) as pipe:
        pipe.load(tmp_path)
        assert "lacks older weight versions that this split reads" in caplog.text
        assert len(losses(pipe, DATA[5:])) == 7


def test_layers_on_other_stages_in_an_asynchronous_schedule_are_said(tmp_path, caplog):
    """With what goes on as it was: layer 2 has no weights, so it may be on any stage.

    The same stages, or a flush at each update, need no words.
    """
    with open_pipe(3, stages=[2, 4], micro_batches=3) as pipe:
        losses(pipe, DATA[:5])
        pipe.save(tmp_path)
    for stages, schedule, told in (
        ([2, 4], "async-1f1b", False),
        ([1, 4], "1f1b", False),
        ([1, 4], "async-1f1b", True),
    ):
        caplog.clear()
        with open_pipe(3, stages=stages, schedule=schedule, micro_batches=3) as pipe:
            pipe.load(tmp_path)
        assert ("was made with other stages" in caplog.text) == told
        assert ("stages=['3', '4'] would go on as it was" in caplog.text) == told


def test_a_run_can_go_back(tmp_path):
    """Load in the middle of a run: its later updates are forgotten."""
    expected, weights = undisturbed(4, "adamw", ())
    with open_pipe() as pipe:
        losses(pipe, DATA[:4])
        pipe.save(tmp_path)
        losses(pipe, DATA[4:9])
        pipe.evaluate(DATA[:2])
        pipe.load(tmp_path)
        assert losses(pipe, DATA[4:]) == expected[4:]
        assert_same(pipe.state_dict(), weights)


def test_hyper_parameters_and_the_users_own_are_there(tmp_path):
    with open_pipe() as pipe:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.5)
        for _ in pipe.train_epoch(DATA[:3]):
            scheduler.step()
        rate = pipe.optimizer.param_groups[0]["lr"]
        folder = pipe.save(tmp_path, extra={"last_epoch": scheduler.last_epoch})
    assert folder == tmp_path / "step-00000003"
    with open_pipe() as pipe:
        manifest = pipe.load(folder)
        assert manifest.extra == {"last_epoch": 3}
        assert pipe.optimizer.param_groups[0]["lr"] == rate
        assert pipe.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_the_newest_whole_checkpoint_is_loaded(tmp_path, caplog):
    with open_pipe() as pipe:
        for step in range(4):
            losses(pipe, DATA[step : step + 1])
            pipe.save(tmp_path, keep=3)
    assert sorted(os.listdir(tmp_path)) == [f"step-0000000{n}" for n in (2, 3, 4)]
    damaged = tmp_path / "step-00000004" / "optimizer-00002-of-00004.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with open_pipe() as pipe:
        assert pipe.load(tmp_path).step == 3
        assert "it was written with" in caplog.text
        assert "trying the one before" in caplog.text


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    with open_pipe() as pipe:
        losses(pipe, DATA[:2])
        pipe.save(tmp_path)
    another = r"another model: weight 0\.bias \(shape .*\) is in the model"
    for other, words in ((open_pipe(micro_batches=2), "1 micro-batches"), (small(), another)):
        with other, pytest.raises(CheckpointError, match=words):
            other.load(tmp_path)
    with open_pipe() as pipe:
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            pipe.load(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match="keep must be"):
            pipe.save(tmp_path, keep=0)
        losses(pipe, DATA)
        assert_same(pipe.state_dict(), undisturbed(4, "adamw", ())[1])


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with open_pipe() as pipe:
        begun = losses(pipe, DATA[:5])
        with pytest.raises(CheckpointError, match="cannot be written"):
            pipe.save(tmp_path / "file")
        with pytest.raises(CheckpointError, match="can hold numbers"):
            pipe.save(tmp_path / "run", extra=object())
        assert begun + losses(pipe, DATA[5:]) == undisturbed(4, "adamw", ())[0]
    assert not os.listdir(tmp_path / "run")


@pytest.mark.processes
def test_a_worker_that_is_killed_before_its_part_is_written(tmp_path):
    """No half checkpoint; the one before is loaded."""
    pipe = open_pipe(workers="local")
    begun = losses(pipe, DATA[:4])
    pipe.save(tmp_path)
    losses(pipe, DATA[4:6])
    kill(pipe, "worker-2")
    with pytest.raises(WorkerLost, match="worker-2"):
        pipe.save(tmp_path)
    assert os.listdir(tmp_path) == ["step-00000004"]
    with open_pipe() as again:
        again.load(tmp_path)
        assert begun + losses(again, DATA[4:]) == undisturbed(4, "adamw", ())[0]


@pytest.mark.parametrize(("before", "later"), [(1, 0), (0, 1), ([0, 1], [1, 0])])
def test_other_slack_is_told_of(tmp_path, caplog, before, later):
    """The run goes on, but is not the run that never stopped."""
    with open_pipe(3, slack=before) as pipe:
        losses(pipe, DATA[:6])
        pipe.save(tmp_path)
    with open_pipe(3, slack=later) as pipe:
        pipe.load(tmp_path)
        losses(pipe, DATA[6:])
    assert "made with slack" in caplog.text
    caplog.clear()
    with open_pipe(3, slack=later, schedule="1f1b") as pipe:
        pipe.load(tmp_path)
    assert "made with slack" not in caplog.text


# -- weights --------------------------------------------------------------------------------------


def test_the_best_weights_are_in_one_file(tmp_path):
    path, data = tmp_path / "best.safetensors", regression(3)

    def best():
        first, second = tied(8)
        model = Of(lambda x, a, b: b(torch.tanh(a(x))), first, second)
        return small(model, stages=2, example=data[0])

    with best() as pipe:
        assert pipe.keep_best(path, 2.0)
        first = pipe.state_dict()
        list(pipe.train_epoch(data))
        assert not pipe.keep_best(path, 2.0)
        assert not pipe.keep_best(path, math.nan)
        assert_same(load_file(path), first)
        assert pipe.keep_best(path, torch.tensor(1.0))
        assert_same(load_file(path), pipe.state_dict())
        assert pipe.keep_best(tmp_path / "other", 0.5, highest=True)
        assert not pipe.keep_best(tmp_path / "other", 0.4, highest=True)
        with pytest.raises(ConfigError, match="value must be a number"):
            pipe.keep_best(path, {"loss": 1.0})
        with pytest.raises(CheckpointError, match="cannot be written"):
            pipe.keep_best(tmp_path / "nowhere" / "file", 1.0)
        pipe.save(tmp_path / "run")
    with best() as pipe:
        pipe.load(tmp_path / "run")
        assert not pipe.keep_best(path, 1.5)  # it goes on from 1.0
        os.mkfifo(tmp_path / "pipe")  # which nobody would ever end
        assert pipe.keep_best(tmp_path / "pipe", 1.0)
        assert pipe.keep_best(path, 0.5)
    with best() as pipe:
        assert pipe.keep_best(path, 9.0)  # a run of its own


def test_load_state_dict_forgets_older_versions():
    """The micro-batches after it read what was loaded, at every stage."""
    data = regression(12)
    with small() as pipe:
        list(pipe.train_epoch(data[:6]))
        pipe.load_state_dict(mlp().state_dict())
        first = next(pipe.train_epoch(data[6:7])).loss
        assert first == F.mse_loss(mlp()(data[6][0]), data[6][1]).item()
        result = next(pipe.train_epoch(data[7:8]))
        assert result.versions == (6, 6, 7)
        pipe.load_state_dict(mlp().state_dict())
        assert_same(pipe.state_dict(), mlp().state_dict())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("0.weight"), r"missing keys: \['0.weight'\]"),
        (lambda s: s.update(more=torch.ones(1)), r"unexpected keys: \['more'\]"),
        (lambda s: s.update({"0.bias": torch.ones(3)}), r"0.bias has .*\(3,\), in .* \(8,\)"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_and_nothing_lost(change, words):
    with small() as pipe:
        state = pipe.state_dict()
        wrong = dict(state)
        change(wrong)
        with pytest.raises(ConfigError, match=words):
            pipe.load_state_dict(wrong)
        assert_same(pipe.state_dict(), state)


@pytest.mark.parametrize(
    "kind",
    [functools.partial(collections.defaultdict, int), collections.UserDict, types.MappingProxyType],
    ids=["defaultdict", "UserDict", "proxy"],
)
def test_any_mapping_is_a_state_dict(kind):
    state = kind(mlp().state_dict())
    with small() as pipe:
        pipe.load_state_dict(state)
        assert torch.equal(pipe.state_dict()["0.weight"], state["0.weight"])
