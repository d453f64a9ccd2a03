"""What a program does is done as plain PyTorch does it, or refused by name: class by class.

Each test trains a small model in a plain loop and on a pipeline, and compares the bits; or sees
that the pipeline says what it cannot do, before anything is lost.
"""

import copy
import subprocess
import sys

import pytest
import torch
from support.deadlines import LATEST_S
from torch import nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    MovingAveragePerChannelMinMaxObserver,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipedream_rt import Clip, ConfigError, Pipeline, StageFailed, Training

SGD = (torch.optim.SGD, {"lr": 0.1})


def batches(count=4):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 8, 8, generator=generator).unbind() for _ in range(count)]


def plain(model, loss_fn=F.mse_loss, optimizer=None, clip=None, data=None):
    """Losses and weights of a plain loop over a copy of a model."""
    model = copy.deepcopy(model)
    optimizer = optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    optimizer, losses = optimizer(model), []
    for x, y in data or batches():
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def piped(model, loss_fn=F.mse_loss, optimizer=SGD, workers="serial", stages=2, **options):
    """The same on a pipeline that flushes."""
    data = batches()
    with Pipeline(
        model, stages=stages, example=data[0], loss_fn=loss_fn, optimizer=optimizer,
        schedule="1f1b", micro_batches=1, workers=workers, **options,
    ) as pipe:  # fmt: skip
        return [r.loss for r in pipe.train_epoch(data)], pipe.state_dict()


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


def layers(*kinds):
    torch.manual_seed(0)
    return [kind(8, 8) for kind in kinds]


# -- a loss from which nothing can be derived ---------------------------------------------------


class Reentrant(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


def frozen(kind):
    one, two, three = layers(nn.Linear, kind, nn.Linear)
    one.requires_grad_(False)
    three.requires_grad_(False)
    return nn.Sequential(one, two, three)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b", "zero-bubble", "gpipe"])
@pytest.mark.parametrize(
    ("model", "loss_fn"),
    [
        (nn.Sequential(*layers(nn.Linear, nn.Linear)), lambda o, y: F.mse_loss(o, y).detach()),
        (nn.Sequential(*layers(nn.Linear, nn.Linear)), lambda o, y: (o > y).float().mean()),
        (frozen(Reentrant), F.mse_loss),
    ],
    ids=["detached", "accuracy", "a reentrant checkpoint over frozen layers"],
)
def test_a_loss_from_which_nothing_can_be_derived_is_refused(model, loss_fn, schedule):
    with pytest.raises(RuntimeError, match="does not require grad"):
        plain(model, loss_fn)
    with (
        Pipeline(
            model, stages=2, loss_fn=loss_fn, optimizer=SGD, schedule=schedule, workers="serial"
        ) as pipe,
        pytest.raises(StageFailed, match="micro-batch 0 depends on no weight that is trained"),
    ):
        list(pipe.train_epoch(batches()))


def test_layers_before_a_detach_keep_their_weights_as_in_plain_pytorch():
    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x.detach())

    model = nn.Sequential(*layers(nn.Linear, Detached, nn.Linear))
    assert_same(piped(model, stages=3), plain(model))


# -- optimizers that were given as objects ------------------------------------------------------


class ReadsDefaults(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.defaults["lr"]
        return super().step(closure)


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["serial", "local"])
def test_defaults_are_those_of_the_object(workers):
    model = nn.Sequential(*layers(nn.Linear, nn.Linear))
    expected = plain(model, optimizer=lambda m: ReadsDefaults(m.parameters(), lr=0.3))
    given = ReadsDefaults(model.parameters(), lr=0.3)
    assert_same(piped(model, optimizer=given, workers=workers), expected)


def test_a_scheduler_sees_the_defaults_of_the_object():
    model = nn.Sequential(*layers(nn.Linear, nn.Linear))
    given = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.3)
    with Pipeline(model, stages=2, loss_fn=F.mse_loss, optimizer=given, workers="serial") as pipe:
        assert pipe.optimizer.defaults == given.defaults


def test_the_state_of_the_optimizer_is_refused_where_there_is_none():
    model = nn.Sequential(*layers(nn.Linear, nn.Linear))
    with Pipeline(
        model, stages=2, loss_fn=F.mse_loss, optimizer=(torch.optim.Adam, {}), workers="serial"
    ) as pipe:
        list(pipe.train_epoch(batches(2)))
        with pytest.raises(ConfigError, match=r"on the stages.*state_dict\(\)\['state'\]"):
            pipe.optimizer.state  # noqa: B018
        kept = pipe.optimizer.state_dict()
        assert len(kept["state"]) == 4
        pipe.optimizer.load_state_dict(kept)


class Doubled(nn.Parameter):
    """A class of parameters by which an optimizer goes."""


class ByClass(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, Doubled) and parameter.grad is not None:
                    parameter.grad.mul_(parameter.factor)
        return super().step(closure)


class Owner(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight = Doubled(self.weight.data)
        self.weight.factor = 2.0


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["serial", "local"])
def test_a_subclass_of_parameter_stays_one(workers):
    model = nn.Sequential(*layers(Owner, nn.Linear, Owner))
    # deepcopy makes a plain Parameter of it, so the plain loop has a model of its own.
    twin = nn.Sequential(*layers(Owner, nn.Linear, Owner))
    optimizer, losses = ByClass(twin.parameters(), lr=0.1), []
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(twin(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = piped(model, optimizer=(ByClass, {"lr": 0.1}), workers=workers)
    assert_same(found, (losses, twin.state_dict()))


# -- norms and random numbers -------------------------------------------------------------------


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.inner = nn.Linear(8, 8, dtype=dtype)

    def forward(self, x):
        return self.inner(x.to(self.inner.weight.dtype)).to(x.dtype)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.bfloat16), (torch.float64, torch.float32), (torch.bfloat16,) * 2],
)
def test_the_norm_over_several_dtypes_is_that_of_torch(stages, norm_type, dtypes):
    torch.manual_seed(0)
    one, other = dtypes
    model = nn.Sequential(Cast(one), nn.Tanh(), Cast(other), nn.Tanh(), Cast(one))
    losses, weights = [], copy.deepcopy(model)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.5)
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.mse_loss(weights(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(weights.parameters(), 0.1, norm_type)
        optimizer.step()
        losses.append(loss.item())
    clip = Training(clip=Clip(norm=0.1, norm_type=norm_type))
    found = piped(model, optimizer=(torch.optim.SGD, {"lr": 0.5}), stages=stages, training=clip)
    assert_same(found, (losses, weights.state_dict()))


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter))


class NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.randn_like(gradient)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x):
        return x @ torch.eye(8) + NoisyBackward.apply(self.weight)


def test_no_two_stages_draw_the_same_noise():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    for layer in model:
        nn.init.zeros_(layer.weight)
    _, weights = piped(model, optimizer=(Noisy, {"lr": 0.1}), stages=3)
    one, two, three = weights.values()
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)
    _, weights = piped(nn.Sequential(Drawing(), Drawing()), stages=2)
    one, two = weights.values()
    assert not torch.equal(one, two)


# -- layers -------------------------------------------------------------------------------------


def test_a_backward_pre_hook_of_the_sequence_is_refused():
    model = nn.Sequential(*layers(nn.Linear, nn.Linear))
    model.register_full_backward_pre_hook(lambda module, gradient: None)
    with pytest.raises(ConfigError, match="has hooks of its own beside its layers"):
        piped(model)


@torch.library.custom_op("pipedream_rt_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("pipedream_rt_tests::add_to", mutates_args={"x"})
def add_to(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: gradient * 2)
RELU, RELU_OF_TENSORS = torch.ops.aten.relu, torch.ops.aten.relu.default


class Operators(nn.Linear):
    def forward(self, x):
        made = torch.ops.aten.relu(twice(super().forward(x)))
        add_to(made.detach().clone(), x.detach())
        return RELU(RELU_OF_TENSORS(made))


def test_operators_of_torch_and_of_the_script_reach_the_stages():
    model = nn.Sequential(*layers(Operators, nn.Linear))
    assert_same(piped(model), plain(model))


SCRIPT = """
import torch
from torch import nn
from pipedream_rt import Pipeline

@torch.library.custom_op("pipedream_rt_tests::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3

thrice.register_fake(torch.empty_like)
thrice.register_autograd(lambda ctx, gradient: gradient * 3)

class Layer(nn.Linear):
    def forward(self, x):
        return torch.ops.aten.relu(thrice(super().forward(x)))

if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(Layer(8, 8), Layer(8, 8))
    with Pipeline(
        model, stages=2, loss_fn=nn.MSELoss(), optimizer=(torch.optim.SGD, {"lr": 0.1})
    ) as pipe:
        x = torch.ones(4, 8)
        print([r.loss for r in pipe.train_epoch([(x, x)])] == [nn.MSELoss()(model(x), x).item()])
"""


@pytest.mark.processes
def test_operators_of_a_script_reach_its_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=LATEST_S, check=False
    )
    assert done.stdout.strip() == "True", done.stderr


class Energy(nn.Linear):
    def forward(self, x):
        z = x if x.requires_grad else x.detach().requires_grad_()
        made = torch.autograd.grad(super().forward(z).tanh().sum(), z, create_graph=True)
        return x + made[0]


class Jacobian(nn.Linear):
    def forward(self, x):
        return torch.func.vmap(torch.func.jacrev(lambda r: torch.tanh(self.weight @ r)))(x).sum(1)


def test_autograd_grad_in_a_layer_that_is_computed_again():
    model = nn.Sequential(*layers(nn.Linear, Energy, Energy, nn.Linear))
    assert_same(piped(model, training=Training(recompute=True)), plain(model))


def test_transforms_of_torch_func_cannot_be_computed_again():
    model = nn.Sequential(*layers(nn.Linear, Jacobian, nn.Linear))
    assert_same(piped(model), plain(model))
    with pytest.raises(StageFailed, match=r"torch.func .*Leave its stage out"):
        piped(model, training=Training(recompute=True))


class Observed(nn.Linear):
    """Quantizes its output per channel, in buffers that have no size at first."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.quantize = FusedMovingAvgObsFakeQuantize(
            MovingAveragePerChannelMinMaxObserver,
            quant_min=-128, quant_max=127, dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric, ch_axis=0,
        )  # fmt: skip

    def forward(self, x):
        return F.linear(x, self.quantize(self.weight), self.bias)


class Resizing(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("most", torch.zeros(1))

    def forward(self, x):
        made = super().forward(x)
        self.most.resize_(8).copy_(made.detach().abs().amax(0))
        return made / (self.most + 1)


class Two(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.one, self.two = layers(kind, kind)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["serial", "local"])
@pytest.mark.parametrize("kind", [Observed, Resizing])
@pytest.mark.parametrize("whole", [True, False])
def test_buffers_may_be_resized(workers, kind, whole):
    model = Two(kind) if whole else nn.Sequential(*layers(kind, kind))
    shapes = [tuple(buffer.shape) for buffer in model.buffers()]
    expected = plain(model)
    assert_same(piped(model, workers=workers), expected)
    assert [tuple(buffer.shape) for buffer in model.buffers()] == shapes
    assert_same(plain(model), expected)  # the script's own model is as it was


@pytest.mark.parametrize("wrap", [nn.DataParallel])
def test_a_wrapped_model_is_refused(wrap):
    with pytest.raises(ConfigError, match=r"wrapped in DataParallel.*give model\.module"):
        piped(wrap(nn.Sequential(*layers(nn.Linear, nn.Linear))))
