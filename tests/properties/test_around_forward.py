"""Code of the user's around the forward of a model, which no stage has as a whole."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support.models import regression
from support.oracle import assert_same
from support.pinned import Pipeline
from torch import nn

from pipedream_rt import ConfigError

SGD = (torch.optim.SGD, {"lr": 0.1})


def layers():
    torch.manual_seed(2)
    return [nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 8)]


def trained(model, data, **options):
    options = {"stages": 2, "schedule": "1f1b", "workers": "serial", **options}
    with Pipeline(model, loss_fn=F.mse_loss, optimizer=SGD, **options) as pipe:
        losses = [result.loss for result in pipe.train_epoch(data)]
        return losses, pipe.evaluate(data), pipe.state_dict()


def plainly(model, data):
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        evaluated = sum(F.mse_loss(model(x), y).item() for x, y in data) / len(data)
    return losses, evaluated, model.state_dict()


class Doubled(nn.Sequential):
    """A call of its own around all layers."""

    def __call__(self, x):
        return 2 * super().__call__(x)


class Backwards(nn.Sequential):
    """The layers in another order than they stand there."""

    def __iter__(self):
        return reversed(list(self._modules.values()))


class Listed(nn.ModuleList):
    """A list with a forward."""

    def forward(self, x):
        for layer in self:
            x = x + layer(x)
        return x


class Whole(nn.Module):
    """No sequence."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layers())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def wrapped(model):
    """A forward that is put on the model itself."""
    before = model.forward

    @functools.wraps(before)
    def forward(x):
        return before(x) * 0.5

    model.forward = forward
    return model


AROUND = {
    "an own __call__": lambda: Doubled(*layers()),
    "an own order": lambda: Backwards(*layers()),
    "a list with a forward": lambda: Listed(layers()),
    "a forward on a sequence": lambda: wrapped(nn.Sequential(*layers())),
    "a forward on a model": lambda: wrapped(Whole()),
    "a forward on a layer": lambda: nn.Sequential(*[wrapped(each) for each in layers()]),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_a_forward_is_part_of_it(name):
    data = regression(4)
    losses, evaluated, weights = trained(AROUND[name](), data, example=data[0])
    expected = plainly(AROUND[name](), data)
    assert losses == expected[0]
    assert evaluated == pytest.approx(expected[1], rel=1e-6)
    assert_same(weights, expected[2])


@pytest.mark.parametrize("name", [name for name in AROUND if name[-5:] != "layer"])
def test_without_an_example_it_is_asked_for(name):
    with pytest.raises(ConfigError, match=r"must be run once .* give example="):
        trained(AROUND[name](), regression(1))


# -- modes --------------------------------------------------------------------------------------


def frozen_statistics(base):
    """As models for detection: BatchNorm keeps its statistics in training."""

    class Frozen(base):
        def train(self, mode=True):
            super().train(mode)
            for module in self.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()
            return self

    return Frozen


def goes_on_dropping(base):
    """As for an estimate of uncertainty: dropout goes on in eval mode."""

    class Drops(base):
        def eval(self):
            super().eval()
            for module in self.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 1.0  # so that it can be seen
                    module.train()
            return self

    return Drops


def frozen_sequence():
    return frozen_statistics(nn.Sequential)(*layers())


def frozen_whole():
    return frozen_statistics(Whole)()


@pytest.mark.parametrize("make", [frozen_sequence, frozen_whole])
@pytest.mark.parametrize("workers", ["serial", pytest.param("local", marks=pytest.mark.processes)])
def test_modules_that_do_not_follow_the_mode_are_left_as_the_model_leaves_them(make, workers):
    data = regression(4)
    options = {"stages": 2, "schedule": "1f1b", "workers": workers, "example": data[0]}
    with Pipeline(make(), loss_fn=F.mse_loss, optimizer=SGD, **options) as pipe:
        assert pipe.module().training
        list(pipe.train_epoch(data))  # as the model came: its statistics move
        moved = pipe.state_dict()
        pipe.train()
        list(pipe.train_epoch(data))
        frozen = pipe.state_dict()
        statistics = [key for key in moved if "running" in key]
        assert statistics
        assert all(torch.equal(moved[key], frozen[key]) for key in statistics)
        assert not torch.equal(moved[max(moved)], frozen[max(moved)])
        pipe.evaluate(data)
        list(pipe.train_epoch(data))  # the mode is that from before the evaluation
        assert all(torch.equal(pipe.state_dict()[key], frozen[key]) for key in statistics)


@pytest.mark.parametrize("base", [nn.Sequential, Whole])
def test_dropout_that_goes_on_in_evaluation_goes_on(base):
    cls = goes_on_dropping(base)

    def make():
        return cls(*layers()) if base is nn.Sequential else cls()

    data = regression(2)
    _, evaluated, weights = trained(make(), data, example=data[0], stages=3)
    last = make()
    last.load_state_dict(weights)
    bias = weights[max(key for key in weights if key.endswith("bias"))]
    expected = sum(F.mse_loss(bias.expand_as(y), y).item() for _, y in data) / 2
    assert evaluated == pytest.approx(expected, rel=1e-6)
