"""A script that resumes has the plain values and the modes that it had set while it trained."""

import logging

import pytest
import torch
from support.both import SGD, batches, layers
from support.inside import kill
from support.pinned import Pipeline
from torch import nn
from torch.nn import functional as F

from pipedream_rt import Checkpoints, ConfigError
from pipedream_rt.checkpoint import Manifest

DATA = batches(16)


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


class Penalty:
    def __init__(self, first=1.0):
        self.beta, self.table, self.steps = first, {"beta": 1.0}, [1.0, 1.0]

    def __call__(self, output, target):
        factor = self.beta * self.table["beta"] * self.steps[1]
        return F.mse_loss(output, target) + factor * output.pow(2).mean()


CHANGES = {
    "an attribute of the loss": lambda m, loss: setattr(loss, "beta", 0.1),
    "an entry of a dict": lambda m, loss: loss.table.update(beta=0.1),
    "an entry of a list": lambda m, loss: loss.steps.__setitem__(1, 0.1),
    "an attribute that a layer had of its class": lambda m, loss: setattr(m[1], "scale", 0.3),
    "a dropout rate": lambda m, loss: setattr(m[2], "p", 0.9),
}


def everything(model, loss):
    for change in CHANGES.values():
        change(model, loss)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


class Script:
    """A model and a loss on a pipeline, as the beginning of a script makes them."""

    def __init__(self, folder=None, loss=None, resume=False, accept=(), **options):
        one, two, three = layers(nn.Linear, Scaled, nn.Linear)
        self.model = nn.Sequential(one, two, nn.Dropout(0.5), nn.BatchNorm1d(8), three)
        self.loss = loss or Penalty()
        every, self.saves = options.pop("every", None), False
        if folder is not None:
            how = {"every": every, "resume": resume, "accept": accept}
            options["checkpoint"], self.saves = Checkpoints(folder, **how), every is None
        defaults = {"stages": 3, "optimizer": SGD, "workers": "serial"}
        self.pipe = Pipeline(self.model, loss_fn=self.loss, **{**defaults, **options})

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.pipe.close()

    def losses(self, change=None, at=2, until=None, data=DATA):
        """Losses by step; the change is made once, when the script sees the result of a step."""
        found = {}
        for result in self.pipe.train_epoch(data):
            found[result.step] = result.loss
            if result.step == at and change is not None:
                change(self.model, self.loss)
            if result.step == until:
                if self.saves:
                    self.pipe.save()
                break
        return found


def interrupted(folder, change, **options):
    """The losses of a run that ends after its seventh result, and of the script that resumes."""
    with Script(folder, **options) as script:
        found = script.losses(change, until=6)
    with Script(folder, resume=True, **options) as script:
        assert script.pipe.step
        return {**found, **script.losses(change)}


@pytest.mark.parametrize(
    ("change", "options"),
    [
        *((change, {"schedule": "1f1b"}) for change in CHANGES.values()),
        (everything, {"schedule": "async-1f1b"}),
        (everything, {"schedule": "async-1f1b", "every": 6}),
    ],
    ids=[*CHANGES, "all of them", "without a flush"],
)
def test_a_script_that_resumes_has_the_values_that_it_had_set(folder, change, options):
    without = {key: value for key, value in options.items() if key != "every"}
    with Script(**without) as script:
        expected = script.losses(change)
    with Script(**without) as script:
        assert script.losses() != expected
    assert interrupted(folder, change, **options) == expected


@pytest.mark.processes
def test_workers_in_processes_get_them_too(folder):
    with Script() as script:
        expected = script.losses(everything)
    assert interrupted(folder, everything, workers="local") == expected


def test_the_script_reads_them_and_a_later_change_is_a_change(folder):
    def again(model, loss):
        loss.beta = 1.0  # as at the start

    with Script(schedule="1f1b") as script:
        first = script.losses(CHANGES["an attribute of the loss"])
        rest = script.losses(again, at=18, data=DATA[:5])
    with Script(folder, schedule="1f1b") as script:
        script.losses(CHANGES["an attribute of the loss"], until=6)
    with Script(folder, resume=True, schedule="1f1b") as script:
        assert script.loss.beta == 0.1
        assert script.losses().items() <= first.items()
        assert script.losses(again, at=18, data=DATA[:5]) == rest


def test_what_was_set_after_the_checkpoint_is_undone_by_a_load(folder):
    def later(model, loss):
        loss.beta = 0.7
        loss.table["beta"] = 0.5
        model[1].scale = 0.2

    with Script(schedule="1f1b") as script:
        expected = script.losses(CHANGES["an attribute of the loss"])
    with Script(folder, schedule="1f1b") as script:
        script.losses(CHANGES["an attribute of the loss"], until=6)
        script.losses(later, at=9)
        script.pipe.load(folder)
        assert (script.loss.beta, script.loss.table["beta"]) == (0.1, 1.0)
        assert "scale" not in vars(script.model[1])
        assert script.losses() == {step: expected[step] for step in range(7, 16)}


def test_the_mode_of_all_modules_comes_back(folder):
    def run(script):
        return lambda *_: script.pipe.train(False)

    with Script(schedule="1f1b") as script:
        expected = script.losses(run(script))
    with Script(folder, schedule="1f1b") as script:
        found = script.losses(run(script), until=6)
    with Script(folder, schedule="1f1b", resume=True) as script:
        assert {**found, **script.losses()} == expected


def test_the_mode_of_a_stage_alone_comes_back_unless_the_split_mixes_it(folder, caplog):
    def run(script):
        return lambda *_: script.pipe.stages[1].rref.rpc_sync().eval()

    options = {"schedule": "1f1b", "stages": [2, 4]}  # dropout and BatchNorm are in the middle
    with Script(**options) as script:
        expected = script.losses(run(script))
    with Script(folder, **options) as script:
        found = script.losses(run(script), until=6)
    with Script(folder, resume=True, **options) as script:
        assert {**found, **script.losses()} == expected
    with Script(folder, resume=True, **{**options, "stages": [3]}):
        assert "stage 0 has layers of several modes" in caplog.text


def saved(folder, change="an attribute of the loss"):
    with Script(folder) as script:
        script.losses(CHANGES[change], until=6)


def test_a_place_that_is_gone_is_named_in_one_warning(folder, caplog):
    saved(folder)
    loss = Penalty()
    del loss.beta
    loss.__dict__["renamed"] = 1.0
    Penalty.beta = 1.0
    try:
        with Script(folder, loss, resume=True):
            pass
    finally:
        del Penalty.beta
    (said,) = [r for r in caplog.messages if "no such place" in r]
    assert "'beta' of loss_fn" in said


@pytest.mark.parametrize(("accept", "value"), [((), 0.1), (["values"], 2.0)])
def test_another_first_value_is_told_as_another_hyper_parameter_is(folder, caplog, accept, value):
    saved(folder)
    with Script(folder, Penalty(2.0), resume=True, accept=[*accept, "loss"]) as script:
        assert script.loss.beta == value
    told = "'beta' of loss_fn was 1.0 at first, and is 2.0 here" in caplog.text
    assert told == (not accept)


def test_a_loss_whose_values_have_changed_is_the_loss_of_the_script(folder, caplog):
    saved(folder)
    with caplog.at_level(logging.WARNING), Script(folder, resume=True):
        pass
    assert "this script" not in caplog.text


def test_a_checkpoint_of_an_older_version_leaves_the_script_as_it_is(folder):
    old = Manifest(step=1, schedule="1f1b", workers=1, stages_per_worker=1, per_update=1)
    with Script(schedule="1f1b") as script:
        settings = script.pipe._run.run_state._settings
        script.losses(CHANGES["an attribute of the loss"])
        script.pipe.train(False)
        settings.put_back_values(folder, old, ())
        settings.put_back_modes(folder, old)
        assert (script.loss.beta, script.pipe._run.feeder.training) == (0.1, False)


@pytest.mark.processes
def test_a_recovery_right_after_a_resume_has_them(folder):
    with Script() as script:
        expected = script.losses(CHANGES["an attribute of the loss"])
    with Script(folder) as script:
        found = script.losses(CHANGES["an attribute of the loss"], until=6)
    with Script(folder, resume=True, workers="local", max_restarts=1) as script:
        kill(script.pipe, "worker-1")
        found |= script.losses()
        assert len(script.pipe.restarts) == 1
    assert found == expected


def test_what_cannot_be_sent_does_not_stop_a_save_but_the_next_mini_batch(folder):
    with Script(folder) as script:
        script.losses(until=6)
        script.loss.beta = torch.ones(2)
        script.pipe.save()
        with pytest.raises(ConfigError, match="beta"):
            script.losses()
