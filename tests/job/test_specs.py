"""The specifications of stages: what is pickled for a worker, and what must not go along."""

import threading

import pytest
import torch
import torch.nn.functional as F
from support.models import Unpicklable, mlp
from support.stages import specs_of
from torch import nn

from pipedream_rt import Clip, ConfigError, Training

SGD = (torch.optim.SGD, {"lr": 0.1})


def linears(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def specs(model, stages=3, **options):
    return specs_of(model, **{"stages": stages, "loss_fn": F.mse_loss, "optimizer": SGD, **options})


def test_a_stage_can_be_made_of_what_is_packed():
    training = Training(clip=Clip(norm=1.0), ema=0.9, autocast=torch.bfloat16)
    made = specs(linears(4), 4, training=training, seed=7)
    assert [spec.stage for spec in made] == [0, 1, 2, 3]
    assert [spec.loss_fn is None for spec in made] == [True, True, True, False]
    assert {type(rule).__name__ for rule in made[0].rules} >= {"Clip", "Averaging"}
    assert made[2].names == {"2.weight": "2.weight", "2.bias": "2.bias"}
    assert all(spec.plan == made[0].plan and spec.seed == 7 for spec in made)


def test_parameters_are_numbered_as_in_the_whole_model_and_frozen_ones_are_not():
    model = linears()
    model[0].bias.requires_grad_(False)
    assert [spec.numbers for spec in specs(model)] == [
        {"0.weight": 0},
        {"1.weight": 1, "1.bias": 2},
        {"2.weight": 3, "2.bias": 4},
    ]


def test_a_tied_weight_has_its_other_names_on_the_stage_that_owns_it():
    model = linears()
    model[2].weight = model[0].weight
    assert [spec.aliases for spec in specs(model)] == [{"0.weight": ("2.weight",)}, {}, {}]


def test_a_loss_with_weights_is_a_layer_of_the_last_stage():
    first, last = specs(linears(2), 2, loss_fn=nn.Bilinear(8, 8, 1))
    assert first.loss_fn is last.loss_fn is None
    assert list(last.layers._modules) == ["1", "(loss)"]
    assert list(last.names) == ["1.weight", "1.bias", "(loss).weight", "(loss).bias"]


def test_a_hook_on_a_gradient_goes_to_the_stage_of_its_parameter():
    model = linears()
    model[1].weight.register_hook(torch.neg)
    model[1].bias.register_post_accumulate_grad_hook(torch.numel)
    hooks = [[(h.parameter, h.after_sum, h.call) for h in spec.hooks] for spec in specs(model)]
    assert hooks == [
        [],
        [("1.weight", False, torch.neg), ("1.bias", True, torch.numel)],
        [],
    ]


def test_a_buffer_of_two_stages_is_known_to_both():
    model, table = linears(), torch.zeros(8)
    for layer in (model[0], model[2]):
        layer.register_buffer("table", table)
    assert [spec.shared for spec in specs(model)] == [("0.table",), (), ("2.table",)]


class Holds(nn.Linear):
    def __init__(self, kept):
        super().__init__(8, 8)
        self.kept = kept


def test_a_weight_of_another_stage_does_not_come_along():
    model = linears()
    model[2] = Holds((model[0],))
    with pytest.raises(ConfigError, match=r"layer 2 of stage 2 refers to 0\.weight of stage 0"):
        specs(model)
    specs(model, 1)  # within one stage it may refer to what it likes


class HoldsDetached(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = self.linear.weight.detach()

    def forward(self, x):
        return self.linear(x) + x @ self.table


def test_a_tensor_over_the_memory_of_a_weight_is_refused():
    with pytest.raises(ConfigError, match=r"layer 0 holds a tensor over the memory of 0\.linear"):
        specs(nn.Sequential(HoldsDetached(), nn.Linear(8, 8)), 2)
    model = mlp()
    table = model[3].weight.detach()
    with pytest.raises(ConfigError, match=r"loss_fn holds a tensor over the memory of 3\.weight"):
        specs(model, loss_fn=lambda o, t: F.mse_loss(o, t) * (1 + table.pow(2).sum()))


def test_a_model_that_does_not_pickle_is_named():
    with pytest.raises(ConfigError, match=r"layer 1 \(Unpicklable\) cannot be pickled"):
        specs(nn.Sequential(nn.Linear(8, 8), Unpicklable(), nn.Linear(8, 8)))


def test_a_loss_that_does_not_pickle_is_named():
    lock = threading.Lock()

    def loss(output, target):
        with lock:
            return F.mse_loss(output, target)

    with pytest.raises(ConfigError, match=r"loss_fn \(function\) cannot be pickled"):
        specs(mlp(), loss_fn=loss)


LOCK = threading.Lock()


def guarded(lock):
    def call(x):
        with lock:
            return x

    return call


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m[1], "guard", threading.Lock()), "'guard' of layer 1: "),
        (lambda m: setattr(m[1], "table", {"a": [LOCK]}), r"0 of 'a' of 'table' of layer 1: "),
        (lambda m: m.__setitem__(1, guarded(LOCK)), "'lock', which guarded.call of 'function' "),
    ],
)
def test_what_does_not_pickle_is_named_wherever_it_lies(change, words):
    layers = list(linears())
    change(layers)
    with pytest.raises(ConfigError, match=rf"layer 1 .* a lock is held as {words}.* in a forward"):
        specs(layers)
