"""A stage's part of a checkpoint: copied between two actions, written by a thread of its own."""

import copy
import os

import pytest
import torch
from support.messages import head
from support.models import Of, Recomputes, tied
from support.oracle import assert_same
from support.stages import a_stage, value
from torch import nn

from pipedream_rt.checkpoint import read_stage
from pipedream_rt.messages.state_keys import by_text
from pipedream_rt.schedules import Kind, plan_for
from pipedream_rt.stage import stage_state
from pipedream_rt.stage.saving import StageSaver, restore_stage

pytestmark = pytest.mark.threads

ASYNC = plan_for("async-1f1b", num_stages=3)
FLUSHED = plan_for("1f1b", num_stages=3)

POSITION = 17


class Counts(nn.Module):
    """A buffer in no state dict, a tensor as extra state, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4), persistent=False)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.calls = torch.zeros(1)

    def forward(self, x):
        self.seen += x.detach().mean(0)
        self.calls += 1
        return x * self.frozen + 0.1 * self.seen

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, calls):
        self.calls = calls.clone()


class Replaces(nn.Module):
    """A backward puts another tensor in the place of a buffer."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("last", torch.zeros(width))

    def forward(self, x):
        output = self.linear(x)
        output.register_hook(lambda gradient: setattr(self, "last", gradient.mean(0)))
        return output


class Noted(nn.Module):
    """Extra state that is no tensor."""

    def forward(self, x):
        return x

    def get_extra_state(self):
        return {"text": {"a", "note"}}

    def set_extra_state(self, state):
        pass


def layers():
    twice = Of(lambda x, a, b: b(a(x)), *tied(4))  # two names for one weight
    return [twice, nn.BatchNorm1d(4), nn.Dropout(0.2), Counts()]


class Run:
    """The first stage of three, driven by hand, with what its saver has told.

    Attributes:
        told: Position and result of every save command that had an outcome.
    """

    def __init__(self, made=None, plan=ASYNC, optimizer=torch.optim.AdamW):
        torch.manual_seed(0)
        given = optimizer and (optimizer, {})
        self.stage = a_stage(layers() if made is None else made, plan, optimizer=given, seed=3)
        self.told = []
        self.saver = StageSaver(self.stage, 3, lambda *outcome: self.told.append(outcome))

    def go(self, stop, command_at=None, folder=None, step=None):
        """Follow the order from where it stands; a save command comes before a forward."""
        stage = self.stage
        for kind, i, _ in stage.plan.order(0, stage.next_forward, stop):
            match kind:
                case Kind.FORWARD:
                    if i == command_at:
                        self.saver.begin(POSITION, str(folder), step)
                    stage.forward(head(i), [value(data(i))])
                case Kind.BACKWARD:
                    with self.saver.watching_buffers():
                        stage.backward(i, [[data(i + 1000)]])
                        stage.end(i)
                case Kind.STEP:
                    stage.step(i)
                    self.saver.save_if_due()
        return self

    def state(self):
        """Everything, in copies."""
        module = self.stage.module
        hidden = {f"hidden {name}": b for name, b in module.named_buffers()}
        moments = {
            str(key): torch.as_tensor(moment)
            for key, moment in self.stage.optimizer.state().items()
            if key.part != "split"
        }
        return copy.deepcopy({**module.state_dict(), **hidden, **moments})

    def restored(self, folder, step=4, plain=None, floor=0):
        """Whether it has all that is needed to go on as of a checkpoint."""
        return restore_stage(self.stage, str(folder), os.listdir(folder), step, plain or {}, floor)

    def closed(self):
        self.saver.close()
        return self


def data(number):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number))


def read(run, folder, plain=None):
    """What is in the files."""
    return read_stage(folder, os.listdir(folder), plain or {}, stage_state.wanted(run.stage))


# -- saving -----------------------------------------------------------------------------------


def test_a_checkpoint_waits_for_its_update(tmp_path):
    """Told before F4 to save update 9, the stage has nothing to say before it has done S8."""
    run = Run().go(8, 4, tmp_path, 9).closed()
    assert run.told == []
    run.go(12).closed()
    assert len(run.told) == 1


def test_it_holds_weights_as_of_the_update_and_buffers_as_of_the_command(tmp_path):
    """F4 and F5, which come between, are not in it: they come again when a run goes on."""
    run = Run().go(8, 4, tmp_path, 4).closed()
    ((position, result),) = run.told
    assert position == POSITION
    found = read(run, tmp_path)
    at_the_update, at_the_command = Run().go(4), Run().go(4)
    expected = at_the_update.state()
    for name, tensor in found.weights.items():
        assert torch.equal(tensor, expected[name]), name
    assert found.hidden.keys() == {"3.seen"}
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert found.buffers.keys() == {f"1.{name}" for name in names}
    for name, tensor in {**found.buffers, **found.hidden}.items():
        assert torch.equal(tensor, at_the_command.state()[f"hidden {name}"]), name
    files, plain, weights, _ = result
    assert {path.name for path in tmp_path.iterdir()} == files.keys()
    assert weights.keys() <= files.keys()
    assert plain.keys() == {"split/0"}


def test_what_is_written_are_copies(tmp_path):
    """The training goes on at once."""
    run = Run().go(4)
    expected = run.state()
    run.saver.begin(POSITION, str(tmp_path), 4)
    run.go(8).closed()
    for name, tensor in read(run, tmp_path).weights.items():
        assert torch.equal(tensor, expected[name]), name


def test_older_versions_that_are_read_later_go_along(tmp_path):
    run = Run().go(8, 4, tmp_path, 4).closed()
    found = read(run, tmp_path).versions
    assert found.keys() == {2, 3}
    for version, named in found.items():
        expected = Run().go(version).state()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in named.items())


def test_one_checkpoint_after_another(tmp_path):
    run = Run()
    for step in (4, 8):
        (tmp_path / str(step)).mkdir()
        run.go(step)
        run.saver.begin(step, str(tmp_path / str(step)), step)
    run.closed()
    assert [position for position, _ in run.told] == [4, 8]
    assert all(type(result) is list for _, result in run.told)


@pytest.mark.parametrize("layer", [Recomputes, Replaces])
def test_a_buffer_that_is_changed_in_a_backward_gives_the_checkpoint_up(tmp_path, layer):
    """It has no state between two micro-batches; told once, and the training goes on."""
    run = Run([layer(4)]).go(8, 4, tmp_path, 4).closed()
    ((position, text),) = run.told
    assert position == POSITION
    assert "buffers" in text
    assert "backward" in text
    assert not list(tmp_path.iterdir())
    assert run.stage.statistics()["updates"] == 8


def test_while_nothing_is_to_be_saved_a_backward_may_change_what_it_likes():
    assert Run([Recomputes(4)]).go(4).closed().told == []


def test_state_that_is_no_tensor_is_told_of(tmp_path):
    """Nothing is written, now or later."""
    run = Run([nn.Linear(4, 4), Noted()]).go(8, 4, tmp_path, 4).closed()
    ((position, text),) = run.told
    assert position == POSITION
    assert "1._extra_state" in text
    assert "cannot be" in text
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_told_of_and_ends_nothing(tmp_path):
    """The next checkpoint is made."""
    run = Run().go(8, 4, tmp_path / "missing", 4)
    run.saver.begin(POSITION + 1, str(tmp_path), 8)
    run.closed()
    (first, text), (second, result) = run.told
    assert (first, second) == (POSITION, POSITION + 1)
    assert str(tmp_path / "missing") in text
    assert type(result) is list


def test_without_an_optimizer_there_is_no_state_of_one(tmp_path):
    run = Run(optimizer=None)
    run.saver.begin(POSITION, str(tmp_path), 0)
    run.closed()
    assert read(run, tmp_path).steps == {}
    again = Run(optimizer=None)
    assert again.restored(tmp_path, step=0)
    assert_same(again.stage.module.state_dict(), run.stage.module.state_dict())


# -- going on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Rprop])
@pytest.mark.parametrize("plan", [ASYNC, FLUSHED], ids=["async", "flushed"])
def test_a_stage_goes_on_bit_for_bit(tmp_path, plan, optimizer):
    """From the middle of a run that never stopped: weights, versions, moments, buffers."""
    undisturbed = Run(plan=plan, optimizer=optimizer).go(8, 4, tmp_path, 4).closed()
    ((_, (_, plain, _, _)),) = undisturbed.told
    again = Run(plan=plan, optimizer=optimizer)
    assert again.restored(tmp_path, plain=plain)
    assert (again.stage.next_forward, again.stage.ended) == (4, 4)
    again.go(8)
    assert_same(again.state(), undisturbed.state())


class Plain(torch.optim.SGD):
    """State that is no tensor."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
        super().step()


def test_optimizer_state_that_is_no_tensor_comes_from_the_manifest(tmp_path):
    run = Run([nn.Linear(4, 4)], optimizer=Plain).go(4)
    run.saver.begin(POSITION, str(tmp_path), 4)
    run.closed()
    ((_, (_, plain, _, _)),) = run.told
    assert plain == {
        "optimizer/0.weight/steps": 4, "optimizer/0.bias/steps": 4,
        "split/0": ["0.weight", "0.bias"],
    }  # fmt: skip
    again = Run([nn.Linear(4, 4)], optimizer=Plain)
    again.restored(tmp_path, plain=plain)
    assert by_text(again.stage.optimizer.state()) == plain


def read_by(run):
    """The versions that the next three forwards read."""
    stage, versions = run.stage, []
    for _ in range(3):
        m = stage.next_forward
        stage.forward(head(m), [value(data(m))])
        versions.append(stage.version_of(m))
    return versions


@pytest.mark.parametrize(
    ("floor", "versions"), [(0, [2, 3, 4]), (3, [3, 3, 4]), (4, [4, 4, 4]), (9, [4, 4, 4])]
)
def test_versions_below_the_floor_are_not_read_again(tmp_path, floor, versions):
    """As after weights were loaded in the middle of the run that made the checkpoint."""
    Run().go(8, 4, tmp_path, 4).closed()
    again = Run()
    assert again.restored(tmp_path, floor=floor)
    assert read_by(again) == versions


def test_where_an_older_version_is_missing_the_newest_is_read(tmp_path):
    """As of a checkpoint that another schedule has made; said in the answer."""
    run = Run(plan=FLUSHED).go(4)
    run.saver.begin(POSITION, str(tmp_path), 4)
    run.closed()
    again = Run()
    assert not again.restored(tmp_path)
    assert read_by(again) == [4, 4, 4]


def test_a_stage_without_weights_misses_no_version(tmp_path):
    run = Run([nn.BatchNorm1d(4, affine=False)]).go(8, 4, tmp_path, 4).closed()
    assert len(run.told) == 1
    again = Run([nn.BatchNorm1d(4, affine=False)])
    assert again.restored(tmp_path)
    again.go(8)
    assert_same(again.state(), run.state())
