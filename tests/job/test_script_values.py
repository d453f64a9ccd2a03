"""What the script changes while it trains: it travels with the micro-batches, or is refused."""

import copy
import dataclasses

import pytest
import torch
from support.both import assert_same, batches, layers, opened, piped, plain
from torch import nn
from torch.nn import functional as F

from pipedream_rt import ConfigError, Layout, Training
from pipedream_rt.corrections import Extrapolation


@dataclasses.dataclass(slots=True)
class Settings:
    beta: float = 1.0


class Penalty:
    beta = 1.0

    def __init__(self, kind="attribute"):
        self.kind, self.cell, self.steps, self.settings = kind, {"beta": 1.0}, [1.0], Settings()

    def __call__(self, output, target):
        beta = {
            "attribute": self.beta, "dict": self.cell["beta"], "list": self.steps[0],
            "slot": self.settings.beta,
        }[self.kind]  # fmt: skip
        return F.mse_loss(output, target) + beta * output.pow(2).mean()

    def anneal(self, value):
        self.beta = self.cell["beta"] = self.steps[0] = self.settings.beta = value


BETAS = {"beta": 1.0}


def by_a_global_of_a_module(output, target):
    return F.mse_loss(output, target) + BETAS["beta"] * output.pow(2).mean()


@pytest.fixture(autouse=True)
def values_of_the_module():
    yield
    BETAS["beta"] = Scaled.scale = 1.0


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


class Remembers(nn.Linear):
    """A layer with a tensor that is no buffer, and a list that grows."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale, self.steps = torch.ones(()), [1.0]

    def forward(self, x):
        return super().forward(x) * self.scale * self.steps[-1]


def sequence():
    one, two, three = layers(nn.Linear, Scaled, nn.Linear)
    return nn.Sequential(one, two, nn.Dropout(0.5), three)


def remembering():
    return nn.Sequential(*layers(Remembers, nn.Linear))


class Calls(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls = 0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.calls += 1
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return super().forward(x)


def counting():
    return nn.Sequential(*layers(Calls, nn.Linear))


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "recompute"), [("serial", False), ("local", True)])
@pytest.mark.parametrize("changed", ["attribute", "dict", "list", "slot", "layer"])
def test_what_the_script_changes_reaches_the_stages(workers, recompute, changed):
    def annealed(model, results):
        """Losses of a run in which the script changes something after each result."""
        loss, found = Penalty("attribute" if changed == "layer" else changed), []
        for number, value in enumerate(results(model, loss)):
            found.append(value)
            if changed == "layer":
                model[1].scale = 1 / (number + 2)
            else:
                loss.anneal(1 / (number + 2))
        return found

    def plainly(model, loss):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches(6):
            optimizer.zero_grad()
            value = loss(model(x), y)
            value.backward()
            optimizer.step()
            yield value.item()

    def on_stages(model, loss):
        training, layout = Training(recompute=recompute), Layout(credits=1)
        with opened(model, loss, workers=workers, training=training, layout=layout) as pipe:
            yield from (result.loss for result in pipe.train_epoch(batches(6)))

    model = sequence()
    model[2].p = 0.0
    expected = annealed(copy.deepcopy(model), plainly)
    assert annealed(model, on_stages) == expected


@pytest.mark.parametrize("schedule", ["async-1f1b", "async-1f1b+vertical-sync", "1f1b", "2bw"])
def test_a_change_travels_with_the_micro_batch_whatever_is_in_flight(schedule):
    """In any schedule the same as a loss to which the value comes as a target."""

    def pipeline_losses(model, loss, data):
        options = {"stages": 3, "schedule": schedule, "micro_batches": 4, "corrections": ()}
        with opened(model, loss, **options) as pipe:
            for number, (x, y) in enumerate(batches(8)):
                if data is None:
                    loss.anneal(1 / (number + 2))
                    pipe.submit(x, y)
                else:
                    pipe.submit(x, (y, torch.tensor(1 / (number + 2), dtype=torch.float64)))
            return pipe.state_dict()

    def told(output, target):
        return F.mse_loss(output, target[0]) + target[1].item() * output.pow(2).mean()

    one = pipeline_losses(sequence(), Penalty("attribute"), None)
    other = pipeline_losses(sequence(), told, "told")
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_a_value_can_be_annealed_and_evaluated_with():
    model = sequence()
    with opened(model) as pipe:
        list(pipe.train_epoch(batches(2)))
        before = pipe.evaluate(batches(2))
        model[1].scale = 5.0
        assert pipe.evaluate(batches(2)) != before
        model[1].scale = 1.0
        assert pipe.evaluate(batches(2)) == before


class Between(nn.Module):
    """Reads an attribute between its layers."""

    def __init__(self):
        super().__init__()
        self.alpha, self.notes = 1.0, 0
        self.one, self.two = layers(Scaled, Scaled)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)) * self.alpha)


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("beta", torch.ones(()))

    def forward(self, output, target):
        return F.mse_loss(output, target) * self.beta


@pytest.mark.parametrize(
    ("make", "loss", "change", "words"),
    [
        (sequence, Penalty(), lambda m, loss: setattr(loss, "cell", [1]),
         "changed 'cell' of loss_fn"),
        (sequence, Penalty(), lambda m, loss: loss.steps.append(2.0), "1 of 'steps' of"),
        (Between, Penalty(), lambda m, loss: setattr(m, "alpha", 0.5),
         "'alpha' of the model.*recorded"),
        (sequence, Buffered(), lambda m, loss: loss.beta.fill_(2), r"the buffer '.loss..beta'"),
        (sequence, Penalty(), lambda m, loss: m[0].requires_grad_(False),
         "requires_grad of '0.weight'"),
        (sequence, Penalty(), lambda m, loss: setattr(Scaled, "scale", 2.0),
         "'scale' of the class Scaled"),
        (remembering, Penalty(), lambda m, loss: m[0].scale.fill_(2), "changed 'scale' of layer 0"),
        (remembering, Penalty(), lambda m, loss: m[0].steps.append(0.5),
         "changed 1 of 'steps' of layer 0"),
        (counting, Penalty(), lambda m, loss: setattr(m[0], "calls", 7),
         "changed 'calls' of layer 0.*its forward changes it too"),
        (sequence, by_a_global_of_a_module, lambda m, loss: BETAS.update(beta=0.5),
         "'BETAS' of the globals that by_a_global"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_refused_by_name(make, loss, change, words):
    model = make()
    with opened(model, loss, example=batches(1)[0]) as pipe:
        list(pipe.train_epoch(batches(2)))
        change(model, loss)
        with pytest.raises(ConfigError, match=words):
            list(pipe.train_epoch(batches(2)))


def test_what_may_be_a_cache_that_a_call_by_the_script_has_filled_is_said_once(caplog):
    loss = Penalty("dict")
    with opened(sequence(), loss) as pipe:
        list(pipe.train_epoch(batches(2)))
        loss.cell["mask"] = torch.ones(2)
        for _ in range(2):
            list(pipe.train_epoch(batches(2)))
    said = [each.getMessage() for each in caplog.records if "has changed" in each.getMessage()]
    assert len(said) == 1
    assert "only numbers, texts, None" in said[0]


def test_what_nobody_reads_may_change():
    model = Between()
    with opened(model, Penalty(), example=batches(1)[0]) as pipe:
        list(pipe.train_epoch(batches(2)))
        model.notes, model.best, model.one.owner = 5, [1], object()
        model.load_state_dict(pipe.state_dict())
        model.eval()
        model(batches(1)[0][0])
        model.train()
        assert len(list(pipe.train_epoch(batches(2)))) == 2


def test_what_the_script_changes_in_a_correction_is_refused():
    correction = Extrapolation()
    with opened(sequence(), schedule="async-1f1b", corrections=[correction]) as pipe:
        list(pipe.train_epoch(batches(2)))
        correction.strength = 0.5
        with pytest.raises(ConfigError, match="changed 'strength' of Extrapolation"):
            list(pipe.train_epoch(batches(2)))


def test_set_default_collects_nothing():
    cache = {}

    def loss_fn(output, target):
        return F.mse_loss(output, target) * cache.setdefault("scale", torch.tensor(2.0))

    model = nn.Sequential(*layers(nn.Linear, nn.Linear))
    assert_same(piped(model, loss_fn), plain(model, loss_fn))


@dataclasses.dataclass
class Config:
    weights: list = dataclasses.field(default_factory=lambda: [1.0] * 8)


class Teaches(nn.Module):
    def __init__(self, teacher):
        super().__init__()
        self.teacher = teacher.requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, output, target):
        return F.mse_loss(output, target) * self.scale + self.teacher(output).mean()


class OwnUse:
    """A model with a loss that has and reads all kinds of things, and the script that has them."""

    def __init__(self):
        self.model = nn.Sequential(*layers(nn.Linear, nn.Linear, nn.Linear))
        self.teacher, self.config = nn.Linear(8, 8), Config()
        self.loss = Teaches(nn.Linear(8, 8))

    def in_closure(self):
        teacher, config = self.teacher, self.config

        def loss_fn(output, target):
            weights = torch.tensor(config.weights)
            return (F.mse_loss(output, target) * weights).mean() + teacher(output).mean()

        return loss_fn


@pytest.mark.parametrize(
    ("change", "words", "in_closure"),
    [
        (lambda use: setattr(use.config, "weights", [2.0] * 8), "'weights' of", True),
        (lambda use: use.teacher.weight.data.copy_(torch.ones(8, 8)), "'weight' of", True),
        (lambda use: nn.init.ones_(use.teacher.weight), "'weight' of", True),
        (lambda use: setattr(use.teacher, "bias", nn.Parameter(torch.ones(8))), "'bias' of", True),
        (lambda use: nn.init.ones_(use.loss.teacher.weight), "teacher.weight' was changed", False),
        (lambda use: setattr(use.loss, "scale", torch.zeros(())), "scale' was replaced", False),
        (lambda use: nn.init.ones_(use.model[1].weight), "weight '1.weight' was changed", False),
        (
            lambda use: use.model[0].register_forward_hook(print),
            "a hook of the model or of the loss was added",
            False,
        ),
    ],
)
def test_what_the_script_does_to_what_stages_have_copies_of(change, words, in_closure):
    use = OwnUse()
    loss_fn = use.in_closure() if in_closure else use.loss
    with opened(use.model, loss_fn) as pipe:
        (x, y), *_ = batches()
        pipe.submit(x, y).result()
        change(use)
        with pytest.raises(ConfigError, match=words):
            pipe.submit(x, y).result()


def test_a_script_may_load_weights_and_use_its_model():
    model = nn.Sequential(*layers(Calls, Calls))
    expected = plain(model)
    data, losses = batches(), []
    with opened(model, example=data[0]) as pipe:
        for x, y in data:
            losses.append(pipe.submit(x, y).result().loss)
            model.load_state_dict(pipe.state_dict())
            model.requires_grad_(False)
            assert model(x).shape == y.shape
        assert_same((losses, pipe.state_dict()), expected)


def test_what_was_changed_and_never_compared_is_said_at_the_end(caplog):
    with opened(sequence(), by_a_global_of_a_module) as pipe:
        for number, (x, y) in enumerate(batches(3)):
            if number == 2:  # compared were the first, the second, and then the fourth
                BETAS["beta"] = 0.5
            pipe.submit(x, y).result()
    assert "the run has ended, and was trained otherwise since" in caplog.text
    assert "'BETAS' of the globals that by_a_global" in caplog.text
