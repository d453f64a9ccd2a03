"""What a script does beside training: it is done as it is written, or refused by name.

The table of what may be trained is in test_compatibility.py.
"""

import copy
import os
import re
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from support.compatibility import LearnedLoss, ScheduleFreeSGD
from support.models import OPTIMIZERS, batches, kitchen_sink, mlp, regression
from support.oracle import assert_same
from support.pinned import Pipeline
from support.small import losses, small
from torch import nn

from pipedream_rt import (
    CheckpointError,
    Checkpoints,
    ConfigError,
    PipelineClosed,
    StageFailed,
)
from pipedream_rt.cli import main

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("environment")]

DATA = batches(12)


@pytest.fixture(params=["serial", "local"])
def workers(request):
    return request.param


def open_pipe(workers, model=None, **kwargs):
    defaults = {
        "stages": [3, 8], "loss_fn": F.cross_entropy, "optimizer": OPTIMIZERS["adamw"],
        "workers": workers,
    }  # fmt: skip
    return Pipeline(model or kitchen_sink(), **{**defaults, **kwargs})


# -- looking changes nothing ------------------------------------------------------------------


class Adapter(nn.Module):
    """A linear layer with an adapter, which is merged into its weight in eval mode."""

    def __init__(self):
        super().__init__()
        self.linear, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8)
        self.register_buffer("evaluations", torch.zeros(1))
        self.merged = False

    def train(self, mode=True):
        if mode is self.merged:
            with torch.no_grad():
                delta = self.b.weight @ self.a.weight
                self.linear.weight.data = self.linear.weight.data + (-delta if mode else delta)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        self.evaluations += not self.training
        beside = 0 if self.merged else F.linear(F.linear(x, self.a.weight), self.b.weight)
        return self.linear(x) + beside


LOOKS = {
    "evaluate": lambda pipe: pipe.evaluate(regression(3)),
    "infer": lambda pipe: pipe(regression(1)[0][0]),
    "flush": lambda pipe: pipe.flush(),
    "state_dict": lambda pipe: pipe.state_dict(),
    "module": lambda pipe: pipe.module(),
    "loss_module": lambda pipe: pipe.loss_module(),
    "fingerprint": lambda pipe: pipe.fingerprint(),
    "statistics": lambda pipe: pipe.statistics(),
    "explain": lambda pipe: pipe.explain(),
    "optimizer state": lambda pipe: pipe.optimizer.state_dict(),
    "the mode it has": lambda pipe: pipe.train(),
    "a function on the stages": lambda pipe: pipe.on_stages(repr),
    "repr": repr,
}


def looked_at(workers, schedule, looks):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), Adapter(), nn.BatchNorm1d(8), Adapter())
    with Pipeline(
        model, stages=[1, 3], loss_fn=LearnedLoss(), schedule=schedule, workers=workers,
        optimizer=(ScheduleFreeSGD, {}),
    ) as pipe:  # fmt: skip
        names = [*LOOKS, *LOOKS, "flush"]
        found = []
        for result, name in zip(pipe.train_epoch(regression(len(names))), names, strict=True):
            found.append((f"before {name}", result.loss))
            if looks:
                LOOKS[name](pipe)
        return found, pipe.state_dict(), pipe.loss_module().state_dict()


@pytest.mark.parametrize("schedule", ["async-1f1b", "1f1b"])
def test_looking_changes_nothing(workers, schedule):
    """Not even adapters, counters, statistics and a loss with a state, or their last digit.

    After each step comes another look, since one might take back what the one before has done.
    """
    calm, looked = (looked_at(workers, schedule, looks) for looks in (False, True))
    assert calm[0] == looked[0]
    assert_same(looked[1], calm[1])
    assert_same(looked[2], calm[2])


def kept(pipe, data):
    with pipe.keep_version() as version:
        pipe.evaluate(data, version=version)
        list(pipe.predict([x for x, _ in data], version=version))
        pipe.module(version=version)


@pytest.mark.parametrize("schedule", ["async-1f1b", "1f1b"])
def test_to_keep_a_version_changes_nothing(workers, schedule):
    found = []
    for looks in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 8))
        with Pipeline(
            model, stages=2, loss_fn=F.mse_loss, schedule=schedule, workers=workers, ema=0.9,
            optimizer=(torch.optim.Adam, {}),
        ) as pipe:  # fmt: skip
            losses = []
            for result in pipe.train_epoch(regression(8)):
                losses.append(result.loss)
                if looks and result.step in (2, 5):
                    kept(pipe, regression(2))
            found.append((losses, pipe.fingerprint().digest))
    assert found[0] == found[1]
    with (
        Pipeline([Adapter(), nn.Linear(8, 8)], stages=2, workers=workers) as pipe,
        pytest.raises(ConfigError, match="does something when its mode is set"),
    ):
        pipe.keep_version()


def test_inference_in_training_mode_moves_statistics_only_when_told(workers):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with Pipeline(model, stages=2, workers=workers) as pipe:
        x = regression(1)[0][0]
        expected = copy.deepcopy(model).eval()(x)
        assert torch.equal(pipe(x), expected)
        assert_same(pipe.state_dict(), model.state_dict())
        assert torch.equal(pipe(x, training=True), copy.deepcopy(model)(x))
        assert pipe.state_dict()["1.num_batches_tracked"] == 1
        assert pipe.seen == 0


# -- epochs -----------------------------------------------------------------------------------


def test_prepare_makes_pairs_of_anything():
    def pair(item):
        return item["x"], item["labels"][0]

    dicts = [{"x": x, "labels": (y, None)} for x, y in regression(4)]
    with small() as pipe, small() as plain:
        found = [r.loss for r in pipe.train_epoch(dicts, prepare=pair)]
        assert found == losses(plain, regression(4))
        assert pipe.evaluate(dicts, prepare=pair) == plain.evaluate(regression(4))


# -- the optimizer ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_a_scheduler_on_the_optimizer_that_was_given():
    model = mlp()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    with small(model, optimizer=given) as pipe:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(given, 0.5)
        epoch = pipe.train_epoch(regression(5))
        next(epoch)
        scheduler.step()
        with pytest.raises(ConfigError, match=r"'lr' of group 0 was changed in the optimizer that"):
            next(epoch)


def test_an_optimizer_with_attributes_and_with_hooks(workers):
    class Halves(torch.optim.SGD):
        share = 1.0

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad *= self.share
            super().step()

    model = mlp()
    given = Halves(model.parameters(), lr=0.1)
    given.share = 0.5
    with (
        small(model, workers=workers, optimizer=given) as pipe,
        small(optimizer=(torch.optim.SGD, {"lr": 0.05})) as plain,
    ):
        losses(pipe, regression(4))
        losses(plain, regression(4))
        assert_same(pipe.state_dict(), plain.state_dict())
    given.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="the optimizer has hooks"):
        small(model, optimizer=given)


def test_an_optimizer_that_holds_a_weight_elsewhere():
    model = mlp()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    given.favourite = model[0].weight
    with pytest.raises(ConfigError, match=r"the optimizer holds the parameter 0\.weight"):
        small(model, optimizer=given)


def test_the_state_that_an_optimizer_keeps_in_its_groups_goes_round(workers):
    """Through state_dict, and through a checkpoint."""
    options = {"optimizer": (ScheduleFreeSGD, {}), "schedule": "1f1b", "workers": workers}
    with small(**options) as pipe:
        begun = losses(pipe, regression(4))
        state = pipe.optimizer.state_dict()
        assert state["param_groups"][0]["k"] == 4
        weights = pipe.state_dict()
        rest = losses(pipe, regression(4))
    assert len(begun) == 4
    with small(**options) as pipe:
        losses(pipe, regression(1))  # so that there is something to replace
        pipe.load_state_dict(weights)
        pipe.optimizer.load_state_dict(state)
        assert pipe.optimizer.state_dict()["param_groups"][0]["k"] == 4
        found = losses(pipe, regression(4))
    with small(**options) as pipe:
        pipe.load_state_dict(weights)
        pipe.optimizer.load_state_dict(state)
        assert found == losses(pipe, regression(4))
    assert rest == found


# -- resume -----------------------------------------------------------------------------------


def other_loss(output, target):
    return 2 * F.cross_entropy(output, target)


DIFFERENT = [
    ("seed", {"seed": 4}, r"with the seed 0, this script has 4"),
    (
        "optimizer", {"optimizer": (torch.optim.SGD, {"lr": 0.1})},
        r"with the optimizer 'torch.optim.adamw.AdamW', this script has 'torch.optim.sgd.SGD'",
    ),
    ("groups", "grouped", r"with the groups of \[13\] parameters, this script has those of \[1,"),
]  # fmt: skip
TOLD = [
    ("loss", {"loss_fn": other_loss}, r"the loss '.*cross_entropy.*', this script has '.*other"),
    (
        "hyper_parameters",
        {"optimizer": (torch.optim.AdamW, {**OPTIMIZERS["adamw"][1], "lr": 0.5})},
        r"with the hyper-parameters lr = 0.003 in group 0, this script has lr = 0.5 in group 0: "
        r"the run goes on with those of the checkpoint",
    ),
    ("threads", {"threads": 2}, r"with the threads 1, this script has 2: the bits may be others"),
    ("schedule", {"schedule": "1f1b"}, r"with the schedule 'async-1f1b', this script has '1f1b'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with open_pipe("serial") as pipe:
        losses(pipe, DATA[:6])
        pipe.save(folder)
    return folder


def other_script(changes, **more):
    model = kitchen_sink()
    if changes == "grouped":
        parameters = list(model.parameters())
        groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
        changes = {"optimizer": torch.optim.AdamW(groups, **OPTIMIZERS["adamw"][1])}
    return open_pipe("serial", model, **changes, **more)


@pytest.mark.parametrize(("name", "changes", "words"), DIFFERENT, ids=[d[0] for d in DIFFERENT])
def test_a_resume_refuses_what_changes_results(saved, name, changes, words):
    with other_script(changes) as pipe:
        with pytest.raises(CheckpointError, match=words) as error:
            pipe.load(saved)
        assert f"load(..., accept=['{name}'])" in str(error.value)
        assert pipe.step == 0
        pipe.load(saved, accept=[name])
        assert len(losses(pipe, DATA[6:])) == 6
    options = Checkpoints(saved, resume=True, accept=[name])
    with other_script(changes, checkpoint=options) as pipe:
        assert pipe.step == 6


@pytest.mark.parametrize(("name", "changes", "words"), TOLD, ids=[t[0] for t in TOLD])
def test_a_resume_tells_of_what_else_is_different(saved, caplog, name, changes, words):
    with other_script(changes) as pipe:
        pipe.load(saved)
        assert re.search(words, caplog.text)
        caplog.clear()
    with other_script(changes) as pipe:
        pipe.load(saved, accept=[name])
        assert "this script has" not in caplog.text
        rate = pipe.optimizer.param_groups[0]["lr"]
        assert rate == (0.5 if name == "hyper_parameters" else 0.003)


def test_another_optimizer_that_is_accepted_begins_with_its_own_rate_and_no_state(saved):
    with other_script({"optimizer": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}) as pipe:
        pipe.load(saved, accept=["optimizer"])
        assert pipe.optimizer.param_groups[0]["lr"] == 0.1
        assert pipe.optimizer.state_dict()["state"] == {}


def test_a_constant_buffer_of_two_stages_goes_through_a_checkpoint(workers, tmp_path):
    """To load it is no change of it."""

    def opened():
        torch.manual_seed(2)
        table = torch.rand(8)
        model = nn.Sequential(Shares(table), nn.Linear(8, 8), Shares(table))
        return small(model, stages=2, workers=workers)

    with opened() as pipe:
        losses(pipe, regression(3))
        pipe.save(tmp_path)
        expected = losses(pipe, regression(3))
    with opened() as pipe:
        losses(pipe, regression(1))
        pipe.load(tmp_path)
        assert losses(pipe, regression(3)) == expected


class Shares(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", table)

    def forward(self, x):
        return self.linear(x) * self.table


# -- fingerprints -----------------------------------------------------------------------------


def test_equal_runs_have_equal_fingerprints_whatever_the_split_and_the_place(workers):
    def train(points, workers, changed=False):
        data = [(x.clone(), y) for x, y in DATA[:6]]
        if changed:
            data[3][0][0, 0] = (data[3][0][0, 0] + 1) % 11
        with open_pipe(
            workers, schedule="1f1b", stages=points, micro_batches=2, fingerprint_every=2
        ) as pipe:
            marks = [result.fingerprint for result in pipe.train_epoch(data)]
            return marks, pipe.fingerprint()

    marks, mark = train([3, 8], workers)
    assert [each is None for each in marks] == [True, False] * 3
    assert len({*marks}) == 4
    assert (marks, mark) == train([3, 8], "serial")
    other_marks, other = train([6], "serial")
    assert other_marks == marks
    assert (other.digest, other.weights, other.buffers, other.optimizer) == (
        mark.digest, mark.weights, mark.buffers, mark.optimizer,
    )  # fmt: skip
    late_marks, late = train([3, 8], workers, changed=True)
    assert late_marks[1] == marks[1]  # the weights that step 1 read
    assert late_marks[5] != marks[5]
    assert late.digest != mark.digest
    assert str(mark) == mark.digest


@pytest.mark.thinned(2)
def test_fingerprints_of_checkpoints_find_the_step_at_which_two_runs_part(workers, tmp_path):
    def train(folder, rates):
        with open_pipe(workers) as pipe:
            marks = []
            for epoch, rate in enumerate(rates):
                pipe.optimizer.param_groups[0]["lr"] = rate
                losses(pipe, DATA[3 * epoch : 3 * epoch + 3])
                pipe.save(tmp_path / folder)
                marks.append(pipe.fingerprint())
            return marks

    calm = train("calm", [0.01] * 4)
    train("same", [0.01] * 4)
    train("late", [0.01, 0.01, 0.02, 0.01])

    def command(*words):
        return CliRunner().invoke(main, ["checkpoint", *map(str, words)])

    same = command("compare", tmp_path / "calm", tmp_path / "same")
    assert (same.exit_code, same.output) == (0, "equal at the steps 3, 6, 9, 12\n")
    late = command("compare", tmp_path / "calm", tmp_path / "late")
    assert late.exit_code == 1
    assert "equal up to step 6, different at step 9: stage 0: weights" in late.output
    shown = command("inspect", tmp_path / "calm").output
    assert f"fingerprint: {calm[-1].digest}" in shown


# -- words ------------------------------------------------------------------------------------


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(3, 8)

    def forward(self, x):
        return self.inside(x)


def test_an_error_names_the_layer_its_input_and_the_users_own_lines(workers):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Narrow())
    with (
        pytest.raises(StageFailed) as error,
        small(model, stages=[1], workers=workers) as pipe,
    ):
        losses(pipe, regression(3))
    text = str(error.value)
    assert "stage 1, F0: RuntimeError: mat1 and mat2 shapes cannot be multiplied" in text
    assert "in layer '2' (Narrow), whose input was a float32 tensor (4, 8)" in text
    assert "return self.inside(x)" in error.value.trace
    assert len(error.value.trace.splitlines()) <= 5
    assert "torch/nn" not in error.value.trace


def test_a_layer_that_expects_two_arguments_is_told_of_the_tuple(workers):
    class Splits(nn.Module):
        def forward(self, x):
            return x, x

    model = nn.Sequential(nn.Linear(8, 8), Splits(), nn.Bilinear(8, 8, 8))
    with (
        pytest.raises(StageFailed, match=r"A layer gets one value, here a tuple of 2: take it"),
        small(model, stages=[1], workers=workers) as pipe,
    ):
        losses(pipe, regression(3))


def test_a_forked_child_cannot_use_the_pipeline(workers):
    with small(workers=workers) as pipe:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                pipe.flush()
            except PipelineClosed as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(writing)
        with os.fdopen(reading) as told:
            assert "belongs to process" in told.read()
        assert len(losses(pipe, regression(2))) == 2


def test_a_second_pipeline_on_processes_is_told_which_line_closes_the_first(monkeypatch):
    monkeypatch.setenv("PIPEDREAM_RT_RPC", "on")  # two without torch RPC may be open
    with (
        small(workers="local"),
        pytest.raises(ConfigError, match=r"the line pipe\.close\(\) does"),
    ):
        small(workers="local")


class Timed(nn.Module):
    """Saves a buffer for its backward, and changes it in place in the next forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        self.scale.mul_(1.1)
        return self.linear(x) * self.scale


def test_a_buffer_that_a_backward_needs_and_the_next_forward_changes(workers):
    """As in plain PyTorch, where nothing passes in between."""
    torch.manual_seed(1)
    model = nn.Sequential(Timed(), nn.Tanh(), Timed(), Timed())
    options = {"stages": [1, 2], "schedule": "1f1b", "micro_batches": 4}
    with small(model, workers=workers, **options) as pipe:
        found = [r.losses for r in pipe.train_epoch(regression(3, samples=8))]
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for (x, y), expected in zip(regression(3, samples=8), found, strict=True):
        optimizer.zero_grad()
        for xi, yi, loss_there in zip(x.chunk(4), y.chunk(4), expected, strict=True):
            loss = F.mse_loss(plain(xi), yi)
            (loss * 0.25).backward()
            assert loss.item() == loss_there
        optimizer.step()


class Curious(nn.Module):
    """Extra state in a dict, and a complex buffer of double precision."""

    def __init__(self):
        super().__init__()
        self.linear, self.notes = nn.Linear(8, 8), {"calls": 0, "text": ("a", 1.5)}
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex128) * 1j)

    def forward(self, x):
        self.notes["calls"] += 1
        self.phase = self.phase * 1j
        return self.linear(x) * (1 + 0.01 * self.notes["calls"]) + self.phase.imag.sum().float()

    def get_extra_state(self):
        return dict(self.notes)

    def set_extra_state(self, state):
        self.notes = dict(state)


def test_extra_state_and_complex_numbers_go_through_state_dicts_and_checkpoints(workers, tmp_path):
    def opened():
        torch.manual_seed(2)
        model = nn.Sequential(Curious(), nn.Linear(8, 8), Curious())
        return small(model, stages=2, workers=workers), model

    pipe, model = opened()
    with pipe:
        losses(pipe, regression(4))
        pipe.save(tmp_path)
        state = pipe.state_dict()
        assert state["0._extra_state"] == {"calls": 4, "text": ("a", 1.5)}
        model.load_state_dict(state)
        assert pipe.module()[0].notes["calls"] == 4
        expected = losses(pipe, regression(4))
    again, _ = opened()
    with again:
        again.load(tmp_path)
        assert again.state_dict()["2._extra_state"] == {"calls": 4, "text": ("a", 1.5)}
        assert torch.equal(again.state_dict()["0.phase"], state["0.phase"])
        assert losses(again, regression(4)) == expected
    other, _ = opened()
    with other:
        other.load_state_dict(state)
        assert other.state_dict()["0._extra_state"]["calls"] == 4


def test_a_grace_time_is_a_time():
    with pytest.raises(ConfigError, match="the grace time of the checkpoints must be a positive"):
        Checkpoints("run", grace=5)
    assert Checkpoints("run").grace == timedelta(seconds=20)


# -- changes in place ---------------------------------------------------------------------------


class Changes(nn.Module):
    """Four layers, between which something is changed in place."""

    def __init__(self, change):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("scale", torch.ones(4))
        self.change = change

    def forward(self, x):
        x = self.layers[1](self.layers[0](x) * self.scale)
        self.change(self)
        return self.layers[3](self.layers[2](x) * self.scale)


def clamps_data(model):
    model.layers[0].weight.data.clamp_(-0.1, 0.1)


def clamps(model):
    with torch.no_grad():
        model.layers[3].weight.clamp_(-0.1, 0.1)


def counts(model):
    model.scale.add_(1)


def fills(model):
    model.layers[2].bias.data[0] = 1.0


def changed_on(change, stages):
    torch.manual_seed(0)
    data = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(3)]
    options = {"schedule": "1f1b", "example": data[0]}
    with small(Changes(change), stages=stages, **options) as pipe:
        return losses(pipe, data)


@pytest.mark.parametrize(
    ("change", "words", "together"),
    [
        (clamps_data, "0.weight in place on stage 1, and layers.0 uses it on stage 0", "layers.2"),
        (clamps, "3.weight in place on stage 1, and layers.3 uses it on stage 3", None),
        (fills, "2.bias in place on stage 1, and layers.2 uses it on stage 2", None),
    ],
    ids=["clamps_data", "clamps", "fills"],
)
def test_a_weight_is_not_changed_on_another_stage_than_its_own(change, words, together):
    with pytest.raises(ConfigError, match=f"changes layers.{words}") as caught:
        changed_on(change, 4)
    assert f"{__file__}:" in str(caught.value)
    alone = changed_on(change, 1)
    if together:
        assert changed_on(change, [together]) == alone


def test_a_buffer_is_not_changed_between_layers_of_two_stages():
    with pytest.raises(ConfigError, match=r"changes scale in place on stage 1, .* on stage 0"):
        changed_on(counts, 4)


class Clamped(nn.Linear):
    """A layer that clamps its own weight."""

    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_layer_does_not_change_a_weight_that_another_stage_uses_too(schedule):
    torch.manual_seed(0)
    layers = [Clamped(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    data = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(3)]
    with small(layers, schedule=schedule) as pipe:
        losses(pipe, data)
    layers[2].weight = layers[0].weight
    words = r"changed the parameter '0\.weight' .*other stages have copies"
    with small(layers, schedule=schedule) as pipe, pytest.raises(StageFailed, match=words):
        losses(pipe, data)


class Rounds(nn.Module):
    def forward(self, x):
        return x["left"].round_() + x["right"][0]


def test_a_change_of_the_mini_batch_itself_is_told_once_with_its_name(caplog):
    data = [({"left": torch.randn(4, 2), "right": [torch.randn(4, 2)]}, torch.randn(4, 2))] * 4
    before = data[0][0]["left"].clone()
    with small([Rounds(), nn.Linear(2, 2)], stages=2) as pipe:
        losses(pipe, data)
    assert torch.equal(data[0][0]["left"], before)
    assert caplog.text.count("changes the tensor 'left' of the mini-batch in place") == 1
