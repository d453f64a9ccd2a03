"""Training a copy of the unsplit model in plain PyTorch."""

import signal

import pytest
import torch
from support.late import Late, too_late
from support.models import Counts, NoisySGD
from support.verified import (
    BATCH,
    Noise,
    NoisyForward,
    cut_for,
    job_of,
    linear,
    training_of,
)
from torch import nn
from torch.nn import functional as F

from pipedream_rt import Clip, ConfigError, LayerSpec, Training
from pipedream_rt.batches.items import Batch
from pipedream_rt.stage.runner import layer_seed
from pipedream_rt.verify.compare import Place
from pipedream_rt.verify.cutting import whole_and_parts
from pipedream_rt.verify.plain import Tap, copies_of, inputs_of


def no_hyper(job):
    return [{} for _ in job.reading.optimizer.groups]


def test_a_forward_or_a_loss_that_changes_a_mini_batch_in_place_changes_copies():
    def loss_fn(output, y):
        return F.mse_loss(output, y.clamp_(0.0, 0.5))

    batch = Batch((torch.ones(4, 4),), {}, torch.ones(4, 4))
    job = job_of(nn.Sequential(nn.Hardtanh(-2, -1, inplace=True), nn.Linear(4, 4)), loss_fn)
    assert whole_and_parts(training_of(job), cut_for(job, batch)) is not None
    assert all(map(torch.equal, (batch.args[0], batch.target), (torch.ones(4, 4),) * 2))


# -- what goes into layers and comes out of them --------------------------------------------------


def test_each_call_of_a_layer_has_a_place_of_its_own():
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    seen, seeded = {}, []
    tap = Tap({"one": one, "two": two}, seen, lambda number, name: seeded.append((number, name)))
    one(BATCH.args[0])  # before `begin` nothing is noted
    tap.begin(5, 11)
    two(one(one(BATCH.args[0])))
    tap.at = None
    one(BATCH.args[0])
    assert [(place.kind, place.name) for place in seen] == [
        ("input", "one"), ("output", "one"), ("input", "one#2"), ("output", "one#2"),
        ("input", "two"), ("output", "two"),
    ]  # fmt: skip
    assert {place[:2] for place in seen} == {(5, 11)}
    assert seeded == [(11, "one"), (11, "one#2"), (11, "two")]
    tap.begin(5, 12)  # calls are counted anew
    one(BATCH.args[0])
    assert Place(5, 12, "input", "one") in seen
    tap.remove()
    before = len(seen)
    one(BATCH.args[0])
    assert len(seen) == before


def test_a_layer_under_several_names_is_called_by_one_after_another():
    layer, seen = nn.Linear(4, 4), {}
    tap = Tap({"first": layer, "last": layer}, seen)
    tap.begin(0, 0)
    layer(layer(BATCH.args[0]))
    assert [place.name for place in seen if place.kind == "input"] == ["first", "last"]


def test_what_is_noted_is_a_copy_and_a_layer_that_raises_is_left():
    relu, seen = nn.ReLU(inplace=True), {}
    wrong = nn.Linear(3, 3)
    tap = Tap({"relu": relu, "wrong": wrong}, seen)
    tap.begin(0, 0)
    relu(torch.tensor([-1.0, 1.0]))
    assert seen[Place(0, 0, "input", "relu")].tolist() == [-1.0, 1.0]
    assert seen[Place(0, 0, "output", "relu")].tolist() == [0.0, 1.0]
    with pytest.raises(RuntimeError):
        wrong(BATCH.args[0])
    assert tap.inside == []


# -- copies ---------------------------------------------------------------------------------------


def test_a_copy_has_the_weights_and_the_hooks_of_the_script_and_shares_nothing():
    model = linear()
    model[0].bias.register_hook(lambda gradient: gradient * 0)
    copies = copies_of(job_of(model), None)
    copy = copies.model.parameters
    assert all(torch.equal(p, copy[name]) for name, p in model.named_parameters())
    F.mse_loss(copies.model.whole(BATCH.args[0]), BATCH.target).backward()
    assert not copy["0.bias"].grad.any()
    assert copy["0.weight"].grad.any()
    assert model[0].weight.grad is None


class Margin(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return F.mse_loss(output, target) * self.weight


def test_a_copy_can_have_other_weights_those_of_the_loss_too():
    job = job_of(loss_fn=Margin())
    plain = training_of(job)
    state = {n: torch.full_like(v.detach(), 2.0) for n, v in plain.state().items()}
    assert len(state) == 5
    copies = copies_of(job, state)
    assert copies.loss_fn.weight.item() == 2.0
    assert all((p == 2).all() for p in copies.model.parameters.values())
    assert job.options.loss_fn.weight.item() == 1.0
    with pytest.raises(ConfigError, match="the weights of now do not go into a copy of the model"):
        copies_of(job, {**state, "0.bias": torch.ones(5)})


def test_a_model_without_values_in_the_script_is_refused():
    job = job_of([LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4)])
    with pytest.raises(ConfigError, match="has no values of this model's weights"):
        copies_of(job, None)


# -- training -------------------------------------------------------------------------------------


def test_a_step_is_that_of_a_loop_which_accumulates_gradients():
    job = job_of()
    seen = training_of(job).step(3, cut_for(job), {}, no_hyper(job))
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for rows in (slice(2), slice(2, 4)):
        loss = F.mse_loss(model(BATCH.args[0][rows]), BATCH.target[rows])
        (loss * 0.5).backward()
        losses.append(loss.item())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert [seen[Place(3, 6 + i, "loss")] for i in (0, 1)] == losses
    for name, p in model.named_parameters():
        assert torch.equal(seen[Place(3, -1, "gradient", name)], gradients[name])
        assert torch.equal(seen[Place(3, -1, "state", name)], p)


def test_a_layer_draws_from_the_seed_that_its_stage_gives_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    job = job_of(model, seed=7)
    seen = training_of(job).step(0, cut_for(job), {}, no_hyper(job))
    place = Place(0, 1, "input", "1")
    torch.manual_seed(layer_seed(7, 1, "1"))
    expected = F.dropout(seen[place], 0.5)
    assert torch.equal(seen[place._replace(kind="output")], expected)


@pytest.mark.parametrize(
    ("model", "options", "note", "left_out"),
    [
        (Noise, {}, "backward", {"gradient"}),
        (
            Noise,
            {"schedule": "gpipe", "training": Training(loss="whole")},
            "backward",
            {"gradient"},
        ),
        (nn.Linear, {"optimizer": (NoisySGD, {"lr": 0.1})}, "step", {"state"}),
    ],
    ids=["backward", "backward of the whole", "step"],
)
def test_what_draws_behind_the_forward_is_not_compared(model, options, note, left_out):
    job = job_of(nn.Sequential(model(4, 4), nn.Linear(4, 4)), **options)
    plain = training_of(job)
    seen = plain.step(0, cut_for(job), {}, no_hyper(job))
    assert list(plain.notes) == [note]
    assert plain.left_out == left_out
    assert left_out.isdisjoint(place.kind for place in seen)
    assert {"input", "output", "loss"} <= {place.kind for place in seen}


def test_it_steps_with_other_gradients_and_takes_other_weights():
    job = job_of()
    plain = training_of(job)
    ones = {name: torch.ones_like(p) for name, p in linear().named_parameters()}
    plain.step(0, cut_for(job), {}, no_hyper(job), ones)
    for name, p in linear().named_parameters():
        assert torch.equal(plain.state()[name], p - 0.1)
    plain.take({name: torch.zeros_like(value) for name, value in ones.items()})
    assert not any(value.any() for value in plain.state().values())


def test_of_a_large_model_some_parameters_are_stepped():
    job = job_of()
    budget = 4 * 4 * 4 + 4 * 4  # of all there are twice as many bytes
    plain = training_of(job, budget)
    assert plain.stepped == {"0.bias", "2.bias"}
    plain.drop_gradients()
    seen = plain.step(0, cut_for(job), {}, no_hyper(job))
    for kind in ("gradient", "state"):
        assert {place.name for place in seen if place.kind == kind} == plain.stepped
    job = job_of(training=Training(clip=Clip(norm=1.0)))
    plain = training_of(job, 1)
    assert len(plain.stepped) == 1  # the smallest, which takes more
    plain.drop_gradients()  # so that the norm is not known
    seen = plain.step(0, cut_for(job), {}, no_hyper(job))
    assert {"gradient", "state"}.isdisjoint(place.kind for place in seen)


def test_what_is_late_is_left_out():
    job = job_of()
    seen = training_of(job).step(0, cut_for(job), {}, no_hyper(job), late=lambda: True)
    assert [place for place in seen if place.kind == "loss"] == [Place(0, 0, "loss")]
    assert {"gradient", "state"}.isdisjoint(place.kind for place in seen)


class Trains(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        output.register_hook(lambda gradient: gradient)  # raises without gradients
        return output


def test_the_loss_in_eval_mode():
    job = job_of(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)))
    expected = F.mse_loss(job.model.whole.eval()(BATCH.args[0]), BATCH.target).item()
    assert training_of(job_of(job.model.whole.train())).loss_of(BATCH) == expected
    for kind in (Counts, NoisyForward, Trains):
        assert training_of(job_of(nn.Sequential(kind(4, 4), nn.Tanh()))).loss_of(BATCH) is None


class Interrupts(nn.Linear):
    def forward(self, x):
        signal.raise_signal(signal.SIGUSR1)
        return super().forward(x)


def test_what_a_signal_handler_of_the_script_raises_meanwhile_is_raised():
    plain = training_of(job_of(nn.Sequential(Interrupts(4, 4), nn.Tanh())))
    signal.signal(signal.SIGUSR1, too_late)
    with pytest.raises(Late):
        plain.loss_of(BATCH)


def test_a_sequence_takes_its_input_and_another_model_its_arguments():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x))

    x, target = inputs_of(job_of(), BATCH)
    (args, kwargs), again = inputs_of(job_of(Net(), example=BATCH.args[0]), BATCH)
    assert torch.equal(x, BATCH.args[0])
    assert torch.equal(*args, BATCH.args[0])
    assert kwargs == {}
    assert torch.equal(target, BATCH.target)
    assert torch.equal(again, BATCH.target)
