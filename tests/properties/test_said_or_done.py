"""What a program does is done as plain PyTorch does it, or refused by name: class by class.

Each test trains a small model in a plain loop and on a pipeline, and compares the bits; or sees
that the pipeline says what it cannot do, before anything is lost.
"""

import collections
import itertools
import random
import sys

import pytest
import torch
from support import forked
from support.both import SGD, assert_same, batches, layers, opened, piped, plain
from support.deadlines import LATEST_S
from support.models import Counts
from support.pinned import Flat as Pipeline
from torch import nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    MovingAveragePerChannelMinMaxObserver,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipedream_rt import Clip, ConfigError, StageFailed, Training


def linear():
    return nn.Sequential(*layers(nn.Linear, nn.Linear))


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
        (linear(), lambda o, y: F.mse_loss(o, y).detach()),
        (linear(), lambda o, y: (o > y).float().mean()),
        (frozen(Reentrant), F.mse_loss),
    ],
    ids=["detached", "accuracy", "a reentrant checkpoint over frozen layers"],
)
def test_a_loss_from_which_nothing_can_be_derived_is_refused(model, loss_fn, schedule):
    with pytest.raises(RuntimeError, match="does not require grad"):
        plain(model, loss_fn)
    with (
        opened(model, loss_fn, schedule=schedule) as pipe,
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
    model = linear()
    expected = plain(model, optimizer=lambda m: ReadsDefaults(m.parameters(), lr=0.3))
    given = ReadsDefaults(model.parameters(), lr=0.3)
    assert_same(piped(model, optimizer=given, workers=workers), expected)


def test_a_scheduler_sees_the_defaults_of_the_object():
    model = linear()
    given = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.3)
    with opened(model, optimizer=given) as pipe:
        assert pipe.optimizer.defaults == given.defaults


def test_the_state_of_the_optimizer_is_refused_where_there_is_none():
    with opened(linear(), optimizer=(torch.optim.Adam, {})) as pipe:
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
    clip = Training(clip=Clip(norm=0.1, norm_type=norm_type))
    found = piped(model, optimizer=(torch.optim.SGD, {"lr": 0.5}), stages=stages, training=clip)
    expected = plain(
        model, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.5), clip=(0.1, norm_type)
    )
    assert_same(found, expected)


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
    model = linear()
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
        model, stages=2, loss_fn=nn.MSELoss(), optimizer=(torch.optim.SGD, {"lr": 0.1}),
        schedule="1f1b",
    ) as pipe:
        x = torch.ones(4, 8)
        print([r.loss for r in pipe.train_epoch([(x, x)])] == [nn.MSELoss()(model(x), x).item()])
"""


@pytest.mark.processes
def test_operators_of_a_script_reach_its_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = forked.run(
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
    assert_same(piped(model), plain(model))  # no context of the stage that failed is left


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


def test_an_unusual_way_out_of_a_layer_is_named():
    """As hooks of transformers do it for output_hidden_states."""

    class Collecting(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            self.seen.append(made.relu())
            return made

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = layers(Collecting, nn.Linear)

        def forward(self, x):
            self.one.seen = seen = []
            return self.two(self.one(x)) + sum(seen)

    with pytest.raises(ConfigError, match="sets the attribute 'seen' of 'one'"):
        piped(Whole())


class ReadsCount(nn.Module):
    def __init__(self, after):
        super().__init__()
        self.after = after
        self.one, self.two = layers(Counts, nn.Linear)

    def forward(self, x):
        if self.after:
            return self.two(self.one(x)) * self.one.calls
        return self.one(x * self.one.calls)


@pytest.mark.parametrize("after", [True, False])
def test_an_attribute_that_a_layer_changes_cannot_be_recorded(after):
    with pytest.raises(ConfigError, match=r"attribute 'calls' of layer 'one', which the layer"):
        piped(ReadsCount(after), stages=1)


def test_a_layer_may_count_for_itself():
    class Warming(Counts):
        def forward(self, x):
            return super().forward(x) * min(1.0, self.calls / 3)

    model = nn.Sequential(*layers(Warming, nn.Linear))
    assert_same(piped(model), plain(model))


# -- objects that several stages have ------------------------------------------------------------


class Writes(nn.Linear):
    def __init__(self, shared):
        super().__init__(8, 8)
        self.shared = shared

    def forward(self, x):
        made = super().forward(x)
        match self.shared:
            case dict():
                self.shared["skip"] = made.detach()
            case torch.Generator():
                made = made + torch.rand(8, generator=self.shared)
            case torch.Tensor():
                self.shared.add_(1)
            case random.Random():
                made = made * self.shared.random()
            case itertools.count():
                made = made * next(self.shared)
            case list() | collections.deque():
                self.shared.append(1)
            case _:
                self.shared.value += 1
        return made


class Box:
    value = 0


SHARED = [
    dict, lambda: torch.Generator().manual_seed(1), lambda: torch.zeros(()),
    lambda: random.Random(1), lambda: itertools.count(1), list, lambda: collections.deque(), Box,
]  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["serial", "local"])
@pytest.mark.parametrize("make", SHARED)
def test_what_stages_share_may_not_change(make, workers):
    shared = make()
    model = nn.Sequential(Writes(shared), nn.Linear(8, 8), Writes(shared))
    with pytest.raises(StageFailed, match=r"has changed .* of which other stages have copies"):
        piped(model, workers=workers)
    alone = nn.Sequential(nn.Linear(8, 8), Writes(make()))
    assert_same(piped(alone, workers="serial"), plain(alone))


def test_a_hook_may_not_count_for_two_stages():
    seen = []

    def hook(module, inputs, output):
        seen.append(0)
        return output * (1 + len(seen) % 3)

    model = linear()
    for layer in model:
        layer.register_forward_hook(hook)
    with pytest.raises(StageFailed, match=r"has changed 0 of 'seen', .*hook of a hook"):
        piped(model)


def test_constants_may_be_shared():
    shared = {"scale": 2.0, "names": ["a"], "table": torch.ones(8)}

    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.config["scale"] + self.config["table"]

    model = nn.Sequential(*layers(Reads, nn.Linear, Reads))
    model[0].config = model[2].config = shared
    assert_same(piped(model), plain(model))


# -- what is collected for the script -----------------------------------------------------------


class Accuracy:
    def __init__(self):
        self.seen, self.outputs = 0, []

    def __call__(self, output, target):
        self.seen += len(target)
        return 0.5


def test_a_metric_that_collects_is_refused():
    outputs = []

    def keep(output, target):
        outputs.append(output)
        return 0.5

    with opened(linear(), optimizer=None) as pipe:
        for metric, words in ((Accuracy(), "'seen' of the metric"), (keep, "'outputs'")):
            with pytest.raises(ConfigError, match=f'"it" must return .*it changes .*{words}'):
                pipe.evaluate(batches(2), metrics={"it": metric})


# -- wrapped and unfinished ---------------------------------------------------------------------


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = layers(nn.Linear, nn.Linear)

    def forward(self, x, labels=None):
        made = self.two(torch.tanh(self.one(x)))
        if labels is None:
            return {"logits": made}
        return {"loss": F.cross_entropy(made, labels), "logits": made}


def test_a_finished_model_that_computes_its_loss_is_evaluated_alone():
    model = OwnLoss().eval()
    data = [{"x": x, "labels": torch.arange(8)} for x, _ in batches(2)]
    data[1]["labels"][:5] = -100
    whole = {name: torch.cat([each[name] for each in data]) for name in data[0]}
    with Pipeline(model, stages=2, example=data[0], workers="serial") as pipe:
        assert pipe.evaluate(data) == pytest.approx(model(**whole)["loss"].item())
        assert torch.equal(pipe(data[0]["x"])["logits"], model(data[0]["x"])["logits"])
    with (
        Pipeline(model, stages=2, example={"x": data[0]["x"]}, workers="serial") as pipe,
        pytest.raises(ConfigError, match="example=, a mini-batch with the labels"),
    ):
        pipe.evaluate(data)


@pytest.mark.parametrize(
    "read",
    [
        None, lambda pipe, folder: pipe.state_dict(), lambda pipe, folder: pipe.module(),
        lambda pipe, folder: pipe.save(folder),
    ],
)  # fmt: skip
def test_a_run_whose_weights_nobody_reads_says_so(read, caplog, tmp_path):
    with opened(linear()) as pipe:
        list(pipe.train_epoch(batches(2)))
        if read is not None:
            read(pipe, tmp_path)
    assert ("the trained weights were never read" in caplog.text) == (read is None)


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("how", ["with", "finally", "except"])
def test_a_run_that_an_error_ends_does_not_ask_for_its_weights(raised, how, caplog):
    pipe = opened(linear())

    def train():
        list(pipe.train_epoch(batches(2)))
        raise raised

    def run():
        if how == "with":
            with pipe:
                train()
        try:
            train()
        except raised:
            if how == "except":
                pipe.close()
            raise
        finally:
            pipe.close()

    with pytest.raises(raised):
        run()
    assert "never read" not in caplog.text


# -- what models of transformers hand on beside their results ------------------------------------


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")

    def made(**more):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=32, use_cache=False, **more,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    return made


def losses_of(model):
    ids = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": ids, "labels": ids}] * 3
    with Pipeline(
        model, stages=2, example=data[0], optimizer=SGD, schedule="1f1b", workers="serial"
    ) as pipe:
        return [result.loss for result in pipe.train_epoch(data)]


def test_a_model_that_was_once_asked_for_its_hidden_states_trains(llama):
    asked = llama()
    asked(torch.zeros(1, 4, dtype=torch.long), output_hidden_states=True)
    assert losses_of(asked) == losses_of(llama())


@pytest.mark.parametrize("what", ["output_hidden_states", "output_attentions"])
def test_a_model_that_records_its_outputs_is_told_what_to_do(llama, what):
    more = {"attn_implementation": "eager"} if what == "output_attentions" else {}
    with pytest.raises(ConfigError, match=f"{what}.* to False, in its config too"):
        losses_of(llama(**{what: True}, **more))


class CountsInItsClass(nn.Linear):
    calls = 0

    def forward(self, x):
        CountsInItsClass.calls += 1
        return super().forward(x) / CountsInItsClass.calls


class Caches(nn.Linear):
    cache = {}  # noqa: RUF012

    def forward(self, x):
        return super().forward(x) * self.cache.setdefault(len(x), 2.0)


@pytest.mark.processes
def test_a_class_may_not_count_for_two_stages_and_may_have_a_cache():
    with pytest.raises(StageFailed, match="changed 'calls' of the class CountsInItsClass"):
        piped(nn.Sequential(*layers(CountsInItsClass, CountsInItsClass)), workers="local")
    model = nn.Sequential(*layers(Caches, Caches))
    assert_same(piped(model, workers="local"), plain(model))


# -- what the script shares with stages ----------------------------------------------------------


class OfTheScript(nn.Linear):
    sizes = [8, 8]  # noqa: RUF012  # as people write it

    def forward(self, x):
        return super().forward(x) * len(self.sizes)


def test_classes_of_the_script_stay_as_they_are(monkeypatch):
    """Read again in this process, cloudpickle would give a class copies of all that it has."""
    monkeypatch.setattr(OfTheScript, "__module__", "__main__")  # so that its code travels
    before = dict(vars(OfTheScript))
    model = nn.Sequential(*layers(OfTheScript, OfTheScript))
    piped(model)
    assert all(vars(OfTheScript)[name] is value for name, value in before.items())


class Masks(nn.Linear):
    """Blocks share a cache that the first call fills."""

    def __init__(self, cache):
        super().__init__(8, 8)
        self.cache = cache

    def forward(self, x):
        if len(x) not in self.cache:
            self.cache[len(x)] = torch.arange(8.0) / 8
        return super().forward(x) * self.cache[len(x)]


@pytest.mark.parametrize("workers", ["serial", "local"])
def test_a_cache_of_constants_may_be_filled_on_each_stage(workers):
    cache = {}
    torch.manual_seed(0)
    model = nn.Sequential(Masks(cache), Masks(cache))
    expected = plain(model)
    assert_same(piped(model, workers=workers), expected)
