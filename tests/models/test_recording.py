"""Recording forwards: what a program says, and what cannot be followed."""

import inspect
import itertools
import pickle
import random
import re
import threading
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.between import Base, Forward, X, recorded
from torch import nn
from torch.nn.utils import rnn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.recording import refuse_changing


def lines(program):
    return str(program).splitlines()


def test_a_program_says_what_happens_between_the_layers():
    model = Base(lambda self, x: F.relu(x * self.scale + self.shift)[:, :2].repeat(1, 2))
    assert lines(recorded(model, X)) == [
        "1 = a(0)",
        "2 = mul(1, <scale>)",
        "3 = add(2, <shift>)",
        "4 = relu(3, inplace=False)",
        "5 = __getitem__(4, (slice(None, None, None), slice(None, 2, None)))",
        "6 = repeat(5, 1, 2)",
        "7 = b(6)",
        "return 7",
    ]


def test_layers_are_asked_for_shapes_alone():
    """Their values are zeros, nothing of the model moves, and the caller's tensors stay."""
    seen = []
    model = Base(lambda self, x: seen.append(x) or x)
    model.a = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    drawn, x = torch.get_rng_state(), X.clone()
    program = recorded(model, x, training=True)
    assert program.layers() == ["a.0", "a.1", "b"]
    assert torch.equal(seen[0], torch.zeros(3, 4))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(x, X)
    assert type(model.a[0]) is nn.BatchNorm1d
    assert model.training


def test_a_layer_that_is_called_twice_has_two_names_for_its_random_numbers():
    model = Base(lambda self, x: self.a(x))
    assert [step.name for step in recorded(model, X).steps] == ["a", "a#2", "b"]


def test_contexts_that_the_forward_enters_come_along():
    def between(self, x):
        with torch.no_grad():
            y = x * 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(y, self.a.weight)
        return y.float()

    steps = recorded(Base(between), X).steps
    assert [s.around.grad for s in steps] == [None, False, None, None, None]
    assert steps[2].around.autocast == ("cpu", True, torch.bfloat16)
    assert steps[3].around.autocast is None


def test_settings_of_kernels_that_the_forward_changes_come_along():
    """As transformers turns cuDNN off around its CTC loss; on the host they change nothing."""
    seen = []

    def between(self, x):
        with torch.backends.cudnn.flags(enabled=False):
            return F.linear(x, self.a.weight)

    steps = recorded(Base(between), X).steps
    assert "torch.backends.cudnn.enabled" in dict(steps[1].around.settings)
    assert steps[2].around.settings == ()
    before = torch.backends.cudnn.enabled
    with steps[1].around.entered():
        seen.append(torch.backends.cudnn.enabled)
    assert [*seen, torch.backends.cudnn.enabled] == [False, before]


def test_a_gradient_that_the_forward_asks_for_is_a_step():
    """As wav2vec2 asks for that of its input, of which torch's checkpoint needs one."""

    def between(self, x):
        y = torch.zeros(3, 4)
        y.requires_grad = True
        return x + y

    assert "requires_grad_(2, True)" in lines(recorded(Base(between), X))[2]


def test_what_a_layer_has_already_may_be_set_again():
    def between(self, x):
        self.b.bias, self.b.scaling = self.b.bias, 2.0
        return x

    model = Base(between)
    model.b.scaling = 2.0
    assert recorded(model, X).layers() == ["a", "b"]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_autograd_functions_are_steps():
    assert lines(recorded(Base(lambda self, x: Double.apply(x)), X))[1] == "2 = Double(1)"


def test_a_function_that_draws_is_seeded():
    model = Base(lambda self, x: F.dropout(x, 0.5, self.training))
    steps = recorded(model, X).steps
    assert [(s.name, s.random) for s in steps] == [("a", True), ("(dropout 1)", True), ("b", True)]
    assert not recorded(model, X, training=False).steps[1].random


def test_what_is_read_from_inputs_becomes_a_guard():
    """With other values the forward may take another way, so it must be recorded anew."""

    def between(self, x, mask=None):
        return x if mask.all() else x.masked_fill(~mask.unsqueeze(-1), 0)

    model = Base(between)
    full, part = torch.ones(3, dtype=torch.bool), torch.tensor([True, False, True])
    program = recorded(model, X, mask=full)
    assert len(program.steps) == 3
    assert program.holds_for([X, full])
    assert not program.holds_for([X, part])
    assert len(recorded(model, X, mask=part).steps) == 6


def same_line(self, x):
    if x.sum() > 0:
        return x
    return -x


def counts(self, x):
    self.count = getattr(self, "count", 0) + 1
    return x


def to_numpy(self, x):
    return torch.from_numpy(np.exp(self.shift.numpy())) * x


def draws(self, x):
    return x if random.random() < 0.5 else -x


def draws_a_mask(self, x):
    return x * torch.from_numpy(np.random.rand(4)).float()


def unknown(self, x):
    return x * OUTSIDE


def sets_data(self, x):
    x.data = x * 2
    return x


def sets_layer(self, x):
    self.b.scaling = 1.0 / len(x)
    return x


OUTSIDE = torch.ones(4, requires_grad=True)


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (same_line, r"bool\(\) reads values that layers have computed.*nn.Module of their own"),
        (counts, "changes the attribute 'count' of the model"),
        (to_numpy, r"numpy\(\) reads values that layers"),
        (draws, "draws random numbers of Python or NumPy"),
        (draws_a_mask, r"before .* its forward draws random .* or in the loader"),
        (lambda self, x: x * torch.rand(1).item(), "were drawn at random.* set layerdrop to 0"),
        (unknown, "is no parameter of the model"),
        (sets_layer, r"sets the attribute 'scaling' of 'b', .*; pass the value to the layer"),
        (sets_data, "sets the attribute 'data' of a tensor"),
        (lambda self, x: x * len(str(x)), r"repr\(\) reads values that layers"),
        (lambda self, x: x * len(f"{x.sum():.3f}"), r"format\(\) reads values that layers"),
        (lambda self, x: print(self.scale) or x, r"repr\(\) reads values that layers"),
        (lambda self, x: x * (x.data_ptr() % 2), r"data_ptr\(\) tells where a tensor lies"),
        (lambda self, x: x * x.untyped_storage().nbytes(), r"untyped_storage\(\) tells where"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_with_its_line(between, words):
    """And the model is as it was."""
    model = Base(between)
    before = dict(vars(model))
    with pytest.raises(ConfigError, match=words) as caught:
        recorded(model, X)
    text = str(caught.value)
    assert "list of modules" in text, "the way out"
    if between not in (counts, draws):
        first = inspect.getsourcelines(between)[1]
        line = int(re.search(r"test_recording\.py:(\d+) in", text)[1])
        assert first <= line <= first + 3
    assert dict(vars(model)) == before
    assert type(model.a) is nn.Linear


CALLS = itertools.count()


class Shared(Base):
    """A class that counts the calls of all of its instances."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return self.b(self.a(x) * type(self).calls)


def by_counter(self, x):
    return x * next(CALLS)


def by_parity(self, x):
    return x if next(CALLS) % 2 else self.a(x)


def by_clock(self, x):
    return x * time.perf_counter()


def by_tensor(self, x):
    return x * torch.tensor([float(next(CALLS))])


@pytest.mark.parametrize(
    "make",
    [Shared, *(lambda f=f: Base(f) for f in (by_counter, by_parity, by_clock, by_tensor))],
)
def test_what_changes_from_call_to_call_is_refused_with_its_line(make):
    model = make()
    words = r"twice with the same inputs.*such as a counter"
    with pytest.raises(ConfigError, match=words) as error:
        refuse_changing(recorded(model, X), recorded(model, X))
    assert re.search(r"test_recording\.py:\d+ in (forward|by_)", str(error.value))


def test_what_is_made_anew_in_each_call_is_the_same():
    """Functions, constants and objects that are equal count as equal."""

    def between(self, x):
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return torch.where(x > 0, x * scale, torch.full((4,), 0.5)) + torch.arange(4)

    model = Base(between)
    refuse_changing(recorded(model, X), recorded(model, X))


def test_an_index_of_integers_does_not_make_a_shape_that_depends_on_values():
    index = torch.tensor([0, 2])

    def between(self, x, index):
        x = x[index]
        y = x[:, index] + self.shift[index]
        return x * len(y) + y.shape[1]

    first, second, *_ = recorded(Base(between), X, index=index).steps
    assert (first.name, second.name) == ("a", "(__getitem__ 1)")

    def by_mask(self, x, index):
        return x[x.sum(1) > 0].repeat(len(x[x.sum(1) > 0]), 1)

    with pytest.raises(ConfigError, match="reads values that layers"):
        recorded(Base(by_mask), X, index=index)


@pytest.mark.parametrize(
    "between",
    [
        lambda self, x: x.type(torch.float64).type(torch.float32),
        lambda self, x: x.type("torch.DoubleTensor").float(),
        lambda self, x: x * torch.from_numpy(np.arange(4, dtype=np.float32)),
        lambda self, x: x + torch.from_numpy(np.ones((3, 4), dtype=np.float32)).sum(),
    ],
)
def test_casts_and_constants_of_numpy_are_steps_that_reach_a_worker(between):
    program = recorded(Base(between), X)
    assert all(step.target == "a" or pickle.dumps(step.target) for step in program.steps)


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (lambda self, x: torch.func.vmap(torch.tanh)(x), r"tanh\(\) is called while a transform"),
        (lambda self, x: torch.func.vmap(self.b)(x), "layer 'b' is called while a transform"),
        (
            lambda self, x: torch.autograd.grad((x**2).sum(), x, create_graph=True)[0],
            r"torch\.autograd\.grad is called in the forward",
        ),
        (lambda self, x: (x**2).sum().backward() or x, r"backward\(\) is called in the forward"),
    ],
)
def test_derivatives_and_transforms_between_layers_belong_into_a_module(between, words):
    with pytest.raises(ConfigError, match=f"{words}.*nn.Module of their own"):
        recorded(Base(between), X)


def test_the_mode_in_which_a_forward_raises_is_said():
    def hooked(self, x):
        x.register_hook(lambda gradient: gradient)
        return x

    recorded(Base(hooked), X)
    with pytest.raises(ConfigError, match=r"in eval mode, without gradients at .*RuntimeError"):
        recorded(Base(hooked), X, training=False, grad=False)


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"layer 'a' \(Linear\), called at .*does not take"):
        recorded(Base(), torch.randn(3, 5))
    with pytest.raises(ConfigError, match="forward of the model, a Base, does not take"):
        recorded(Base(), X, X)


def test_packed_sequences_must_stay_in_one_layer():
    """Their shape depends on values, which pad_packed_sequence reads."""

    def packed(self, x, lengths):
        rows = rnn.pack_padded_sequence(self.a(x), lengths, batch_first=True)
        return rnn.pad_packed_sequence(self.c(rows)[0], batch_first=True)[0]

    model = Forward(packed)
    model.c = nn.LSTM(4, 4, batch_first=True)
    with pytest.raises(ConfigError, match=r"test_recording.*size\(\) reads values that layers"):
        recorded(model, torch.randn(2, 3, 4), torch.tensor([3, 2]))


def test_an_encoder_that_makes_nested_tensors_is_told_what_to_do():
    class Encoder(nn.Module):
        def __init__(self, **kwargs):
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, **kwargs)

        def forward(self, x, mask):
            return self.encoder(x, src_key_padding_mask=mask)

    x, mask = torch.randn(2, 3, 4), torch.tensor([[False, False, True], [False, False, False]])
    assert recorded(Encoder(), x, mask).layers() == ["encoder.layers.0", "encoder.layers.1"]
    with pytest.raises(ConfigError, match="build it with enable_nested_tensor=False"):
        recorded(Encoder(), x, mask, training=False, grad=False)
    calm = Encoder(enable_nested_tensor=False)
    assert len(recorded(calm, x, mask, training=False, grad=False).layers()) == 2


def test_a_layer_that_turns_autocast_on_is_recorded_with_its_dtype():
    class Cast(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    model = Base()
    model.a = Cast(4, 4)
    assert [kind[1] for kind in recorded(model, X).steps[0].kinds] == [torch.bfloat16]


class Makes(nn.Module):
    def forward(self, x):
        return x, object()


class Takes(nn.Module):
    def forward(self, pair):
        return pair[0]


def test_an_object_cannot_pass_from_layer_to_layer():
    model = Base()
    model.a, model.b = Makes(), Takes()
    with pytest.raises(ConfigError, match="layer 'a' returns a object, which a later layer takes"):
        recorded(model, X)


class Bag:
    """An object that may hold something."""

    def __init__(self, held=None):
        self.held = held


class TakesBag(nn.Module):
    def __init__(self, fills):
        super().__init__()
        self.linear, self.fills = nn.Linear(4, 4), fills

    def forward(self, x, bag):
        if self.fills:
            bag.held = self.fills
        return self.linear(x)


def test_an_object_may_be_passed_to_a_layer_unless_it_takes_something_along():
    """As an object with options; not as one that layers fill one after another, as a cache is."""

    def with_bag(make, fills=None):
        model = Base(lambda self, x: self.c(x, make(x)))
        model.c = TakesBag(fills)
        return recorded(model, X)

    assert len(with_bag(lambda x: Bag(3)).steps) == 3
    words = "a Bag is passed on that holds tensors which the forward"
    with pytest.raises(ConfigError, match=words):
        with_bag(Bag)
    with pytest.raises(ConfigError, match="layer 'c' changes the Bag that it is given"):
        with_bag(lambda x: Bag(), fills=5)
    with pytest.raises(ConfigError, match="a Bag is passed on that cannot be pickled"):
        with_bag(lambda x: Bag(threading.Lock()))


@pytest.mark.parametrize("how", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_a_module_that_is_taken_apart_are_refused(how):
    model = Base()
    getattr(model, how)(lambda *_: None)
    with pytest.raises(ConfigError, match="the model has hooks"):
        recorded(model, X)


def graph_of(kind):
    return torch.eye(3).to_sparse() if kind == "coo" else torch.eye(3).to_sparse_csr()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_a_sparse_input_is_made_of_its_parts_by_each_stage_that_needs_it(kind):
    program = recorded(Base(lambda self, x, mask: mask @ x), X, mask=graph_of(kind))
    number = 3 if kind == "coo" else 4
    assert program.inputs == number
    made, *rest = program.steps
    assert made.free
    assert lines(program)[0].startswith(f"{number} = sparse_{kind}_tensor(1, 2, ")
    assert any(number in step.taken for step in rest)


def test_a_change_of_the_values_of_a_sparse_input_comes_first():
    def between(self, x, mask):
        mask._values().mul_(2)
        return mask @ x

    program = recorded(Base(between), X, mask=graph_of("coo"))
    product = next(step for step in program.steps if "matmul" in step.name or "mm" in step.name)
    assert [program.steps[n].name for n in product.after] == ["(mul_ 3)"]


def test_a_sparse_tensor_beside_the_inputs_is_a_constant():
    model = Base(lambda self, x: self.graph @ x)
    model.graph = graph_of("coo")
    first, second = recorded(model, X), recorded(model, X)
    refuse_changing(first, second)
    model.graph = model.graph * 2
    with pytest.raises(ConfigError, match="something else that changes from call to call"):
        refuse_changing(first, recorded(model, X))


@pytest.mark.parametrize("layout", ["sparse", "nested"])
def test_what_is_not_dense_cannot_pass_between_layers(layout):
    class Makes(nn.Module):
        def forward(self, x):
            return x.to_sparse() if layout == "sparse" else torch.nested.nested_tensor([x, x[:1]])

    model = Base()
    model.a = Makes()
    with pytest.raises(ConfigError, match=f"layer 'a' returns a {layout} tensor, which cannot"):
        recorded(model, X)
