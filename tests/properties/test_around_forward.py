"""Code of the user's around the forward of a model, which no stage has as a whole.

That it is a part of the forward is in `test_any_model`, where all models are.
"""

import pytest
import torch
import torch.nn.functional as F
from support.models import regression
from support.small import small
from support.whole import AROUND, Whole, five_layers
from torch import nn

from pipedream_rt import ConfigError


@pytest.mark.parametrize("name", [name for name in AROUND if name[-5:] != "layer"])
def test_without_an_example_it_is_asked_for(name):
    with pytest.raises(ConfigError, match=r"must be run once .* give example="):
        small(AROUND[name](), stages=2)


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
    return frozen_statistics(nn.Sequential)(*five_layers())


def frozen_whole():
    return frozen_statistics(Whole)()


@pytest.mark.parametrize("make", [frozen_sequence, frozen_whole])
@pytest.mark.parametrize("workers", ["serial", pytest.param("local", marks=pytest.mark.processes)])
def test_modules_that_do_not_follow_the_mode_are_left_as_the_model_leaves_them(make, workers):
    data = regression(4)
    options = {"stages": 2, "schedule": "1f1b", "workers": workers, "example": data[0]}
    with small(make(), **options) as pipe:
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
        return cls(*five_layers()) if base is nn.Sequential else cls()

    data = regression(2)
    with small(make(), schedule="1f1b", example=data[0]) as pipe:
        list(pipe.train_epoch(data))
        evaluated, weights = pipe.evaluate(data), pipe.state_dict()
    bias = weights[max(key for key in weights if key.endswith("bias"))]
    expected = sum(F.mse_loss(bias.expand_as(y), y).item() for _, y in data) / 2
    assert evaluated == pytest.approx(expected, rel=1e-6)
